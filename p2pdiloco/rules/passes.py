"""When a pass ends: whichever is first of H steps and `pass_s` seconds (DyLU, algorithm.md 1 and 3).

Both are counted from the first adoption in the pass (decision 16).
"""

from __future__ import annotations

import math
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
    aligned_steps: int | None = None  # steps and seconds at the first adoption in this pass
    aligned_s: float = 0.0

    def add_step(self, loss: float, seconds: float) -> None:
        self.steps += 1
        self.loss_sum += loss
        self.seconds += seconds

    def adopted(self) -> None:
        """A newer state was taken over. From the first one in a pass its length is counted anew.

        Everybody adopts a version at about the same time, so passes fall into step without anybody waiting,
        and deltas come together: merged one by one they cost loss (docs/results/learning.md).
        """
        if self.aligned_steps is None:
            self.aligned_steps, self.aligned_s = self.steps, self.seconds

    @property
    def loss(self) -> float:
        """Mean over the pass, nats per token."""
        return self.loss_sum / self.steps if self.steps else 0.0


def next_move(current: Pass, *, inner_steps: int, pass_s: float, allowed: bool, prolong: bool = True) -> Next:
    """The rule of a pass.

    A pass has at least one step. It ends H steps or `pass_s` after the first adoption in it, or after its
    beginning while there was none, and at four times its length at the latest. With too much in flight
    (`allowed` is False) it is prolonged up to that; then the node waits, with its work unsent. In a run that
    its owner paused nothing is prolonged (`prolong` is False), and no pass begins; the one under way ends.
    """
    if current.steps == 0:
        return Next.STEP if prolong else Next.WAIT
    factor = limits.pass_prolonged_factor
    longest = current.steps >= factor * inner_steps or current.seconds >= factor * pass_s
    steps = current.steps - (current.aligned_steps or 0)
    full = longest or steps >= inner_steps or current.seconds - current.aligned_s >= pass_s
    if not allowed:
        return Next.WAIT if longest or (full and not prolong) else Next.STEP
    return Next.FINISH if full else Next.STEP


def steps_expected(current: Pass, *, inner_steps: int) -> int:
    """How many inner steps this pass has if no `pass_s` ends it, for people.

    Adoption moves its end, and with too much in flight it goes on to its longest.
    """
    longest = limits.pass_prolonged_factor * inner_steps
    due = min(inner_steps + (current.aligned_steps or 0), longest)
    return due if current.steps <= due else longest


def steps_left(current: Pass, *, inner_steps: int, pass_s: float, step_s: float) -> int:
    """Inner steps of `step_s` seconds until `next_move` ends an allowed pass, at least 1: to leap ahead.

    `pass_s` may be infinite: the pass ends by its steps alone.
    """
    factor = limits.pass_prolonged_factor
    by_steps = min(inner_steps + (current.aligned_steps or 0), factor * inner_steps) - current.steps
    left_s = min(pass_s + current.aligned_s, factor * pass_s) - current.seconds
    return max(1, by_steps if math.isinf(pass_s) else min(by_steps, math.ceil(left_s / step_s)))
