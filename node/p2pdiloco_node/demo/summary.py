"""What a demo run did, from its certified log and from what its nodes said: for people and for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from p2pdiloco.ids import NO_DIGEST, Digest, PeerId
from p2pdiloco.rules.evaluation import bits_per_byte
from p2pdiloco.run_spec import RunSpec
from p2pdiloco.wire.log import Committee, Entry, Membership, OuterStep, open_body
from p2pdiloco.words import count_of

STALE_ROUNDS = 0.5  # later than this counts as stale, as on the page
BF16_BYTES = 2


class Deltas(msgspec.Struct, frozen=True):
    accepted: int  # listed in the log, stale ones included
    stale: int
    refused: dict[str, int]  # by reason: in the log, or at the door


class Fault(msgspec.Struct, frozen=True):
    kind: str  # kill aggregator, kill node, pause node, kill tracker
    target: str
    to_next_version_s: float | None  # from the fault to the next certified version seen anywhere
    to_contribution_s: float | None  # from the fault until the target has a delta listed again


class Summary(msgspec.Struct, frozen=True):
    """`p2pdiloco demo --json`. Losses in nats per token, times in seconds."""

    seed: int
    nodes: int
    run_id: str
    version: int
    seconds: float  # from the start of the processes to the last version
    tokens: int  # merged
    eval_loss_first: float | None
    eval_loss_last: float | None
    bits_per_byte_last: float | None
    state_digests: dict[str, str]  # node -> state root of its last version
    terms: int  # terms that certified something
    aggregators: list[str]  # training nodes that did, PeerIds in order of their first time
    voters: int  # seats of the last committee
    deltas: Deltas
    staleness: dict[str, int]  # deltas by rounds late, rounded
    # Sent and received by a node per token that it trained on; the run's data, fetched once, is not counted.
    bytes_per_node_per_token: float | None
    times_less_than_bf16_data_parallel: float | None
    tokens_per_s: float
    faults: list[Fault]
    longest_inner_gap_s: dict[str, float]  # node -> longest pause of its trainer while it was not itself hit
    page: str


class LogFacts(NamedTuple):
    version: int
    tokens: int
    terms: int
    aggregators: list[PeerId]  # training nodes, in order of their first entry
    entries_by: dict[PeerId, int]  # entries certified under each aggregator, the witness included
    committee: Committee
    accepted: int
    stale: int
    refused: dict[str, int]
    staleness: dict[str, int]
    state_root: Digest


class NodeFacts(NamedTuple):
    """What one node said last, as far as the summary needs it."""

    name: str
    state_digest: str
    bytes_total: int  # sent and received for training, over all lives
    refused: Mapping[str, int]
    longest_gap_s: float


def facts_of_log(spec: RunSpec, entries: Sequence[Entry]) -> LogFacts:
    """Read the certified log. Raises: PeerError for an entry that does not open."""
    committee = spec.committee.genesis
    version = tokens = accepted = stale = 0
    root = NO_DIGEST
    terms: set[int] = set()
    entries_by: Counter[PeerId] = Counter()
    refused: Counter[str] = Counter()
    rounds: Counter[int] = Counter()
    for entry in entries:
        content = open_body(entry.body).content
        term = entry.certificate.term
        terms.add(term)
        entries_by[committee.aggregator_of(term)] += 1
        if isinstance(content, OuterStep):
            version, tokens, root = content.version, content.clock, Digest(content.state_root)
            accepted += len(content.contributions)
            stale += sum(c.staleness >= STALE_ROUNDS for c in content.contributions)
            rounds.update(int(c.staleness + 0.5) for c in content.contributions)
            refused.update(r.reason for r in content.refused)
        elif isinstance(content, Membership):
            committee = content.committee
    witness = spec.committee.genesis.witness
    return LogFacts(
        version=version, tokens=tokens, terms=len(terms), aggregators=[p for p in entries_by if p != witness],
        entries_by=dict(entries_by), committee=committee, accepted=accepted, stale=stale,
        refused=dict(refused), staleness={str(k): n for k, n in sorted(rounds.items())}, state_root=root,
    )  # fmt: skip


def data_parallel_bytes_per_token(spec: RunSpec, nodes: int) -> float:
    """Bytes that a bf16 ring all-reduce each inner step sends and receives, per token of a node.

    2 (N - 1) / N of the gradient each way, every `tokens_per_inner_step` tokens (targets.md, P3).
    """
    each_way = 2 * (nodes - 1) / nodes * BF16_BYTES * spec.model.params
    return 2 * each_way / spec.tokens_per_inner_step


def summarise(
    spec: RunSpec,
    log_facts: LogFacts,
    nodes: Sequence[NodeFacts],
    *,
    seed: int,
    run_id: str,
    seconds: float,
    evaluations: Mapping[int, float],
    faults: Sequence[Fault],
    page: str,
) -> Summary:
    """`evaluations`: version -> held-out loss, as reported to the tracker."""
    last = evaluations[max(evaluations)] if evaluations else None
    bits = None if last is None else bits_per_byte(last, spec.data.evaluations[0])
    refused = Counter(log_facts.refused)
    for node in nodes:
        refused.update(node.refused)
    per_token = sum(n.bytes_total for n in nodes) / log_facts.tokens if log_facts.tokens else None
    parallel = data_parallel_bytes_per_token(spec, len(nodes))
    return Summary(
        seed=seed, nodes=len(nodes), run_id=run_id, version=log_facts.version, seconds=round(seconds, 1),
        tokens=log_facts.tokens, eval_loss_first=evaluations[min(evaluations)] if evaluations else None,
        eval_loss_last=last, bits_per_byte_last=bits,
        state_digests={n.name: n.state_digest for n in nodes}, terms=log_facts.terms,
        aggregators=[p.hex() for p in log_facts.aggregators], voters=log_facts.committee.size,
        deltas=Deltas(log_facts.accepted, log_facts.stale, dict(refused)), staleness=log_facts.staleness,
        bytes_per_node_per_token=per_token,
        times_less_than_bf16_data_parallel=parallel / per_token if per_token and parallel else None,
        tokens_per_s=round(log_facts.tokens / seconds, 1) if seconds else 0.0, faults=list(faults),
        longest_inner_gap_s={n.name: round(n.longest_gap_s, 2) for n in nodes}, page=page,
    )  # fmt: skip


def in_words(summary: Summary, *, names: Mapping[str, str], witness_entries: int) -> list[str]:
    """A few lines for people. `names`: PeerId in hex -> name."""
    s = summary
    rate = f"{s.tokens_per_s:,.0f} tokens/s"
    lines = [
        f"{count_of(s.version, 'outer step')} and {count_of(s.tokens, 'token')} in {s.seconds:.0f} s ({rate})"
    ]
    if s.eval_loss_first is not None and s.eval_loss_last is not None and s.bits_per_byte_last is not None:
        change = 100 * (1 - s.eval_loss_last / s.eval_loss_first) if s.eval_loss_first else 0.0
        first_bits = s.bits_per_byte_last * s.eval_loss_first / s.eval_loss_last if s.eval_loss_last else 0.0
        lines.append(
            f"Held-out loss {s.eval_loss_first:.3f} -> {s.eval_loss_last:.3f} nats per byte "
            f"({change:.0f} % lower); {first_bits:.2f} -> {s.bits_per_byte_last:.2f} bits per byte"
        )
    else:
        lines.append("Held-out loss: no evaluation reached the tracker.")
    leaders = [names.get(p, p[:8]) for p in s.aggregators]
    if witness_entries:
        leaders.append(f"the witness while it was alone ({count_of(witness_entries, 'entry', 'entries')})")
    lines.append(
        f"{count_of(s.terms, 'term')}, {count_of(s.voters, 'seat')} in the committee; aggregated by "
        f"{', '.join(leaders)}"
    )
    refused = ", ".join(f"{n} {reason}" for reason, n in sorted(s.deltas.refused.items())) or "none"
    late = ", ".join(f"{n} at {k}" for k, n in s.staleness.items()) or "none"
    lines.append(f"Deltas: {s.deltas.accepted} accepted, {s.deltas.stale} of them stale; refused: {refused}")
    lines.append(f"Staleness in rounds: {late}")
    if s.bytes_per_node_per_token and s.times_less_than_bf16_data_parallel:
        lines.append(
            f"Traffic: {s.bytes_per_node_per_token:,.0f} bytes per node and token, "
            f"{s.times_less_than_bf16_data_parallel:,.1f} times less than a bf16 gradient exchange each step"
        )
    lines += [
        f"Fault: {fault.kind} {fault.target}: next version after {_seconds(fault.to_next_version_s)}, "
        f"contributes again after {_seconds(fault.to_contribution_s)}"
        for fault in s.faults
    ]
    if s.faults:
        gap = max(s.longest_inner_gap_s.values(), default=0.0)
        lines.append(f"Longest pause between inner steps on nodes that were not hit: {gap:.1f} s")
    digests = set(s.state_digests.values())
    if len(digests) == 1:
        who = f"All {s.nodes} nodes hold" if s.nodes > 1 else "The one node holds"
        lines.append(f"{who} the same model: {digests.pop()[:16]}")
    else:
        lines.append(f"The nodes do NOT hold the same model: {s.state_digests}")
    return lines


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} s"
