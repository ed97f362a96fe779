"""Planning an outer step, and checking one that somebody else planned (algorithm.md 4, 5).

The aggregator plans, a voter plans again from what the entry lists and compares: integers exactly, declared
figures within a relative tolerance. So one function holds the rules and neither can drift from the other.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from p2pdiloco import limits
from p2pdiloco.ids import NO_DIGEST, Digest, PeerId
from p2pdiloco.rules.caps import capped_tokens
from p2pdiloco.rules.float32 import f32, is_f32, near
from p2pdiloco.rules.full_round import effective_nodes, tokens_after
from p2pdiloco.rules.staleness import decay, staleness, too_late
from p2pdiloco.rules.state import RulesState, last_sequence, targets_reached
from p2pdiloco.run_spec import OuterSpec, RunSpec
from p2pdiloco.wire.log import Contribution, Left, OuterStep, Refused, Scalars

__all__ = ["Candidate", "check_outer_step", "plan_outer_step", "steps_max", "too_late"]


class Candidate(NamedTuple):
    """A delta that may be listed: the signed facts of its header and the norm measured here."""

    delta: Digest
    peer: PeerId
    base_version: int
    sequence: int
    steps: int
    norm: float  # L2 norm of the decoded delta
    key: bytes  # the peer's public key
    signature: bytes  # over wire.signing.delta_statement


def steps_max(spec: RunSpec) -> int:
    """Inner steps that one delta may hold: a prolonged pass (algorithm.md 3, 4)."""
    return limits.pass_prolonged_factor * spec.inner.inner_steps


def plan_outer_step(
    state: RulesState, spec: RunSpec, candidates: Sequence[Candidate], left: Sequence[Left]
) -> OuterStep | None:
    """The outer step that merges `candidates` into `state`; its state_root is still NO_DIGEST.

    `candidates` come oldest first: beyond 32 contributors the later ones wait for the next entry. One delta
    per peer is taken, its lowest sequence; the too late ones are refused; those that no voter would accept
    (revoked, passed over, too many steps, a base to come) are left alone.

    Returns None where there is nothing to merge: no candidate that is in time, a total weight of zero
    (never 0/0), or a run that is paused, over, or at its targets.
    """
    if _closed(state, spec) is not None:
        return None
    usable = [c for c in candidates if _unusable(state, spec, c) is None]
    late = sorted((c for c in usable if too_late(state, spec, c)), key=lambda c: c.delta)
    chosen = _one_per_peer(c for c in usable if not too_late(state, spec, c))
    refused = tuple(
        Refused(
            delta=c.delta,
            peer=c.peer,
            sequence=c.sequence,
            reason="TOO_LATE",
            base_version=c.base_version,
            steps=c.steps,
            key=c.key,
            signature=c.signature,
        )
        for c in late[: limits.refused_max]
    )
    gone = tuple(sorted(left, key=lambda gone: gone.peer)[: limits.refused_max])
    return _plan(state, spec, chosen, refused, gone) if chosen else None


def check_outer_step(
    state: RulesState,
    spec: RunSpec,
    step: OuterStep,
    norms: Mapping[Digest, float],
    *,
    relative: float = 1e-4,
) -> str | None:
    """Why a voter must refuse `step` after `state`, or None where it may accept it.

    `norms` are the L2 norms measured here, by delta. `relative` is the tolerance for declared figures: 1e-3
    where the body is a re-proposal (algorithm.md 5). Signatures are the envelope's business and the state
    root the driver's.
    """
    reason = _closed(state, spec) or _order_broken(state, spec, step)
    if reason:
        return reason
    named_here: list[Contribution | Refused] = [*step.contributions, *step.refused]
    for named in named_here:
        reason = _unusable(state, spec, named)
        if reason:
            return reason
    for refused in step.refused:
        if refused.reason != "TOO_LATE" or not too_late(state, spec, refused):
            return f"a delta is refused as {refused.reason} that is not too late"
    chosen = []
    for c in step.contributions:
        if too_late(state, spec, c):
            return "a delta is listed that is too late"
        measured = norms.get(Digest(c.delta))
        if measured is None:
            return "a listed delta is not held here"
        if not near(c.norm, f32(measured), relative):
            return f"norm {c.norm:.6g} is declared and {measured:.6g} measured"
        # The declared norm is used from here on, so that its tolerance is not spent a second time.
        chosen.append(
            Candidate(
                Digest(c.delta),
                PeerId(c.peer),
                c.base_version,
                c.sequence,
                c.steps,
                c.norm,
                c.key,
                c.signature,
            )
        )
    mine = _plan(state, spec, chosen, step.refused, step.left)
    if mine is None:
        return "the total weight is zero"
    return _difference(step, mine, relative)


def _closed(state: RulesState, spec: RunSpec) -> str | None:
    if state.finished or targets_reached(state, spec):
        return "the run is over"
    return "the run is paused" if state.paused else None


def _unusable(state: RulesState, spec: RunSpec, named: Candidate | Contribution | Refused) -> str | None:
    """Why a delta may neither be listed nor refused in the log."""
    peer = PeerId(named.peer)
    if peer in state.revoked:
        return "a delta of a revoked peer"
    if named.sequence <= last_sequence(state, peer):
        return "a delta that the log has passed over or listed before"
    if named.base_version > state.version:
        return "a delta with a base that is not made yet"
    if not 1 <= named.steps <= steps_max(spec):
        return f"a delta of {named.steps} inner steps, at most {steps_max(spec)}"
    return None


def _one_per_peer(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The lowest sequence of each peer, each digest once, the first 32 of them, in digest order."""
    first: dict[PeerId, Candidate] = {}
    for c in candidates:
        held = first.get(c.peer)
        # Assigning to a key that is there keeps its place: the peer waits as long as its oldest delta.
        if held is None or (c.sequence, c.delta) < (held.sequence, held.delta):
            first[c.peer] = c
    by_digest: dict[Digest, Candidate] = {}
    for c in first.values():
        by_digest.setdefault(c.delta, c)
    return sorted(list(by_digest.values())[: limits.contributions_max], key=lambda c: c.delta)


