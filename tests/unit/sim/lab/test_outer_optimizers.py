"""Each rule's displacement after one and two steps, worked out by hand."""

import math

import numpy as np
import pytest

from p2pdiloco.diloco.global_state import GlobalState
from p2pdiloco.diloco.outer_step import apply_outer_step
from p2pdiloco.sim.lab.experiment import Outer
from p2pdiloco.sim.lab.outer_optimizers import make_optimizer


def moved(optimizer, steps):
    """Params after `steps`, pairs of (mean, planned), from zero."""
    params = np.zeros(len(steps[0][0]), np.float32)
    for mean, planned in steps:
        optimizer.step(params, np.array(mean, np.float32), planned)
    return params.astype(float).tolist()


def test_nesterov_is_the_products(planned):
    rng = np.random.default_rng(1)
    state = GlobalState(rng.normal(size=50).astype(np.float32), np.zeros(50, np.float32))
    params = state.params.copy()
    optimizer = make_optimizer(Outer(mu=0.9), 50)
    for rho in (1.0, 0.3):
        mean = rng.normal(size=50).astype(np.float32)
        apply_outer_step(state, mean.copy(), planned(rho=rho).scalars, 0.9)
        optimizer.step(params, mean, planned(rho=rho))
    assert params.tolist() == state.params.tolist()
    assert optimizer.momentum == pytest.approx(state.momentum * np.float32(0.1), rel=1e-5)


def test_without_momentum_it_is_sgd(planned):
    optimizer = make_optimizer(Outer(mu=0.0), 1)
    step = planned(rho=0.5, mu=0.0, eta=0.4)
    assert moved(optimizer, [([1.0], step), ([2.0], step)]) == pytest.approx([-0.6])
    assert optimizer.momentum is None


def test_delayed_nesterov_is_the_papers_with_one_delta_an_entry(planned):
    # N = 2, eta 0.5, mu 0.9. Gradients act by halves at once: -0.25 g.
    # After two: m = (1 + 3) / 2 = 2 and -0.5 * 0.9 * 2 = -0.9. After four: m = 1.8 + 1 and -0.45 * 2.8.
    optimizer = make_optimizer(Outer(mu=0.9, optimizer="delayed_nesterov", delay=2), 1)
    step = planned()
    params = np.zeros(1, np.float32)
    seen = []
    for g in (1.0, 3.0, 1.0, 1.0):
        optimizer.step(params, np.array([g], np.float32), step)
        seen.append(float(params[0]))
    assert seen == pytest.approx([-0.25, -1.9, -2.15, -3.66])
    assert optimizer.momentum == pytest.approx([0.28])


def test_delayed_nesterov_counts_deltas_and_keeps_its_pace_when_an_entry_overshoots(planned):
    optimizer = make_optimizer(Outer(mu=0.9, optimizer="delayed_nesterov", delay=2), 1)
    # Three deltas of mean 1: -0.5 * 3/2, then x = 1.5: m = (1 - 0.9^1.5) / 0.1 and -0.5 * 1.5 * 0.9 m.
    m = (1 - 0.9**1.5) / 0.1
    assert moved(optimizer, [([1.0], planned((10, 10, 10)))]) == pytest.approx([-0.75 - 0.675 * m])


def test_delayed_nesterov_lets_a_stale_delta_count_by_its_decay(planned):
    optimizer = make_optimizer(Outer(mu=0.9, optimizer="delayed_nesterov", delay=4), 1)
    assert moved(optimizer, [([1.0], planned((10,), (5,)))]) == pytest.approx([-0.5 * 0.5 / 4])


def test_adam_divides_by_the_root_of_the_mean_square(planned):
    # First step: m' = g, v' = g^2, s = sqrt((16 + 9) / 2).
    optimizer = make_optimizer(Outer(mu=0.9, optimizer="adamw", beta2=0.99), 2)
    s = math.sqrt(12.5)
    expected = [-0.5 * s * 4 / (4 + 0.1 * s), 0.5 * s * 3 / (3 + 0.1 * s)]
    assert moved(optimizer, [([4.0, -3.0], planned())]) == pytest.approx(expected)
    assert optimizer.momentum == pytest.approx([0.4, -0.3])


def test_adam_in_two_half_rounds_of_the_same_mean_is_one_round(planned):
    half = make_optimizer(Outer(mu=0.9, optimizer="adamw"), 2)
    whole = make_optimizer(Outer(mu=0.9, optimizer="adamw"), 2)
    two = moved(half, [([4.0, -3.0], planned(rho=0.5)), ([4.0, -3.0], planned(rho=0.5))])
    assert two == pytest.approx(moved(whole, [([4.0, -3.0], planned())]))
    assert half.momentum == pytest.approx(whole.momentum)


def test_adam_stays_where_it_is_without_a_gradient(planned):
    assert moved(make_optimizer(Outer(mu=0.9, optimizer="adamw"), 1), [([0.0], planned())]) == [0.0]


def test_lion_moves_every_coordinate_alike(planned):
    optimizer = make_optimizer(Outer(mu=0.9, optimizer="lion", beta2=0.5), 2)
    # s = sqrt((16 + 9) / 2), the average of squares is half filled: 6.25.
    first = 0.5 * math.sqrt(12.5)
    assert moved(optimizer, [([4.0, -3.0], planned())]) == pytest.approx([-first, first])
    assert optimizer.momentum == pytest.approx([2.0, -1.5])
    # 0.9 m + 0.1 g keeps its signs against a small g of the other sign; rho halves the step.
    fading = 0.5**0.5
    square = (fading * 6.25 + (1 - fading) * 1.0) / (1 - 0.5**1.5)
    second = 0.25 * math.sqrt(square)
    assert moved(optimizer, [([-1.0, 1.0], planned(rho=0.5))]) == pytest.approx([-second, second])


def test_textbook_takes_each_delta_whole_with_its_decay(planned):
    # s = 1: m = 1, -0.5 (1 + 0.9). s = 0.5: m = 0.9 + 0.5 * 2, -0.5 (1 + 1.71).
    optimizer = make_optimizer(Outer(mu=0.9, optimizer="textbook", policy="immediate"), 1)
    steps = [([1.0], planned(rho=0.1)), ([2.0], planned((10,), (5,), rho=0.1))]
    assert moved(optimizer, steps) == pytest.approx([-0.95 - 1.355])
    assert optimizer.momentum == pytest.approx([0.19])


def test_textbook_takes_two_of_an_entry_one_after_the_other(planned):
    together = make_optimizer(Outer(mu=0.9, optimizer="textbook", policy="immediate"), 1)
    apart = make_optimizer(Outer(mu=0.9, optimizer="textbook", policy="immediate"), 1)
    assert moved(together, [([1.0], planned((10, 10)))]) == pytest.approx(
        moved(apart, [([1.0], planned()), ([1.0], planned())])
    )


def test_four_equal_deltas_compound_in_the_textbook_rule_and_not_in_the_products(planned):
    # arXiv 2401.09135, section 4: 12.14 against 1.9 for one averaged update.
    textbook = make_optimizer(Outer(mu=0.9, optimizer="textbook", policy="immediate"), 1)
    assert moved(textbook, [([1.0], planned(eta=1.0))] * 4) == pytest.approx([-12.1441], rel=1e-4)
    product = make_optimizer(Outer(mu=0.9), 1)
    assert moved(product, [([1.0], planned(rho=0.25, eta=1.0))] * 4)[0] > -1.9
