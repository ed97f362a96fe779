"""When a pass ends: whichever is first of H steps and `pass_s` seconds (DyLU, algorithm.md 1 and 3)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from p2pdiloco import limits


class Next(Enum):
    """What the trainer does at an inner-step boundary."""

    STEP = "step"
    FINISH = "finish"
    WAIT = "wait"


@dataclass
class Pass:
    """One node's inner steps between two deltas."""

    base_version: int  # the anchor's version when it began; adoption in mid-pass does not change it
    data_first: int  # in sequences
    steps: int = 0
    seconds: float = 0.0  # spent in inner steps and between them, not paused
    loss_sum: float = 0.0

    def add_step(self, loss: float, seconds: float) -> None:
        self.steps += 1
        self.loss_sum += loss
        self.seconds += seconds

    @property
    def loss(self) -> float:
        """Mean over the pass, nats per token."""
        return self.loss_sum / self.steps if self.steps else 0.0


def next_move(current: Pass, *, inner_steps: int, pass_s: float, allowed: bool) -> Next:
    """The rule of a pass.

    A pass has at least one step. With too much in flight (`allowed` is False) it is prolonged up to four
    times its length in steps or seconds; then the node waits, with its work unsent.
    """
    if current.steps == 0:
        return Next.STEP
    if allowed:
        full = current.steps >= inner_steps or current.seconds >= pass_s
        return Next.FINISH if full else Next.STEP
    factor = limits.pass_prolonged_factor
    full = current.steps >= factor * inner_steps or current.seconds >= factor * pass_s
    return Next.WAIT if full else Next.STEP
