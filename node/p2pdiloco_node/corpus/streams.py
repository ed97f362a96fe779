"""Bytes of a file as they were before it was compressed, in pieces, from any place on."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from typing import IO, Protocol

import zstandard

from p2pdiloco.errors import OperatorError
from p2pdiloco_node.corpus.sources import Input, cannot_read

READ_BYTES = 1 << 20
PACKED_BYTES = (
    32 << 10
)  # taken of a compressed file at a time: zstd may make hundreds of megabytes of a megabyte


class Source(Protocol):
    def read(self, size: int, /) -> bytes: ...


def pieces(entry: Input, first: int) -> Iterator[bytes]:
    """The file from byte `first` (unpacked) on; what lies before it in a compressed file is read and dropped.

    Raises: OperatorError: it cannot be read, is damaged or is cut off.
    """
    where = first
    try:
        with open(entry.path, "rb") as file:  # noqa: PTH123  # a path's text as it is
            if not entry.packed:
                file.seek(first)
            else:
                where = 0
            for piece in _unpacked(file, entry.packed):
                new = piece[max(0, first - where) :] if where < first else piece
                where += len(piece)
                if new:
                    yield new
    except (gzip.BadGzipFile, zlib.error, EOFError, zstandard.ZstdError) as error:
        raise OperatorError(
            f"{entry.path} is damaged or cut off behind byte {where} of its content ({error}): fetch it "
            "again, "
            "or leave it out with --data."
        ) from None
    except OSError as error:
        raise cannot_read(entry.path, error) from None


def _unpacked(file: IO[bytes], packed: str) -> Iterator[bytes]:
    if packed == "zst":
        yield from _zstd(file)
        return
    source: Source = gzip.GzipFile(fileobj=file) if packed == "gz" else file
    while piece := source.read(READ_BYTES):
        yield piece


def _zstd(file: IO[bytes]) -> Iterator[bytes]:
    """Frame after frame. The library's own stream ends without a word where a file is cut off."""
    opener = None
    while packed := file.read(PACKED_BYTES):
        while packed:
            opener = opener or zstandard.ZstdDecompressor().decompressobj()
            if piece := opener.decompress(packed):
                yield piece
            packed = opener.unused_data if opener.eof else b""
            opener = None if opener.eof else opener
    if opener is not None:
        raise EOFError("the last frame does not end")
