"""The estimate against what torch really keeps for the backward pass."""

from __future__ import annotations

from typing import Any

import pytest

from p2pdiloco.run_spec import ModelSpec
from p2pdiloco_node.training.activations import activation_bytes, kept_bytes, logits_bytes
from p2pdiloco_node.training.families import FAMILIES
from p2pdiloco_node.training.presets import config_bytes
from tests.unit.training.test_families import tiny_config

SEQ, SEQUENCES, VOCAB = 64, 4, 256
# Large enough that tensors, not what surrounds them, are counted; the widths of real models to one another.
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": SEQ, "head_dim": 32,
    "moe_intermediate_size": 96, "shared_expert_intermediate_size": 96, "n_positions": SEQ, "n_embd": 128,
    "n_layer": 3, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
    "v_head_dim": 32,
}  # fmt: skip
OWN = {"gpt_neox": {"intermediate_size": 512}, "deepseek_v3": {"num_key_value_heads": 4}}


def measured(family: str, *, checkpointing: bool) -> tuple[ModelSpec, int]:
    """Bytes that one forward pass keeps beside params and buffers, each memory once."""
    import torch

    from p2pdiloco_node.training import models
    from p2pdiloco_node.training.losses import CausalLoss

    known = tiny_config(family)
    sizes = {key: size for key, size in SIZES.items() if key in known} | OWN.get(family, {})
    config = models.make_config(family, known | sizes)
    model = models.initialised(family, config)
    spec = ModelSpec(
        family, "x", config_bytes(models.frozen_config(config)), VOCAB, SEQ, models.tensor_layout(model)
    )
    if checkpointing:
        models.checkpoint_layers(model)
    loss = CausalLoss(model, bf16=False).train()
    standing = {t.untyped_storage().data_ptr() for t in (*loss.parameters(), *loss.buffers())}
    kept: dict[int, Any] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in standing:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        losses = loss(torch.zeros((SEQUENCES, SEQ + 1), dtype=torch.int64))
    total = losses.cross_entropy + losses.balance
    assert total.requires_grad
    return spec, sum(size for size, _ in kept.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_estimate_is_within_a_fifth(family: str) -> None:
    spec, found = measured(family, checkpointing=False)
    assert kept_bytes(spec, SEQUENCES, bf16=False, checkpointing=False) == pytest.approx(found, rel=0.2)


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "mixtral"])
def test_with_checkpointing_too(family: str) -> None:
    spec, found = measured(family, checkpointing=True)
    assert kept_bytes(spec, SEQUENCES, bf16=False, checkpointing=True) == pytest.approx(found, rel=0.2)
    whole = activation_bytes(spec, SEQUENCES, bf16=False, checkpointing=False)
    assert activation_bytes(spec, SEQUENCES, bf16=False, checkpointing=True) < 0.7 * whole


def test_logits_stop_growing() -> None:
    assert logits_bytes(256, 1000) == 4 * 256 * 1000
    assert logits_bytes(128_000, 65_536) <= 256 * 2**20
    assert logits_bytes(2**30, 10) == 4 * 2**30  # one token's are the least there can be
