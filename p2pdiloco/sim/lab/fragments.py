"""Balanced tensor fragmentation: params in groups of whole tensors, synced one at a time (algorithm.md 8).

Decoupled DiLoCo (arXiv 2604.21428): greedy bin-packing of tensors in descending size, so peak bandwidth falls
by the number of fragments. A tensor is never cut: the largest one bounds how even the groups can be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from p2pdiloco.diloco.layout import Array
from p2pdiloco.errors import OperatorError
from p2pdiloco.exit_codes import USAGE
from p2pdiloco.run_spec import TensorSpec
from p2pdiloco.words import count_of


class Fragment(NamedTuple):
    """Some tensors, in the RunSpec's order, and where they lie in the flat params (neighbours: one slice)."""

    tensors: tuple[TensorSpec, ...]
    slices: tuple[slice, ...]

    @property
    def size(self) -> int:
        """Float32 values."""
        return sum(tensor.size for tensor in self.tensors)


def fragments_of(tensors: Sequence[TensorSpec], count: int) -> list[Fragment]:
    """`count` fragments that hold every tensor once.

    The largest tensor first, each to the fragment with the fewest values so far; of equals the first. A pure
    function of the tensors, so every node has the same fragments.

    Raises:
        OperatorError: more fragments than tensors, since none may be empty.
    """
    if count > len(tensors):
        raise OperatorError(
            f"outer.fragments is {count} and the model has {count_of(len(tensors), 'tensor')}, never to be "
            f"cut: set outer.fragments to {len(tensors)} or less.",
            exit_code=USAGE,
        )
    held: list[list[int]] = [[] for _ in range(count)]
    values = [0] * count
    for place in sorted(range(len(tensors)), key=lambda i: (-tensors[i].size, i)):
        # Empty ones first: tensors of no values would otherwise leave a fragment without any.
        target = min(range(count), key=lambda f: (values[f], len(held[f]), f))
        held[target].append(place)
        values[target] += tensors[place].size
    starts = [0]
    for tensor in tensors:
        starts.append(starts[-1] + tensor.size)
    return [_fragment(tensors, starts, sorted(places)) for places in held]


def gather(flat: Array, fragment: Fragment) -> Array:
    """The fragment's values of float32 [params], as float32 [fragment.size].

    A view where the fragment lies in one piece, as it always does with one fragment: who keeps it copies it.
    """
    if len(fragment.slices) == 1:
        return flat[fragment.slices[0]]
    return np.concatenate([flat[here] for here in fragment.slices])


def scatter(flat: Array, fragment: Fragment, values: Array) -> None:
    """Put the fragment's `values` (float32 [fragment.size]) in their places of `flat`, in place."""
    first = 0
    for here in fragment.slices:
        size = here.stop - here.start
        flat[here] = values[first : first + size]
        first += size


def _fragment(tensors: Sequence[TensorSpec], starts: Sequence[int], places: Sequence[int]) -> Fragment:
    slices: list[slice] = []
    for place in places:
        here = slice(starts[place], starts[place + 1])
        if slices and slices[-1].stop == here.start:
            slices[-1] = slice(slices[-1].start, here.stop)
        else:
            slices.append(here)
    return Fragment(tuple(tensors[place] for place in places), tuple(slices))
