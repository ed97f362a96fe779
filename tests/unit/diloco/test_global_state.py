"""Chunks and roots of the shared arrays (protocol.md 2)."""

import hashlib

import numpy as np
import pytest

from p2pdiloco import limits
from p2pdiloco.diloco.global_state import (
    GlobalState,
    chunk_digests,
    chunk_sizes,
    chunks_of,
    put_chunk,
    roots_of,
)
from p2pdiloco.diloco.norms import l2_norm
from p2pdiloco.errors import PeerError
from p2pdiloco.ids import merkle_root

PARAMS = 2 * (1 << 20) + 5


def numbers(seed=0, params=PARAMS):
    return np.random.default_rng(seed).standard_normal(params).astype(np.float32)


def test_chunks_are_4_mib_of_little_endian_floats():
    array = numbers()
    chunks = chunks_of(array)
    assert [len(c) for c in chunks] == [4 << 20, 4 << 20, 20] == chunk_sizes(PARAMS)
    assert b"".join(chunks) == array.astype("<f4").tobytes()
    assert chunk_digests(array)[2] == hashlib.sha256(array[-5:].tobytes()).digest()


def test_roots_name_both_arrays_to_the_last_bit():
    state = GlobalState(numbers(0), numbers(1))
    roots = roots_of(state)
    assert roots.params == merkle_root(chunk_digests(state.params))
    other = state.copy()
    other.momentum[-1] = np.nextafter(other.momentum[-1], np.float32(9))
    assert roots_of(other).momentum != roots.momentum
    assert roots_of(other).params == roots.params
    assert roots_of(state) == roots


def test_chunks_put_back_make_the_array():
    array, again = numbers(), np.zeros(PARAMS, np.float32)
    for place, chunk in enumerate(chunks_of(array)):
        put_chunk(again, place, chunk)
    assert np.array_equal(array, again)


@pytest.mark.parametrize(("place", "size"), [(0, 20), (2, 24), (2, 19), (3, 20), (-1, 20)])
def test_a_chunk_of_another_size_is_refused(place, size):
    with pytest.raises(PeerError) as error:
        put_chunk(np.zeros(PARAMS, np.float32), place, bytes(size))
    assert error.value.reason == "BAD_SHAPE"


def test_a_chunk_with_nan_is_refused():
    with pytest.raises(PeerError) as error:
        put_chunk(np.zeros(4, np.float32), 0, np.array([1, np.nan, 2, 3], "<f4").tobytes())
    assert error.value.reason == "NOT_FINITE"


def test_a_large_models_chunks_grow_so_that_their_digests_fit_in_a_message():
    assert chunk_sizes(2**31) == [4 * limits.MIB] * 2048
    for params in (2**31 + 1, 6_478_000_000, limits.model_params_max):
        sizes = chunk_sizes(params)
        assert 1024 < len(sizes) <= limits.chunks_max
        assert sum(sizes) == 4 * params
        assert 2 * 34 * len(sizes) < limits.message_bytes_max
    assert limits.chunks_max <= limits.array_items_max


def test_chunks_that_grew_come_back(monkeypatch):
    monkeypatch.setattr(limits, "chunk_bytes", 64)
    monkeypatch.setattr(limits, "chunks_max", 4)
    array = numbers(5, 200)
    chunks = chunks_of(array)
    assert [len(chunk) for chunk in chunks] == chunk_sizes(200) == [256, 256, 256, 32]
    again = np.zeros_like(array)
    for place, chunk in enumerate(chunks):
        put_chunk(again, place, chunk)
    assert np.array_equal(again, array)


def test_norms_neither_overflow_nor_lose_the_small():
    assert l2_norm(np.full(100, 1e30, np.float32)) == pytest.approx(1e31, rel=1e-6)
    assert l2_norm(np.full(100, 1e-40, np.float32)) == pytest.approx(1e-39, rel=1e-4)
    assert l2_norm(np.zeros(10, np.float32)) == 0
    array = numbers(3, 200_000)
    assert l2_norm(array) == pytest.approx(np.linalg.norm(array.astype(np.float64)), rel=1e-12)
    assert limits.chunk_bytes % 4 == 0
