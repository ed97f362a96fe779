"""How a model's tensors lie in one flat float32 array, and which a codec sends in blocks or chunks."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from p2pdiloco.rules.delta_layout import BLOCK, CHUNK, is_raw, is_sparse
from p2pdiloco.run_spec import TensorSpec

Array = npt.NDArray[np.float32]


class Run(NamedTuple):
    """Consecutive values of the flat array that are coded alike, without padding in between."""

    start: int  # first value in the flat array
    size: int  # values
    place: int  # first block or chunk, or first raw value, in the blob

    @property
    def stop(self) -> int:
        return self.start + self.size


class Layout(NamedTuple):
    """`coded` runs come in blocks of 128 values (int4) or chunks of 4096 (topk); `raw` ones as float16.

    A run's last block is padded with zeros, its last chunk is shorter.
    """

    params: int
    coded: tuple[Run, ...]
    raw: tuple[Run, ...]
    blocks: int  # or chunks
    raw_values: int


@lru_cache(maxsize=16)
def layout_of(codec: str, tensors: tuple[TensorSpec, ...]) -> Layout:
    """The layout of a delta (rules/delta_layout.py). Neighbours without a part of a block become one run."""
    unit = CHUNK if is_sparse(codec) else BLOCK
    coded: list[Run] = []
    raw: list[Run] = []
    start = blocks = raw_values = 0
    for tensor in tensors:
        if is_raw(codec, tensor):
            _extend(raw, Run(start, tensor.size, raw_values), joins=True)
            raw_values += tensor.size
        else:
            whole = not coded or coded[-1].size % unit == 0
            _extend(coded, Run(start, tensor.size, blocks), joins=whole)
            blocks += -(-tensor.size // unit)
        start += tensor.size
    return Layout(start, tuple(coded), tuple(raw), blocks, raw_values)


def sparse_runs(codec: str, tensors: tuple[TensorSpec, ...]) -> tuple[Run, ...]:
    """The coordinates of which a delta holds a few: those that `merge` averages over their senders."""
    return layout_of(codec, tensors).coded if is_sparse(codec) else ()


def _extend(runs: list[Run], run: Run, *, joins: bool) -> None:
    if runs and joins and runs[-1].stop == run.start:
        runs[-1] = runs[-1]._replace(size=runs[-1].size + run.size)
    else:
        runs.append(run)
