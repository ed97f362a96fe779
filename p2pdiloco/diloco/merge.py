"""The weighted mean of deltas, one at a time: two arrays of memory whatever the number of contributors.

g = sum_i w_i * clip_i * delta_i / sum_i w_i (algorithm.md 4). Digest order, each product, each sum and the
quotient rounded to float32 by itself: arrival order changes no bit, and no machine fuses two of them.

Where deltas are sparse, each coordinate is averaged over those who sent it (algorithm.md 7): the divisor is
the sum of their w_i, a third array. Sent is what decodes to something else than zero; what nobody sent is 0
in the mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from p2pdiloco.diloco.compress import Origin, decode, origin_of
from p2pdiloco.diloco.layout import Array, Run, sparse_runs
from p2pdiloco.errors import PeerError
from p2pdiloco.ids import Digest, PeerId, short
from p2pdiloco.run_spec import RunSpec
from p2pdiloco.wire.log import OuterStep

CHUNK = 1 << 16  # values at a time: 256 KiB each of the arrays stay in the cache


class Load(Protocol):
    """Decodes the delta named by `digest` into `out` (float32 [params]). Raises what decode raises."""

    def __call__(self, digest: bytes, out: Array, /) -> None: ...


def merge_listed(
    spec: RunSpec,
    step: OuterStep,
    read: Callable[[Digest], bytes],
    see: Callable[[Digest, Array], None] | None = None,
) -> Array:
    """The mean g of the deltas that a log entry lists, float32 [params].

    `read` gives a delta's blob, which has that digest; `see` looks at each that is decoded. Both are called
    once for each delta, in digest order.

    Raises:
        PeerError: a delta does not decode, or is another one than its listed sender's (BAD_SHAPE).
    """
    codec, tensors = spec.outer.codec, spec.model.tensors
    origins = {c.delta: Origin(PeerId(c.peer), c.sequence) for c in step.contributions}

    def load(digest: bytes, out: Array, /) -> None:
        named = Digest(digest)
        data = read(named)
        if origin_of(data) != origins[digest]:
            raise PeerError("BAD_SHAPE", f"the delta {short(digest)} is of another peer or sequence")
        decode(codec, data, tensors, out)
        if see is not None:
            see(named, out)

    return merge(step, spec.model.params, load, sparse_runs(codec, tensors))


class Mean:
    """Adds up deltas in the order given; the caller sees to digest order, the log entry already has it."""

    def __init__(self, params: int, over_senders: tuple[Run, ...] = ()) -> None:
        """`over_senders`: coordinates averaged over their senders, in general `sparse_runs`."""
        self.sum: Array = np.zeros(params, np.float32)
        self._runs = over_senders
        self._sent: Array = np.zeros(params if over_senders else 0, np.float32)  # senders' weights

    def add(self, delta: Array, *, weight: float, clip: float) -> None:
        """Add `delta` (float32 [params], overwritten) with its declared weight and clip."""
        for run in self._runs:
            for first in range(run.start, run.stop, CHUNK):
                here = slice(first, min(first + CHUNK, run.stop))
                self._sent[here] += np.float32(weight) * (delta[here] != 0)
        factor = np.float32(weight) * np.float32(clip)
        for first in range(0, len(delta), CHUNK):
            part = delta[first : first + CHUNK]
            part *= factor
            self.sum[first : first + CHUNK] += part

    def divide(self, weight_sum: float) -> Array:
        """The mean, float32 [params], by the declared sum of weights, or by the weights of a coordinate's
        senders. Clips are not in the divisor.
        """
        assert weight_sum > 0, "nothing to merge: the plan must be None (never 0/0)"
        if not self._runs:
            self.sum /= np.float32(weight_sum)
            return self.sum
        for first in range(0, len(self.sum), CHUNK):
            divisor = self._sent[first : first + CHUNK]
            # Outside of the runs; inside, where nobody sent anything and the sum is 0.
            divisor[divisor == 0] = np.float32(weight_sum)
            self.sum[first : first + CHUNK] /= divisor
        return self.sum


def merge(step: OuterStep, params: int, load: Load, over_senders: tuple[Run, ...] = ()) -> Array:
    """The mean g of an outer step's contributions, float32 [params].

    `load` is called once for each delta, in digest order. `over_senders`: the run's `sparse_runs`.

    Raises:
        PeerError: what `load` raises for a delta that does not decode.
    """
    mean = Mean(params, over_senders)
    room: Array = np.empty(params, np.float32)
    for c in step.contributions:
        load(c.delta, room)
        mean.add(room, weight=c.weight, clip=c.clip)
    return mean.divide(step.scalars.weight_sum)
