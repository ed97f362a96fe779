"""Blocks of 128 values that share a float16 scale; each value a whole number in [-7, 7] (algorithm.md 7).

Symmetric 4-bit outer gradients cost +0.09 % loss in Decoupled DiLoCo (arXiv 2604.21428). The scale is the
largest magnitude over 7, stored times 256: pseudo-gradients late in a run are around 1e-5, where float16
itself has three digits left. The range check keeps it below 65504, so a scale never overflows; a block
whose scale rounds to zero (all zeros, or denormals) decodes as zeros.

Decoding multiplies a 4-bit integer by an 11-bit scale, which is exact in float32: every machine gets the
same bits, whatever its instructions.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from p2pdiloco import limits
from p2pdiloco.diloco.compress.fp16 import Half, check_range
from p2pdiloco.diloco.layout import Array
from p2pdiloco.errors import PeerError
from p2pdiloco.rules.delta_layout import BLOCK

Bytes = npt.NDArray[np.uint8]

SCALE_FACTOR = np.float32(256)
LARGEST = np.float32(7)
CHUNK_BLOCKS = 512  # blocks at a time: 256 KiB of float32 stay in the cache
_SCALE_MAX = np.float32(limits.delta_value_max) / LARGEST * SCALE_FACTOR


def _both_values() -> npt.NDArray[np.uint64]:
    """For each byte its two values as float32, side by side in eight bytes: one look-up decodes two.

    A nibble is a two's complement number. -8 is never written and decodes as what it says.
    """
    byte = np.arange(256)
    pair = np.stack([byte & 15, byte >> 4], axis=1)
    return np.ascontiguousarray((pair ^ 8) - 8, dtype=np.float32).view(np.uint64).reshape(256)


_VALUES = _both_values()


def encode_into(values: Array, scales: Half, nibbles: Bytes) -> None:
    """Encode float32 [n], n <= 128 * blocks, into float16 [blocks] and uint8 [blocks, 64].

    Values are rounded to the nearest step, ties to even.

    Raises:
        PeerError: NOT_FINITE; also a magnitude above limits.delta_value_max, which no working trainer has.
    """
    whole = len(values) // BLOCK
    rows = values[: whole * BLOCK].reshape(whole, BLOCK)
    room: Array = np.empty((min(max(whole, 1), CHUNK_BLOCKS), BLOCK), np.float32)
    for first in range(0, whole, CHUNK_BLOCKS):
        here = slice(first, min(first + CHUNK_BLOCKS, whole))
        _encode_blocks(rows[here], scales[here], nibbles[here], room[: here.stop - first])
    if whole < len(scales):
        padded = np.zeros((1, BLOCK), np.float32)
        padded[0, : len(values) - whole * BLOCK] = values[whole * BLOCK :]
        _encode_blocks(padded, scales[whole:], nibbles[whole:], room[:1])


def _encode_blocks(rows: Array, scales: Half, nibbles: Bytes, room: Array) -> None:
    """Float32 [blocks, 128] into float16 [blocks] and uint8 [blocks, 64]; `room` is as large as `rows`."""
    # Without its sign bit a float32 orders like an integer (NaN above infinity), and numpy finds the largest
    # integer of a row several times faster than the largest float.
    bits = room.view(np.int32)
    np.bitwise_and(rows.view(np.int32), np.int32(0x7FFFFFFF), out=bits)
    largest = bits.max(axis=1).view(np.float32)
    check_range(largest.max())
    scales[...] = largest * (SCALE_FACTOR / LARGEST)
    step = scales.astype(np.float32) / SCALE_FACTOR
    inverse = np.divide(np.float32(1), step, out=np.zeros_like(step), where=step > 0)
    np.multiply(rows, inverse[:, None], out=room)
    np.rint(room, out=room)
    if (largest * inverse).max() > 7.4:
        # Only where float16 is denormal is a scale rounded so far down that a quotient exceeds 7.
        np.clip(room, -LARGEST, LARGEST, out=room)
    # As 16-bit words (low byte first): low nibble of the first byte, low nibble of the second above it.
    words = room.astype(np.int8).view("<u2")
    nibbles[...] = (words & 0x0F) | ((words >> 4) & 0xF0)


def decode_into(scales: Half, nibbles: Bytes, out: Array) -> None:
    """Decode float16 [blocks] and uint8 [blocks, 64] into float32 [n], n <= 128 * blocks.

    Raises:
        PeerError: NOT_FINITE if a scale is not finite, negative, or above what encoding can make.
    """
    wide = scales.astype(np.float32)
    if not bool(np.all((wide >= 0) & (wide <= _SCALE_MAX * np.float32(1.001)))):
        raise PeerError("NOT_FINITE", "a block's scale is not a number in range")
    wide /= SCALE_FACTOR
    whole = len(out) // BLOCK
    rows = out[: whole * BLOCK].reshape(whole, BLOCK)
    for first in range(0, whole, CHUNK_BLOCKS):
        here = slice(first, min(first + CHUNK_BLOCKS, whole))
        part = rows[here]
        np.take(_VALUES, nibbles[here], out=part.view(np.uint64), mode="clip")
        part *= wide[here, None]
    if whole < len(scales):
        last = _VALUES[nibbles[whole]].view(np.float32) * wide[whole]
        out[whole * BLOCK :] = last[: len(out) - whole * BLOCK]
