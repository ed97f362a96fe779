"""Inner steps on one machine: AdamW on flat float32 params, and what happens to them between steps.

theta and anchor are one flat vector each, in the order of the RunSpec's tensors, so that the outer loop's
arithmetic (algorithm.md 3) is four vector operations. The model's parameters are views into theta, its
gradients views into one gradient vector. What must not be on a small GPU may lie in host memory: it is moved
in pieces, so that no second copy of the model is ever there.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache

from p2pdiloco import limits
from p2pdiloco.rules.schedule import moments_warmup
from p2pdiloco.run_spec import InnerSpec, ModelSpec
from p2pdiloco_node.training.adamw import AdamW
from p2pdiloco_node.training.data import Tokens
from p2pdiloco_node.training.device import DeviceMissing
from p2pdiloco_node.training.losses import CausalLoss, Losses
from p2pdiloco_node.training.machine import Machine, free_disk
from p2pdiloco_node.training.memory_plan import Offload
from p2pdiloco_node.training.models import checkpoint_layers, give_memory, outline_of, tensor_layout, views
from p2pdiloco_node.training.ram import ram

Floats = npt.NDArray[np.float32]


def choose_device(wanted: str) -> str:
    """`auto` takes CUDA where it is. Raises: DeviceMissing."""
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        raise DeviceMissing(wanted, "this machine has no usable NVIDIA GPU, or torch is a build without CUDA")
    if wanted.startswith("cuda:") and int(wanted.removeprefix("cuda:")) >= torch.cuda.device_count():
        raise DeviceMissing(
            wanted, f"this machine has {torch.cuda.device_count()} usable NVIDIA GPU(s), counted from 0"
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
    ) -> None:
        """`micro_batch`: sequences per forward pass; 0: the whole batch at once.

        `checkpointing`: each layer's activations are computed again in the backward pass. `offload`: what is
        in host memory: the anchor and params under evaluation, or these and the moments. `compiled`: the
        losses by torch.compile; where that fails, `compile_failure` says why, and all goes on without.
        `model`: in place of the one that `spec` describes, with the same tensors (the lab's).

        Raises: ModelRefused: the run's model is not what its config says, or cannot be built here.
        """
        self._inner = spec.inner
        self._device = device
        self._micro_batch = micro_batch or spec.inner.sequences_per_step
        self._model = outline_of(spec.model) if model is None else model
        self._layout = spec.model.tensors
        assert tensor_layout(self._model) == self._layout, "the model's tensors are not those of the RunSpec"
        self.theta = torch.zeros(spec.model.params, dtype=torch.float32, device=device)
        self._gradient = torch.zeros_like(self.theta)
        self._eval_device = "cpu" if offload != "none" else device
        self.anchor = torch.zeros(
            spec.model.params, device=self._eval_device, pin_memory=self._eval_device != device
        )
        give_memory(self._model, views(self.theta, self._layout), views(self._gradient, self._layout), device)
        if checkpointing:
            checkpoint_layers(self._model)
        # Where the hardware multiplies bf16; elsewhere emulation is slower than float32.
        bf16 = device.startswith("cuda") and torch.cuda.is_bf16_supported(including_emulation=False)
        self._loss = CausalLoss(self._model, bf16=bf16).train()
        self._forward: Any = self._loss
        self.compile_failure = ""
        if compiled:
            self._compile(spec.model.seq_len)
        self._optimizer = AdamW(
            self._model.named_parameters(), spec.inner, device=device, on_host=offload == "moments"
        )
        self._steps_since_zero = 0  # inner steps since the moments were zero
        self._eval_flat: Any = None
        self._evaluating = False  # theta holds the params under evaluation
        self._cache: Any = None  # keys and values of a continuation under way

    @property
    def device_name(self) -> str:
        if self._device.startswith("cuda"):
            return str(torch.cuda.get_device_name(self._device))
        threads = torch.get_num_threads()
        return f"cpu, {threads} thread{'s' if threads > 1 else ''}"

    # One inner step.

    def step(self, tokens: Tokens, lr: float) -> float | None:
        """One inner step on `tokens` (sequences, seq_len + 1): AdamW with clipping (algorithm.md 2).

        Returns: mean cross-entropy in nats per token before the step, without the router's balance loss; None
        if a loss or the gradient is not finite, and then nothing was changed.
        """
        batch = torch.from_numpy(tokens).to(self._device)
        self._gradient.zero_()
        predicted = batch.shape[0] * (batch.shape[1] - 1)
        cross_entropy: Any = torch.zeros((), device=self._device)
        for part in batch.split(self._micro_batch):
            losses = self.training_loss(part)
            share = part.shape[0] / batch.shape[0]  # a balance is a mean, a cross-entropy a sum
            (losses.cross_entropy / predicted + self._loss.balance_weight * share * losses.balance).backward()
            cross_entropy += losses.cross_entropy.detach()
        loss: float = float(cross_entropy) / predicted
        norm = float(torch.linalg.vector_norm(self._gradient))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return None
        if norm > self._inner.clip_norm:
            self._gradient.mul_(self._inner.clip_norm / norm)
        self._optimizer.step(lr * moments_warmup(self._inner, self._steps_since_zero))
        self._steps_since_zero += 1
        return loss

    def training_loss(self, tokens: Any) -> Losses:
        """Of (sequences, seq_len + 1) tokens, with a graph behind it."""
        losses: Losses = self._forward(tokens)
        return losses

    def expert_tokens(self) -> Floats | None:
        """(sparse layers, experts): tokens sent to each since the last call; None: no routers or no steps."""
        routed = self._loss.take_routed()
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

    def adopt(self, anchor: Floats, *, reset: bool) -> None:
        """Rebase the unfinished work on a new anchor, or with `reset` give it up and warm the moments up.

        `anchor`: (params,) G - sum(in_flight).
        """
        for part in self._pieces():
            new = torch.from_numpy(anchor[part]).to(self._device)
            if reset:
                self.theta[part].copy_(new)
            else:
                self.theta[part].sub_(self.anchor[part].to(self._device)).add_(new)
            self.anchor[part].copy_(new)
        if reset:
            self.zero_moments()

    def start_from(self, anchor: Floats) -> None:
        """The first state of this process's life: no progress to carry, moments as loaded."""
        self.theta.copy_(torch.from_numpy(anchor))
        self.anchor.copy_(self.theta)

    def cut_delta(self) -> Floats:
        """The pseudo-gradient anchor - theta (params,); the anchor moves to theta."""
        delta = np.empty(self.theta.numel(), np.float32)
        for part in self._pieces():
            difference = self.anchor[part].to(self._device) - self.theta[part]
            torch.from_numpy(delta[part]).copy_(difference)
            self.anchor[part].copy_(self.theta[part])
        return delta

    def roll_back(self) -> None:
        """After a step that was not finite: theta <- anchor, the last state known to be sound."""
        self.theta.copy_(self.anchor)
        self.zero_moments()

    # Moments: private to the node, saved with its checkpoint, never sent (algorithm.md 2).

    def zero_moments(self) -> None:
        self._optimizer.zero()
        self._steps_since_zero = 0

    def moments(self) -> tuple[int, Floats]:
        """Steps since zero and (2, params): first and second moments; a copy."""
        return self._steps_since_zero, self._optimizer.moments()

    def load_moments(self, steps: int, both: Floats) -> None:
        """The inverse of `moments`."""
        self._optimizer.load(steps, both)
        self._steps_since_zero = steps

    # Evaluation of somebody else's params, which for that time take theta's place.

    def load_evaluation(self, params: Floats) -> None:
        """(params,) to evaluate; kept until `drop_evaluation`. Its memory is this loop's from here on."""
        self._eval_flat = torch.from_numpy(params).to(self._eval_device)

    def evaluate(self, tokens: Tokens) -> float:
        """Sum of losses in nats over `tokens` (sequences, seq_len + 1) under the loaded params."""
        batch = torch.from_numpy(tokens).to(self._device)
        with self.under_evaluation():
            parts = [self._loss(part).cross_entropy for part in batch.split(self._micro_batch)]
            return float(torch.stack(parts).sum())

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
            with torch.no_grad(), self._loss.autocast(self.theta.device.type):
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
        # The model adds to the cache in place.
        cache = {_cache_name(type(self._model)): self._cache}
        out = self._model(input_ids=tokens, use_cache=True, logits_to_keep=1, **cache)
        return int(out.logits[0, -1, :vocab_size].argmax())

    def drop_evaluation(self) -> None:
        self._eval_flat = self._cache = None

    def _exchange(self) -> None:
        """theta <-> the params under evaluation: the model computes with whatever theta's memory holds."""
        for part in self._pieces():
            kept = self.theta[part].clone()
            self.theta[part].copy_(self._eval_flat[part])
            self._eval_flat[part].copy_(kept)

    def _pieces(self) -> Iterator[slice]:
        for first in range(0, self.theta.numel(), limits.handed_over_values):
            yield slice(first, first + limits.handed_over_values)

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
        self._gradient.zero_()
        self._loss.take_routed()


def _cache_name(kind: type) -> str:
    """How the model's forward calls its cache: transformers has renamed it."""
    return "cache" if "cache" in inspect.signature(kind.forward).parameters else "past_key_values"  # type: ignore[attr-defined]