def _order_broken(state: RulesState, spec: RunSpec, step: OuterStep) -> str | None:
    if step.version != state.version + 1:
        return f"version {step.version} after {state.version}"
    if step.fragment >= spec.outer.fragments:
        return f"fragment {step.fragment} of {spec.outer.fragments}"
    if not _ascending([c.delta for c in step.contributions]):
        return "contributions are not in the order of their digests"
    if len({c.peer for c in step.contributions}) < len(step.contributions):
        return "two deltas of one peer"
    if not _ascending([r.delta for r in step.refused]) or not _ascending([gone.peer for gone in step.left]):
        return "refusals or goodbyes are not in order"
    if {r.delta for r in step.refused} & {c.delta for c in step.contributions}:
        return "a delta is both listed and refused"
    return None


def _ascending(names: Sequence[bytes]) -> bool:
    return all(a < b for a, b in pairwise(names))


def _plan(
    state: RulesState,
    spec: RunSpec,
    chosen: Sequence[Candidate],
    refused: tuple[Refused, ...],
    left: tuple[Left, ...],
) -> OuterStep | None:
    """Caps, staleness, weights, clips and scalars for `chosen`, which are in digest order."""
    per_step = spec.tokens_per_inner_step
    capped = capped_tokens(state, spec, {c.peer: c.steps * per_step for c in chosen})
    clips = clip_factors(state, [(f32(c.norm), c.steps) for c in chosen])
    contributions = []
    for c, clip in zip(chosen, clips, strict=True):
        k = staleness(state, c)
        contributions.append(
            Contribution(
                delta=c.delta,
                peer=c.peer,
                base_version=c.base_version,
                sequence=c.sequence,
                steps=c.steps,
                tokens=capped[c.peer],
                norm=f32(c.norm),
                staleness=f32(k),
                weight=f32(capped[c.peer] * decay(spec.outer, k)),
                clip=clip,
                key=c.key,
                signature=c.signature,
            )
        )
    counts = tokens_after(state, capped.items(), {PeerId(gone.peer) for gone in left})
    t_full = sum(counts.values())
    weight_sum = f32(math.fsum(c.weight for c in contributions))
    if weight_sum == 0:
        return None
    return OuterStep(
        version=state.version + 1,
        fragment=0,
        contributions=tuple(contributions),
        refused=refused,
        left=left,
        scalars=scalars_of(spec.outer, weight_sum, t_full, effective_nodes(counts)),
        clock=state.clock + sum(capped.values()),
        t_full=t_full,
        state_root=NO_DIGEST,
    )


