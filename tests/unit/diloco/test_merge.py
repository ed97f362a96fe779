"""The mean of deltas, streaming and bit for bit (algorithm.md 4, 5)."""

import tracemalloc

import numpy as np
import pytest

from p2pdiloco.diloco.compress import decode, encode
from p2pdiloco.diloco.layout import Run, sparse_runs
from p2pdiloco.diloco.merge import Mean, merge
from p2pdiloco.errors import PeerError
from p2pdiloco.run_spec import TensorSpec


def deltas(count, params, seed=0):
    return np.random.default_rng(seed).standard_normal((count, params)).astype(np.float32)


def loader(stored):
    def load(digest, out):
        out[:] = stored[digest[0]]

    return load


def test_is_the_weighted_mean_with_clips_above_the_line_only(make_step):
    stored = deltas(3, 1000)
    figures = [(10.0, 1.0), (20.0, 0.5), (5.5, 1.0)]
    expected = sum(w * c * d.astype(np.float64) for (w, c), d in zip(figures, stored, strict=True)) / 35.5
    assert np.allclose(merge(make_step(figures), 1000, loader(stored)), expected, atol=1e-6)


def test_rounds_each_operation_by_itself(make_step):
    """Against the rule written out with scalars: the pieces and the in-place order change no bit."""
    params = 3 * (1 << 16) + 17
    stored = deltas(4, params)
    figures = [(f, c) for f, c in zip((3.0, 1e7, 0.1, 77.0), (1.0, 0.25, 1.0, 0.9), strict=True)]
    step = make_step([(float(np.float32(w)), float(np.float32(c))) for w, c in figures])
    total = np.zeros(params, np.float32)
    for contribution, delta in zip(step.contributions, stored, strict=True):
        factor = np.float32(contribution.weight) * np.float32(contribution.clip)
        total = (total + (delta * factor).astype(np.float32)).astype(np.float32)
    expected = (total / np.float32(step.scalars.weight_sum)).astype(np.float32)
    assert merge(step, params, loader(stored)).tobytes() == expected.tobytes()


def test_a_sparse_coordinate_is_averaged_over_its_senders(make_step):
    """Two of three send the first coordinate, one the second, nobody the third; the last is dense."""
    stored = np.array([[1, 0, 0, 3], [0, 0, 0, 0], [5, 2, 0, 6]], np.float32)
    step = make_step([(10.0, 1.0), (4.0, 1.0), (30.0, 0.5)])
    mean = merge(step, 4, loader(stored), (Run(0, 3, 0),))
    expected = np.array([(10 + 75) / 40, 30 / 30, 0, (30 + 90) / 44], np.float32)
    assert np.array_equal(mean, expected)
    over_all = merge(step, 4, loader(stored))
    assert np.allclose(over_all, np.array([85, 30, 0, 120]) / 44)


def test_over_senders_rounds_each_operation_by_itself(make_step):
    params = (1 << 16) + 40
    rng = np.random.default_rng(2)
    stored = deltas(5, params) * (rng.random((5, params)) < 0.2)
    runs = (Run(3, 70, 0), Run(100, params - 117, 1))  # neither begins nor ends with a piece
    step = make_step([(float(np.float32(w)), 0.75) for w in (3.3, 1e7, 0.1, 0.0, 77.7)])
    total, sent = np.zeros(params, np.float32), np.zeros(params, np.float32)
    for contribution, delta in zip(step.contributions, stored, strict=True):
        factor = np.float32(contribution.weight) * np.float32(contribution.clip)
        total = (total + (delta * factor).astype(np.float32)).astype(np.float32)
        sent = np.where(delta != 0, sent + np.float32(contribution.weight), sent)
    sparse = np.zeros(params, bool)
    for run in runs:
        sparse[run.start : run.stop] = True
    divisor = np.where(sparse & (sent > 0), sent, np.float32(step.scalars.weight_sum))
    assert merge(step, params, loader(stored), runs).tobytes() == (total / divisor).tobytes()


def test_real_sparse_blobs(make_step):
    """What every replica does with topk blobs, against plain sums over those that hold a coordinate."""
    tensors = (TensorSpec("norm", (9,)), TensorSpec("matrix", (10, 500)))
    raws = deltas(3, 5009) * np.float32(1e-3)
    stored = [decode("topk128", encode("topk128", raw, tensors), tensors) for raw in raws]
    weights = np.array([[100.0], [50.0], [25.0]])
    mean = merge(
        make_step([(w, 1.0) for w in weights[:, 0].tolist()]),
        5009,
        loader(stored),
        sparse_runs("topk128", tensors),
    )
    sent = np.array(stored) != 0
    assert (sent[:, 9:].sum(axis=0) > 1).sum() > 3
    expected = (stored * weights).sum(axis=0) / np.maximum((sent * weights).sum(axis=0), 1)
    assert np.allclose(mean, expected, rtol=1e-5, atol=0)


def test_streams_with_two_arrays_of_memory(make_step):
    params = 1 << 20
    one = np.ones(params, np.float32)

    def load(digest, out):
        out[:] = one

    tracemalloc.start()
    merge(make_step([(1.0, 1.0)] * 16), params, load)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2.2 * one.nbytes


def test_a_delta_that_does_not_decode_stops_the_merge(make_step):
    def load(digest, out):
        raise PeerError("NOT_FINITE")

    with pytest.raises(PeerError):
        merge(make_step([(1.0, 1.0)]), 8, load)


def test_never_divides_by_zero():
    with pytest.raises(AssertionError):
        Mean(4).divide(0.0)
