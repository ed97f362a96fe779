"""Where a mixture of experts keeps its experts in the flat params (algorithm.md 8)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from p2pdiloco.run_spec import TensorSpec

# transformers 5 stores all experts of a layer in one tensor, [experts, ...], as in
# "model.layers.0.mlp.experts.gate_up_proj".
_FUSED = re.compile(r"(?:^|\.)layers\.(\d+)\.(?:.*\.)?experts\.[^.]+$")


class ExpertSlice(NamedTuple):
    """One expert's part of one tensor."""

    layer: int
    expert: int
    part: slice  # of the flat params


def expert_slices(tensors: Sequence[TensorSpec]) -> list[ExpertSlice]:
    """Every expert's parts, in the order of the flat params; empty for a dense model.

    A fused tensor [experts, ...] is contiguous by expert. The router and everything else belongs to no
    expert: it is weighted by the tokens of the whole delta.
    """
    found: list[ExpertSlice] = []
    at = 0
    for tensor in tensors:
        match = _FUSED.search(tensor.name)
        if match:
            experts = tensor.shape[0]
            size = tensor.size // experts
            layer = int(match[1])
            found += [
                ExpertSlice(layer, expert, slice(at + expert * size, at + (expert + 1) * size))
                for expert in range(experts)
            ]
        at += tensor.size
    return found
