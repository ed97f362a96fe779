"""A model without a model: a noisy quadratic whose minimum every node sees a little differently."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from p2pdiloco.diloco.layout import Array
from p2pdiloco.run_spec import TensorSpec

TENSORS = (
    TensorSpec("embed.weight", (40, 8)),
    TensorSpec("block.weight", (64, 64)),
    TensorSpec("norm", (16,)),
)
PARAMS = 40 * 8 + 64 * 64 + 16
TARGET = (np.sin(np.arange(PARAMS)) / 4).astype(np.float32)


class ToyTrainer:
    """Plain gradient steps with noise from the node's own stream."""

    def __init__(self, node: int, seed: int, batch_factor: int) -> None:
        self.theta: Array = np.zeros(PARAMS, np.float32)
        self._noise = np.random.Generator(np.random.PCG64([seed, node]))
        self._scale = np.float32(0.1 / batch_factor**0.5)
        self.rates: list[float] = []
        self.zeroed = 0

    def step(self, lr: float) -> float:
        self.rates.append(lr)
        gap = self.theta - TARGET
        noise = self._noise.standard_normal(PARAMS, np.float32) * self._scale
        self.theta -= np.float32(lr) * (gap + noise)
        return float(np.dot(gap, gap))

    def zero_moments(self) -> None:
        self.zeroed += 1

    def expert_tokens(self) -> Sequence[float]:
        return ()


class ToyModel:
    """`trainers` by node, for looking inside."""

    def __init__(self, seed: int = 1) -> None:
        self.tensors = TENSORS
        self.initial: Array = np.zeros(PARAMS, np.float32)
        self._seed = seed
        self.trainers: dict[int, ToyTrainer] = {}

    def trainer(self, node: int, *, batch_factor: int = 1) -> ToyTrainer:
        self.trainers[node] = ToyTrainer(node, self._seed, batch_factor)
        return self.trainers[node]

    def evaluate(self, params: Array) -> float:
        gap = params - TARGET
        return float(np.dot(gap, gap))

    def expert_load(self, params: Array) -> Sequence[Sequence[float]]:
        return ()
