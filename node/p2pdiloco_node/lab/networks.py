"""The lab's architectures from plain numbers, built as the product builds them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from p2pdiloco.run_spec import ModelSpec, TensorSpec
from p2pdiloco.sim.lab.experiment import Model
from p2pdiloco_node.training.models import build_model, views
from p2pdiloco_node.training.presets import VOCAB_BYTES, config_bytes

Counts = npt.NDArray[np.float64]


def model_spec(model: Model, tensors: tuple[TensorSpec, ...]) -> ModelSpec:
    """The RunSpec's words for it."""
    assert model.kind != "none", "no arrays"
    config: dict[str, Any] = {
        "vocab_size": VOCAB_BYTES,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.heads,
        "max_position_embeddings": model.seq_len,
        "tie_word_embeddings": True,
    }
    if model.kind == "mixtral":
        config |= {
            "num_local_experts": model.experts,
            "num_experts_per_tok": model.experts_per_token,
            "router_aux_loss_coef": model.balance,
        }
    return ModelSpec(
        family=model.kind,
        preset="lab",
        config=config_bytes(config),
        vocab_size=VOCAB_BYTES,
        seq_len=model.seq_len,
        tensors=tensors,
    )


def build(model: Model) -> Any:
    """A module in float32 on the CPU, initialised by transformers from torch's global seed."""
    return build_model(model_spec(model, ()))


def cross_entropy_sum(logits_btv: Any, tokens: Any) -> Any:
    """Sum in nats of predicting tokens[:, 1:] (batch, seq_len + 1)."""
    flat = logits_btv.reshape(-1, logits_btv.shape[-1])
    return torch.nn.functional.cross_entropy(flat, tokens[:, 1:].reshape(-1), reduction="sum")


def route_counts(router_logits: Any, experts_per_token: int) -> Counts:
    """(layers, experts): tokens that chose each expert. `router_logits`: a (tokens, experts) each layer.

    The router takes the top k of a softmax, and a softmax keeps the order of its logits.
    """
    return np.stack(
        [
            torch.bincount(
                layer.detach().topk(experts_per_token, dim=-1).indices.reshape(-1), minlength=layer.shape[-1]
            ).numpy()
            for layer in router_logits
        ]
    ).astype(np.float64)


class Evaluator:
    """Somebody's flat params through one module, without gradients; large batches."""

    def __init__(self, module: Any, tensors: tuple[TensorSpec, ...], model: Model) -> None:
        self._module = module
        self._tensors = tensors
        self._model = model
        self._batch = max(1, 2048 // model.seq_len)  # sequences: logits and activations stay in the cache

    def loss(self, params: npt.NDArray[np.float32], tokens: npt.NDArray[np.int64]) -> float:
        """Mean cross-entropy in nats per token over `tokens` (sequences, seq_len + 1)."""
        total = 0.0
        for part, out in self._through(params, tokens):
            total += float(cross_entropy_sum(out.logits, part))
        count: int = tokens.shape[0] * (tokens.shape[1] - 1)
        return total / count

    def routes(self, params: npt.NDArray[np.float32], tokens: npt.NDArray[np.int64]) -> Counts:
        """(layers, experts): how often each expert is chosen."""
        counts = np.zeros((self._model.layers, self._model.experts))
        for _, out in self._through(params, tokens, output_router_logits=True):
            counts += route_counts(out.router_logits, self._model.experts_per_token)
        return counts

    def _through(self, params: npt.NDArray[np.float32], tokens: npt.NDArray[np.int64], **more: Any) -> Any:
        # A copy: the caller's array may be read-only, and torch warns of that.
        parts = views(torch.from_numpy(np.array(params, np.float32)), self._tensors)
        with torch.no_grad():
            for batch in torch.from_numpy(tokens).split(self._batch):
                kwargs = {"input_ids": batch[:, :-1], **more}
                yield batch, torch.func.functional_call(self._module, parts, kwargs=kwargs, tie_weights=True)
