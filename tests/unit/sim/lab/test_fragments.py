"""Groups of whole tensors, as even as they can be, and the way there and back."""

import numpy as np
import pytest

from p2pdiloco.errors import OperatorError
from p2pdiloco.run_spec import TensorSpec
from p2pdiloco.sim.lab.fragments import fragments_of, gather, scatter


def tensors(*sizes):
    return tuple(TensorSpec(f"t{place}", (size,)) for place, size in enumerate(sizes))


def names(fragments):
    return [[tensor.name for tensor in fragment.tensors] for fragment in fragments]


def test_the_largest_tensor_goes_to_the_emptiest_fragment():
    # 7 | 6, then 5 to the 6, 4 to the 7: a tie, so 3 goes to the first and 2 to the second.
    assert names(fragments_of(tensors(2, 3, 4, 5, 6, 7), 2)) == [["t1", "t2", "t5"], ["t0", "t3", "t4"]]
    assert names(fragments_of(tensors(5, 5, 5), 3)) == [["t0"], ["t1"], ["t2"]]


def test_every_value_is_in_one_fragment():
    specs = tensors(11, 3, 8, 1, 1, 20, 8, 5)
    flat = np.arange(57, dtype=np.float32)
    for count in (1, 2, 3, 8):
        fragments = fragments_of(specs, count)
        together = np.concatenate([gather(flat, fragment) for fragment in fragments])
        assert sorted(together.tolist()) == flat.tolist()
        assert [len(gather(flat, f)) for f in fragments] == [f.size for f in fragments]
        assert all(f.tensors for f in fragments)


def test_one_fragment_is_everything_in_one_piece_without_a_copy():
    (everything,) = fragments_of(tensors(4, 9, 2), 1)
    assert everything.slices == (slice(0, 15),)
    flat = np.zeros(15, np.float32)
    assert np.shares_memory(gather(flat, everything), flat)


def test_values_return_to_their_places():
    first, second = fragments_of(tensors(2, 4, 3), 2)
    assert (names([first, second]), first.slices, second.slices) == (
        [["t1"], ["t0", "t2"]],
        (slice(2, 6),),
        (slice(0, 2), slice(6, 9)),
    )
    flat = np.zeros(9, np.float32)
    scatter(flat, second, np.array([1, 2, 3, 4, 5], np.float32))
    assert flat.tolist() == [1, 2, 0, 0, 0, 0, 3, 4, 5]
    assert gather(flat, second).tolist() == [1, 2, 3, 4, 5]


def test_more_fragments_than_tensors_are_refused():
    with pytest.raises(OperatorError, match=r"fragments is 4 and the model has 3 tensors.*to 3 or less"):
        fragments_of(tensors(1, 2, 3), 4)
