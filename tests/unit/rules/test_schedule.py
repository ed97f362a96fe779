"""Learning rate by the token clock, moments' warm-up, and when a pass ends."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdiloco.rules.passes import Next, Pass, next_move, steps_left
from p2pdiloco.rules.schedule import learning_rate, moments_warmup
from p2pdiloco_node.training.presets import PRESETS, inner_spec

INNER = msgspec.structs.replace(inner_spec("llama:1m", 10**6), lr=1.0, lr_min_share=0.1, warmup_tokens=1000)


def rate(clock: int) -> float:
    return learning_rate(INNER, clock, target_tokens=11_000, step_tokens=100)


def test_warm_up_cosine_and_floor() -> None:
    assert rate(0) == pytest.approx(0.1)  # the first step of a run moves something
    assert rate(400) == pytest.approx(0.5)
    assert rate(1000) == pytest.approx(1.0)
    assert rate(6000) == pytest.approx(0.55)  # half way down
    assert rate(11_000) == pytest.approx(0.1)
    assert rate(10**9) == pytest.approx(0.1)


@given(st.integers(900, 20_000), st.integers(0, 5000))
def test_after_the_warm_up_it_never_rises(clock: int, later: int) -> None:
    assert rate(clock) >= rate(clock + later) >= 0.1


def test_no_warm_up() -> None:
    inner = msgspec.structs.replace(INNER, warmup_tokens=0)
    assert learning_rate(inner, 0, target_tokens=100, step_tokens=10) == 1.0


def test_moments_warm_up() -> None:
    inner = msgspec.structs.replace(INNER, moments_warmup_steps=4)
    assert [moments_warmup(inner, n) for n in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert moments_warmup(msgspec.structs.replace(INNER, moments_warmup_steps=0), 0) == 1.0


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_warms_up_within_its_run(name: str) -> None:
    inner = inner_spec(name, 10**9)
    assert 0 < inner.warmup_tokens < 10**9


def move(steps: int, seconds: float, *, allowed: bool) -> Next:
    current = Pass(base_version=3, data_first=0, steps=steps, seconds=seconds)
    return next_move(current, inner_steps=10, pass_s=5.0, allowed=allowed)


def test_a_pass_ends_after_its_steps_or_its_seconds() -> None:
    assert move(9, 4.9, allowed=True) is Next.STEP
    assert move(10, 1.0, allowed=True) is Next.FINISH
    assert move(2, 5.0, allowed=True) is Next.FINISH  # DyLU: a slow node takes fewer steps


def test_a_pass_has_at_least_one_step() -> None:
    assert move(0, 99.0, allowed=True) is Next.STEP
    assert move(0, 99.0, allowed=False) is Next.STEP


def test_with_too_much_in_flight_it_is_prolonged_fourfold_then_waits() -> None:
    assert move(39, 19.9, allowed=False) is Next.STEP
    assert move(40, 1.0, allowed=False) is Next.WAIT
    assert move(1, 20.0, allowed=False) is Next.WAIT
    assert move(40, 20.0, allowed=True) is Next.FINISH


def test_a_paused_run_prolongs_nothing_and_begins_nothing() -> None:
    """A pause took inner steps up to four times a pass's length, which nobody had asked for."""

    def paused(steps: int, seconds: float, *, allowed: bool = True) -> Next:
        current = Pass(base_version=3, data_first=0, steps=steps, seconds=seconds)
        return next_move(current, inner_steps=10, pass_s=5.0, allowed=allowed, prolong=False)

    assert paused(9, 4.9) is Next.STEP  # the pass under way ends as always
    assert paused(10, 1.0) is Next.FINISH
    assert paused(2, 5.0) is Next.FINISH
    assert paused(10, 1.0, allowed=False) is Next.WAIT
    assert paused(0, 0.0) is Next.WAIT


def after_adoption(steps: int, seconds: float, then: int) -> Next:
    """`then` more steps of half a second each, with a second adoption half-way."""
    current = Pass(base_version=3, data_first=0, steps=steps, seconds=seconds)
    current.adopted()
    for n in range(then):
        current.add_step(1.0, 0.5)
        if n == then // 2:
            current.adopted()
    return next_move(current, inner_steps=10, pass_s=5.0, allowed=True)


def test_the_first_adoption_begins_the_count_anew() -> None:
    assert after_adoption(6, 3.0, 9) is Next.STEP
    assert after_adoption(6, 3.0, 10) is Next.FINISH  # by steps and seconds after it, whatever came later
    assert after_adoption(0, 0.0, 10) is Next.FINISH


def test_no_pass_is_longer_than_what_the_log_takes() -> None:
    assert after_adoption(36, 10.0, 4) is Next.FINISH


@given(
    st.integers(1, 39),
    st.integers(0, 30),
    st.sampled_from([0.1, 0.3, 0.9, 2.0]),
    st.sampled_from([5.0, math.inf]),
)
def test_who_leaps_ahead_lands_where_the_steps_end(
    steps: int, then: int, step_s: float, pass_s: float
) -> None:
    """`steps_left` agrees with `next_move` taken step by step, adoption and the cap of 4 H included."""
    current = Pass(base_version=0, data_first=0, steps=steps, seconds=steps * step_s)
    if then:
        current.adopted()
    rules = {"inner_steps": 10, "pass_s": pass_s}
    left = steps_left(current, step_s=step_s, **rules)  # type: ignore[arg-type]
    taken = 0
    while taken == 0 or next_move(current, allowed=True, **rules) is not Next.FINISH:  # type: ignore[arg-type]
        current.add_step(1.0, step_s)
        taken += 1
    assert abs(left - taken) <= 1  # seconds are a sum, which may round
    assert current.steps <= 40
    if math.isinf(pass_s):
        assert left == taken


def test_loss_is_the_mean_of_the_pass() -> None:
    current = Pass(base_version=0, data_first=0)
    assert current.loss == 0.0
    current.add_step(3.0, 0.5)
    current.add_step(2.0, 0.25)
    assert (current.loss, current.steps, current.seconds) == (2.5, 2, 0.75)
