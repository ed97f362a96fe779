"""Raw float16: every value by itself. For tests, and for tiny tensors inside int4 (algorithm.md 7)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from p2pdiloco import limits
from p2pdiloco.diloco.layout import Array
from p2pdiloco.errors import PeerError

Half = npt.NDArray[np.float16]

CHUNK = 1 << 16  # values at a time: 256 KiB of float32 stay in the cache


def encode_into(values: Array, out: Half) -> None:
    """Round `values` (float32 [n]) to float16 into `out` (float16 [n]).

    Raises:
        PeerError: NOT_FINITE; also a magnitude above limits.delta_value_max, which no working trainer has.
    """
    for first in range(0, len(values), CHUNK):
        part = values[first : first + CHUNK]
        check_range(np.maximum(part.max(), -part.min()))
        out[first : first + CHUNK] = part


def decode_into(data: Half, out: Array) -> None:
    """Widen float16 [n] to float32 [n]: exact.

    Raises:
        PeerError: NOT_FINITE, as in encode_into.
    """
    for first in range(0, len(data), CHUNK):
        part = out[first : first + CHUNK]
        part[...] = data[first : first + CHUNK]
        check_range(np.maximum(part.max(), -part.min()))


def check_range(largest: np.float32) -> None:
    """`largest` magnitude of some values: NaN and infinity fail the comparison as well.

    Raises:
        PeerError: NOT_FINITE.
    """
    if not largest <= limits.delta_value_max:
        raise PeerError("NOT_FINITE", f"a value of magnitude {largest}, at most {limits.delta_value_max:g}")
