"""Params spread over the ranks with FSDP2: a layer is whole on a rank only while that layer computes.

`fully_shard` cuts each tensor along its rows, so what a rank holds of one is a stretch of the RunSpec's flat
order, and the ranks' stretches of a tensor are side by side. So anchor, moments and pseudo-gradient are
handled by each rank for its own stretches, and files are read and written a piece at a time: at no time does
any rank hold a second whole copy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from p2pdiloco.run_spec import TensorSpec
from p2pdiloco_node.training.flat_params import Placed, Stretch, in_pieces
from p2pdiloco_node.training.models import decoder_layers, derive_buffers
from p2pdiloco_node.training.rank_group import Group

Floats = npt.NDArray[np.float32]


class ShardedParams:
    """`HeldParams` where each rank has its rows of every tensor."""

    def __init__(
        self, loss: Any, layout: tuple[TensorSpec, ...], device: str, group: Group, *, bf16: bool
    ) -> None:
        """`loss`: the module whose forward pass is taken, around an outline, which gets its memory here.

        `bf16`: layers are sent to and fro in bfloat16, in which they are multiplied anyway; gradients are
        added up in float32.
        """
        self._group = group
        # FSDP takes the mean over ranks, and what is wanted is the sum.
        self.loss_factor = float(group.size)
        model = loss.model
        mesh = init_device_mesh(torch.device(device).type, (group.size,))
        # What enters a layer stays float32, as it is on one device; what is not in a layer (embedding, head,
        # the last norm) is sent as float32.
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        for layer in decoder_layers(model):
            fully_shard(layer, mesh=mesh, reshard_after_forward=True, mp_policy=policy if bf16 else NO_POLICY)
        # Also behind a forward pass without a backward one (evaluation) nothing may stay gathered: theta
        # changes between two passes.
        fully_shard(loss, mesh=mesh, reshard_after_forward=True)
        for name in type(loss).other_forwards:
            register_fsdp_forward_method(loss, name)
        loss.to_empty(device=device)
        derive_buffers(model, device)
        loss.unshard()  # FSDP takes the new memory for its own now, not in the first step
        loss.reshard()
        self._parameters = [parameter for _, parameter in model.named_parameters()]
        self.stretches, self.placed = [], []
        self._shards: list[tuple[int, slice]] = []  # of each tensor, by rank: who holds what
        at = 0
        for tensor, parameter in zip(layout, self._parameters, strict=True):
            places = shard_places(tensor, at, group.size)
            self._shards += enumerate(places)
            own = places[group.rank]
            local = parameter.to_local().detach()
            assert local.numel() == own.stop - own.start, f"{tensor.name} is cut in another way"
            with torch.no_grad():
                local.zero_()
            self.stretches.append(Stretch(own, local.view(-1)))
            self.placed.append(Placed(own, torch.nn.Parameter(local)))
            at += tensor.size

    def zero_gradient(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def finish_gradient(self) -> float:
        for parameter, (_, own) in zip(self._parameters, self.placed, strict=True):
            # Without a gradient: nothing of the batch went through it.
            own.grad = torch.zeros_like(own) if parameter.grad is None else parameter.grad.to_local()
        norms = torch.stack([torch.linalg.vector_norm(own.grad) for _, own in self.placed])
        square = torch.linalg.vector_norm(norms) ** 2
        self._group.add_up(square)
        return math.sqrt(float(square))

    def scale_gradient(self, factor: float) -> None:
        for _, own in self.placed:
            own.grad.mul_(factor)

    def align(self) -> None:
        """Every value is on one rank alone."""

    def collect(self, own: Iterator[Floats]) -> Iterator[Floats]:
        for rank, place in self._shards:
            for piece in in_pieces(place):
                if rank == self._group.rank:
                    values = next(own)
                    if rank == 0:
                        yield values
                    else:
                        self._group.give(values)
                elif self._group.rank == 0:
                    yield self._group.take(piece.stop - piece.start, rank)
        assert next(own, None) is None, "there are values of no tensor"


NO_POLICY = MixedPrecisionPolicy()


def shard_places(tensor: TensorSpec, at: int, ranks: int) -> list[slice]:
    """Where in the flat order each rank's rows of a tensor are that begins at `at`: as many rows for each,
    fewer or none for the last."""
    rows = tensor.shape[0] if tensor.shape else 1
    width = tensor.size // rows
    each = -(-rows // ranks)
    edges = [at + min(rank * each, rows) * width for rank in range(ranks + 1)]
    return [slice(first, last) for first, last in itertools.pairwise(edges)]
