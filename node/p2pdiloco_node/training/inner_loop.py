"""Inner steps of one node: AdamW on flat float32 params, and what happens to them between steps.

theta and anchor are in the flat order of the RunSpec's tensors, so that the outer loop's arithmetic
(algorithm.md 3) is four vector operations. The model's parameters are views into theta. What must not be on a
small GPU may lie in host memory: it is moved in pieces, so that no second copy of the model is ever there.

One rank or several: each has its rows of every batch, and all of the params (flat_params.py) or some of them
(sharded_params.py). Several call the same methods in the same order (led_loop.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache

from p2pdiloco.rules.schedule import moments_warmup
from p2pdiloco.run_spec import InnerSpec, ModelSpec
from p2pdiloco.words import count_of
from p2pdiloco_node.training.adamw import AdamW
from p2pdiloco_node.training.arrays import Values
from p2pdiloco_node.training.data import Tokens
from p2pdiloco_node.training.device import DeviceMissing
from p2pdiloco_node.training.flat_params import FlatParams, HeldParams, in_pieces
from p2pdiloco_node.training.losses import CausalLoss, Losses
from p2pdiloco_node.training.machine import Machine, free_disk
from p2pdiloco_node.training.memory_plan import Offload
from p2pdiloco_node.training.models import checkpoint_layers, outline_of, tensor_layout
from p2pdiloco_node.training.moments_file import read_moments
from p2pdiloco_node.training.ram import ram
from p2pdiloco_node.training.rank_group import Alone, Group

Floats = npt.NDArray[np.float32]


def choose_device(wanted: str) -> str:
    """`auto` takes CUDA where it is. Raises: DeviceMissing."""
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        raise DeviceMissing(
            f"--device {wanted}", "this machine has no usable NVIDIA GPU, or torch is a build without CUDA"
        )
    if wanted.startswith("cuda:") and int(wanted.removeprefix("cuda:")) >= torch.cuda.device_count():
        raise DeviceMissing(
            f"--device {wanted}",
            f"this machine has {torch.cuda.device_count()} usable NVIDIA GPU(s), counted from 0",
        )
    return wanted


def torch_machine(device: str, folder: str) -> Machine:
    """What is there for a trainer on `device`; of RAM all, because the daemon has its part already."""
    gpu_bytes, name = None, ""
    if device.startswith("cuda"):
        gpu_bytes, name = torch.cuda.mem_get_info(device)[0], torch.cuda.get_device_name(device)
    return Machine(name, gpu_bytes, ram().total, free_disk(Path(folder)), folder)


def set_threads(threads: int) -> None:
    """torch's CPU threads: one by default, because several processes share a small machine."""
    torch.set_num_threads(threads)


class LoopSpec(Protocol):
    """What an inner loop needs to know of a RunSpec."""

    @property
    def model(self) -> ModelSpec: ...

    @property
    def inner(self) -> InnerSpec: ...


class _Piece(NamedTuple):
    """Some params of this rank, side by side."""

    place: slice  # in the flat order
    theta: Any
    anchor: Any
    evaluated: Any  # None: no params are under evaluation