def clip_factors(state: RulesState, measured: Sequence[tuple[float, int]]) -> list[float]:
    """Each delta's clip, in (0, 1], from (L2 norm, steps) of all contributors (algorithm.md 4).

    clip_i = 2 * median_j(|d_j| / sqrt(s_j)) * sqrt(s_i), as a factor: norms grow like the square root of
    the steps, so a plain median would cut the fastest honest nodes every time (DyLU). With fewer than three
    contributors the last 16 entries count too; with fewer than three figures nothing is clipped. A zero
    norm says nothing about how large a delta should be and is left out: zero deltas must not clip others.
    """
    figures = [norm / math.sqrt(steps) for norm, steps in measured if norm > 0]
    if len(measured) < 3:
        figures += [norm / math.sqrt(steps) for entry in state.norms for norm, steps in entry if norm > 0]
    if len(figures) < 3:
        return [1.0] * len(measured)
    bound = 2 * median(figures)
    return [f32(min(1.0, bound * math.sqrt(steps) / norm)) if norm > 0 else 1.0 for norm, steps in measured]


def scalars_of(outer: OuterSpec, weight_sum: float, t_full: int, n_eff: float) -> Scalars:
    """rho, mu_r, momentum gain and eta (algorithm.md 4; Async Local-SGD, arXiv 2401.09135, section 4).

    `t_full` (tokens) and `n_eff` (nodes) hold after the entry. eta follows DiLoCo's scaling laws
    (arXiv 2503.09799): from eta_alone by equal steps per doubling to eta_eight.
    """
    # Its contributors are in T_full, so only float32 rounding of the weights could exceed 1.
    rho = f32(min(1.0, weight_sum / t_full))
    mu_r = outer.mu**rho
    gain = rho if outer.mu == 1 else (1 - mu_r) / (1 - outer.mu)
    doublings = math.log2(min(8.0, max(1.0, n_eff)))
    eta = outer.eta_alone + (outer.eta_eight - outer.eta_alone) / 3 * doublings
    return Scalars(weight_sum=weight_sum, rho=rho, mu_r=f32(mu_r), momentum_gain=f32(gain), eta=f32(eta))


def _difference(step: OuterStep, mine: OuterStep, relative: float) -> str | None:
    """Where the declared step departs from the one computed here."""
    if step.clock != mine.clock or step.t_full != mine.t_full:
        return (
            f"clock {step.clock} and T_full {step.t_full} are declared, "
            f"{mine.clock} and {mine.t_full} computed"
        )
    for theirs, ours in zip(step.contributions, mine.contributions, strict=True):
        if theirs.tokens != ours.tokens:
            return f"{theirs.tokens} tokens are declared, {ours.tokens} computed"
        reason = _floats_differ(theirs, ours, ("norm", "staleness", "weight", "clip"), relative)
        if reason:
            return reason
    return _floats_differ(
        step.scalars, mine.scalars, ("weight_sum", "rho", "mu_r", "momentum_gain", "eta"), relative
    )


def _floats_differ(
    theirs: Contribution | Scalars, ours: Contribution | Scalars, names: Collection[str], relative: float
) -> str | None:
    for name in names:
        declared, computed = getattr(theirs, name), getattr(ours, name)
        if not is_f32(declared):
            return f"{name} {declared!r} is not a float32 value"
        if not near(declared, computed, relative):
            return f"{name} {declared:.6g} is declared, {computed:.6g} computed"
    return None
