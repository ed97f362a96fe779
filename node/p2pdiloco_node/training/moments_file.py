"""AdamW's moments on disk: 8 bytes of step count, then two vectors of raw little-endian float32."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
HEADER_BYTES = 8


def write_moments(path: Path, steps: int, both: Floats) -> tuple[int, bytes]:
    """Write and fsync; the name becomes durable with the manifest that lists it.

    `both`: (2, params). Returns: size in bytes and SHA-256.
    """
    digest = hashlib.sha256()
    parts = (steps.to_bytes(HEADER_BYTES, "big"), np.ascontiguousarray(both, dtype="<f4").data.cast("B"))
    with path.open("wb") as file:
        for part in parts:
            file.write(part)
            digest.update(part)
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    return size, digest.digest()


def read_moments(path: Path, params: int) -> tuple[int, Floats]:
    """Steps, and (2, params) as they lie in the file: what is not looked at is not read.

    Raises: ValueError: it is not the moments of a model of this size.
    """
    size = path.stat().st_size
    if size != HEADER_BYTES + 8 * params:
        raise ValueError(f"{path.name} has {size} bytes instead of {HEADER_BYTES + 8 * params}")
    with path.open("rb") as file:
        steps = int.from_bytes(file.read(HEADER_BYTES), "big")
    both: Floats = np.memmap(path, "<f4", mode="r", offset=HEADER_BYTES, shape=(2, params))
    return steps, both
