"""What training lowers: cross-entropy, and for mixtures of experts the router's balance loss beside it.

One module around the model, so that whatever wraps modules (torch.compile, DDP, FSDP, functional_call) wraps
the whole of it.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any, ClassVar, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from p2pdiloco import limits
from p2pdiloco_node.training.families import family_of


class Losses(NamedTuple):
    """Of one forward pass over (sequences, seq_len + 1) tokens."""

    cross_entropy: Any  # sum over the predicted tokens, in nats
    balance: Any  # mean over layers and tokens, about 1 where experts are used evenly; 0 without routers


class CausalLoss(torch.nn.Module):  # type: ignore[misc]  # torch has no types here
    """The losses of predicting each token from those before it."""

    other_forwards: ClassVar[tuple[str, ...]] = ("next_logits",)  # what else computes with the params

    def __init__(self, model: Any, *, bf16: bool, logits_bytes: int = limits.logits_bytes) -> None:
        """`bf16`: matrices are multiplied in bfloat16 (autocast); params, norms and losses stay float32.

        `logits_bytes`: float32 logits that may be there at a time; the rest is computed again in the backward
        pass. A vocabulary of 128 thousand takes half a megabyte a token.
        """
        super().__init__()
        self.model = model
        config, family = model.config, family_of(model.config.model_type)
        self._divisor = getattr(config, family.logits_divided_by) if family.logits_divided_by else None
        self._cap = getattr(config, family.logits_capped_at) if family.logits_capped_at else None
        self._bf16 = bf16
        self._logits_bytes = logits_bytes
        # Families whose router is trained with a loss say its weight; the others balance by other means.
        self.balance_weight = float(getattr(config, "router_aux_loss_coef", 0.0) or 0.0)
        self._has_router = hasattr(config, "router_aux_loss_coef")
        self._routed: Any = None
        self.counted = True  # whether what a forward pass sends to experts counts

    def forward(self, tokens: Any) -> Losses:
        """`tokens`: (sequences, seq_len + 1). In evaluation mode nothing is asked of the routers."""
        model, inputs = self.model, tokens[:, :-1]
        routes = self._has_router and self.training
        with self.autocast(tokens.device.type):
            asked = {"output_router_logits": True} if routes else {}
            out = model.base_model(input_ids=inputs, use_cache=False, **asked)
            hidden_nh = out.last_hidden_state.reshape(-1, out.last_hidden_state.shape[-1])
            cross_entropy = self._cross_entropy(hidden_nh, tokens[:, 1:].reshape(-1))
        balance = self._balance(out.router_logits) if routes else cross_entropy.new_zeros(())
        return Losses(cross_entropy, balance)

    def next_logits(self, tokens: Any, cache: Any) -> Any:
        """(vocabulary,) logits of what follows `tokens` (1, n), which are added to the cache."""
        # The model adds to the cache in place; transformers has renamed it.
        named = inspect.signature(type(self.model).forward).parameters
        seen = {"cache" if "cache" in named else "past_key_values": cache}
        return self.model(input_ids=tokens, use_cache=True, logits_to_keep=1, **seen).logits[0, -1]

    def autocast(self, device_type: str) -> Any:
        """What the model computes under."""
        # Without autocast's cache: it would keep a copy of every matrix although each is used once.
        return torch.autocast(device_type, dtype=torch.bfloat16, enabled=self._bf16, cache_enabled=False)

    def take_routed(self) -> Any:
        """(sparse layers, experts): tokens that chose each since the last call; None: no routers, no pass."""
        routed, self._routed = self._routed, None
        return routed

    def _cross_entropy(self, hidden_nh: Any, targets_n: Any) -> Any:
        head = self.model.get_output_embeddings()
        rows = max(1, self._logits_bytes // (4 * self.model.config.vocab_size))
        if len(targets_n) <= rows:
            return self._piece(head, hidden_nh, targets_n)
        total = hidden_nh.new_zeros((), dtype=torch.float32)
        for hidden, targets in zip(hidden_nh.split(rows), targets_n.split(rows), strict=True):
            if torch.is_grad_enabled():
                total = total + checkpoint(
                    self._piece, head, hidden, targets, use_reentrant=False, preserve_rng_state=False
                )
            else:
                total = total + self._piece(head, hidden, targets)
        return total

    def _piece(self, head: Any, hidden_nh: Any, targets_n: Any) -> Any:
        logits_nv = head(hidden_nh)
        if self._divisor is not None:
            logits_nv = logits_nv / self._divisor
        if self._cap is not None:
            logits_nv = self._cap * torch.tanh(logits_nv / self._cap)
        return torch.nn.functional.cross_entropy(logits_nv.float(), targets_n, reduction="sum")

    def _balance(self, router_logits: Any) -> Any:
        """Switch's loss (arXiv 2101.03961, equations 4 to 6), as transformers computes it for this family."""
        model = self.model
        self._count(router_logits)
        # The layers' logits may be bfloat16; their sum over thousands of tokens needs float32.
        return sys.modules[type(model).__module__].load_balancing_loss_func(
            tuple(layer.float() for layer in router_logits), model.num_experts, model.num_experts_per_tok
        )

    def _count(self, router_logits: Any) -> None:
        """A router takes the top k of a softmax, and a softmax keeps the order of its logits."""
        counts = []
        for layer in router_logits:
            chosen = layer.detach().topk(self.model.num_experts_per_tok, dim=-1).indices.reshape(-1)
            ones = torch.ones_like(chosen, dtype=torch.float32)
            counts.append(ones.new_zeros(layer.shape[-1]).scatter_add_(0, chosen, ones))
        routed = torch.stack(counts) * float(self.counted)
        self._routed = routed if self._routed is None else self._routed + routed
