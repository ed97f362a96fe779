"""Staleness in rounds on the token clock, and what it does to a weight (algorithm.md 1, 4).

The token clock follows Decoupled DiLoCo (arXiv 2604.21428); measuring in rounds keeps the figure apart from
swarm size, quorum and number of fragments.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Protocol

from p2pdiloco.rules.state import RulesState, clock_at
from p2pdiloco.run_spec import OuterSpec, RunSpec


class HasBase(Protocol):
    """A delta header, a candidate, a contribution or a refusal."""

    @property
    def base_version(self) -> int: ...


def too_late(state: RulesState, spec: RunSpec, candidate: HasBase) -> bool:
    """Whether the delta's base is more than staleness_max rounds back: a decision, so integers only.

    k = (clock - base) / T_full - 1 > staleness_max, multiplied out. A base in the future is not late.
    """
    if candidate.base_version > state.version:
        return False
    base = clock_at(state, candidate.base_version)
    if base is None:
        return True
    return state.clock - base > (spec.outer.staleness_max + 1) * state.t_full


def staleness(state: RulesState, candidate: HasBase) -> float:
    """k = max(0, (clock - base) / T_full - 1), rounds; clock and T_full before the entry.

    The -1: in steady state every delta is one round late by construction.

    Raises:
        AssertionError: the base's clock is no longer kept; ask `too_late` first.
    """
    base = clock_at(state, candidate.base_version)
    assert base is not None, "too late: its clock is no longer kept"
    if state.t_full == 0:
        return 0.0
    return max(0.0, float(Fraction(state.clock - base, state.t_full) - 1))


def decay(outer: OuterSpec, k: float) -> float:
    """The factor for a delta that is `k` rounds late, in (0, 1].

    `exponential` exp(-lambda k); `polynomial` (1 + k)^-0.5 (FedAsync, arXiv 1903.03934; FedBuff, arXiv
    2106.06639), which a RunSpec from outside cannot ask for: the lab compares with it; `constant` 1.
    """
    if outer.decay == "exponential":
        return math.exp(-outer.lambda_ * k)
    if outer.decay == "polynomial":
        return float((1 + k) ** -0.5)
    assert outer.decay == "constant", f"no staleness law {outer.decay!r}"
    return 1.0
