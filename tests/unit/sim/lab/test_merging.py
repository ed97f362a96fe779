"""Means by hand: the product's, radial-directional, direction-corrected, and experts by their own tokens."""

import math

import numpy as np
import pytest

from p2pdiloco.diloco.merge import merge
from p2pdiloco.run_spec import TensorSpec
from p2pdiloco.sim.lab.experiment import Outer
from p2pdiloco.sim.lab.merging import corrected, merge_listed, rda, untrained

PLAIN = Outer(codec="fp16")


def floats(*values):
    return np.array(values, np.float32)


def merged(outer, step, deltas, tensors, *, momentum=None, expert_tokens=None):
    before = [delta.copy() for delta in deltas]
    mean = merge_listed(outer, step, deltas, tensors, momentum, expert_tokens or [()] * len(deltas))
    assert all(np.array_equal(a, b) for a, b in zip(before, deltas, strict=True)), "a delta was overwritten"
    return mean


def test_mean_is_the_products(planned):
    rng = np.random.default_rng(1)
    deltas = [rng.normal(size=30).astype(np.float32) for _ in range(3)]
    step = planned((10, 20, 30), (10, 17.5, 30), clips=[1.0, 0.5, 1.0])
    expected = merge(step, 30, lambda digest, out: np.copyto(out, deltas[digest[0]]))
    assert merged(PLAIN, step, deltas, (TensorSpec("a", (30,)),)).tolist() == expected.tolist()


def test_sparse_deltas_are_averaged_over_their_senders_or_over_all(planned):
    tensors = (TensorSpec("matrix", (2, 4096)), TensorSpec("norm", (2,)))
    deltas = [np.zeros(8194, np.float32), np.zeros(8194, np.float32)]
    deltas[0][:2] = 3, 6
    deltas[1][1:3] = 12, 9
    deltas[0][8192] = 8  # a raw tensor: zero is a value there
    step = planned((10, 20))
    senders = merged(Outer(codec="topk64"), step, deltas, tensors)
    assert senders[:4].tolist() == [3, 10, 9, 0]
    everybody = merged(Outer(codec="topk64", average_over="all"), step, deltas, tensors)
    assert everybody[:4].tolist() == [1, 10, 6, 0]
    assert senders[8192] == everybody[8192] == pytest.approx(8 / 3)


def test_rda_keeps_the_length_of_orthogonal_deltas():
    # Lengths 3 and 4 with weights 1 and 3: 3.75, along (1, 3).
    got = rda([floats(3, 0), floats(0, 4)], [10, 30], [1.0, 1.0])
    assert got == pytest.approx(floats(1, 3) * 3.75 / math.sqrt(10))
    # A clip of a half shortens the second: (3 + 3 * 2) / 4.
    clipped = rda([floats(3, 0), floats(0, 4)], [10, 30], [1.0, 0.5])
    assert clipped == pytest.approx(floats(1, 3) * 2.25 / math.sqrt(10))


def test_rda_of_nothing_and_of_opposites_is_nothing():
    assert rda([floats(0, 0), floats(0, 0)], [1, 1], [1.0, 1.0]).tolist() == [0, 0]
    assert rda([floats(2, 0), floats(-2, 0)], [1, 1], [1.0, 1.0]).tolist() == [0, 0]
    # A zero delta has no direction, but it shortens the mean.
    assert rda([floats(2, 0), floats(0, 0)], [1, 1], [1.0, 1.0]).tolist() == [1, 0]


def test_rda_goes_tensor_by_tensor_and_spares_embeddings(planned):
    tensors = (
        TensorSpec("model.embed_tokens.weight", (2,)),
        TensorSpec("model.layers.0.q", (2,)),
        TensorSpec("model.layers.0.k", (2,)),
        TensorSpec("lm_head.weight", (2,)),
    )
    deltas = [floats(2, 0, 2, 0, 6, 0, 2, 0), floats(0, 2, 0, 2, 0, 6, 0, 2)]
    got = merged(Outer(codec="fp16", merge="rda"), planned((10, 10)), deltas, tensors)
    r = math.sqrt(2)
    assert got == pytest.approx(floats(1, 1, r, r, 3 * r, 3 * r, 1, 1))


def test_an_aligned_delta_is_left_alone():
    d = floats(1, 0.25, 0, 0)
    assert corrected(d, floats(1, 0, 0, 0), (TensorSpec("a", (4,)),)).tolist() == d.tolist()


def test_an_opposing_delta_loses_part_of_its_opposing_component():
    # |d| = 5, |m| = 2: c = -0.6, conf = 5 / 11, beta = 0.5 * 0.6 * 5 / 11; along m it was -3.
    got = corrected(floats(-3, 4), floats(2, 0), (TensorSpec("a", (2,)),))
    assert got == pytest.approx(floats(-3 + 3 * 0.3 * 5 / 11, 4))


