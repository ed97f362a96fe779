"""Flat float32 arrays as files: how daemon and trainer hand each other params and deltas."""

from __future__ import annotations

from pathlib import Path

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


def take_array(path: Path, params: int) -> Floats:
    """`read_array`, and the file is gone."""
    array = read_array(path, params)
    path.unlink()
    return array
