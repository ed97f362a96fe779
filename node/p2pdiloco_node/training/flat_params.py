"""All params in one flat vector, in the order of the RunSpec's tensors; each rank of several has them all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from p2pdiloco import limits
from p2pdiloco.run_spec import TensorSpec
from p2pdiloco_node.training.models import give_memory, views
from p2pdiloco_node.training.rank_group import Group

Floats = npt.NDArray[np.float32]


class Stretch(NamedTuple):
    """Params that are side by side in the RunSpec's flat order, here and in this rank's memory."""

    place: slice  # in the flat order
    theta: Any  # (n,) float32 on the device: the memory that the model computes with


class Placed(NamedTuple):
    """A parameter, or this rank's part of it, as the optimizer sees it; its gradient is in `.grad`."""

    place: slice  # in the flat order
    parameter: Any


class HeldParams(Protocol):
    """What of the model's params this rank holds, and how the ranks put theirs together."""

    stretches: list[Stretch]  # in the flat order
    placed: list[Placed]  # the same params, one by one
    loss_factor: float  # what each rank's loss is multiplied by, so that gradients add up

    def zero_gradient(self) -> None: ...

    def finish_gradient(self) -> float:
        """After the last backward pass: the gradient of all ranks' losses. Returns: its norm."""
        ...

    def scale_gradient(self, factor: float) -> None: ...

    def align(self) -> None:
        """Between two passes: what all ranks hold is one model again, to the last bit."""
        ...

    def collect(self, own: Iterator[Floats]) -> Iterator[Floats]:
        """`own`: this rank's values in the flat order, as `in_pieces` cuts them; it is exhausted.

        Yields on rank 0 all values in the flat order, a piece at a time; on other ranks nothing.
        """
        ...


def in_pieces(place: slice) -> Iterator[slice]:
    """A place in the flat order, a piece at a time: `handed_over_values` at most."""
    for first in range(place.start, place.stop, limits.handed_over_values):
        yield slice(first, min(first + limits.handed_over_values, place.stop))


class FlatParams:
    """`HeldParams` where each rank has the whole model. The gradient is one vector, too: it is added up at
    once."""

    loss_factor = 1.0

    def __init__(self, model: Any, layout: tuple[TensorSpec, ...], device: str, group: Group) -> None:
        """`model`: an outline, which gets its memory here."""
        self._group = group
        size = sum(tensor.size for tensor in layout)
        self.theta = torch.zeros(size, dtype=torch.float32, device=device)
        self.gradient = torch.zeros_like(self.theta)
        give_memory(model, views(self.theta, layout), views(self.gradient, layout), device)
        self.stretches = [Stretch(slice(0, size), self.theta)]
        self.placed = placed(layout, (parameter for _, parameter in model.named_parameters()))

    def zero_gradient(self) -> None:
        self.gradient.zero_()

    def finish_gradient(self) -> float:
        self._group.add_up(self.gradient)
        return float(torch.linalg.vector_norm(self.gradient))

    def scale_gradient(self, factor: float) -> None:
        self.gradient.mul_(factor)

    def align(self) -> None:
        # Unlike GPUs need not round alike, and nothing else would ever bring them together.
        self._group.spread(self.theta)

    def collect(self, own: Iterator[Floats]) -> Iterator[Floats]:
        for piece in own:
            if self._group.rank == 0:
                yield piece


def placed(layout: tuple[TensorSpec, ...], parameters: Iterator[Any]) -> list[Placed]:
    """Whole parameters, side by side."""
    found, at = [], 0
    for tensor, parameter in zip(layout, parameters, strict=True):
        found.append(Placed(slice(at, at + tensor.size), parameter))
        at += tensor.size
    return found
