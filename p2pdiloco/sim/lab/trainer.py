"""What the lab needs of a trainer. The real model comes from p2pdiloco_node.lab: nothing here knows torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from p2pdiloco.diloco.layout import Array
from p2pdiloco.run_spec import TensorSpec


class LabTrainer(Protocol):
    """The inner loop of one node."""

    @property
    def theta(self) -> Array:
        """Float32 [params]: the node's params, live. The engine reads and writes them in place."""
        ...

    def step(self, lr: float) -> float:
        """One inner step on the node's next tokens. Returns: its loss before the step, nats per token.

        NaN: loss or gradient were not finite, and nothing was changed.

        `lr` already contains the schedule; the moments' warm-up is the trainer's.
        """
        ...

    def zero_moments(self) -> None:
        """After an absence: AdamW's moments start again, with their warm-up."""
        ...

    def expert_tokens(self) -> Sequence[float]:
        """Tokens that each expert of each layer saw since the last call, layer by layer; empty if dense."""
        ...


class LabModel(Protocol):
    """A model with its data, and the trainers that work on it."""

    @property
    def tensors(self) -> tuple[TensorSpec, ...]: ...

    @property
    def initial(self) -> Array:
        """Float32 [params]: version 0. The same for all arms of a seed."""
        ...

    def trainer(self, node: int, *, batch_factor: int = 1) -> LabTrainer:
        """Node number `node` (from 0) with its own data order; `batch_factor` times the usual batch."""
        ...

    def evaluate(self, params: Array) -> float:
        """Held-out loss of float32 [params], nats per token."""
        ...

    def expert_load(self, params: Array) -> Sequence[Sequence[float]]:
        """Share of the held-out tokens' routes that each expert gets, a row a layer; empty if dense."""
        ...
