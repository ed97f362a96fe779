"""`LabModel` with real arrays: the product's inner loop on real text, for `p2pdiloco.sim.lab`.

model = make_model(experiment, seed)
result = run_experiment(experiment, seed, rng, model, told)
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from p2pdiloco.run_spec import InnerSpec, ModelSpec, TensorSpec
from p2pdiloco.sim.lab.experiment import Experiment
from p2pdiloco.sim.lab.terms import terms_of
from p2pdiloco_node.lab import networks
from p2pdiloco_node.lab.compiling import LossSum, compiled_for
from p2pdiloco_node.lab.text import Feed, load_text
from p2pdiloco_node.training.inner_loop import InnerLoop, set_threads
from p2pdiloco_node.training.losses import Losses
from p2pdiloco_node.training.models import flatten_params, tensor_layout

Floats = npt.NDArray[np.float32]


class LabSpec(NamedTuple):
    """What the product's inner loop needs to know: `LoopSpec`."""

    model: ModelSpec
    inner: InnerSpec


class _CompiledLoop(InnerLoop):
    """The product's inner loop with its forward and backward pass compiled."""

    def __init__(self, spec: LabSpec, loss_sum: LossSum, *, model: Any) -> None:
        super().__init__(spec, model=model)
        self._compiled = loss_sum
        self._parameters = tuple(model.parameters())

    def training_loss(self, tokens: Any) -> Losses:
        return Losses(self._compiled(self._parameters, tokens), torch.zeros(()))


class TextTrainer:
    """The inner loop of one node on its own text. `LabTrainer`."""

    def __init__(self, loop: InnerLoop, feeds: list[Feed], sequences: int) -> None:
        """`sequences` of each feed in every step."""
        self._loop = loop
        self._feeds = feeds
        self._sequences = sequences
        self._theta: Floats = loop.theta.numpy()

    @property
    def theta(self) -> Floats:
        return self._theta

    def step(self, lr: float) -> float:
        """NaN: loss or gradient were not finite, and nothing was changed."""
        batch = np.concatenate([feed.next_batch(self._sequences) for feed in self._feeds])
        loss = self._loop.step(batch, lr)
        return math.nan if loss is None else loss

    def zero_moments(self) -> None:
        self._loop.zero_moments()

    def expert_tokens(self) -> list[float]:
        return []


class MixtureTrainer(TextTrainer):
    """The same for a mixture of experts."""

    def expert_tokens(self) -> list[float]:
        routed = self._loop.expert_tokens()
        return [] if routed is None else [float(count) for count in routed.reshape(-1)]


class TextModel:
    """A byte model with its text. `LabModel`."""

    def __init__(self, experiment: Experiment, seed: int, *, compiled: bool | None = None) -> None:
        """`compiled` None: see `compiling`.

        Raises: OperatorError: there is no text, or too few kinds of it.
        """
        self._experiment = experiment
        self._seed = seed
        self._text = load_text(experiment)
        self._compiled, self.how = compiled_for(experiment, wanted=compiled)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = networks.build(experiment.model)
        self._tensors = tensor_layout(module)
        self._initial: Floats = flatten_params(module).numpy()
        self._initial.flags.writeable = False
        self._evaluator = networks.Evaluator(module, self._tensors, experiment.model)
        self._held_out = self._text.held_out(
            seq_len=experiment.model.seq_len, tokens=experiment.data.evaluation_tokens
        )
        self._spec = loop_spec(experiment, self._tensors)

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        return self._tensors

    @property
    def initial(self) -> Floats:
        """Float32 [params], read-only: drawn by transformers from the seed alone."""
        return self._initial

    @property
    def data_digest(self) -> str:
        """Hex SHA-256 of all text that is trained on or held out: another Python has other text."""
        return self._text.digest

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of text that are read; one if data is i.i.d."""
        return tuple(kind.name for kind in self._text.kinds)

    def trainer(self, node: int, *, batch_factor: int = 1) -> TextTrainer:
        """Node `node` from version 0; it stands for nodes `node` to `node` + `batch_factor` - 1 at once.

        Its batch is then the union of theirs: the data-parallel reference.
        """
        feeds = [
            self._text.feed(self._experiment, self._seed, member)
            for member in range(node, node + batch_factor)
        ]
        sequences = self._experiment.inner.sequences_per_step
        shape = self._experiment.model
        with torch.random.fork_rng(devices=[]):
            module = networks.build(shape)
        # One part for each node's batch, so that data parallel balances experts as its nodes would.
        if self._compiled is None:
            loop = InnerLoop(self._spec, model=module)
        else:
            loop = _CompiledLoop(self._spec, self._compiled, model=module)
        loop.start_from(self._initial.copy())
        trainer = MixtureTrainer if shape.kind == "mixtral" else TextTrainer
        return trainer(loop, feeds, sequences)

    def evaluate(self, params: Floats) -> float:
        return self._evaluator.loss(params, self._held_out)

    def expert_load(self, params: Floats) -> list[list[float]]:
        if self._experiment.model.kind != "mixtral":
            return []
        counts = self._evaluator.routes(params, self._held_out)
        shares: list[list[float]] = (counts / counts.sum(axis=1, keepdims=True)).tolist()
        return shares


def make_model(experiment: Experiment, seed: int, *, compiled: bool | None = None) -> TextModel:
    """The real model of an experiment, on one thread: a seed is a process.

    `compiled`: None leaves it to P2PDILOCO_LAB_COMPILE (1, 0, auto) and the length of the run; `how` of the
    model says what came of it.

    Raises: OperatorError: there is no text, or too few kinds of it.
    """
    set_threads(1)
    return TextModel(experiment, seed, compiled=compiled)


def loop_spec(experiment: Experiment, tensors: tuple[TensorSpec, ...]) -> LabSpec:
    """The experiment in the RunSpec's words."""
    return LabSpec(networks.model_spec(experiment.model, tensors), terms_of(experiment, tensors).inner)
