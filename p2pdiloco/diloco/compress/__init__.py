"""A delta as bytes and back. The layout is rules/delta_layout.py; its size follows from the model alone."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from p2pdiloco.diloco.compress import fp16, int4, topk
from p2pdiloco.diloco.layout import Array, Layout, layout_of
from p2pdiloco.errors import PeerError
from p2pdiloco.ids import DIGEST_BYTES, NO_DIGEST, PeerId
from p2pdiloco.rules.delta_layout import (
    BLOCK,
    CODECS,
    FORMAT,
    HEADER_BYTES,
    KEPT,
    MAGIC,
    encoded_size,
    is_sparse,
)
from p2pdiloco.run_spec import TensorSpec

__all__ = ["Origin", "decode", "encode", "encoded_size", "is_sparse", "origin_of"]


class Origin(NamedTuple):
    """Whose delta a blob is. A voter compares it with the signed header or the log entry."""

    peer: PeerId
    sequence: int


NOBODY = Origin(PeerId(NO_DIGEST), 0)  # benches and golden vectors


def encode(codec: str, flat: Array, tensors: tuple[TensorSpec, ...], origin: Origin = NOBODY) -> bytes:
    """The blob of a pseudo-gradient: float32 [params] to `encoded_size(codec, tensors)` bytes.

    Raises:
        PeerError: NOT_FINITE, as any receiver would say; also a magnitude above limits.delta_value_max. The
            trainer went astray: treat it as a step that is not finite.
    """
    layout = layout_of(codec, tensors)
    assert flat.shape == (layout.params,), "a delta of another model"
    assert flat.dtype == np.float32, "deltas are float32"
    data = bytearray(encoded_size(codec, tensors))
    data[:HEADER_BYTES] = _kind(codec) + origin.sequence.to_bytes(8, "big") + origin.peer
    coded, raw = _parts(np.frombuffer(data, np.uint8), layout)
    if is_sparse(codec):
        topk.encode_into(flat, layout, KEPT[codec], coded)
    else:
        scales, nibbles = _int4_parts(coded, layout)
        for run in layout.coded:
            blocks = slice(run.place, run.place + -(-run.size // BLOCK))
            int4.encode_into(flat[run.start : run.stop], scales[blocks], nibbles[blocks])
    for run in layout.raw:
        fp16.encode_into(flat[run.start : run.stop], raw[run.place : run.place + run.size])
    return bytes(data)


def decode(
    codec: str,
    data: bytes | bytearray | memoryview,
    tensors: tuple[TensorSpec, ...],
    out: Array | None = None,
) -> Array:
    """An untrusted blob to float32 [params], into `out` where given; nothing else of that size is made.

    Where the codec is sparse, a coordinate that was not sent is 0, and one that was sent is not.

    Raises:
        PeerError: TOO_BIG or BAD_SHAPE for another size, header or list of places than the model implies,
            NOT_FINITE for values that are not finite or out of range. What `out` holds then is undefined.
    """
    layout = layout_of(codec, tensors)
    size = encoded_size(codec, tensors)
    if len(data) != size:
        raise PeerError("TOO_BIG" if len(data) > size else "BAD_SHAPE", f"{len(data)} bytes, not {size}")
    if bytes(data[:_KIND_BYTES]) != _kind(codec):
        raise PeerError("BAD_SHAPE", f"not a delta coded as {codec}")
    flat = np.empty(layout.params, np.float32) if out is None else out
    assert flat.shape == (layout.params,), "room for another model"
    coded, raw = _parts(np.frombuffer(data, np.uint8), layout)
    if is_sparse(codec):
        topk.decode_into(coded, layout, KEPT[codec], flat)
    else:
        scales, nibbles = _int4_parts(coded, layout)
        for run in layout.coded:
            blocks = slice(run.place, run.place + -(-run.size // BLOCK))
            int4.decode_into(scales[blocks], nibbles[blocks], flat[run.start : run.stop])
    for run in layout.raw:
        fp16.decode_into(raw[run.place : run.place + run.size], flat[run.start : run.stop])
    return flat


def origin_of(data: bytes | bytearray | memoryview) -> Origin:
    """Whose delta a blob says it is; `decode` does not look at it.

    Raises:
        PeerError: BAD_SHAPE for a blob shorter than its header.
    """
    if len(data) < HEADER_BYTES:
        raise PeerError("BAD_SHAPE", f"{len(data)} bytes")
    peer = bytes(data[HEADER_BYTES - DIGEST_BYTES : HEADER_BYTES])
    return Origin(PeerId(peer), int.from_bytes(data[_KIND_BYTES : HEADER_BYTES - DIGEST_BYTES], "big"))


_KIND_BYTES = 8


def _kind(codec: str) -> bytes:
    return MAGIC + bytes([FORMAT, CODECS[codec], 0, 0])


def _parts(data: topk.Bytes, layout: Layout) -> tuple[topk.Bytes, fp16.Half]:
    """Views of a blob: what is between header and raw values, and the raw values."""
    raw_at = len(data) - 2 * layout.raw_values
    return data[HEADER_BYTES:raw_at], data[raw_at:].view("<f2")


def _int4_parts(coded: int4.Bytes, layout: Layout) -> tuple[fp16.Half, int4.Bytes]:
    """Views: scales [blocks], nibbles [blocks, 64]."""
    nibbles_at = 2 * layout.blocks
    return coded[:nibbles_at].view("<f2"), coded[nibbles_at:].reshape(layout.blocks, BLOCK // 2)
