"""Where experts lie in the flat params."""

from __future__ import annotations

import numpy as np

from p2pdiloco.run_spec import TensorSpec
from p2pdiloco.sim.lab.experts import expert_slices

TENSORS = (
    TensorSpec("model.embed_tokens.weight", (7, 4)),
    TensorSpec("model.layers.0.mlp.gate.weight", (3, 4)),
    TensorSpec("model.layers.0.mlp.experts.gate_up_proj", (3, 10, 4)),
    TensorSpec("model.layers.0.mlp.experts.down_proj", (3, 4, 5)),
    TensorSpec("model.layers.0.input_layernorm.weight", (4,)),
    TensorSpec("model.layers.1.mlp.experts.gate_up_proj", (3, 10, 4)),
    TensorSpec("model.norm.weight", (4,)),
)


def test_slices_cover_the_experts_and_nothing_else() -> None:
    flat = np.concatenate([np.full(t.size, i) for i, t in enumerate(TENSORS)])
    hits = np.zeros(len(flat), int)
    for part in expert_slices(TENSORS):
        hits[part.part] += 1
    assert hits.max() == 1
    assert set(flat[hits == 1]) == {2, 3, 5}
    assert set(flat[hits == 0]) == {0, 1, 4, 6}


def test_a_slice_is_one_expert_of_its_layer() -> None:
    at = 7 * 4 + 3 * 4
    values = np.zeros(sum(t.size for t in TENSORS))
    values[at : at + 3 * 40].reshape(3, 10, 4)[1] = 1  # expert 1's gate and up projection in layer 0
    holding = [(p.layer, p.expert) for p in expert_slices(TENSORS) if values[p.part].any()]
    assert holding == [(0, 1)]
    assert {(p.layer, p.expert) for p in expert_slices(TENSORS)} == {(i, e) for i in (0, 1) for e in range(3)}


def test_a_dense_model_has_none() -> None:
    dense = (TensorSpec("model.layers.0.mlp.up_proj.weight", (4, 4)), TensorSpec("expert.weight", (2, 2)))
    assert expert_slices(dense) == []