def test_an_orthogonal_delta_is_rotated_and_keeps_its_length():
    # c = 0: lambda = 0.5 conf with conf = 5 / (5 + 6).
    turn = 0.5 * 5 / 11
    direction = np.array([turn, 1 - turn])
    got = corrected(floats(0, 5), floats(2, 0), (TensorSpec("a", (2,)),))
    assert got == pytest.approx(5 * direction / np.linalg.norm(direction))
    assert np.linalg.norm(got) == pytest.approx(5)


def test_angles_are_of_single_tensors_and_zeros_have_none():
    tensors = (TensorSpec("a", (2,)), TensorSpec("b", (2,)), TensorSpec("c", (2,)))
    d = floats(-3, 4, 1, 0, 0, 0)
    got = corrected(d, floats(2, 0, 2, 0, 5, 5), tensors)
    assert got[2:].tolist() == [1, 0, 0, 0]
    assert got[0] > -3
    assert corrected(d, np.zeros(6, np.float32), tensors).tolist() == d.tolist()


def test_only_stale_deltas_are_corrected(planned):
    tensors = (TensorSpec("a", (2,)),)
    outer = Outer(codec="fp16", direction_correction=True)
    step = planned((10, 10), staleness=[0.0, 0.5])
    got = merged(outer, step, [floats(-3, 4), floats(-3, 4)], tensors, momentum=floats(2, 0))
    assert got == pytest.approx(floats(-3 + 1.5 * 0.3 * 5 / 11, 4))
    with pytest.raises(AssertionError, match="without momentum"):
        merged(outer, step, [floats(-3, 4), floats(-3, 4)], tensors)


# Two experts in each of two layers, two values each, and a tensor that belongs to none.
EXPERTS = (
    TensorSpec("model.layers.0.mlp.experts.down_proj", (2, 2)),
    TensorSpec("model.norm.weight", (2,)),
    TensorSpec("model.layers.1.mlp.experts.down_proj", (2, 2)),
)
BY_EXPERT = Outer(codec="fp16", expert_weights=True)


def test_an_expert_is_weighted_by_its_own_tokens_and_left_alone_without(planned):
    deltas = [floats(1, 1, 1, 1, 1, 1, 1, 1, 1, 1), floats(5, 5, 5, 5, 5, 5, 5, 5, 5, 5)]
    # Layer 0: shares 1/4, 3/4 and 3/4, 1/4. Layer 1: the second expert saw nothing at all.
    tokens = [(5, 15, 20, 0), (15, 5, 20, 0)]
    got = merged(BY_EXPERT, planned((10, 10)), deltas, EXPERTS, expert_tokens=tokens)
    assert got == pytest.approx(floats(4, 4, 2, 2, 3, 3, 3, 3, 0, 0))
    assert untrained(EXPERTS, tokens) == [slice(8, 10)]
    assert untrained(EXPERTS, [(1, 1, 1, 1), (0, 0, 0, 0)]) == []


def test_a_stale_deltas_experts_weigh_as_little_as_the_rest_of_it(planned):
    deltas = [floats(*[1] * 10), floats(*[4] * 10)]
    tokens = [(10, 10, 10, 10), (10, 10, 10, 10)]
    got = merged(BY_EXPERT, planned((10, 10), (10, 5)), deltas, EXPERTS, expert_tokens=tokens)
    assert got == pytest.approx(floats(*[2] * 10))


def test_experts_are_clipped_averaged_over_senders_and_rotated_like_the_rest(planned):
    step = planned((10, 10), clips=[1.0, 0.5])
    tokens = [(10, 10, 10, 10), (10, 10, 10, 10)]
    deltas = [floats(*[2, 0] * 5), floats(*[0, 4] * 5)]
    clipped = merged(BY_EXPERT, step, deltas, EXPERTS, expert_tokens=tokens)
    assert clipped == pytest.approx(floats(*[1, 1] * 5))
    radial = Outer(codec="fp16", expert_weights=True, merge="rda")
    r = math.sqrt(2)
    assert merged(radial, step, deltas, EXPERTS, expert_tokens=tokens) == pytest.approx(floats(*[r, r] * 5))


def test_experts_of_a_sparse_codec_are_averaged_over_their_senders(planned):
    tensors = (TensorSpec("norm", (2,)), TensorSpec("layers.0.mlp.experts.down_proj", (2, 1024)))
    deltas = [np.zeros(2050, np.float32), np.zeros(2050, np.float32)]
    deltas[0][2:4] = 6, 2
    deltas[1][3], deltas[1][2049] = 5, 7
    outer = Outer(codec="topk64", expert_weights=True)
    got = merged(outer, planned((10, 10)), deltas, tensors, expert_tokens=[(10, 30), (20, 20)])
    # The first expert has shares 1/4 and 1/2: (2 * 1 + 5 * 2) / 3.
    assert (got[2], got[3], got[2049]) == (6, 4, 7)


def test_fragments_without_experts_take_no_notice_of_them(planned):
    dense = (TensorSpec("model.norm.weight", (2,)),)
    got = merged(
        BY_EXPERT, planned((10, 30)), [floats(1, 1), floats(5, 5)], dense, expert_tokens=[(1, 2)] * 2
    )
    assert got.tolist() == [4, 4]
