"""The mean of deltas, streaming and bit for bit (algorithm.md 4, 5)."""

import tracemalloc

import numpy as np
import pytest

from p2pdiloco.diloco.merge import Mean, merge
from p2pdiloco.errors import PeerError


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
