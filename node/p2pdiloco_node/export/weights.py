"""model.safetensors from a stream of float32 chunks: a few MiB of memory whatever the size of the model.

The format is eight bytes of length, a JSON header, and the tensors' bytes without gaps, which is how the
chunks of a snapshot lie one behind the other. Beyond `limits.weights_file_bytes_max` there are several files
and an index, cut between tensors.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from p2pdiloco import limits
from p2pdiloco_node.export.names import Piece
from p2pdiloco_node.storage.files import Files, guarded, replace_file

Chunk = bytes | memoryview
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
VALUE_BYTES = {"float32": 4, "bfloat16": 2}
_NAMES = {"float32": "F32", "bfloat16": "BF16"}
_ALIGNMENT = 8  # bytes at which the tensors begin


class Written(NamedTuple):
    """A file of the folder."""

    name: str
    size: int  # bytes
    sha256: str  # 64 hex digits


def write_weights(
    files: Files,
    folder: Path,
    pieces: Sequence[Piece],
    chunks: Iterable[Chunk],
    dtype: str,
    told: Callable[[int], None],
    *,
    file_bytes_max: int = limits.weights_file_bytes_max,
) -> list[Written]:
    """Write the tensors `pieces`, which cover the flat array, from its little-endian float32 bytes in order.

    `told`: values written so far. Every file is durable but for its name.

    Raises: OperatorError (disk); AssertionError: fewer or more bytes than the pieces have; what `chunks`
        raises.
    """
    parts = _cut(pieces, VALUE_BYTES[dtype], file_bytes_max)
    stream = _Stream(chunks)
    written = []
    done = 0
    for number, part in enumerate(parts, start=1):
        name = WEIGHTS if len(parts) == 1 else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        values = sum(piece.size for piece in part)
        before = done

        def body(values: int = values, before: int = before) -> Iterator[Chunk]:
            moved = before
            for data in stream.take(4 * values):
                yield data if dtype == "float32" else to_bfloat16(data)
                moved += len(data) // 4
                told(moved)

        written.append(_write(files, folder / name, _header(part, dtype), body()))
        done += values
    assert stream.is_empty(), "more bytes than the model has"
    if len(parts) > 1:
        placed = {piece.name: file.name for piece, file in _places(parts, written)}
        index = {"metadata": {"total_size": done * VALUE_BYTES[dtype]}, "weight_map": placed}
        written.append(write_file(files, folder / INDEX, json_bytes(index)))
    return written


def write_file(files: Files, path: Path, data: bytes) -> Written:
    """A small file, whole. Raises: OperatorError."""
    replace_file(files, path, data)
    return Written(path.name, len(data), hashlib.sha256(data).hexdigest())


def json_bytes(value: object) -> bytes:
    """JSON as people read it, the same bytes for the same value."""
    return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def to_bfloat16(data: Chunk) -> bytes:
    """Little-endian float32 as bfloat16, rounded to nearest, ties to even. Values are finite."""
    bits = np.frombuffer(data, "<u4")
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    return bytes((rounded >> np.uint32(16)).astype("<u2").data)


def _cut(pieces: Sequence[Piece], value_bytes: int, bytes_max: int) -> list[list[Piece]]:
    """Runs of tensors for one file each; a tensor that is larger has a file of its own."""
    parts: list[list[Piece]] = [[]]
    size = 0
    for piece in pieces:
        needed = piece.size * value_bytes
        if parts[-1] and size + needed > bytes_max:
            parts.append([])
            size = 0
        parts[-1].append(piece)
        size += needed
    return parts


def _places(parts: Sequence[Sequence[Piece]], written: Sequence[Written]) -> Iterator[tuple[Piece, Written]]:
    for part, file in zip(parts, written, strict=True):
        for piece in part:
            yield piece, file


def _header(pieces: Sequence[Piece], dtype: str) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for piece in pieces:
        end = at + piece.size * VALUE_BYTES[dtype]
        header[piece.name] = {
            "dtype": _NAMES[dtype], "shape": list(piece.shape), "data_offsets": [at, end]
        }  # fmt: skip
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _write(files: Files, path: Path, header: bytes, body: Iterator[Chunk]) -> Written:
    """Raises: OperatorError; then the folder is of no use."""
    hashed = hashlib.sha256(header)
    size = len(header)
    fd = guarded(lambda: files.create(path, 0o644), path)
    try:
        guarded(lambda: files.write(fd, header), path)
        for data in body:
            hashed.update(data)
            size += len(data)
            guarded(lambda data=data: files.write(fd, data), path)  # type: ignore[misc]
        guarded(lambda: files.fsync(fd), path)
    finally:
        os.close(fd)
    return Written(path.name, size, hashed.hexdigest())


class _Stream:
    """Chunks handed on in other portions."""

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        self._chunks = iter(chunks)
        self._rest = memoryview(b"")

    def take(self, size: int) -> Iterator[memoryview]:
        """The next `size` bytes, in parts that are never larger than a chunk."""
        while size:
            if not self._rest:
                chunk = next(self._chunks, None)
                assert chunk is not None, f"{size} bytes of the model are missing"
                self._rest = memoryview(chunk).cast("B")
            part, self._rest = self._rest[:size], self._rest[size:]
            size -= len(part)
            yield part

    def is_empty(self) -> bool:
        return not self._rest and next(self._chunks, None) is None
