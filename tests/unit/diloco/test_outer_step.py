"""Nesterov scaled by rho (algorithm.md 4): DiLoCo's at rho = 1, and what splitting a round keeps."""

import numpy as np
import pytest

from p2pdiloco.diloco.global_state import GlobalState
from p2pdiloco.diloco.outer_step import apply_outer_step
from p2pdiloco.rules.outer_step import scalars_of
from p2pdiloco.run_spec import OuterSpec

MU = 0.9


def zeros(params):
    return GlobalState(np.zeros(params, np.float32), np.zeros(params, np.float32))


def scalars(parts, n_eff=1.0):
    """Of one part of a full round that comes in `parts` equal ones."""
    return scalars_of(OuterSpec(mu=MU, eta_alone=0.4, eta_eight=0.8), 1.0, parts, n_eff)


def test_at_rho_1_it_is_the_nesterov_of_diloco():
    """The outer optimizer of arXiv 2311.08105: M <- mu M + g, G <- G - eta (g + mu M), in float64."""
    rng = np.random.default_rng(0)
    state = GlobalState(rng.standard_normal(5000).astype(np.float32), np.zeros(5000, np.float32))
    params, momentum = state.params.astype(np.float64), np.zeros(5000)
    for _ in range(10):
        g = rng.standard_normal(5000).astype(np.float32)
        momentum = MU * momentum + g
        params = params - 0.8 * (g + MU * momentum)
        apply_outer_step(state, g.copy(), scalars(1, n_eff=8.0), MU)
    assert np.allclose(state.params, params, atol=1e-4)
    assert np.allclose(state.momentum, momentum, atol=1e-4)


@pytest.mark.parametrize("parts", [2, 4, 32])
def test_a_round_of_equal_deltas_in_parts_makes_the_same_momentum(parts):
    state, whole = zeros(1), zeros(1)
    whole.momentum[:] = state.momentum[:] = 2.0
    for _ in range(parts):
        apply_outer_step(state, np.ones(1, np.float32), scalars(parts), MU)
    apply_outer_step(whole, np.ones(1, np.float32), scalars(1), MU)
    assert state.momentum[0] == pytest.approx(whole.momentum[0], rel=1e-5)


def test_displacement_is_equal_in_steady_state_but_not_from_a_cold_start():
    def displacement(parts, momentum):
        state = zeros(1)
        state.momentum[:] = momentum
        for _ in range(parts):
            apply_outer_step(state, np.ones(1, np.float32), scalars(parts), MU)
        return -state.params[0] / np.float32(0.4)

    assert displacement(4, momentum=10.0) == pytest.approx(displacement(1, momentum=10.0), rel=1e-5)
    assert displacement(1, momentum=0.0) == pytest.approx(1.9, abs=0.005)
    assert displacement(4, momentum=0.0) == pytest.approx(1.57, abs=0.005)


def test_a_lone_stale_delta_counts_little():
    state = zeros(1)
    apply_outer_step(state, np.ones(1, np.float32), scalars_of(OuterSpec(), 0.5, 16, 8.0), MU)
    assert -state.params[0] < 0.04


def test_rounds_each_operation_by_itself():
    rng = np.random.default_rng(1)
    params, momentum, g = (rng.standard_normal(70_000).astype(np.float32) for _ in range(3))
    state = GlobalState(params.copy(), momentum.copy())
    s = scalars(3, n_eff=3.0)
    apply_outer_step(state, g.copy(), s, MU)
    f = np.float32
    m = (momentum * f(s.mu_r)).astype(f) + (g * f(s.momentum_gain)).astype(f)
    p = params - ((m * f(MU)).astype(f) + g) * (f(s.eta) * f(s.rho))
    assert state.momentum.tobytes() == m.tobytes()
    assert state.params.tobytes() == p.tobytes()
