"""Bytes of a file as they were before it was compressed, in pieces, from any place on."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import zstandard

from p2pdiloco.errors import OperatorError
from p2pdiloco.exit_codes import RESOURCES

READ_BYTES = 1 << 20
PACKED_BYTES = (
    32 << 10
)  # taken of a compressed file at a time: zstd may make hundreds of megabytes of a megabyte


def pieces(path: str, packed: str, first: int) -> Iterator[bytes]:
    """A file from byte `first` (unpacked) on. `packed`: gz, zst or empty; what lies before `first` in a
    compressed file is read and dropped.

    Raises: OperatorError: it cannot be read, is damaged or is cut off.
    """
    where = first
    try:
        with open(path, "rb") as file:  # noqa: PTH123  # a path's text as it is
            if not packed:
                file.seek(first)
            else:
                where = 0
            for piece in _unpacked(file, packed):
                new = piece[max(0, first - where) :] if where < first else piece
                where += len(piece)
                if new:
                    yield new
    except (gzip.BadGzipFile, zlib.error, EOFError, zstandard.ZstdError) as error:
        raise OperatorError(
            f"{path} is damaged or cut off: {where:,} bytes of text could be unpacked, then {error}: "
            "fetch it again, or leave it out with --data."
        ) from None
    except OSError as error:
        raise cannot_read(path, error) from None


def cannot_read(path: Path | str, error: OSError) -> OperatorError:
    """A disk or a network drive that failed: what is done so far is still worth something."""
    return OperatorError(
        f"{path} cannot be read ({error.strerror}): mend that and give the same command again, it goes on "
        "where it was; or leave the file out with --data.",
        exit_code=RESOURCES,
    )


def _unpacked(file: IO[bytes], packed: str) -> Iterator[bytes]:
    if packed == "zst":
        yield from _zstd(file)
        return
    if packed == "gz":
        # Not `read`: of a file that is cut off it gives an error and nothing of what stands before.
        opened = gzip.GzipFile(fileobj=file)
        while piece := opened.read1(READ_BYTES):
            yield piece
        return
    while piece := file.read(READ_BYTES):
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
