"""The weighted mean of deltas, one at a time: two arrays of memory whatever the number of contributors.

g = sum_i w_i * clip_i * delta_i / sum_i w_i (algorithm.md 4). Digest order, each product, each sum and the
quotient rounded to float32 by itself: arrival order changes no bit, and no machine fuses two of them.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from p2pdiloco.diloco.layout import Array
from p2pdiloco.wire.log import OuterStep

CHUNK = 1 << 16  # values at a time: 256 KiB each of both arrays stay in the cache


class Load(Protocol):
    """Decodes the delta named by `digest` into `out` (float32 [params]). Raises what decode raises."""

    def __call__(self, digest: bytes, out: Array, /) -> None: ...


class Mean:
    """Adds up deltas in the order given; the caller sees to digest order, the log entry already has it."""

    def __init__(self, params: int) -> None:
        self.sum: Array = np.zeros(params, np.float32)

    def add(self, delta: Array, *, weight: float, clip: float) -> None:
        """Add `delta` (float32 [params], overwritten) with its declared weight and clip."""
        factor = np.float32(weight) * np.float32(clip)
        for first in range(0, len(delta), CHUNK):
            part = delta[first : first + CHUNK]
            part *= factor
            self.sum[first : first + CHUNK] += part

    def divide(self, weight_sum: float) -> Array:
        """The mean, float32 [params], by the declared sum of weights. Clips are not in the divisor."""
        assert weight_sum > 0, "nothing to merge: the plan must be None (never 0/0)"
        self.sum /= np.float32(weight_sum)
        return self.sum


def merge(step: OuterStep, params: int, load: Load) -> Array:
    """The mean g of an outer step's contributions, float32 [params].

    `load` is called once for each delta, in digest order.

    Raises:
        PeerError: what `load` raises for a delta that does not decode.
    """
    mean = Mean(params)
    room: Array = np.empty(params, np.float32)
    for c in step.contributions:
        load(c.delta, room)
        mean.add(room, weight=c.weight, clip=c.clip)
    return mean.divide(step.scalars.weight_sum)
