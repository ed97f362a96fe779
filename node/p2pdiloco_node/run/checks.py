"""What cannot work, said when a run is made: one sentence each, with what to change.

Types and ranges are the RunSpec's own; here is what no single field shows. Sizes and figures of one node's
traffic are here as well, for `run inspect`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError, PeerError
from p2pdiloco.exit_codes import USAGE
from p2pdiloco.rules.delta_layout import encoded_size, is_raw, is_sparse
from p2pdiloco.run_spec import (
    CommitteeSpec,
    InnerSpec,
    ModelSpec,
    OuterSpec,
    RunSpec,
    contradictions,
    contradictory_loops,
    contradictory_timings,
)
from p2pdiloco.wire.codec import decode, encode
from p2pdiloco.words import count_of
from p2pdiloco_node.config import nearest
from p2pdiloco_node.run.fields import faults
from p2pdiloco_node.training.families import POSITIONS, open_config
from p2pdiloco_node.training.machine import Machine
from p2pdiloco_node.training.memory_plan import MemoryPlan, amount, plan_memory

LATE_SHARE = 0.25  # of a pass: who needs longer for a delivery is told so at join (protocol.md 5)
DECLARED_MAX = 1_000_000  # Mbit/s of a link or GiB of memory: more is a slip
CANNOT_WORK = "this run cannot work: "


class Declared(NamedTuple):
    """What the owner expects of the nodes that will come."""

    up_mbit: float = 20.0
    down_mbit: float = 100.0
    memory_gb: float | None = None  # of the GPU, in GiB, or of RAM where a node has none; None: any

    def check(self) -> None:
        """Raises: OperatorError (usage): no machine is like that."""
        given = {"--up-mbit": self.up_mbit, "--down-mbit": self.down_mbit, "--memory-gb": self.memory_gb}
        for flag, value in given.items():
            if value is not None and not 0 < value <= DECLARED_MAX:
                raise OperatorError(
                    f"{flag} is a number above 0 and at most {DECLARED_MAX:,}; {value} is not possible.",
                    USAGE,
                )


class Traffic(NamedTuple):
    """Of one node and pass, with `limits.planned_nodes` nodes; seconds at the declared links."""

    delta_bytes: int
    voters: int  # to which each delta goes
    up_bytes: int
    up_s: float
    down_bytes: int
    down_s: float
    pass_s: float

    @property
    def up_share(self) -> float:
        """Of the pass that an upload takes."""
        return self.up_s / self.pass_s


def traffic(spec: RunSpec, declared: Declared) -> Traffic:
    """Each delta goes to every voter; each node fetches what the others' deltas bring."""
    delta = encoded_size(spec.outer.codec, spec.model.tensors)
    voters = min(spec.committee.size_max, limits.planned_nodes)
    up, down = delta * voters, delta * (limits.planned_nodes - 1)
    return Traffic(
        delta, voters, up, up * 8 / (declared.up_mbit * 1e6), down, down * 8 / (declared.down_mbit * 1e6),
        spec.inner.pass_s,
    )  # fmt: skip


def memory(spec: RunSpec, memory_gb: float) -> MemoryPlan:
    """What a node with so much on its GPU would do; RAM and disk are its owner's to see to."""
    size = int(memory_gb * 2**30)
    return plan_memory(spec, Machine("declared", size, 2**60, 2**60, "."))


def check_parts(
    inner: InnerSpec, outer: OuterSpec, committee: CommitteeSpec, target_tokens: int, target_version: int,
    step_tokens: int,
) -> None:  # fmt: skip
    """Before anything is made: what needs neither model nor data. `step_tokens`: of one inner step.

    Raises: OperatorError with every sentence.
    """
    _raise(
        [
            *contradictory_timings(committee),
            *contradictory_loops(inner, outer),
            *_sparse(outer),
            *_targets(inner, target_tokens, target_version, step_tokens),
        ]
    )


def check_run(spec: RunSpec, declared: Declared) -> list[str]:
    """Everything; sentences that only warn. Raises: OperatorError with every sentence that refuses."""
    _raise(
        [*_faults(spec), *map(": ".join, _links(spec, declared)), *map(": ".join, _memory(spec, declared))]
    )
    return [*map(" ".join, _late(spec, declared)), *_rare(spec)]


