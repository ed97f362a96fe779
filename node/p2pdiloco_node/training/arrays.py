"""Flat float32 arrays as files: how daemon and trainer hand each other params and deltas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


def write_array(path: Path, array: Floats) -> None:
    """Raw little-endian float32. Not durable: after a crash nobody reads it."""
    array.astype("<f4", copy=False).tofile(path)


def read_array(path: Path, params: int) -> Floats:
    """(params,) float32. Raises: OSError; AssertionError: another size than this model's."""
    array = np.fromfile(path, "<f4", params + 1).astype(np.float32, copy=False)
    assert array.size == params, f"{path.name} holds {array.size} values instead of {params}"
    return array


class Values(Protocol):
    """(params,) float32 that are read a piece at a time: an array, or files."""

    def __getitem__(self, place: slice, /) -> Floats: ...


class FileValues:
    """Params in a file, less what is in others. `Values`: a rank reads only what it holds."""

    def __init__(self, path: Path, params: int, less: Sequence[Path] = ()) -> None:
        """Raises: OSError; AssertionError: another size than this model's."""
        self.path, self.less = path, tuple(less)
        self._first, *self._others = (_mapped(p, params) for p in (path, *less))

    def __getitem__(self, place: slice, /) -> Floats:
        """A copy."""
        values = np.array(self._first[place], np.float32)
        for other in self._others:
            values -= other[place]
        return values


def write_pieces(path: Path, pieces: Iterable[Floats]) -> None:
    """`write_array` of pieces, one behind the other."""
    with path.open("wb") as file:
        for piece in pieces:
            piece.astype("<f4", copy=False).tofile(file)


def _mapped(path: Path, params: int) -> Floats:
    size = path.stat().st_size
    assert size == 4 * params, f"{path.name} holds {size} bytes instead of {4 * params}"
    mapped: Floats = np.memmap(path, "<f4", mode="r")
    return mapped
