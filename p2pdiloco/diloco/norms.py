"""L2 norms. They come from a reduction, so the log declares them and voters compare within a tolerance."""

from __future__ import annotations

import math

import numpy as np

from p2pdiloco.diloco.layout import Array

CHUNK = 1 << 16  # values at a time, widened to float64


def l2_norm(values: Array) -> float:
    """The L2 norm of float32 [n], added up in float64: no overflow, and 1e-12 between machines at most."""
    squares = []
    for first in range(0, len(values), CHUNK):
        part = values[first : first + CHUNK].astype(np.float64)
        # Not np.dot: BLAS wakes its threads for it, which costs 30 ms beside a busy trainer instead of 0.1.
        np.square(part, out=part)
        squares.append(float(part.sum()))
    return math.sqrt(math.fsum(squares))
