"""Virtual time: a heap of things to come."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable


class Clock:
    """What was asked for first happens first among what is due at the same moment."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, delay_s: float, happen: Callable[[], None]) -> None:
        """`happen` after `delay_s` seconds of virtual time."""
        self._count += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._count, happen))

    def advance(self, until_s: float) -> bool:
        """Let the next thing happen that is due up to `until_s`. False: there is none, and it is then.

        An endless `until_s` leaves the time as it is.
        """
        if not self._heap or self._heap[0][0] > until_s:
            self.now = max(self.now, until_s) if until_s < math.inf else self.now
            return False
        self.now, _, happen = heapq.heappop(self._heap)
        happen()
        return True
