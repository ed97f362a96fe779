"""Inner steps on one machine: AdamW on flat float32 params, and what happens to them between steps.

theta and anchor are one flat vector each, in the order of the RunSpec's tensors, so that the outer loop's
arithmetic (algorithm.md 3) is four vector operations. The model's parameters are views into theta, its
gradients views into one gradient vector.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from p2pdiloco.rules.schedule import moments_warmup
from p2pdiloco.run_spec import InnerSpec, ModelSpec
from p2pdiloco_node.training.data import Tokens
from p2pdiloco_node.training.device import DeviceMissing
from p2pdiloco_node.training.models import build_model, tensor_layout, views

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
    """Params, anchor and moments of one node. Not usable before the first `adopt`."""

    def __init__(
        self, spec: LoopSpec, *, device: str = "cpu", micro_batch: int = 0, model: Any = None
    ) -> None:
        """`micro_batch`: sequences per forward pass; 0: the whole batch at once.

        `model`: in place of the one that `spec` describes, with the same tensors (the lab's).

        Raises: AssertionError: this build of transformers gives the model other tensors than the RunSpec.
        """
        self._inner = spec.inner
        self._device = device
        self._micro_batch = micro_batch or spec.inner.sequences_per_step
        # Where the hardware multiplies bf16; elsewhere emulation is slower than float32.
        self._bf16 = device.startswith("cuda") and torch.cuda.is_bf16_supported(including_emulation=False)
        self._model = (build_model(spec.model) if model is None else model).to(device)
        layout = tensor_layout(self._model)
        assert layout == spec.model.tensors, "the model's tensors are not those of the RunSpec"
        self.theta = torch.zeros(spec.model.params, dtype=torch.float32, device=device)
        self.anchor = torch.zeros_like(self.theta)
        self._gradient = torch.zeros_like(self.theta)
        self._layout = layout
        parts, gradients = views(self.theta, layout), views(self._gradient, layout)
        for name, parameter in self._model.named_parameters():
            parameter.data = parts[name]
            parameter.grad = gradients[name]
        self._optimizer = self._make_optimizer()
        self._steps_since_zero = 0  # inner steps since the moments were zero
        self._eval_flat: Any = None

    @property
    def device_name(self) -> str:
        if self._device.startswith("cuda"):
            return str(torch.cuda.get_device_name(self._device))
        threads = torch.get_num_threads()
        return f"cpu, {threads} thread{'s' if threads > 1 else ''}"

    # One inner step.

    def step(self, tokens: Tokens, lr: float) -> float | None:
        """One inner step on `tokens` (sequences, seq_len + 1): AdamW with clipping (algorithm.md 2).

        Returns: mean loss in nats per token before the step; None if it or the gradient is not finite,
        and then nothing was changed.
        """
        batch = torch.from_numpy(tokens).to(self._device)
        self._gradient.zero_()
        loss = 0.0
        for part in batch.split(self._micro_batch):
            part_loss = self.loss_sum(self._model, part) / (batch.shape[0] * (batch.shape[1] - 1))
            part_loss.backward()
            loss += float(part_loss.detach())
        norm = float(torch.linalg.vector_norm(self._gradient))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return None
        if norm > self._inner.clip_norm:
            self._gradient.mul_(self._inner.clip_norm / norm)
        for group in self._optimizer.param_groups:
            group["lr"] = lr * moments_warmup(self._inner, self._steps_since_zero)
        self._optimizer.step()
        self._steps_since_zero += 1
        return loss

    def loss_sum(self, model: Any, tokens: Any) -> Any:
        """Sum of the cross-entropies of predicting tokens[:, 1:], in nats; float32 under bf16 autocast."""
        with torch.autocast(self.theta.device.type, dtype=torch.bfloat16, enabled=self._bf16):
            logits_btv = model(input_ids=tokens[:, :-1]).logits
        flat_logits = logits_btv.float().reshape(-1, logits_btv.shape[-1])
        return torch.nn.functional.cross_entropy(flat_logits, tokens[:, 1:].reshape(-1), reduction="sum")

    # Between steps: algorithm.md 3.

    def adopt(self, anchor: Floats, *, reset: bool) -> None:
        """Rebase the unfinished work on a new anchor, or with `reset` give it up and warm the moments up.

        `anchor`: (params,) G - sum(in_flight).
        """
        new = torch.from_numpy(anchor).to(self._device)
        if reset:
            self.theta.copy_(new)
            self.zero_moments()
        else:
            self.theta.sub_(self.anchor).add_(new)
        self.anchor.copy_(new)

    def start_from(self, anchor: Floats) -> None:
        """The first state of this process's life: no progress to carry, moments as loaded."""
        self.theta.copy_(torch.from_numpy(anchor))
        self.anchor.copy_(self.theta)

    def cut_delta(self) -> Floats:
        """The pseudo-gradient anchor - theta (params,); the anchor moves to theta."""
        delta = (self.anchor - self.theta).cpu().numpy()
        self.anchor.copy_(self.theta)
        return np.ascontiguousarray(delta, dtype=np.float32)

    def roll_back(self) -> None:
        """After a step that was not finite: theta <- anchor, the last state known to be sound."""
        self.theta.copy_(self.anchor)
        self.zero_moments()

    # Moments: private to the node, saved with its checkpoint, never sent (algorithm.md 2).

    def zero_moments(self) -> None:
        self._optimizer = self._make_optimizer()
        self._steps_since_zero = 0

    def moments(self) -> tuple[int, Floats]:
        """Steps since zero and (2, params): first and second moments; a copy."""
        both = np.zeros((2, self.theta.numel()), np.float32)
        for row, key in enumerate(("exp_avg", "exp_avg_sq")):
            for name, parameter in self._model.named_parameters():
                state = self._optimizer.state.get(parameter)
                if state:
                    both[row, self._slice(name)] = state[key].reshape(-1).cpu().numpy()
        return self._steps_since_zero, both

    def load_moments(self, steps: int, both: Floats) -> None:
        """The inverse of `moments`."""
        self.zero_moments()
        for name, parameter in self._model.named_parameters():
            first, second = (
                torch.from_numpy(both[row, self._slice(name)].copy()).view(parameter.shape).to(self._device)
                for row in (0, 1)
            )
            self._optimizer.state[parameter] = {
                "step": torch.tensor(float(steps), device=self._device),
                "exp_avg": first,
                "exp_avg_sq": second,
            }
        self._steps_since_zero = steps

    # Evaluation of somebody else's params, beside the training state.

    def load_evaluation(self, params: Floats) -> None:
        """(params,) to evaluate; kept until `drop_evaluation`."""
        self._eval_flat = torch.from_numpy(params).to(self._device)

    def evaluate(self, tokens: Tokens) -> float:
        """Sum of losses in nats over `tokens` (sequences, seq_len + 1) under the loaded params."""
        params = views(self._eval_flat, self._layout)

        def model(**inputs: Any) -> Any:
            # Tied parameters have one name here, and functional_call ties the rest itself.
            return torch.func.functional_call(self._model, params, kwargs=inputs, tie_weights=True)

        with torch.no_grad():
            return float(self.loss_sum(model, torch.from_numpy(tokens).to(self._device)))

    def drop_evaluation(self) -> None:
        self._eval_flat = None

    def _make_optimizer(self) -> Any:
        inner = self._inner
        named = list(self._model.named_parameters())
        groups = [
            # Norms (vectors) are not decayed: pulling a gain towards zero regularises nothing.
            {"params": [p for _, p in named if p.dim() > 1], "weight_decay": inner.weight_decay},
            {"params": [p for _, p in named if p.dim() <= 1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=inner.lr, betas=(inner.beta1, inner.beta2), fused=True)

    def _slice(self, name: str) -> slice:
        at = 0
        for tensor in self._layout:
            if tensor.name == name:
                return slice(at, at + tensor.size)
            at += tensor.size
        raise AssertionError(f"no tensor {name}")
