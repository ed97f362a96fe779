"""Directed schedules: the lives that random seeds meet too rarely, each from a rule or a scenario.

Each is a function of a Stage factory; it returns nothing and raises a Violation. They run before random
seeds do (protocol.md 4: random schedules find the membership bug in 0.5 % of seeds only).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from p2pdiloco.sim.stage import Stage


class MakeStage(Protocol):
    """A fresh stage: same seed, same brain, the run's parameters as the schedule needs them."""

    def __call__(self, *, size_max: int = 3, rotation: int = 3, target_version: int = 0) -> Stage: ...


Schedule = Callable[[MakeStage], None]
