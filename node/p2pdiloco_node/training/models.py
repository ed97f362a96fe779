"""transformers' models built from the RunSpec's config: no remote code, no download, no pickle.

Only the trainer process imports this module: torch and transformers take seconds and hundreds of megabytes.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from p2pdiloco.run_spec import ModelSpec, TensorSpec


def build_model(spec: ModelSpec) -> Any:
    """A causal language model in float32 on the CPU, initialised by transformers from torch's global seed.

    `spec.tensors` is not looked at: genesis builds the model to find them.
    """
    config = AutoConfig.for_model(spec.family, **json.loads(spec.config))
    config.use_cache = False
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)


def tensor_layout(model: Any) -> tuple[TensorSpec, ...]:
    """Name and shape of each parameter in the order of `named_parameters`; tied ones once."""
    return tuple(TensorSpec(name, tuple(p.shape)) for name, p in model.named_parameters())


def flatten_params(model: Any) -> Any:
    """(params,) float32 on the CPU: all parameters in the layout's order."""
    return torch.cat([p.detach().reshape(-1).float().cpu() for _, p in model.named_parameters()])


def views(flat: Any, layout: tuple[TensorSpec, ...]) -> dict[str, Any]:
    """`flat` (params,) as tensors by name, sharing its memory."""
    found: dict[str, Any] = {}
    at = 0
    for tensor in layout:
        found[tensor.name] = flat[at : at + tensor.size].view(tensor.shape)
        at += tensor.size
    assert at == flat.numel(), f"a layout of {at} values on {flat.numel()}"
    return found
