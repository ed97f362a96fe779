"""Declared figures are float32 values, so that every replica computes with the same bits (algorithm.md 5)."""

from __future__ import annotations

import math
import struct


def f32(x: float) -> float:
    """`x` rounded to the nearest float32, as a Python float.

    Raises:
        OverflowError: beyond the range of float32, or not finite: our own fault, never a peer's, because
            figures of peers are compared with ours before they are used.
    """
    if not math.isfinite(x):
        raise OverflowError(f"{x} is not finite")
    return float(struct.unpack("<f", struct.pack("<f", x))[0])


def is_f32(x: float) -> bool:
    """Whether `x` is finite and a float32 value exactly."""
    try:
        return f32(x) == x
    except OverflowError:
        return False


def near(declared: float, computed: float, rel: float) -> bool:
    """Whether a declared figure is within `rel` (relative) of the one computed here (algorithm.md 5)."""
    if not (math.isfinite(declared) and math.isfinite(computed)):
        return False
    return abs(declared - computed) <= rel * max(abs(declared), abs(computed))
