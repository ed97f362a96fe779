"""Golden vectors: does this machine compute the bits that everybody else computes? (algorithm.md 5)

Run at every start; a node that fails may train but must not vote. Inputs come from SHA-256, so nothing has
to be shipped: all kinds of codec, merge over all and over senders, and four outer steps, with denormal
numbers, zeros of both signs, clips, a padded block, a short chunk and scales of zero.
tests/vectors/outer_step.json holds the same vectors written out, for other programs.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from p2pdiloco.diloco.compress import decode, encoded_size, topk
from p2pdiloco.diloco.global_state import GlobalState
from p2pdiloco.diloco.layout import Array, sparse_runs
from p2pdiloco.diloco.merge import Mean
from p2pdiloco.diloco.outer_step import apply_outer_step
from p2pdiloco.rules.delta_layout import (
    BLOCK,
    CODECS,
    FORMAT,
    HEADER_BYTES,
    KEPT,
    MAGIC,
    bit_parts,
    kept_of,
    place_bits,
)
from p2pdiloco.rules.float32 import f32
from p2pdiloco.run_spec import TensorSpec
from p2pdiloco.wire.log import Scalars

TENSORS = (TensorSpec("matrix", (4, 1036)), TensorSpec("norm", (16,)))
PARAMS = 4160
BLOCKS = 33  # of int4, the last one padded
CHUNKS = (4096, 48)  # of topk
MU = 0.9

# (weight, clip) of each contribution and the scalars, one row for each outer step; all float32 values.
STEPS = (
    ("int4", ((f32(81920.0), f32(1.0)), (f32(30517.3), f32(0.731))), Scalars(
        f32(112437.3), f32(0.6), f32(0.93874), f32(0.6126), f32(0.6667))),
    ("fp16", ((f32(1.0e-38), f32(0.5)), (f32(3.0e-39), f32(1.0)), (f32(0.0), f32(1.0))), Scalars(
        f32(1.3e-38), f32(1.0), f32(0.9), f32(1.0), f32(0.8))),
    ("int4", ((f32(16777217.0), f32(1.0)),), Scalars(
        f32(16777216.0), f32(0.0371), f32(0.99610), f32(0.039), f32(0.4))),
    ("topk128", ((f32(40960.0), f32(1.0)), (f32(12288.7), f32(0.61)), (f32(3.0e-39), f32(1.0))), Scalars(
        f32(53248.7), f32(0.83), f32(0.91628), f32(0.8372), f32(0.5333))),
)  # fmt: skip

PARAMS_DIGEST = "87d34c79b1b88e2e1f6a9a50d491d72b6e08bc2958849ca99cc1dc89305e4534"
MOMENTUM_DIGEST = "af813192cf9c9ef0a9012d2af19ca45f4eee3295e4238ec83dc3e9a854d82a46"


class Golden(NamedTuple):
    """The blobs of each outer step, and the state before and after them."""

    blobs: tuple[tuple[bytes, ...], ...]
    before: GlobalState
    after: GlobalState


def check_golden() -> str | None:
    """None where this machine computes the golden bits, else what differs. Takes a few milliseconds."""
    after = compute_golden().after
    faults = [
        name
        for name, array, expected in (
            ("params", after.params, PARAMS_DIGEST),
            ("momentum", after.momentum, MOMENTUM_DIGEST),
        )
        if hashlib.sha256(array.astype("<f4").tobytes()).hexdigest() != expected
    ]
    if not faults:
        return None
    return (
        f"this machine computes other bits than the golden vectors ({' and '.join(faults)}), so it may train "
        "but does not vote; likely causes: denormal numbers flushed to zero, an unusual build of numpy"
    )


def compute_golden() -> Golden:
    """The golden vectors as this machine computes them."""
    before = GlobalState(_floats("params"), _floats("momentum"))
    after = before.copy()
    blobs = []
    for place, (codec, factors, scalars) in enumerate(STEPS):
        step_blobs = tuple(_blob(codec, f"step {place} delta {i}") for i in range(len(factors)))
        mean = Mean(PARAMS, sparse_runs(codec, TENSORS))
        for blob, (weight, clip) in zip(step_blobs, factors, strict=True):
            mean.add(decode(codec, blob, TENSORS), weight=weight, clip=clip)
        apply_outer_step(after, mean.divide(scalars.weight_sum), scalars, MU)
        blobs.append(step_blobs)
    return Golden(tuple(blobs), before, after)


def _bits(label: str, count: int, kind: str) -> npt.NDArray[np.unsignedinteger]:
    """`count` little-endian unsigned integers of `kind` from SHA-256 in counter mode."""
    size = count * np.dtype(kind).itemsize
    stream = b"".join(
        hashlib.sha256(f"p2pdiloco/golden/{label}/{i}".encode()).digest() for i in range(-(-size // 32))
    )
    return np.frombuffer(stream[:size], kind)


def _floats(label: str) -> Array:
    """Float32 [PARAMS] from 2**-47 to 2**16; the first 64 denormal, then a zero of each sign."""
    bits = _bits(label, PARAMS, "<u4")
    exponent = (bits >> 23 & 63) + 80
    exponent[:64] = 0
    values = (bits & 0x807FFFFF) | (exponent << 23)
    values[64:66] = 0, 0x80000000
    return values.astype(np.uint32).view(np.float32)


def _blob(codec: str, label: str) -> bytes:
    """A blob as it travels: the first block zero, or a scale, so that denormal state stays denormal; scales
    and raw values below 2 in magnitude, a denormal scale, any nibbles, places, signs and groups.
    """
    head = MAGIC + bytes([FORMAT, CODECS[codec]])
    head += bytes(HEADER_BYTES - len(head))
    if codec == "fp16":
        return head + bytes(2 * BLOCK) + _raw(label, PARAMS - BLOCK)
    if codec in KEPT:
        blob = head + _chunks(label, codec) + _raw(label, 16)
        assert len(blob) == encoded_size(codec, TENSORS)
        return blob
    scales = _bits(label + " scales", BLOCKS, "<u2") & 0x3FFF
    scales[:2] = 0, 1
    nibbles = _bits(label + " nibbles", BLOCKS * 64, "u1")
    blob = head + scales.astype("<u2").tobytes() + nibbles.tobytes() + _raw(label, 16)
    assert len(blob) == encoded_size(codec, TENSORS)
    return blob


def _chunks(label: str, codec: str) -> bytes:
    """Of each chunk the places that the smallest hashed numbers have, outside of the first 128 values."""
    k, places, first = KEPT[codec], [], 0
    for chunk, size in enumerate(CHUNKS):
        order = np.argsort(_bits(f"{label} places {chunk}", size, "<u4"), kind="stable")
        allowed = order[order >= BLOCK] if chunk == 0 else order
        count = kept_of(k, size)
        places.append(np.sort(allowed[:count]) + (first << place_bits(k)))
        first += count
    scales = _bits(label + " scales", 2 * len(CHUNKS), "<u2") & 0x3FFF
    scales[2:] = 0, 1  # in the short chunk one group was not sent, the other is denormal
    flags = _bits(label + " flags", first, "u1")
    out = np.empty(4 * len(CHUNKS) + sum(bit_parts(k, first)), np.uint8)
    halves = scales.astype(np.uint16).view(np.float16).reshape(-1, 2)
    kept = topk.Kept(
        halves, np.concatenate(places), (flags & 1).astype(np.bool_), (flags & 2).astype(np.bool_)
    )
    topk.pack(kept, k, out)
    return out.tobytes()


def _raw(label: str, count: int) -> bytes:
    return (_bits(label + " raw", count, "<u2") & 0xBFFF).astype("<u2").tobytes()
