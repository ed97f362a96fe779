"""A model's dimensions as plain numbers, from its config's arguments: what a plan counts with. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from p2pdiloco.run_spec import ModelSpec
from p2pdiloco_node.training.families import open_config


class Shape(NamedTuple):
    """Of one decoder layer, and how many there are. Widths are numbers of values for one token."""

    family: str
    layers: int
    hidden: int
    heads: int
    queries: int  # heads x their width
    keys: int  # key heads x their width; values the same
    dense: int  # width inside an MLP; 0: only experts
    expert: int  # width inside one expert; 0: no experts
    experts_per_token: int
    experts: int
    shared: int  # width of experts that see every token
    vocab: int  # rows of the embedding
    tied: bool


def shape_of(model: ModelSpec) -> Shape:
    """From a RunSpec's model, which `run new` writes with every argument; unknown ones are guessed large.

    Raises: ModelRefused: a config that no trainer takes.
    """
    return read_shape(model.family, open_config(model.family, model.config))


def read_shape(family: str, config: Mapping[str, Any]) -> Shape:
    """The same from a config's arguments, whatever the family calls them."""

    def first(*keys: str, default: int) -> int:
        return next((int(v) for k in keys if isinstance(v := config.get(k), int | float) and v), default)

    hidden = first("hidden_size", "n_embd", default=1)
    heads = first("num_attention_heads", "n_head", default=1)
    key_heads = first("num_key_value_heads", default=heads)
    width = first("head_dim", default=max(1, hidden // heads))
    latent = first("qk_nope_head_dim", default=0) + first("qk_rope_head_dim", default=0)
    if latent:  # latent attention: keys are as wide as queries, values have a width of their own
        width, key_heads = max(latent, first("v_head_dim", default=latent)), heads
    experts = first("num_local_experts", "num_experts", "n_routed_experts", default=0)
    inside = first("intermediate_size", "n_inner", default=4 * hidden)
    expert = first("moe_intermediate_size", default=inside) if experts else 0
    shared = first("shared_expert_intermediate_size", default=0) if experts else 0
    if experts and config.get("n_shared_experts"):
        shared = int(config["n_shared_experts"]) * expert
    sparse_only = experts and not config.get("first_k_dense_replace") and not config.get("mlp_only_layers")
    return Shape(
        family=family,
        layers=first("num_hidden_layers", "n_layer", default=1),
        hidden=hidden,
        heads=heads,
        queries=heads * width,
        keys=key_heads * width,
        dense=0 if sparse_only else inside,
        expert=expert,
        experts_per_token=first("num_experts_per_tok", default=1) if experts else 0,
        experts=experts,
        shared=shared,
        vocab=first("vocab_size", default=1),
        tied=bool(config.get("tie_word_embeddings", False)),
    )
