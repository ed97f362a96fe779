"""Everything random in a simulated world comes from one stream, so that a seed is a whole story."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")

_DRAWS = 1024  # numbers drawn at once: a single draw costs ten times as much


class Chance:
    """Draws from one Generator, in the order in which they are asked for."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._ready: list[float] = []

    def random(self) -> float:
        """Uniform in [0, 1)."""
        if not self._ready:
            self._ready = self._rng.random(_DRAWS).tolist()
        return self._ready.pop()

    def happens(self, probability: float) -> bool:
        return probability > 0 and self.random() < probability

    def uniform(self, low: float, high: float) -> float:
        return low + (high - low) * self.random()

    def below(self, n: int) -> int:
        """An integer in [0, n)."""
        return int(self.random() * n)

    def choice(self, of: Sequence[T]) -> T:
        return of[self.below(len(of))]

    def sample(self, of: Sequence[T], n: int) -> list[T]:
        """`n` different ones, in random order."""
        rest = list(of)
        return [rest.pop(self.below(len(rest))) for _ in range(min(n, len(rest)))]