def about_a_node(spec: RunSpec, declared: Declared) -> list[str]:
    """Sentences for who reads of a run that is there: what such a node cannot; the run stays as it is."""
    faults = list(_faults(spec))
    return [
        *([CANNOT_WORK + "\n".join(faults)] if faults else []),
        *(f"Such a node cannot keep up: {fact}." for fact, _ in _links(spec, declared)),
        *(f"Such a node cannot take part: {fact}." for fact, _ in _memory(spec, declared)),
        *(fact for fact, _ in _late(spec, declared)),
        *_rare(spec),
    ]


def _faults(spec: RunSpec) -> Iterator[str]:
    """Of the run itself, whatever nodes it has."""
    yield from contradictions(spec)
    yield from _sparse(spec.outer)
    yield from _targets(
        spec.inner, spec.target_tokens, spec.target_version, spec.tokens_per_inner_step
    )  # fmt: skip
    yield from _model(spec.model, spec.outer)
    yield from _data(spec)


def _raise(sentences: list[str]) -> None:
    if sentences:
        raise OperatorError(CANNOT_WORK + "\n".join(sentences), USAGE)


def _sparse(outer: OuterSpec) -> Iterator[str]:
    if is_sparse(outer.codec) and outer.error_feedback_beta == 0:
        yield (
            f"outer.codec {outer.codec} without error feedback would lose most of every delta: raise "
            "outer.error_feedback_beta or choose int4."
        )


def _targets(inner: InnerSpec, tokens: int, version: int, step_tokens: int) -> Iterator[str]:
    in_a_pass = inner.inner_steps * step_tokens
    if version and version * step_tokens > tokens:
        yield (
            f"the target of {count_of(version, 'outer step')} cannot be reached: each merges an inner "
            f"step at least, {count_of(step_tokens, 'token')}, and the run is over after {tokens:,}; raise "
            f"--tokens to {version * in_a_pass:,} or lower --outer-steps."
        )
    elif not version and tokens < in_a_pass:
        yield (
            f"{tokens:,} tokens are less than one full round: a single pass has "
            f"{count_of(inner.inner_steps, 'inner step')} of {count_of(step_tokens, 'token')}, {in_a_pass:,} "
            "in all; raise --tokens, or lower --inner-steps or --batch."
        )
    if inner.warmup_tokens >= tokens:
        yield (
            f"inner.warmup_tokens ({inner.warmup_tokens:,}) is not below the target of {tokens:,} tokens: "
            "the learning rate would never be reached; lower it."
        )


def _model(model: ModelSpec, outer: OuterSpec) -> Iterator[str]:
    positions = _positions(model)
    if positions is not None and model.seq_len > positions:
        yield (
            f"sequences of {count_of(model.seq_len, 'token')} are longer than the "
            f"{count_of(positions, 'position')} of {model.preset or model.family}: lower --seq-len to "
            f"{positions}."
        )
    if is_sparse(outer.codec) and all(is_raw(outer.codec, t) for t in model.tensors):
        yield (
            f"{outer.codec} sends parts of matrices, and {model.preset or model.family} has none that is "
            "large enough: choose --codec fp16."
        )
    size = encoded_size(outer.codec, model.tensors)
    if size > limits.blob_bytes_max:
        yield (
            f"a delta of {amount(size)} is more than any node takes ({amount(limits.blob_bytes_max)}): "
            "choose --codec topk64 or a smaller model."
        )


def _positions(model: ModelSpec) -> int | None:
    """How long a text the config allows; None where it does not say. Raises: ModelRefused."""
    config = open_config(model.family, model.config)
    found = (config.get(key) for key in POSITIONS)
    return next((value for value in found if isinstance(value, int) and value > 0), None)


