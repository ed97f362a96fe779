"""transformers' models built from the RunSpec's config: no remote code, no download, no pickle.

Only the trainer process and processes like it import this module: torch and transformers take seconds and
hundreds of megabytes. A model is first built on torch's meta device, where tensors have shapes and no memory:
there it is counted and compared with what the RunSpec says, and only then does anything get memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from importlib.metadata import version
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from p2pdiloco import limits
from p2pdiloco.exit_codes import FILES, RUN
from p2pdiloco.run_spec import ModelSpec, TensorSpec
from p2pdiloco_node.config import nearest
from p2pdiloco_node.training.families import (
    EXPERT_COUNTS,
    LAYER_COUNTS,
    ModelRefused,
    family_of,
    open_config,
    without_dropout,
)

_COMMON = frozenset(field.name for field in fields(PreTrainedConfig))
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# What config classes have and no model that is trained here reads: it would tie runs to some releases.
NOT_READ = frozenset(
    {*TOKEN_IDS, "classifier_dropout", "output_router_logits", "pretraining_tp", "use_cache"}
)
NOT_READ_PREFIX = "summary_"  # heads of gpt2 for other tasks
# Keys of config.json files from before rope_parameters; their classes turn them into that.
LEGACY_ROPE = frozenset(
    {"rope_theta", "rope_scaling", "rotary_pct", "rotary_emb_base", "partial_rotary_factor"}
)


def known_keys(family: str) -> frozenset[str]:
    """What the config class of a family is called with, beside what all classes share."""
    family_of(family)
    cls = type(AutoConfig.for_model(family))
    return frozenset(field.name for field in fields(cls)) - _COMMON


def make_config(
    family: str, arguments: Mapping[str, Any], *, from_file: bool = False, made_with: str = ""
) -> Any:
    """The config object of checked `arguments` (families.py).

    A key that the class does not know may stand there with a value that says no: another release has that
    feature, and this model does without. `made_with`: the releases that made the run, if it says so.

    `from_file`: with what config.json files have besides: rope's keys by their old names, and values that the
    class derives itself, which are left out.

    Raises: ModelRefused: a key that the class does not know, or a combination that it refuses.
    """
    known = known_keys(family)
    if from_file:
        derived = AutoConfig.for_model(family).to_dict().keys() - known
        arguments = {key: value for key, value in arguments.items() if key not in derived}
        known |= LEGACY_ROPE
    arguments = {key: value for key, value in arguments.items() if _is_read(key)}
    for key, value in arguments.items():
        if key not in known and not _says_no(value):
            raise ModelRefused(
                f"the model's config has the key {key!r}, which {family!r} does not know"
                f"{nearest(key, known) or '.'} In a run: install "
                f"{made_with or 'the transformers of its owner'} "
                f"(here is transformers {transformers.__version__}); in a file: take the key out, if the "
                "model does not need it.",
                exit_code=FILES,
            )
    arguments = {key: value for key, value in arguments.items() if key in known}
    try:
        config = AutoConfig.for_model(
            family, **dict.fromkeys(TOKEN_IDS), **without_dropout(family, arguments)
        )
    except MemoryError:  # says nothing about the model
        raise
    except Exception as error:  # noqa: BLE001 - config classes raise what they like about their arguments
        raise _unbuildable(family, error) from None
    config.use_cache = False
    return config


def frozen_config(config: Any) -> dict[str, Any]:
    """All arguments that make `config` again, defaults included: another release may have other defaults.

    Those that no model reads are left out: another release may not have them.
    """
    own = sorted(known_keys(config.model_type))
    return {key: getattr(config, key) for key in own if hasattr(config, key) and _is_read(key)}


def releases() -> str:
    """Of the libraries that make a run's model and tokenizer, for people."""
    return f"transformers {transformers.__version__}, tokenizers {version('tokenizers')}"


def _is_read(key: str) -> bool:
    return key not in NOT_READ and not key.startswith(NOT_READ_PREFIX)


def _says_no(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {})


def build_model(spec: ModelSpec) -> Any:
    """A RunSpec's model in float32 on the CPU, initialised by transformers from torch's global seed.

    `spec.tensors` is not looked at.

    Raises: ModelRefused: the config is not one that may be built.
    """
    return initialised(spec.family, _config_of(spec))


def _config_of(spec: ModelSpec) -> Any:
    return make_config(spec.family, open_config(spec.family, spec.config), made_with=spec.made_with)


def initialised(family: str, config: Any) -> Any:
    """The same from a config object. Raises: ModelRefused."""
    outline(family, config)
    return _from_config(family, config)


