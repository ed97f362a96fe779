"""The summary says what the log says."""

from __future__ import annotations

from math import log

import msgspec
import pytest

from p2pdiloco.ids import NO_DIGEST, PeerId
from p2pdiloco.run_spec import (
    BYTES,
    BlobRef,
    CommitteeSpec,
    DataSpec,
    EvaluationSet,
    Genesis,
    InnerSpec,
    ModelSpec,
    OuterSpec,
    RunSpec,
    TensorSpec,
)
from p2pdiloco.wire.codec import encode
from p2pdiloco.wire.log import (
    AckSignature,
    Body,
    Certificate,
    Committee,
    Content,
    Contribution,
    Entry,
    Membership,
    OuterStep,
    Refused,
    Scalars,
)
from p2pdiloco_node.demo.summary import (
    Fault,
    NodeFacts,
    data_parallel_bytes_per_token,
    facts_of_log,
    in_words,
    summarise,
)

WITNESS, ONE, TWO = (PeerId(bytes([n]) * 32) for n in (9, 1, 2))
SPEC = RunSpec(
    format=1,
    math_version=1,
    name="x",
    owner_key=bytes(32),
    model=ModelSpec("llama", "llama:tiny", b"{}", 256, 128, (TensorSpec("w", (1000,)),)),
    data=DataSpec(
        BYTES, 1, (BlobRef(bytes(32), 10, 10),), (EvaluationSet("all", BlobRef(bytes(32), 10, 10), 10),)
    ),
    inner=InnerSpec(10, 4.0, 8, 1e-3, 0.1, 0, 0, 0.9, 0.95, 0.1, 1.0),
    outer=OuterSpec(),
    committee=CommitteeSpec(genesis=Committee(WITNESS, ())),
    genesis=Genesis((bytes(32),), (bytes(32),)),
    admission="local",
    trust_tokens=0,
    bootstrap_tokens=0,
    target_tokens=10**6,
    target_version=3,
    eval_every=2,
    nonce=bytes(16),
)


def entry(index: int, term: int, content: Content) -> Entry:
    body = Body(bytes(32), 0, index, NO_DIGEST, NO_DIGEST, content)
    acks = (AckSignature(bytes(32), bytes(64)),)
    return Entry(encode(body), Certificate(NO_DIGEST, term, False, acks))


def step(version: int, clock: int, staleness: list[float], refused: int = 0) -> OuterStep:
    contributions = tuple(
        Contribution(
            bytes([version, n]) * 16, ONE, 0, version, 5, 100, 1.0, k, 1.0, 1.0, bytes(32), bytes(64)
        )
        for n, k in enumerate(staleness)
    )
    gone = tuple(
        Refused(bytes([n]) * 32, TWO, 0, n + 1, 5, "TOO_LATE", bytes(32), bytes(64)) for n in range(refused)
    )
    return OuterStep(
        version, 0, contributions, gone, (), Scalars(1, 1, 1, 1, 1), clock, 100, bytes([version]) * 32
    )


LOG = [
    entry(1, 1, step(1, 100, [0.0])),
    entry(2, 1, Membership(Committee(WITNESS, (ONE, TWO)), bytes(32))),
    entry(3, 2, step(2, 300, [0.0, 0.5])),
    entry(4, 3, step(3, 600, [0.2, 1.6], refused=1)),
]


def test_the_log_counts_deltas_terms_and_aggregators() -> None:
    facts = facts_of_log(SPEC, LOG)
    assert (facts.version, facts.tokens, facts.terms) == (3, 600, 3)
    assert facts.entries_by == {WITNESS: 2, ONE: 1, TWO: 1}
    assert facts.aggregators == [ONE, TWO], "the witness is not a training node"
    assert (facts.accepted, facts.stale, facts.refused) == (5, 2, {"TOO_LATE": 1})
    assert facts.staleness == {"0": 3, "1": 1, "2": 1}
    assert facts.committee.size == 3


def test_data_parallel_is_a_ring_in_bf16_each_step() -> None:
    # 2 nodes: each sends and receives the whole gradient once a step of 1024 tokens, two bytes a parameter.
    assert data_parallel_bytes_per_token(SPEC, 2) == pytest.approx(2 * 2 * 1000 / 1024)
    assert data_parallel_bytes_per_token(SPEC, 1) == 0


def test_bits_are_those_of_the_text_as_on_the_page() -> None:
    """Its end tokens are no text."""
    (held_out,) = SPEC.data.evaluations
    shorter = msgspec.structs.replace(held_out, text_bytes=held_out.shard.tokens // 2)
    spec = msgspec.structs.replace(SPEC, data=msgspec.structs.replace(SPEC.data, evaluations=(shorter,)))
    nodes = [NodeFacts("node-1", "aa", 3000, {}, 0.4)]
    summary = summarise(
        spec, facts_of_log(spec, LOG), nodes, seed=1, run_id="00", seconds=30.0, evaluations={0: 4.0, 3: 2.0},
        faults=[], page="",
    )  # fmt: skip
    assert summary.bits_per_byte_last == pytest.approx(4.0 / log(2))
    assert "11.54 -> 5.77 bits per byte" in " ".join(in_words(summary, names={}, witness_entries=1))


def test_the_summary_adds_up_and_reads_well() -> None:
    nodes = [NodeFacts("node-1", "aa", 3000, {"RUN_OVER": 2}, 0.4), NodeFacts("node-2", "aa", 3000, {}, 0.9)]
    faults = [Fault("kill node", "node-2", 1.5, None)]
    summary = summarise(
        SPEC,
        facts_of_log(SPEC, LOG),
        nodes,
        seed=1,
        run_id="00",
        seconds=30.0,
        evaluations={0: 4.0, 3: 2.0},
        faults=faults,
        page="http://x",
    )
    assert summary.bytes_per_node_per_token == 10.0
    assert summary.times_less_than_bf16_data_parallel == pytest.approx(2 * 2 * 1000 / 1024 / 10)
    assert summary.bits_per_byte_last == pytest.approx(2.0 / log(2))
    assert summary.deltas.refused == {"TOO_LATE": 1, "RUN_OVER": 2}
    assert summary.tokens_per_s == 20.0
    assert msgspec.json.decode(msgspec.json.encode(summary))["longest_inner_gap_s"] == {
        "node-1": 0.4,
        "node-2": 0.9,
    }
    words = "\n".join(in_words(summary, names={ONE.hex(): "node-1", TWO.hex(): "node-2"}, witness_entries=2))
    assert "4.000 -> 2.000 nats per byte (50 % lower)" in words
    assert "aggregated by node-1, node-2" in words
    assert "next version after 1.5 s, contributes again after –" in words
    assert "All 2 nodes hold the same model: aa" in words
    other = [nodes[0], nodes[1]._replace(state_digest="bb")]
    differing = summarise(
        SPEC,
        facts_of_log(SPEC, LOG),
        other,
        seed=1,
        run_id="00",
        seconds=30.0,
        evaluations={},
        faults=[],
        page="",
    )
    assert "NOT hold the same model" in in_words(differing, names={}, witness_entries=0)[-1]
    assert differing.eval_loss_last is None
