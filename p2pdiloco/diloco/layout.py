"""How a model's tensors lie in one flat float32 array, and which of them a codec sends in blocks."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from p2pdiloco.rules.delta_layout import BLOCK, in_blocks
from p2pdiloco.run_spec import TensorSpec

Array = npt.NDArray[np.float32]


class Run(NamedTuple):
    """Consecutive values of the flat array that are coded alike, without padding in between."""

    start: int  # first value in the flat array
    size: int  # values
    place: int  # first block, or first raw value, in the blob

    @property
    def stop(self) -> int:
        return self.start + self.size


class Layout(NamedTuple):
    """`blocked` runs come in blocks of 128 values, the last padded with zeros; `raw` ones as float16."""

    params: int
    blocked: tuple[Run, ...]
    raw: tuple[Run, ...]
    blocks: int
    raw_values: int


@lru_cache(maxsize=16)
def layout_of(codec: str, tensors: tuple[TensorSpec, ...]) -> Layout:
    """The layout of a delta (rules/delta_layout.py). Neighbours that need no padding become one run."""
    blocked: list[Run] = []
    raw: list[Run] = []
    start = blocks = raw_values = 0
    for tensor in tensors:
        if in_blocks(codec, tensor):
            whole = not blocked or blocked[-1].size % BLOCK == 0
            _extend(blocked, Run(start, tensor.size, blocks), joins=whole)
            blocks += -(-tensor.size // BLOCK)
        else:
            _extend(raw, Run(start, tensor.size, raw_values), joins=True)
            raw_values += tensor.size
        start += tensor.size
    return Layout(start, tuple(blocked), tuple(raw), blocks, raw_values)


def _extend(runs: list[Run], run: Run, *, joins: bool) -> None:
    if runs and joins and runs[-1].stop == run.start:
        runs[-1] = runs[-1]._replace(size=runs[-1].size + run.size)
    else:
        runs.append(run)
