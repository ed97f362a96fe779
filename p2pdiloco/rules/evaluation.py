"""Who evaluates a certified state on the held-out tokens, and what of that counts.

A loss on held-out tokens is a peer's word; nobody recomputes it. So the log chooses who may give it, and
nobody chooses itself. It chooses three wherever three nodes train that it trusts: the median is shown, and
one of them that lies moves nothing. Where two train, the mean of both is shown, and either may move it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from p2pdiloco import limits
from p2pdiloco.ids import PeerId
from p2pdiloco.rules.full_round import latest_tokens
from p2pdiloco.rules.state import RulesState, is_trusted
from p2pdiloco.run_spec import EvaluationSet, RunSpec
from p2pdiloco.wire.messages import EvalReport


class Evaluators(NamedTuple):
    """Of one version."""

    chosen: tuple[PeerId, ...]  # evaluate at once
    stand_in: PeerId | None  # evaluates as well after `stand_in_after_s`; counts where a chosen one is silent


def is_evaluated(state: RulesState, spec: RunSpec) -> bool:
    """Whether the state of this version is due: at the RunSpec's cadence, and the last one."""
    return state.finished or (state.version > 0 and state.version % spec.eval_every == 0)


def evaluators(state: RulesState, spec: RunSpec) -> Evaluators:
    """Up to `evaluators_max` peers of the present full round, each kind taking turns by version.

    Training voters first, then others that the log trusts; one alone of the rest where there is neither. The
    next in that order stands in.

    Nobody before the first outer step: version 0 has no contributors to choose from.
    """
    peers = latest_tokens(state)
    voters = {PeerId(v) for v in state.committee.voters if v in peers}
    trusted = {peer for peer in peers.keys() - voters if is_trusted(state, spec, peer)}
    turn = state.version // spec.eval_every
    kinds = (voters, trusted, peers.keys() - voters - trusted)
    order = tuple(peer for kind in kinds for peer in _turned(sorted(kind), turn))
    chosen = order[: min(max(1, len(voters) + len(trusted)), spec.evaluators_max)]
    return Evaluators(chosen, order[len(chosen)] if len(chosen) < len(order) else None)


def stand_in_after_s(spec: RunSpec) -> float:
    """Seconds after which the one who stands in evaluates as well: two passes."""
    return 2 * spec.inner.pass_s


def sequences_measured(tokens: int, *, seq_len: int, tokens_max: int) -> int:
    """Of a held-out set of `tokens`: all, or as many as `tokens_max` holds. At least one, if the set does."""
    return min(max(0, tokens - 1) // seq_len, max(1, tokens_max // seq_len))


def measured_tokens(spec: RunSpec) -> tuple[int, ...]:
    """Held-out tokens that an evaluation predicts, by set.

    Every evaluator predicts the same ones: a median of losses on other parts of a set would say nothing. What
    is measured of single sources all together costs as much as the whole corpus does.
    """
    sets, seq_len, most = spec.data.evaluations, spec.model.seq_len, limits.evaluation_tokens_max
    of_source = most // max(1, len(sets) - 1)
    return tuple(
        seq_len * sequences_measured(one.shard.tokens, seq_len=seq_len, tokens_max=of_source if n else most)
        for n, one in enumerate(sets)
    )


def report_fault(report: EvalReport, spec: RunSpec) -> str:
    """Why a well-formed report makes no sense in this run; empty when it does.

    It may end before the last set: of an evaluation that was not finished, the sets that were.
    """
    measured = measured_tokens(spec)
    if len(report.sets) > len(measured):
        return f"{len(report.sets)} losses for {len(measured)} evaluation sets"
    for said, tokens in zip(report.sets, measured, strict=False):
        if not said.loss <= limits.loss_shown_max:
            return f"a loss of {said.loss:.3g}"
        if said.tokens != tokens or not tokens:
            return f"a loss on {said.tokens} held-out tokens, where {tokens} are measured"
    if len(report.samples) not in (0, len(spec.samples.prompts)):
        return f"{len(report.samples)} samples for {len(spec.samples.prompts)} prompts"
    return ""


def shown_loss(losses: Sequence[float]) -> float:
    """The median of what a version's evaluators say; of one or two the mean. Nats per token."""
    return float(median(losses))


def agreeing(losses: Sequence[float]) -> int:
    """How many of them say what is shown, but for what devices differ in."""
    shown = shown_loss(losses)
    return sum(abs(loss - shown) <= limits.evaluation_agrees_nats for loss in losses)


def perplexity(loss: float) -> float:
    """e^loss, of a loss in nats per token of at most `loss_shown_max`."""
    return math.exp(loss)


def bits_per_byte(loss: float, held_out: EvaluationSet) -> float:
    """Nats per token as bits per byte of the text that its tokens stand for, whatever the tokenizer."""
    return loss * held_out.shard.tokens / held_out.text_bytes / math.log(2)


def _turned(peers: Sequence[PeerId], turn: int) -> tuple[PeerId, ...]:
    first = turn % len(peers) if peers else 0
    return (*peers[first:], *peers[:first])
