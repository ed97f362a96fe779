"""Which models a run may have, and what their config may say. Plain values: no torch here.

A RunSpec comes from a stranger. Its config is opened here before a class of transformers sees it: a known
family, plain values of bounded size, nothing that names code, files or other machines, nothing that makes a
model that this inner loop does not train rightly. Which keys a family knows is for its config class to say
(models.py); how large the model is in all is counted without memory, there too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.exit_codes import FILES
from p2pdiloco_node.config import nearest


class ModelRefused(OperatorError):
    """A model that is not built here; trying again does not change it."""


class Family(NamedTuple):
    """What differs between families of decoder-only transformers, for training and for planning memory."""

    gated: bool = True  # the MLP multiplies an activation with a second projection
    stepwise_activation: bool = False  # an activation in several steps, most of which keep their input
    norms: int = 2  # of the width of the model, in each layer
    layer_norm: bool = False  # torch's LayerNorm keeps its input alone; RMS norms keep two vectors
    dropouts: tuple[str, ...] = ("attention_dropout",)  # keys; zero unless the config asks
    must_be_false: tuple[str, ...] = ()  # keys that would make it another kind of model
    logits_divided_by: str = ""  # key of a number by which logits are divided
    logits_capped_at: str = ""  # key of the cap of cap * tanh(logits / cap); its value may be null
    sdpa: bool = True  # else attention keeps its (tokens, tokens) weights


_MOE_FALSE = ("output_router_logits",)  # asked for where training needs them, not by the config
FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
    "olmo2": Family(),
    "smollm3": Family(),
    "phi3": Family(dropouts=("attention_dropout", "resid_pdrop", "embd_pdrop")),
    "granite": Family(logits_divided_by="logits_scaling"),
    "gemma": Family(must_be_false=("use_bidirectional_attention",)),
    "gemma2": Family(
        must_be_false=("use_bidirectional_attention",),
        logits_capped_at="final_logit_softcapping",
        norms=4,
        sdpa=False,
    ),
    "gemma3_text": Family(
        must_be_false=("use_bidirectional_attention",), logits_capped_at="final_logit_softcapping", norms=4
    ),
    "gpt_neox": Family(
        gated=False, layer_norm=True, dropouts=("attention_dropout", "hidden_dropout", "classifier_dropout")
    ),
    "gpt2": Family(
        gated=False,
        stepwise_activation=True,
        layer_norm=True,
        dropouts=("attn_pdrop", "resid_pdrop", "embd_pdrop", "summary_first_dropout"),
        must_be_false=("add_cross_attention",),
    ),
    "starcoder2": Family(
        gated=False, layer_norm=True, dropouts=("attention_dropout", "residual_dropout", "embedding_dropout")
    ),
    "stablelm": Family(layer_norm=True, dropouts=("attention_dropout", "hidden_dropout")),
    "mixtral": Family(must_be_false=_MOE_FALSE),
    "qwen2_moe": Family(must_be_false=_MOE_FALSE),
    "qwen3_moe": Family(must_be_false=_MOE_FALSE),
    "olmoe": Family(must_be_false=_MOE_FALSE),
    "deepseek_v3": Family(must_be_false=_MOE_FALSE),
}

ACTIVATIONS = frozenset({"silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "relu", "relu2"})

# Never in a RunSpec, whatever a family's class would do with them.
FORBIDDEN = {
    "auto_map": "it names code of its own",
    "quantization_config": "its params are quantised, and a run trains float32",
    "_name_or_path": "it names a place to download from",
    "name_or_path": "it names a place to download from",
    "attn_implementation": "how attention is computed is each node's own affair",
    "experts_implementation": "how experts are computed is each node's own affair",
    "torch_dtype": "master params are float32 in every run",
    "dtype": "master params are float32 in every run",
}
# What a config.json says besides the model's shape: left out when a file becomes a run's config.
ABOUT_THE_FILE = frozenset(
    {
        "_name_or_path", "architectures", "auto_map", "dtype", "id2label", "label2id", "model_type",
        "name_or_path", "output_attentions", "output_hidden_states", "output_router_logits", "problem_type",
        "return_dict", "torch_dtype", "transformers_version", "use_cache",
    }
)  # fmt: skip
LAYER_COUNTS = ("num_hidden_layers", "n_layer")
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "n_shared_experts")
# A model without one of these builds, and cannot train.
AT_LEAST_1 = (
    *LAYER_COUNTS, "num_local_experts", "hidden_size", "n_embd", "intermediate_size",
    "num_experts_per_tok", "num_attention_heads", "n_head",
)  # fmt: skip
POSITIONS = ("max_position_embeddings", "n_positions")
# Without these nobody knows how large it is.
SIZES = (("hidden_size", "n_embd"), ("num_hidden_layers", "n_layer"))


def family_of(name: str) -> Family:
    """Raises: ModelRefused: this build does not train that family; names the nearest and all it does."""
    found = FAMILIES.get(name)
    if found is None:
        raise ModelRefused(
            f"models of the family {name!r} are not trained by this build{nearest(name, FAMILIES) or '.'} It "
            f"has {', '.join(sorted(FAMILIES))}. If the run needs a newer build: pip install -U p2pdiloco.",
            exit_code=FILES,
        )
    return found


def open_config(family: str, config: bytes) -> dict[str, Any]:
    """The arguments of the family's config class, from an untrusted RunSpec.

    Raises: ModelRefused: unknown family, no plain JSON object, a value out of bounds, or a key that says
    more than a model's shape.
    """
    family_of(family)
    try:
        opened = json.loads(config, parse_constant=_no_constant, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise _fault(f"is not JSON ({error})") from None
    if not isinstance(opened, dict):
        raise _fault("is not a JSON object")
    check_values(family, opened)
    return opened


def check_values(family: str, config: Mapping[str, Any]) -> None:
    """Bounds of every value, before anything is made of them. Raises: ModelRefused."""
    facts = family_of(family)
    for key, value in config.items():
        if key in FORBIDDEN:
            raise _fault(f"has the key {key!r}: {FORBIDDEN[key]}")
        if key.startswith("_"):
            raise _fault(f"has the key {key!r}, which is transformers' own")
        _check_plain(key, value, depth=0)
        if key.endswith(("act", "activation", "activation_function")) and isinstance(value, str):
            _check_one_of(key, value, ACTIVATIONS)
        if key in facts.dropouts and not (isinstance(value, int | float) and 0 <= value < 1):
            raise _fault(f"{key} is {value!r}: a dropout is from 0 to less than 1")
        if key in facts.must_be_false and value:
            raise _fault(f"{key} is set: such a model is not trained as a language model here")
    for key in AT_LEAST_1:
        if (value := config.get(key)) is not None and not (isinstance(value, int) and value >= 1):
            raise _fault(f"{key} is {value!r}: it is a whole number, at least 1")
    _check_trainable(config)
    _check_most(config, LAYER_COUNTS, limits.model_layers_max, "layers")
    _check_most(config, EXPERT_COUNTS, limits.model_experts_max, "experts")


def without_dropout(family: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with every dropout zero that it does not set itself: some classes' default is 0.1.

    Pre-training sees each text about once, so there is nothing to forget; the classes' defaults are for
    tuning on small sets.
    """
    return dict.fromkeys(family_of(family).dropouts, 0.0) | dict(config)


