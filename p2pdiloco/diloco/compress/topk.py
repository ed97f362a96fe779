"""Of each chunk of 4096 values the k largest magnitudes: sign, one bit of magnitude, place (algorithm.md 7).

Chunked top-k with error feedback and very few bits a value is SparseLoCo's (arXiv 2508.15706). A kept value
becomes the mean magnitude of one of two groups, the larger or the smaller ones of its chunk. The border
between them is the one with the least squared error: in one dimension that is the best of k - 1 cuts through
the sorted magnitudes, found exactly with running sums (Lloyd-Max with two levels).

Places are Elias-Fano coded (Elias, J. ACM 21(2), 1974): low bits as they are, high bits in unary. That takes
8 bits a place at k = 64, where a plain one takes 12 and the entropy is 7.36; it needs no entropy decoder, and
the size of a blob still follows from the model alone (docs/adr/0014). rules/delta_layout.py has the layout.

Decoding multiplies nothing but powers of two: every machine gets the same bits. A group whose scale is zero
was not sent, so a decoded value that is not zero was sent, and the other way round.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from p2pdiloco import limits
from p2pdiloco.diloco.compress.fp16 import Half, check_range
from p2pdiloco.diloco.layout import Array, Layout
from p2pdiloco.errors import PeerError
from p2pdiloco.rules.delta_layout import CHUNK, bit_parts, kept_of, place_bits

Bytes = npt.NDArray[np.uint8]
Bits = npt.NDArray[np.bool_]
Places = npt.NDArray[np.int64]

SCALE_FACTOR = np.float32(32)  # 1024 is 32768 in float16; magnitudes keep 11 bits down to 2e-6
CHUNKS_AT_ONCE = 16  # 256 KiB of float32 stay in the cache
_SCALE_MAX = np.float32(limits.delta_value_max) * SCALE_FACTOR
_KEY_MASK = np.int32(0x7FFFF000)  # a magnitude's upper bits; the lower twelve hold the place in the chunk


class Kept(NamedTuple):
    """What is sent of a delta's chunks. `places` count values through all buckets, increasing."""

    scales: Half  # [chunks, 2]: mean magnitudes times 32, of the smaller and of the larger group
    places: Places  # [kept]
    negative: Bits  # [kept]
    larger: Bits  # [kept]


def encode_into(flat: Array, layout: Layout, k: int, out: Bytes) -> None:
    """Encode the chunks of float32 [params] into uint8 [bytes between header and raw values].

    Raises:
        PeerError: NOT_FINITE; also a magnitude above limits.delta_value_max, which no working trainer has.
    """
    total = _kept(layout, k)
    kept = Kept(
        np.empty((layout.blocks, 2), "<f2"), np.empty(total, np.int64), np.empty(total, np.bool_),
        np.empty(total, np.bool_),
    )  # fmt: skip
    chunk = slot = 0
    for run in layout.coded:
        for rows in _rows(flat[run.start : run.stop]):
            count = kept_of(k, rows.shape[1])
            here = slice(slot, slot + len(rows) * count)
            columns = _choose(rows, count)
            values = np.take_along_axis(rows, columns, axis=1)
            firsts = np.arange(slot, here.stop, count)[:, None] << place_bits(k)
            kept.places[here] = (columns + firsts).ravel()
            kept.negative[here] = np.signbit(values).ravel()
            larger, kept.scales[chunk : chunk + len(rows)] = _two_groups(np.abs(values))
            kept.larger[here] = larger.ravel()
            chunk += len(rows)
            slot = here.stop
    pack(kept, k, out)


def _kept(layout: Layout, k: int) -> int:
    return sum(kept_of(k, run.size) for run in layout.coded)


def _rows(values: Array) -> Iterator[Array]:
    """Float32 [n] as pieces of [chunks, 4096], then what is left as [1, rest]."""
    whole = len(values) // CHUNK
    rows = values[: whole * CHUNK].reshape(whole, CHUNK)
    for first in range(0, whole, CHUNKS_AT_ONCE):
        yield rows[first : first + CHUNKS_AT_ONCE]
    if whole * CHUNK < len(values):
        yield values[None, whole * CHUNK :]


def _choose(rows: Array, count: int) -> npt.NDArray[np.int32]:
    """Columns of the `count` largest magnitudes of each row, increasing: int32 [rows, count].

    Without its sign bit a float32 orders like an integer. With the column in its lowest twelve bits one
    partial sort finds columns instead of values; magnitudes that agree in the 11 bits left count as equal.
    """
    width = rows.shape[1]
    check_range(np.maximum(rows.max(), -rows.min()))
    keys = rows.view(np.int32) & _KEY_MASK
    keys |= np.arange(width, dtype=np.int32)
    keys.partition(width - count, axis=1)
    columns: npt.NDArray[np.int32] = keys[:, width - count :] & np.int32(CHUNK - 1)
    columns.sort(axis=1)
    return columns