class InnerLoop:
    """Params, anchor and moments of one node. Not usable before the first `adopt` or `start_from`."""

    def __init__(
        self,
        spec: LoopSpec,
        *,
        device: str = "cpu",
        micro_batch: int = 0,
        checkpointing: bool = False,
        offload: Offload = "none",
        compiled: bool = False,
        model: Any = None,
        group: Group | None = None,
        sharded: bool = False,
        bf16: bool | None = None,
    ) -> None:
        """`micro_batch`: sequences per forward pass; 0: the whole batch at once.

        `checkpointing`: each layer's activations are computed again in the backward pass. `offload`: what is
        in host memory: the anchor and params under evaluation, or these and the moments. `compiled`: the
        losses by torch.compile; where that fails, `compile_failure` says why, and all goes on without.
        `model`: in place of the one that `spec` describes, with the same tensors (the lab's). `group`: the
        ranks that train this one model, which all make their loop alike; `sharded`: each holds a part of it.
        `bf16`: matrices are multiplied in bfloat16; None: where the hardware does.

        Raises: ModelRefused: the run's model is not what its config says, or cannot be built here.
        """
        self._inner = spec.inner
        self._device = device
        self._group = group or Alone()
        self._micro_batch = micro_batch or spec.inner.sequences_per_step
        self._model = outline_of(spec.model) if model is None else model
        self.layout = spec.model.tensors
        assert tensor_layout(self._model) == self.layout, "the model's tensors are not those of the RunSpec"
        if bf16 is None:
            # Emulation is slower than float32.
            bf16 = device.startswith("cuda") and torch.cuda.is_bf16_supported(including_emulation=False)
        self._loss = CausalLoss(self._model, bf16=bf16).train()
        self._held = self._hold(sharded=sharded, bf16=bf16)
        self._beside = "cpu" if offload != "none" else device  # anchor and params under evaluation
        pinned = self._beside != device  # which the GPU's copies need to be fast
        self._anchors = [
            torch.zeros(theta.numel(), device=self._beside, pin_memory=pinned)
            for _, theta in self._held.stretches
        ]
        self._evaluated: list[Any] = []
        if checkpointing:
            checkpoint_layers(self._model)
        self._forward: Any = self._loss
        self.compile_failure = ""
        if compiled and sharded:
            self.compile_failure = "torch.compile is not used where the model is spread over ranks (fsdp)"
        elif compiled:
            self._compile(spec.model.seq_len)
        self._optimizer = AdamW(self._held.placed, spec.inner, device=device, on_host=offload == "moments")
        self._steps_since_zero = 0  # inner steps since the moments were zero
        self._evaluating = False  # theta holds the params under evaluation
        self._cache: Any = None  # keys and values of a continuation under way

    def _hold(self, *, sharded: bool, bf16: bool) -> HeldParams:
        if not sharded:
            return FlatParams(self._model, self.layout, self._device, self._group)
        # Here, because FSDP takes seconds to import.
        from p2pdiloco_node.training.sharded_params import ShardedParams

        return ShardedParams(self._loss, self.layout, self._device, self._group, bf16=bf16)

    @property
    def theta(self) -> Any:
        """(params,) where a rank has the whole model: the memory that the model computes with."""
        (stretch,) = self._held.stretches
        return stretch.theta

    @property
    def anchor(self) -> Any:
        """(params,) where a rank has the whole model."""
        (anchor,) = self._anchors
        return anchor

    @property
    def device_name(self) -> str:
        if self._device.startswith("cuda"):
            return str(torch.cuda.get_device_name(self._device))
        threads = torch.get_num_threads()
        return f"cpu, {count_of(threads, 'thread')}"

    # One inner step.

    def step(self, tokens: Tokens, lr: float) -> float | None:
        """One inner step on `tokens` (sequences, seq_len + 1): AdamW with clipping (algorithm.md 2).

        Returns: mean cross-entropy in nats per token before the step, without the router's balance loss; None
        if a loss or the gradient is not finite, and then nothing was changed.
        """
        batch = torch.from_numpy(tokens).to(self._device)
        self._held.zero_gradient()
        predicted = batch.shape[0] * (batch.shape[1] - 1)
        cross_entropy: Any = torch.zeros((), device=self._device)
        for part, share in self._parts(batch):
            self._loss.counted = share > 0
            losses = self.training_loss(part)
            # A balance is a mean, a cross-entropy a sum.
            objective = losses.cross_entropy / predicted + self._loss.balance_weight * share * losses.balance
            (objective * (self._held.loss_factor if share else 0.0)).backward()
            if share:
                cross_entropy += losses.cross_entropy.detach()
        self._group.add_up(cross_entropy)
        loss: float = float(cross_entropy) / predicted
        norm = self._held.finish_gradient()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return None
        if norm > self._inner.clip_norm:
            self._held.scale_gradient(self._inner.clip_norm / norm)
        self._optimizer.step(lr * moments_warmup(self._inner, self._steps_since_zero))
        self._steps_since_zero += 1
        return loss

    def _parts(self, batch: Any) -> Iterator[tuple[Any, float]]:
        """This rank's rows of a batch, as many at a time as a forward pass takes, and their share of it.

        Every rank takes as many forward passes, since sharded ones wait for each other in each: where a rank
        has no rows left, the first row stands in, and its share is 0.
        """
        rows, ranks = batch.shape[0], self._group.size
        mine = batch.tensor_split(ranks)[self._group.rank]
        for first in range(0, -(-rows // ranks), self._micro_batch):
            part = mine[first : first + self._micro_batch]
            if len(part):
                yield part, len(part) / rows
            else:
                yield batch[:1], 0.0

    def training_loss(self, tokens: Any) -> Losses:
        """Of (sequences, seq_len + 1) tokens, with a graph behind it."""
        losses: Losses = self._forward(tokens)
        return losses

    def expert_tokens(self) -> Floats | None:
        """(sparse layers, experts): tokens sent to each since the last call; None: no routers or no steps."""
        routed = self._loss.take_routed()
        if routed is not None:
            self._group.add_up(routed)
        return None if routed is None else np.asarray(routed.cpu().numpy(), np.float32)

    def expert_evenness(self) -> tuple[float, ...]:
        """Of each sparse layer since the last call: the entropy of where tokens went, over the largest.

        1: all experts are used alike; 0: one alone. Empty without routers or steps.
        """
        routed = self.expert_tokens()
        if routed is None:
            return ()
        shares = routed / routed.sum(axis=1, keepdims=True)
        entropies = -(shares * np.log(np.where(shares > 0, shares, 1))).sum(axis=1)
        return tuple(float(entropy) for entropy in entropies / math.log(max(2, routed.shape[1])))

    # Between steps: algorithm.md 3.

    def adopt(self, anchor: Values, *, reset: bool) -> None:
        """Rebase the unfinished work on a new anchor, or with `reset` give it up and warm the moments up.

        `anchor`: (params,) G - sum(in_flight).
        """
        for piece in self._pieces():
            new = torch.from_numpy(anchor[piece.place]).to(self._device)
            if reset:
                piece.theta.copy_(new)
            else:
                piece.theta.sub_(piece.anchor.to(self._device)).add_(new)
            piece.anchor.copy_(new)
        if reset:
            self.zero_moments()

    def start_from(self, anchor: Values) -> None:
        """The first state of this process's life: no progress to carry, moments as loaded."""
        for piece in self._pieces():
            piece.theta.copy_(torch.from_numpy(anchor[piece.place]))
            piece.anchor.copy_(piece.theta)

    def cut_delta(self) -> Iterator[Floats]:
        """The pseudo-gradient anchor - theta in the flat order, a piece at a time; the anchor moves to theta.

        To be exhausted. Of several ranks the first one gets all of it, the others nothing.
        """
        self._held.align()
        yield from self._held.collect(self._cut())

    def _cut(self) -> Iterator[Floats]:
        for piece in self._pieces():
            difference = piece.anchor.to(self._device) - piece.theta
            piece.anchor.copy_(piece.theta)
            yield difference.cpu().numpy()

    def roll_back(self) -> None:
        """After a step that was not finite: theta <- anchor, the last state known to be sound."""
        for piece in self._pieces():
            piece.theta.copy_(piece.anchor)
        self.zero_moments()

    # Moments: private to the node, saved with its checkpoint, never sent (algorithm.md 2).

    def zero_moments(self) -> None:
        self._optimizer.zero()
        self._steps_since_zero = 0

    def moments(self) -> tuple[int, Floats]:
        """Steps since zero and (2, params): first and second moments; a copy. Of several ranks the first one
        gets them, the others (2, 0)."""
        size = sum(tensor.size for tensor in self.layout) if self._group.rank == 0 else 0
        both = np.empty((2, size), np.float32)
        for row in range(2):
            at = 0
            for piece in self._held.collect(self._optimizer.moments(row)):
                both[row, at : at + len(piece)] = piece
                at += len(piece)
        return self._steps_since_zero, both

    def load_moments(self, path: Path) -> None:
        """What was written of `moments` (moments_file.py). Raises: ValueError, OSError."""
        steps, both = read_moments(path, sum(tensor.size for tensor in self.layout))
        self._optimizer.load(steps, both)
        self._steps_since_zero = steps

    # Evaluation of somebody else's params, which for that time take theta's place.

    def load_evaluation(self, params: Values) -> None:
        """(params,) to evaluate; kept until `drop_evaluation`."""
        self._evaluated = [
            torch.empty(theta.numel(), device=self._beside) for _, theta in self._held.stretches
        ]
        for piece in self._pieces():
            piece.evaluated.copy_(torch.from_numpy(params[piece.place]))

    def evaluate(self, tokens: Tokens) -> float:
        """Sum of losses in nats over `tokens` (sequences, seq_len + 1) under the loaded params."""
        batch = torch.from_numpy(tokens).to(self._device)
        total: Any = torch.zeros((), device=self._device)
        with self.under_evaluation():
            for part, share in self._parts(batch):
                cross_entropy = self._loss(part).cross_entropy
                if share:
                    total += cross_entropy
            self._group.add_up(total)
        return float(total)

    @contextmanager
    def under_evaluation(self) -> Iterator[Any]:
        """The model, computing with the loaded params, without gradients; theta is back afterwards.

        It moves all params, twice: who does several things enters it once, around them.
        """
        if self._evaluating:
            yield self._model
            return
        self._exchange()
        self._evaluating = True
        try:
            self._loss.eval()
            with torch.no_grad(), self._loss.autocast(torch.device(self._device).type):
                yield self._model
        finally:
            self._loss.train()
            self._exchange()
            self._evaluating = False

    def next_token(self, seen: Sequence[int], *, begin: bool, vocab_size: int) -> int:
        """Under evaluation: the likeliest token after `seen` and what was seen since the last `begin`."""
        if begin:
            self._cache = DynamicCache(config=self._model.config)
        tokens = torch.tensor([seen], dtype=torch.int64, device=self._device)
        return int(self._loss.next_logits(tokens, self._cache)[:vocab_size].argmax())

    def drop_evaluation(self) -> None:
        self._evaluated, self._cache = [], None

    def _exchange(self) -> None:
        """theta <-> the params under evaluation: the model computes with whatever theta's memory holds."""
        for piece in self._pieces():
            kept = piece.theta.clone()
            piece.theta.copy_(piece.evaluated)
            piece.evaluated.copy_(kept)

    def _pieces(self) -> Iterator[_Piece]:
        for number, (place, theta) in enumerate(self._held.stretches):
            anchor = self._anchors[number]
            evaluated: Any = self._evaluated[number] if self._evaluated else None
            for piece in in_pieces(place):
                here = slice(piece.start - place.start, piece.stop - place.start)
                yield _Piece(piece, theta[here], anchor[here], None if evaluated is None else evaluated[here])

    def _compile(self, seq_len: int) -> None:
        """Compile now, forward and backward: a failure is found before the first batch, and said."""
        forward = torch.compile(self._loss, dynamic=False)
        tokens = torch.zeros((self._micro_batch, seq_len + 1), dtype=torch.int64, device=self._device)
        try:
            forward(tokens).cross_entropy.backward()
        except Exception as error:  # noqa: BLE001 - whatever a compiler raises, training goes on without it
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            self.compile_failure = f"torch.compile failed here, training goes on without it: {said[:200]}"
        else:
            self._forward = forward
        self._held.zero_gradient()
        self._loss.take_routed()
