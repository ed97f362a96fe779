"""How long to wait before a crashed trainer is started again (scenario S18)."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from p2pdiloco import limits


class Pause(NamedTuple):
    seconds: float
    braked: bool  # crashed too often: this is the long pause, and the person must be told


class RestartBrake:
    """1 s, 2 s, and after the third crash within five minutes ten minutes, doubling while it goes on.

    A crash burns no work but the pass in progress; a trainer that crashes for ever burns electricity.
    """

    def __init__(self) -> None:
        self._crashes: deque[float] = deque(maxlen=limits.trainer_crashes_max)
        self._brakes = 0  # in a row

    def astray(self, *, passed: bool) -> Pause:
        """The trainer met values that are not finite again and again: the long pause at once.

        `passed`: a good pass came in that life before, so this is the first brake in a row.
        """
        if passed:
            self._brakes = 0
        return self._brake()

    def crashed(self, started_at: float, now: float) -> Pause:
        """Count a crash at `now` of a trainer that was `started_at` (both seconds, monotonic)."""
        if now - started_at > limits.trainer_crash_window_s:
            # It worked for a while: whatever was wrong before is over.
            self._crashes.clear()
            self._brakes = 0
        self._crashes.append(now)
        recent = [at for at in self._crashes if now - at <= limits.trainer_crash_window_s]
        if len(recent) == limits.trainer_crashes_max or self._brakes:
            return self._brake()
        return Pause(float(2 ** (len(recent) - 1)), braked=False)

    def _brake(self) -> Pause:
        pause_s = min(limits.trainer_brake_s * 2**self._brakes, limits.trainer_brake_s_max)
        self._brakes += 1
        return Pause(pause_s, braked=True)