def _two_groups(sizes: Array) -> tuple[Bits, npt.NDArray[np.float64]]:
    """Cut each row of magnitudes [rows, count] in two with the least squared error.

    Returns: which are in the larger group [rows, count], and scales [rows, 2], 0 for a group that is empty.
    """
    count = sizes.shape[1]
    ordered = np.sort(sizes, axis=1)[:, ::-1]
    sums = np.cumsum(ordered, axis=1, dtype=np.float64)
    rest = sums[:, -1:] - sums
    n = np.arange(1, count + 1)
    # The squared error is a constant less this: each group's sum squared over its number.
    best = np.argmax(sums**2 / n + rest**2 / np.maximum(count - n, 1), axis=1)[:, None]
    larger: Bits = sizes >= np.take_along_axis(ordered, best, axis=1)
    scales = np.empty((len(sizes), 2))
    for place, group in enumerate((~larger, larger)):
        number = np.maximum(group.sum(axis=1), 1)
        scales[:, place] = np.sum(sizes, axis=1, dtype=np.float64, where=group) / number * SCALE_FACTOR
    return larger, scales


def pack(kept: Kept, k: int, out: Bytes) -> None:
    """Lay out `kept` as rules/delta_layout.py says, into uint8 [bytes between header and raw values]."""
    low_bits, total = place_bits(k), len(kept.places)
    scales, low, high, signs, groups = _sections(out, len(kept.scales), k, total)
    scales[...] = kept.scales.reshape(-1)
    lows = (kept.places & ((1 << low_bits) - 1)).astype(np.uint8)
    bits = np.unpackbits(lows[:, None], axis=1, bitorder="little")[:, :low_bits]
    low[...] = np.packbits(bits.reshape(-1), bitorder="little")
    unary = np.zeros(2 * total, np.bool_)
    unary[(kept.places >> low_bits) + np.arange(total)] = True
    high[...] = np.packbits(unary, bitorder="little")
    signs[...] = np.packbits(kept.negative, bitorder="little")
    groups[...] = np.packbits(kept.larger, bitorder="little")


def decode_into(data: Bytes, layout: Layout, k: int, out: Array) -> None:
    """Decode untrusted bytes into the chunks of float32 [params]; all that was not kept is 0 there.

    Raises:
        PeerError: BAD_SHAPE where places do not increase, lie outside their chunk, or are more or fewer than
            a chunk keeps, and for padding that is not zero; NOT_FINITE for a scale that is not finite,
            negative, or above what encoding can make.
    """
    low_bits, total = place_bits(k), _kept(layout, k)
    halves, low, high, signs, groups = _sections(data, layout.blocks, k, total)
    scales = halves.astype(np.float32)
    if not bool(np.all((scales >= 0) & (scales <= _SCALE_MAX))):
        raise PeerError("NOT_FINITE", "a chunk's scale is not a number in range")
    scales /= SCALE_FACTOR
    lows = _bits(low, total * low_bits).reshape(total, low_bits)
    ones = np.flatnonzero(_bits(high, 2 * total))
    if len(ones) != total:
        raise PeerError("BAD_SHAPE", f"{len(ones)} places, not {total}")
    buckets = ones - np.arange(total)
    places = (buckets << low_bits) | np.packbits(lows, axis=1, bitorder="little")[:, 0]
    negative, larger = _bits(signs, total), _bits(groups, total)
    slot = 0
    for run in layout.coded:
        here = slice(slot, slot + kept_of(k, run.size))
        slots = np.arange(here.stop - slot)
        mine = places[here] - (slot << low_bits)
        inside = bool(np.all((buckets[here] - slot) // k == slots // k)) and mine[-1] < run.size
        if not inside or not bool(np.all(mine[1:] > mine[:-1])):
            raise PeerError("BAD_SHAPE", "places that do not increase inside their chunk")
        values = scales[2 * (run.place + slots // k) + larger[here]]
        np.negative(values, out=values, where=negative[here].view(np.bool_))
        part = out[run.start : run.stop]
        part.fill(0)
        part[mine] = values
        slot = here.stop


def _bits(data: Bytes, count: int) -> Bytes:
    """The first `count` bits as 0 and 1. Raises: PeerError: BAD_SHAPE where another one is set."""
    bits = np.unpackbits(data, bitorder="little")
    if bool(bits[count:].any()):
        raise PeerError("BAD_SHAPE", "padding that is not zero")
    return bits[:count]


def _sections(data: Bytes, chunks: int, k: int, total: int) -> tuple[Half, Bytes, Bytes, Bytes, Bytes]:
    """Views: scales [2 chunks], then low, high, signs and groups as bytes."""
    ends = np.cumsum((4 * chunks, *bit_parts(k, total)))
    scales, low, high, signs, groups, rest = np.split(data, ends)
    assert len(rest) == 0, "room for another model"
    return scales.view("<f2"), low, high, signs, groups
