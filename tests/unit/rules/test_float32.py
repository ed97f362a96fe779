import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdiloco.rules.float32 import f32, is_f32, near


@given(st.floats(-3e38, 3e38))
def test_rounds_as_numpy_does(x):
    assert f32(x) == float(np.float32(x))
    assert is_f32(f32(x))


def test_what_is_out_of_range_is_our_own_fault():
    for x in (1e39, float("nan"), float("inf")):
        with pytest.raises(OverflowError):
            f32(x)
        assert not is_f32(x)
    assert not is_f32(0.1)


def test_near_is_relative_and_refuses_what_is_not_finite():
    assert near(1.0, 1.00009, 1e-4)
    assert not near(1.0, 1.0002, 1e-4)
    assert near(0.0, 0.0, 1e-4)
    assert not near(0.0, 1e-9, 1e-4)
    assert not near(1e-20, 2e-20, 1e-4)
    assert not near(float("nan"), float("nan"), 1e-4)
    assert not near(float("inf"), float("inf"), 1e-4)