def outline(family: str, config: Any) -> Any:
    """The model on the meta device: its tensors' names and shapes, and no memory.

    Raises: ModelRefused: too large, or the class refuses the config.
    """
    layers = max((getattr(config, key, None) or 0 for key in LAYER_COUNTS), default=0)
    experts = max((getattr(config, key, None) or 0 for key in EXPERT_COUNTS), default=0)
    if layers * max(1, experts) > limits.model_modules_max:
        raise _too_large(f"{layers} layers of {experts} experts")
    try:
        with torch.device("meta"):
            model = _from_config(family, config)
    except ModelRefused:
        raise
    except MemoryError:  # says nothing about the model
        raise
    except Exception as error:  # noqa: BLE001 - model classes raise what they like about sizes that do not fit
        raise _unbuildable(family, error) from None
    params = sum(p.numel() for p in model.parameters())
    if not 0 < params <= limits.model_params_max:
        raise _too_large(f"{params:,} parameters")
    buffer_bytes = sum(b.numel() * b.element_size() for b in model.buffers())
    if buffer_bytes > limits.model_buffer_bytes_max:
        raise _too_large(f"derived tables of {buffer_bytes / limits.MIB:,.0f} MiB")
    return model


def outline_of(spec: ModelSpec) -> Any:
    """The RunSpec's model on the meta device, with exactly the tensors that the RunSpec names.

    Raises: ModelRefused: it is another model, too large, or cannot be built.
    """
    model = outline(spec.family, _config_of(spec))
    if model.config.vocab_size < spec.vocab_size:
        raise ModelRefused(
            f"The run names {spec.vocab_size:,} tokens where its config knows {model.config.vocab_size:,}: a "
            "run that lies. Nothing of it is built.",
            exit_code=RUN,
        )
    found = tensor_layout(model)
    if found != spec.tensors:
        said = f" (it was made with {spec.made_with})" if spec.made_with else ""
        raise ModelRefused(f"{_difference(found, spec.tensors)}{said} Nothing of it is built.", exit_code=RUN)
    return model


def give_memory(model: Any, parts: Mapping[str, Any], gradients: Mapping[str, Any], device: str) -> None:
    """Turn an outline into a model on `device`: params are views, buffers are derived as at a build.

    `parts`, `gradients`: tensors by parameter name, float32 on `device`; what the model computes with is
    `parts`, without a copy. A tied parameter is one tensor.
    """
    new: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        made = torch.nn.Parameter(parts[name])
        made.grad = gradients[name]
        new[id(parameter)] = made
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = new[id(parameter)]
    derive_buffers(model, device)


def derive_buffers(model: Any, device: str) -> None:
    """Memory and values for every buffer: inverse frequencies, masks. They are never sent."""
    for module in model.modules():
        own = {name: buffer for name, buffer in module._buffers.items() if buffer is not None}
        if not own:
            continue
        for name, buffer in own.items():
            module._buffers[name] = torch.zeros_like(buffer, device=device)
        # transformers initialises a module's params and buffers together; params have their values already.
        marked = [p for p in module.parameters(recurse=False) if not hasattr(p, "_is_hf_initialized")]
        for parameter in marked:
            parameter._is_hf_initialized = True
        with torch.no_grad(), torch.device(device):
            model._init_weights(module)
        for parameter in marked:
            del parameter._is_hf_initialized


def decoder_layers(model: Any) -> list[Any]:
    """The model's decoder layers in their order: its outermost list of as many modules as it has layers."""
    # The config's attribute_map finds it under whatever name the family has.
    count = model.config.num_hidden_layers
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return list(module)
    raise AssertionError(f"a {model.config.model_type} without a list of {count} layers")


def checkpoint_layers(model: Any) -> None:
    """Each layer's activations are computed again in the backward pass instead of being kept."""
    # The reentrant kind would lose the router's losses, which leave a layer by the side door.
    how = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):  # its newer name
        model.activation_checkpointing_enable(how)
    else:
        model.gradient_checkpointing_enable(how)


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


def _from_config(family: str, config: Any) -> Any:
    how = {"attn_implementation": "sdpa" if family_of(family).sdpa else "eager"}
    if torch.cuda.is_available():
        # The grouped kernel knows no autocast and would multiply in float32.
        how["experts_implementation"] = "eager"
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, **how)


def _difference(found: tuple[TensorSpec, ...], named: tuple[TensorSpec, ...]) -> str:
    for here, there in zip(found, named, strict=False):
        if here != there:
            return (
                f"The run names the tensor {there.name} {list(there.shape)} where its config makes "
                f"{here.name} {list(here.shape)}: another release of transformers, or a run that lies."
            )
    return f"The run names {len(named)} tensors where its config makes {len(found)}."


def _too_large(what: str) -> ModelRefused:
    most = math.log2(limits.model_params_max)
    return ModelRefused(
        f"the model's config asks for {what}: a run's model has up to 2**{most:.0f} parameters. Nothing of "
        "it is built.",
        exit_code=FILES,
    )


def _unbuildable(family: str, error: Exception) -> ModelRefused:
    return ModelRefused(
        f"a model of the family {family!r} cannot be made from this config: {said_by(error)}.",
        exit_code=FILES,
    )


def said_by(error: Exception) -> str:
    """What torch or transformers said, in one line without its full stop."""
    said = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
    return said[:300].rstrip(".")