def _data(spec: RunSpec) -> Iterator[str]:
    data, needed = spec.data, spec.model.seq_len + 1  # each token but the first is predicted
    if all(shard.tokens < needed for shard in data.shards):
        longest = max(shard.tokens for shard in data.shards)
        yield (
            f"no data shard holds a sequence of {needed:,} tokens (the longest has {longest:,}): name more "
            "text with --data, or lower --seq-len."
        )
    for held_out in data.evaluations:
        if held_out.shard.tokens < needed:
            yield (
                f"the evaluation set {held_out.name!r} has {count_of(held_out.shard.tokens, 'token')}, less "
                f"than a sequence of {needed:,}: name more text with --data, lower --seq-len, or leave "
                "--eval-per-source out."
            )


def _links(spec: RunSpec, declared: Declared) -> Iterator[tuple[str, str]]:
    """A pass shorter than its transfer: deltas would pile up for ever. What is so, and what to do."""
    t = traffic(spec, declared)
    ways = (
        ("up", t.up_s, t.up_bytes, declared.up_mbit, f"to {count_of(t.voters, 'voter')}"),
        ("down", t.down_s, t.down_bytes, declared.down_mbit, f"from {limits.planned_nodes - 1} others"),
    )
    for way, seconds, size, mbit, whom in ways:
        if seconds > t.pass_s:
            thinner = "" if is_sparse(spec.outer.codec) else "choose --codec topk64, "
            fact = (
                f"a pass takes {t.pass_s:g} s, and its {amount(size)} {whom} take {seconds:,.0f} s at "
                f"{mbit:g} Mbit/s {way}"
            )
            to_mend = f"{thinner}raise --pass-s to {math.ceil(4 * seconds)}, or declare faster links with "
            yield fact, f"{to_mend}--{way}-mbit."


def _memory(spec: RunSpec, declared: Declared) -> Iterator[tuple[str, str]]:
    if declared.memory_gb is None:
        return
    plan = memory(spec, declared.memory_gb)
    if plan.missing:
        fact = (
            f"{spec.model.preset or spec.model.family} with {count_of(spec.model.params, 'parameter')} needs "
            f"{amount(plan.gpu)} at least, and {declared.memory_gb:g} GiB are declared"
        )
        yield fact, "choose a smaller model or shorter sequences, or raise --memory-gb."


def _late(spec: RunSpec, declared: Declared) -> Iterator[tuple[str, str]]:
    t = traffic(spec, declared)
    if t.up_share > LATE_SHARE:
        fact = (
            f"Delivering a delta takes {t.up_share:.0%} of a pass at {declared.up_mbit:g} Mbit/s up: nodes "
            "with slower links will always be late."
        )
        yield fact, "A longer --pass-s or a topk codec helps."


def _rare(spec: RunSpec) -> Iterator[str]:
    if spec.target_version and spec.eval_every > spec.target_version:
        yield f"Evaluations are every {spec.eval_every:,} versions: there will be one at the end alone."


def replaced(part: Any, fields: Mapping[str, Any], what: str) -> Any:
    """A part of the RunSpec with other fields. `what`: its table in the run file.

    Raises: OperatorError: no such field, or out of range.
    """
    unknown = sorted(set(fields) - set(part.__struct_fields__))
    if unknown:
        hint = nearest(unknown[0], part.__struct_fields__) or "."
        raise OperatorError(f"the run's {what} part has no field {unknown[0]!r}{hint}", USAGE)
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    check_fields(type(part), values, what)
    made = msgspec.structs.replace(part, **values)
    check_types(made, what)
    return made


def check_fields(kind: type[msgspec.Struct], values: Mapping[str, Any], table: str) -> None:
    """Some fields of a part, each by itself. Raises: OperatorError with a sentence for each that is out."""
    _raise(list(faults(kind, values, table)))


def check_types(part: msgspec.Struct, table: str = "run") -> None:
    """Every node will open it with the same types; a value out of range is said here and now.

    Raises: OperatorError (usage).
    """
    check_fields(type(part), {name: getattr(part, name) for name in part.__struct_fields__}, table)
    try:
        decode(encode(part), type(part), bytes_max=limits.run_spec_bytes_max)
    except OverflowError:
        raise OperatorError(f"the run's {table} part has a number that is too large.", USAGE) from None
    except (PeerError, TypeError) as error:
        raise OperatorError(f"the run's {table} part cannot be opened again: {error}.", USAGE) from None
