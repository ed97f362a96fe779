"""One forward and backward pass of one short sequence, before a model becomes a run's.

transformers builds many a model that cannot compute: what no static check of a config sees, this does. The
losses are those that nodes train, evaluate and continue texts with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from transformers import DynamicCache

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.exit_codes import RESOURCES
from p2pdiloco.run_spec import ModelSpec
from p2pdiloco_node.training.activations import activation_bytes
from p2pdiloco_node.training.losses import CausalLoss
from p2pdiloco_node.training.memory_plan import FLOAT32, amount
from p2pdiloco_node.training.models import said_by

SHOWN = 3  # names in a message
NO_MEMORY = ("can't allocate memory", "not enough memory")  # torch has no class of its own for a CPU's
MEND = "Every node would fail: mend the config, or choose another model with --model"


def check_room(spec: ModelSpec, free: int) -> None:
    """`free`: bytes of RAM. Raises: OperatorError RESOURCES: the params alone take more."""
    needed = FLOAT32 * spec.params
    if needed > free:
        raise OperatorError(
            f"this model has {spec.params:,} parameters, and to make them takes {amount(needed)} of RAM, "
            f"where {amount(free)} is free: choose a smaller model, or use a machine with more "
            "memory (what a config leaves out is its class's default).",
            RESOURCES,
        )


def try_model(
    model: Any, spec: ModelSpec, free: int, at: Callable[[str], None] = lambda _: None
) -> list[str]:
    """What the owner should know. `model`: becomes float32. `free`: bytes of RAM beside it.

    `at` hears what is going on: with a large model all this takes minutes.

    Raises: OperatorError: it cannot compute, or what it computes is not finite.
    """
    short = msgspec.structs.replace(spec, seq_len=min(spec.seq_len, limits.trial_tokens_max))
    # The gradient, and what a checkpoint in 16 bits grows by.
    grown = sum(p.numel() * (FLOAT32 - p.element_size()) for p in model.parameters())
    needed = FLOAT32 * spec.params + grown + activation_bytes(short, 1, bf16=False, checkpointing=False)
    if needed > free:
        said = f"one short sequence takes {amount(needed)} of RAM beside it, where {amount(free)} is free"
        return [f"Whether this model can be trained was not tried: {said}."]
    try:
        loss, norm, still = _passes(model.float(), short, at)
    except MemoryError:
        raise
    except Exception as error:  # model classes raise what they like
        said = said_by(error)
        if any(sign in said for sign in NO_MEMORY):
            raise
        built = f"a model of the family {spec.family!r} can be built from this config"
        raise OperatorError(f"{built} and cannot compute: {said}. {MEND}.") from None
    finally:
        model.zero_grad(set_to_none=True)
    if not math.isfinite(loss):
        raise OperatorError(f"the model's first loss is {loss}, which is no number to lower. {MEND}.")
    if loss > limits.loss_shown_max:
        raise OperatorError(
            f"the model's first loss is {loss:.0f}: a guess among all tokens costs 12. {MEND}."
        )
    if not math.isfinite(norm):
        raise OperatorError(f"the gradient of the model's first loss is not finite. {MEND}.")
    if norm == 0:
        raise OperatorError(f"the gradient of the model's first loss is zero: it would never learn. {MEND}.")
    if still:
        names = ", ".join(still[:SHOWN]) + (" and more" if len(still) > SHOWN else "")
        return [f"No gradient reaches {names}: they stay as they are, and travel with every delta."]
    return []


def _passes(model: Any, spec: ModelSpec, at: Callable[[str], None]) -> tuple[float, float, list[str]]:
    """Mean loss in nats, norm of its gradient, and names of params that have no part in it."""
    losses = CausalLoss(model, bf16=False).train()
    # From the last token down: the vocabulary's end is where an embedding is too small.
    tokens = torch.arange(spec.vocab_size - 1, spec.vocab_size - 2 - spec.seq_len, -1) % spec.vocab_size
    at("forward pass")
    found = losses(tokens[None])
    loss = found.cross_entropy / spec.seq_len + losses.balance_weight * found.balance
    at("backward pass")
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    # Experts to which no token went have a gradient of zeros: a mixture's are one tensor.
    still = [name for name, gradient in gradients.items() if gradient is None]
    norm = math.hypot(*(float(torch.linalg.vector_norm(g)) for g in gradients.values() if g is not None))
    at("evaluating and sampling")
    with torch.no_grad():  # as nodes evaluate, and write samples
        losses.eval()
        losses(tokens[None])
        cache = DynamicCache(config=model.config)
        for token in tokens[:2]:
            losses.next_logits(token.reshape(1, 1), cache)
    return float(loss.detach()), norm, still
