"""What cannot work is refused when a run is made, each with what to change."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.ids import NO_DIGEST
from p2pdiloco.run_spec import BlobRef, EvaluationSet, RunSpec, TensorSpec, chunk_sizes
from p2pdiloco.sim.keys import FastSigner
from p2pdiloco.sim.tiny_run import tiny_run
from p2pdiloco_node.run.checks import Declared, check_parts, check_run, replaced, traffic

TINY = tiny_run(FastSigner("owner"), FastSigner("witness").peer_id).spec
ROOMY = Declared(1000, 1000)
Change = Callable[[RunSpec], RunSpec]


def part(name: str, **fields: Any) -> Change:
    def change(spec: RunSpec) -> RunSpec:
        old = getattr(spec, name)
        new = msgspec.structs.replace(old, **fields)
        return msgspec.structs.replace(spec, **{name: new})

    return change


def top(**fields: Any) -> Change:
    return lambda spec: msgspec.structs.replace(spec, **fields)


def config(**values: int) -> Change:
    return part("model", config=json.dumps(values).encode())


def shard(tokens: int) -> BlobRef:
    return BlobRef(NO_DIGEST, 1024, tokens)


def held_out(name: str, tokens: int) -> EvaluationSet:
    return EvaluationSet(name, shard(tokens), 1)


def test_a_run_that_works_is_refused_nothing() -> None:
    assert check_run(TINY, ROOMY) == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        pytest.param(part("committee", size_max=4), "1, 3, 5 or 7 seats", id="seats"),
        pytest.param(
            part("committee", timeout_s_min=1.5), r"less than 2 heartbeats .* raise it to 3", id="heartbeat"
        ),
        pytest.param(part("committee", timeout_s_max=3.0), "all voters would move at once", id="timeouts"),
        pytest.param(part("committee", voter_lease_s=5.0), r"voter_lease_s .* raise it to 24", id="lease"),
        pytest.param(part("outer", mu=1.0), "momentum would never decay", id="mu"),
        pytest.param(part("inner", beta2=1.0), "must be less than 1", id="beta"),
        pytest.param(
            part("outer", codec="topk64", error_feedback_beta=0.0), "without error feedback", id="no feedback"
        ),
        pytest.param(
            top(target_tokens=31), "31 tokens are less than one full round: .* 32 in all", id="round"
        ),
        pytest.param(
            lambda spec: top(target_tokens=7)(part("inner", inner_steps=1)(spec)),
            "a single pass has 1 inner step of 8 tokens", id="round of one step",
        ),
        pytest.param(
            lambda spec: top(target_version=1, target_tokens=7)(spec), "the target of 1 outer step cannot",
            id="one outer step",
        ),
        pytest.param(
            top(target_tokens=800, target_version=101), "cannot be reached: .* raise --tokens to 3,232",
            id="version beyond tokens",
        ),
        pytest.param(
            part("inner", warmup_tokens=2**41), "the learning rate would never be reached", id="warm-up"
        ),
        pytest.param(
            config(max_position_embeddings=7), r"the 7 positions .* --seq-len to 7", id="positions"
        ),
        pytest.param(config(n_positions=4), "longer than the 4 positions", id="positions by another name"),
        pytest.param(part("outer", codec="topk64"), "has none that is large enough", id="topk, no matrices"),
        pytest.param(
            part("model", tensors=(TensorSpec("huge", (2**17, 2**17)),)), "choose --codec topk64", id="huge"
        ),
        pytest.param(part("data", shards=(shard(8), shard(5))), "no data shard holds .* of 9", id="shards"),
        pytest.param(
            part("data", evaluations=(held_out("all", 9), held_out("poems", 8))),
            "evaluation set 'poems' has 8 tokens", id="evaluation set",
        ),
        pytest.param(
            part("data", tokenizer=msgspec.structs.replace(TINY.data.tokenizer, vocab_size=300)),
            r"the tokenizer has 300 tokens and the model 256", id="vocabulary",
        ),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_with_what_to_change(change: Change, sentence: str) -> None:
    with pytest.raises(OperatorError, match=sentence) as caught:
        check_run(change(TINY), ROOMY)
    assert caught.value.exit_code == 2


def test_every_fault_is_said_at_once() -> None:
    spec = part("committee", size_max=4)(top(target_tokens=31)(TINY))
    with pytest.raises(OperatorError, match=r"(?s)1, 3, 5 or 7.*\n.*less than one full round"):
        check_run(spec, ROOMY)


def test_what_needs_no_data_is_refused_before_any_is_made() -> None:
    seats = msgspec.structs.replace(TINY.committee, timeout_s_min=0.5)
    with pytest.raises(OperatorError, match="less than 2 heartbeats"):
        check_parts(TINY.inner, TINY.outer, seats, 10**9, 0, 8)


def test_a_pass_shorter_than_its_transfer_is_refused_and_a_long_transfer_is_said() -> None:
    """fp16 of 160 params is 368 bytes, to three voters 1,104; a pass takes four seconds."""
    t = traffic(TINY, Declared(0.01, 0.01))
    assert (t.delta_bytes, t.voters, t.up_bytes, t.down_bytes) == (368, 3, 1104, 1104)
    assert t.up_s == pytest.approx(0.8832)
    assert check_run(TINY, Declared(0.01, 0.01)) == []
    assert "44%" in check_run(TINY, Declared(0.005, 1))[0]
    with pytest.raises(
        OperatorError, match=r"at 0.002 Mbit/s up: choose --codec topk64, raise --pass-s to 18"
    ):
        check_run(TINY, Declared(0.002, 1))
    with pytest.raises(OperatorError, match=r"raise --pass-s to 17664, or"):  # as it can be pasted
        check_run(TINY, Declared(2e-6, 1))
    with pytest.raises(OperatorError, match=r"at 0.002 Mbit/s down: .*--down-mbit"):
        check_run(TINY, Declared(1, 0.002))
    alone = part("committee", size_max=1)(TINY)
    assert check_run(alone, Declared(0.002, 1)) != []  # to one voter it fits
    assert limits.planned_nodes == 4


def test_a_model_larger_than_the_declared_memory_is_refused() -> None:
    model = part(
        "model", tensors=(TensorSpec("matrix", (30_000, 30_000)),), preset="llama:900m",
        config=b'{"hidden_size":2048,"num_attention_heads":16,"num_hidden_layers":16}',
    )(part("outer", codec="topk64")(part("inner", pass_s=3600.0)(TINY)))  # fmt: skip
    chunks = (NO_DIGEST,) * len(chunk_sizes(model.model.params))
    model = part("genesis", params=chunks, momentum=chunks)(model)
    with pytest.raises(OperatorError, match=r"llama:900m .* needs .* GiB at least, and 4 GiB are declared"):
        check_run(model, Declared(1000, 1000, 4))
    assert check_run(model, Declared(1000, 1000, 80)) == []


def test_an_unknown_field_comes_with_the_nearest() -> None:
    with pytest.raises(OperatorError, match="no field 'codek'; did you mean 'codec'"):
        replaced(TINY.outer, {"codek": "fp16"}, "outer")
    with pytest.raises(OperatorError, match=r"--codec is int4, .* or topk128; 'zip' is not possible"):
        replaced(TINY.outer, {"codec": "zip"}, "outer")
    assert replaced(TINY.samples, {"prompts": ["a", "b"]}, "samples").prompts == ("a", "b")