def drops_out(family: str, config: Mapping[str, Any]) -> list[str]:
    """`key value` of each dropout that is not zero, for people."""
    return [f"{key} {config[key]}" for key in family_of(family).dropouts if config.get(key)]


def _check_plain(key: str, value: Any, *, depth: int) -> None:
    """Plain values, small: nothing here may cost memory or time when a class reads it."""
    match value:
        case None | bool():
            return
        case int():
            if not 0 <= abs(value) <= limits.model_config_int_max:
                raise _fault(f"{key} is {value}: numbers go up to {limits.model_config_int_max}")
        case float():
            if not abs(value) <= limits.model_config_float_max:
                raise _fault(f"{key} is {value}: numbers go up to {limits.model_config_float_max:g}")
        case str():
            if len(value) > limits.model_config_text_chars_max:
                raise _fault(f"{key} has more than {limits.model_config_text_chars_max} characters")
        case list() | dict():
            if depth == limits.model_config_depth_max or len(value) > limits.model_config_items_max:
                raise _fault(f"{key} is too large or too deep")
            inside = value.items() if isinstance(value, dict) else ((key, item) for item in value)
            for name, item in inside:
                if name in FORBIDDEN:
                    raise _fault(f"{key} has the key {name!r}: {FORBIDDEN[name]}")
                _check_plain(f"{key}.{name}" if isinstance(value, dict) else key, item, depth=depth + 1)
        case _:
            raise _fault(f"{key} is a {type(value).__name__}, no plain value")


def _check_trainable(config: Mapping[str, Any]) -> None:
    """Values with which a class builds a model whose first loss raises or is not a number."""
    for key in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "rope_theta"):
        _check_above_0(key, config.get(key))
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(inside := config.get(key), dict):
            for name in ("rope_theta", "factor"):
                _check_above_0(f"{key}.{name}", inside.get(name))
    each = config.get("num_experts_per_tok")
    for key in ("num_local_experts", "num_experts", "n_routed_experts"):
        experts = config.get(key)
        if isinstance(each, int) and isinstance(experts, int) and each > experts:
            raise _fault(f"num_experts_per_tok is {each}, more than {key}, which is {experts}")
    heads, shared = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(shared, int) and (shared < 1 or heads % shared):
        raise _fault(f"num_attention_heads is {heads}, no multiple of num_key_value_heads, which is {shared}")


def _check_above_0(key: str, value: Any) -> None:
    if isinstance(value, int | float) and not value > 0:
        raise _fault(f"{key} is {value!r}: it is above 0")


def _check_most(config: Mapping[str, Any], keys: tuple[str, ...], most: int, what: str) -> None:
    for key in keys:
        value = config.get(key)
        if value is not None and not (isinstance(value, int) and 0 <= value <= most):
            raise _fault(f"{key} is {value!r}: a model has up to {most} {what}")


def _check_one_of(key: str, value: str, allowed: frozenset[str]) -> None:
    if value not in allowed:
        known = nearest(value, allowed) or f"; known are {', '.join(sorted(allowed))}"
        raise _fault(f"{key} is {value!r}{known}")


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found


def _fault(what: str) -> ModelRefused:
    end = "" if what.endswith("?") else "."
    return ModelRefused(
        f"the model's config {what}{end} Nothing of it is built; ask the run's owner, or mend the config.",
        exit_code=FILES,
    )
