"""The shared arrays: params G and outer momentum M, and the digests that name them (protocol.md 2, 3)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from p2pdiloco.diloco.layout import Array
from p2pdiloco.errors import PeerError
from p2pdiloco.ids import Digest, digest_of, merkle_root
from p2pdiloco.run_spec import chunk_bytes_of, chunk_sizes


class GlobalState(NamedTuple):
    """`params` and `momentum`: float32 [params], writeable, not aliased."""

    params: Array
    momentum: Array

    def copy(self) -> GlobalState:
        return GlobalState(self.params.copy(), self.momentum.copy())


class Roots(NamedTuple):
    """Two thirds of the state root; the third is the digest of the rules state."""

    params: Digest
    momentum: Digest


def chunks_of(array: Array) -> list[memoryview]:
    """An array's chunks as they travel: its float32 values little-endian, the last one shorter.

    On a little-endian machine these are views, not copies.
    """
    data = np.ascontiguousarray(array, dtype="<f4").view(np.uint8)
    size = chunk_bytes_of(len(array))
    return [data[first : first + size].data for first in range(0, len(data), size)]


def chunk_digests(array: Array) -> list[Digest]:
    """The digest of each chunk. Hashing releases the interpreter's lock: call it in a thread."""
    return [digest_of(chunk) for chunk in chunks_of(array)]


def roots_of(state: GlobalState) -> Roots:
    return Roots(
        merkle_root(chunk_digests(state.params)),
        merkle_root(chunk_digests(state.momentum)),
    )


def put_chunk(array: Array, place: int, data: bytes | bytearray | memoryview) -> None:
    """Copy chunk `place`, already checked against its digest, into float32 [params].

    Raises:
        PeerError: BAD_SHAPE where the chunk has another size than the model implies, NOT_FINITE.
    """
    sizes = chunk_sizes(len(array))
    if not 0 <= place < len(sizes) or len(data) != sizes[place]:
        raise PeerError("BAD_SHAPE", f"chunk {place} of {len(data)} bytes")
    values = np.frombuffer(data, "<f4")
    if not bool(np.isfinite(values).all()):
        raise PeerError("NOT_FINITE", f"chunk {place}")
    first = place * (chunk_bytes_of(len(array)) // 4)
    array[first : first + len(values)] = values
