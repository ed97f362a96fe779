"""Ready tokens: `.bin`, raw little-endian numbers of the run's own width, or `.npy` of uint8, uint16, uint32.

Documents end at the tokenizer's end token. One that is longer than `limits.document_bytes_max` in tokens of
the run's width is cut near multiples of that length, so that parts of a file can be read on their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.run_spec import TOKEN_WIDTHS


def token_bytes_for(vocab_size: int) -> int:
    """The least of 1, 2 and 4 that every token fits in."""
    return next(width for width in TOKEN_WIDTHS if vocab_size <= 256**width)


def shard_tokens(tokens: int, token_bytes: int) -> int:
    """Tokens of each shard but the last, so that they are of equal size, at most 4 MiB."""
    most = limits.frame_content_bytes_max // token_bytes
    return -(-tokens // -(-tokens // most))


def count_tokens(path: Path, token_bytes: int) -> int:
    """Raises: OperatorError: it cannot be read, or is no file of tokens."""
    return len(_mapped(path, token_bytes))


def read_tokens(
    path: Path, first: int, stop: int, *, aligned: bool, token_bytes: int, vocab_size: int, end_token: int
) -> Iterator[tuple[list[bytes], int]]:
    """Documents that begin in tokens [first, stop), without their end tokens, and where the next one begins.

    `aligned`: `first` is where a document begins. Each document is little-endian, of `token_bytes`.

    Raises: OperatorError: it cannot be read, is no file of tokens, or has one outside the vocabulary.
    """
    tokens = _mapped(path, token_bytes)
    grid = limits.document_bytes_max // token_bytes
    at = first if aligned or first == 0 else _boundary(tokens, first, grid, end_token)
    while at < min(stop, len(tokens)):
        place = (at // grid + 1) * grid
        end = _boundary(tokens, place, grid, end_token) if place < len(tokens) else len(tokens)
        cell = tokens[at:end]
        if int(cell.max()) >= vocab_size:
            where = at + int(np.argmax(cell >= vocab_size))
            raise OperatorError(
                f"{path}: token {where} is {int(tokens[where])}, but the tokenizer has {vocab_size}: it was "
                "made with another tokenizer, or with numbers of another width."
            )
        ends = np.flatnonzero(cell == end_token)
        cuts = [0, *(ends + 1).tolist(), len(cell)]
        raw = np.ascontiguousarray(cell, f"<u{token_bytes}").tobytes()
        stops = [*ends.tolist(), len(cell)]
        documents = [
            raw[a * token_bytes : b * token_bytes] for a, b in zip(cuts, stops, strict=False) if a < b
        ]
        yield documents, end
        at = end


def _boundary(tokens: npt.NDArray[np.unsignedinteger], place: int, grid: int, end_token: int) -> int:
    """Behind the first end token at or behind `place` - 1, if there is one near; else `place` itself."""
    ends = np.flatnonzero(tokens[place - 1 : place + grid // 4] == end_token)
    return place + int(ends[0]) if len(ends) else place


def _mapped(path: Path, token_bytes: int) -> npt.NDArray[np.unsignedinteger]:
    tokens: npt.NDArray[Any]
    try:
        if path.suffix.lower() == ".npy":
            tokens = np.lib.format.open_memmap(path, mode="r")
        else:
            size = path.stat().st_size
            if size % token_bytes:
                raise OperatorError(
                    f"{path} has {size} bytes, which are no whole tokens of {token_bytes} bytes: a .bin "
                    "file has the width that the tokenizer's vocabulary needs; save others as .npy."
                )
            tokens = (
                np.memmap(path, f"<u{token_bytes}", mode="r") if size else np.empty(0, f"<u{token_bytes}")
            )
    except OSError as error:
        raise OperatorError(
            f"{path} cannot be read ({error.strerror}); mend that, or leave it out."
        ) from None
    except ValueError as error:
        raise OperatorError(f"{path} is no .npy file of tokens ({error}).") from None
    if tokens.ndim != 1 or tokens.dtype.kind != "u" or tokens.dtype.itemsize not in TOKEN_WIDTHS:
        raise OperatorError(
            f"{path} holds {tokens.dtype} of shape {tokens.shape}; tokens are uint8, uint16 or uint32 "
            "in one row."
        )
    found: npt.NDArray[np.unsignedinteger] = tokens
    return found
