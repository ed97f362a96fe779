"""Planning an outer step, and refusing one planned otherwise (algorithm.md 4, 5; scenarios D6, S9)."""

import math
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from p2pdiloco.ids import NO_DIGEST
from p2pdiloco.rules.float32 import f32
from p2pdiloco.rules.outer_step import check_outer_step, clip_factors, plan_outer_step, scalars_of
from p2pdiloco.rules.state import after_owner
from p2pdiloco.run_spec import OuterSpec
from p2pdiloco.wire.log import Left, OwnerWord


def grown(log, nodes=range(4), entries=6):
    for _ in range(entries):
        log.deliver(*nodes)
    return log


def norms_of(step):
    return {c.delta: c.norm for c in step.contributions}


# --- weights and scalars


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    passes=st.dictionaries(
        st.integers(0, 40), st.tuples(st.integers(1, 40), st.integers(0, 5)), min_size=1, max_size=32
    ),
    seed=st.integers(0, 1000),
)
def test_weights_sum_to_the_divisor_and_arrival_order_changes_nothing(make_log, passes, seed):
    log = grown(make_log())
    candidates = [log.next_candidate(n, base=b, steps=s, norm=1 + n / 7) for n, (s, b) in passes.items()]
    step = log.plan(candidates)
    assert step.scalars.weight_sum == f32(math.fsum(c.weight for c in step.contributions))
    assert 0 < step.scalars.rho <= 1
    assert step.clock == log.state.clock + sum(c.tokens for c in step.contributions)
    random.Random(seed).shuffle(candidates)
    assert log.plan(candidates) == step


def test_staleness_in_rounds_and_its_weight(log):
    grown(log, range(2), 8)
    # base 5: three entries of a full round each since, and one round late is not late at all
    step = log.plan([log.next_candidate(0, base=5), log.next_candidate(1, base=7)])
    by_base = {c.base_version: c for c in step.contributions}
    assert by_base[7].staleness == 0
    assert by_base[7].weight == 10
    assert by_base[5].staleness == 2
    assert by_base[5].weight == f32(10 * math.exp(-0.14))
    assert step.scalars.rho == f32(f32(10 + f32(10 * math.exp(-0.14))) / 20)


def test_constant_decay(make_log):
    log = grown(make_log(outer={"decay": "constant"}), range(2), 8)
    step = log.plan([log.next_candidate(0, base=2)])
    assert step.contributions[0].staleness == 5
    assert step.contributions[0].weight == 10


def test_polynomial_decay(make_log):
    log = grown(make_log(outer={"decay": "polynomial"}), range(2), 8)
    step = log.plan([log.next_candidate(0, base=4)])
    assert step.contributions[0].staleness == 3
    assert step.contributions[0].weight == 5


def test_at_rho_1_it_is_dilocos_nesterov():
    scalars = scalars_of(OuterSpec(mu=0.9, eta_eight=0.8), 80.0, 80, 8.0)
    assert scalars.rho == 1
    assert scalars.mu_r == f32(0.9)
    assert scalars.momentum_gain == 1
    assert scalars.eta == f32(0.8)


@pytest.mark.parametrize(("n_eff", "eta"), [(0, 0.5), (1, 0.5), (2, 0.55), (4, 0.6), (8, 0.65), (60, 0.65)])
def test_eta_follows_the_number_of_nodes(n_eff, eta):
    assert scalars_of(OuterSpec(), 1.0, 10, n_eff).eta == pytest.approx(eta, abs=1e-4)


def test_rounding_never_lifts_rho_above_1():
    assert scalars_of(OuterSpec(), 16777228.0, 16777219, 1.0).rho == 1


@pytest.mark.parametrize(("mu", "gain"), [(0.0, 1.0), (1.0, 0.25)])
def test_momentum_at_its_ends(mu, gain):
    assert scalars_of(OuterSpec(mu=mu), 25.0, 100, 1.0).momentum_gain == gain


def test_two_halves_of_a_full_round_make_the_momentum_of_one():
    outer = OuterSpec()
    whole, half = scalars_of(outer, 8.0, 8, 1.0), scalars_of(outer, 4.0, 8, 1.0)
    assert half.mu_r**2 == pytest.approx(whole.mu_r, rel=1e-6)
    assert half.momentum_gain * (1 + half.mu_r) == pytest.approx(whole.momentum_gain, rel=1e-6)


# --- who is taken


def test_one_delta_of_each_peer_its_lowest_sequence(log, name_peer, make_candidate):
    candidates = [make_candidate(name_peer(1), s, 0) for s in (3, 2, 5)] + [log.next_candidate(2)]
    step = log.plan(candidates)
    assert sorted(c.sequence for c in step.contributions) == [1, 2]


def test_the_oldest_32_are_taken_and_the_rest_wait(log):
    candidates = [log.next_candidate(n) for n in range(40)]
    step = log.plan(candidates)
    assert {c.delta for c in step.contributions} == {c.delta for c in candidates[:32]}


def test_one_blob_under_two_names_counts_once(log):
    honest = log.next_candidate(1)
    step = log.plan([honest, log.next_candidate(2)._replace(delta=honest.delta)])
    assert [c.peer for c in step.contributions] == [honest.peer]


def test_what_no_voter_would_accept_is_left_alone(log, name_peer, make_candidate):
    grown(log)
    log.state = after_owner(log.state, OwnerWord("revoke", 1, 0, name_peer(3), bytes(64)))
    bad = [
        log.next_candidate(3),
        make_candidate(name_peer(0), 6, 6),
        log.next_candidate(1, base=7),
        log.next_candidate(2, steps=41),
    ]
    assert log.plan(bad) is None
    step = log.plan([*bad, log.next_candidate(9)])
    assert [c.peer for c in step.contributions] == [name_peer(9)]
    assert step.refused == ()


def test_the_too_late_are_refused_beside_a_listed_one_and_alone_make_no_step(make_log):
    log = grown(make_log(outer={"staleness_max": 2}))
    late = log.next_candidate(8, base=2)
    assert log.plan([late]) is None
    step = log.plan([late, log.next_candidate(1)])
    assert [(r.delta, r.reason, r.base_version) for r in step.refused] == [(late.delta, "TOO_LATE", 2)]
    in_time = log.next_candidate(8, base=3)
    assert len(log.plan([in_time, log.next_candidate(1)]).contributions) == 2


def test_no_weight_no_step(make_log):
    """Scenario D6: the weights underflow to zero, so there is no step, never 0/0."""
    log = grown(make_log(outer={"lambda_": 10.0}), range(1), 16)
    assert log.plan([log.next_candidate(0, base=0)]) is None
    assert log.plan([]) is None
    fresh = log.plan([log.next_candidate(0, base=0), log.next_candidate(1)])
    assert sorted(c.weight for c in fresh.contributions) == [0, 10]


def test_nothing_while_paused_or_over(log):
    one = log.next_candidate(1)
    step = log.plan([one])
    for kind, why in (("pause", "the run is paused"), ("finish", "the run is over")):
        state = after_owner(log.state, OwnerWord(kind, 1, 0, b"", bytes(64)))
        assert plan_outer_step(state, log.spec, [one], []) is None
        assert check_outer_step(state, log.spec, step, norms_of(step)) == why


# --- caps


def test_nobody_weighs_more_than_half_once_there_are_three(log):
    two = log.plan([log.next_candidate(1, steps=40), log.next_candidate(2, steps=5)])
    assert sorted(c.tokens for c in two.contributions) == [5, 40]
    three = log.plan([log.next_candidate(n, steps=s) for n, s in ((1, 40), (2, 5), (3, 5))])
    assert sorted(c.tokens for c in three.contributions) == [5, 5, 10]
    assert three.clock == 20


def test_newcomers_together_weigh_a_tenth(make_log):
    log = make_log(admission="open", trust_tokens=50, bootstrap_tokens=80)
    grown(log, range(2))
    crowd = [log.next_candidate(n, steps=40) for n in range(9, 13)]
    step = log.plan([log.next_candidate(n, steps=40) for n in (0, 1)] + crowd)
    assert sorted(c.tokens for c in step.contributions) == [2, 2, 2, 2, 40, 40]
    step = log.plan([log.next_candidate(n, steps=40) for n in (0, 1)] + crowd[:1])
    assert sorted(c.tokens for c in step.contributions) == [8, 40, 40]
    alone = log.plan([log.next_candidate(n) for n in (9, 10)])
    assert [c.tokens for c in alone.contributions] == [10, 10]


def test_one_trusted_node_and_a_crowd_of_newcomers(make_log, name_peer):
    log = grown(make_log(admission="open", trust_tokens=50, bootstrap_tokens=50), range(1))
    step = log.plan([log.next_candidate(0)] + [log.next_candidate(n) for n in range(5, 15)])
    tokens = {c.peer: c.tokens for c in step.contributions}
    assert tokens[name_peer(0)] == 10
    assert sum(tokens.values()) <= 11


# --- clip


def test_fast_honest_nodes_are_not_clipped():
    """Norms measured at speeds 1, 0.8, 0.6, 0.3 (algorithm.md 4): nobody is cut, at any number of steps."""
    measured = [(2.06, 100), (1.68, 80), (1.35, 60), (0.83, 30)]
    assert clip_factors_of(measured) == [1, 1, 1, 1]
    # A prolonged pass of 4 H measures about 2.8 times the norm; the limit allows 4.
    assert clip_factors_of([*measured, (2.06 * 2.8, 400)])[-1] == 1


def clip_factors_of(measured, log_norms=()):
    class State:
        norms = log_norms

    return clip_factors(State, measured)


def test_an_exaggerated_delta_is_clipped_to_twice_the_median():
    factors = clip_factors_of([(1.0, 10), (1.0, 10), (1.0, 10), (100.0, 10)])
    assert factors == [1, 1, 1, f32(0.02)]


def test_with_fewer_than_three_values_nothing_is_clipped():
    assert clip_factors_of([(1.0, 10), (100.0, 10)]) == [1, 1]
    assert clip_factors_of([(100.0, 10)], (((1.0, 10),),)) == [1]


def test_with_fewer_than_three_contributors_the_log_helps(log):
    grown(log, range(3), 2)
    step = log.plan([log.next_candidate(1, norm=100.0)])
    assert step.contributions[0].clip == f32(0.02)


def test_zero_deltas_clip_nobody():
    assert clip_factors_of([(0.0, 10), (0.0, 10), (1.0, 10)]) == [1, 1, 1]
    assert clip_factors_of([(0.0, 10)] * 3 + [(1.0, 10)] * 3) == [1] * 6


# --- a voter's check


def contribution_with(**changes):
    return lambda s: replace(s, contributions=(replace(s.contributions[0], **changes), *s.contributions[1:]))


def scalars_with(**changes):
    return lambda s: replace(s, scalars=replace(s.scalars, **changes))


LIES = {
    "version": (lambda s: replace(s, version=s.version + 1), "version"),
    "fragment": (lambda s: replace(s, fragment=1), "fragment"),
    "order": (lambda s: replace(s, contributions=s.contributions[::-1]), "order of their digests"),
    "twice": (lambda s: replace(s, contributions=s.contributions + s.contributions[-1:]), "not in the order"),
    "two of one peer": (
        lambda s: contribution_with(peer=s.contributions[1].peer)(s), "two deltas of one peer"),
    "sequence": (contribution_with(sequence=6), "passed over"),
    "base to come": (contribution_with(base_version=7), "not made yet"),
    "steps": (contribution_with(steps=41), "at most 40"),
    "no steps": (contribution_with(steps=0), "0 inner steps"),
    "tokens": (contribution_with(tokens=11), "11 tokens"),
    "unknown delta": (contribution_with(delta=bytes(32)), "not held"),
    "norm": (contribution_with(norm=1.001), "norm"),
    "staleness": (contribution_with(staleness=1.0), "staleness"),
    "weight": (contribution_with(weight=f32(10.002)), "weight"),
    "clip": (contribution_with(clip=0.5), "clip"),
    "not float32": (contribution_with(weight=10.0 + 1e-9), "float32"),
    "weight sum": (scalars_with(weight_sum=41.0), "weight_sum"),
    "rho": (scalars_with(rho=f32(0.9997)), "rho"),
    "mu_r": (scalars_with(mu_r=0.25), "mu_r"),
    "momentum gain": (scalars_with(momentum_gain=2.0), "momentum_gain"),
    "eta": (scalars_with(eta=1.5), "eta"),
    "clock": (lambda s: replace(s, clock=s.clock + 1), "clock"),
    "t_full": (lambda s: replace(s, t_full=s.t_full + 1), "T_full"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_refused_with_its_reason(log, lie):
    grown(log)
    step = log.plan([log.next_candidate(n, steps=9 + (n == 3)) for n in range(4)])
    change, reason = LIES[lie]
    assert reason in check_outer_step(log.state, log.spec, change(step), norms_of(step))


def test_figures_within_the_tolerance_are_accepted_and_a_re_proposal_has_more(log):
    grown(log)
    step = log.plan([log.next_candidate(n) for n in range(4)])
    near = scalars_with(rho=f32(step.scalars.rho * (1 - 5e-5)))(step)
    assert check_outer_step(log.state, log.spec, near, norms_of(step)) is None
    further = scalars_with(rho=f32(step.scalars.rho * (1 - 5e-4)))(step)
    assert check_outer_step(log.state, log.spec, further, norms_of(step)) is not None
    assert check_outer_step(log.state, log.spec, further, norms_of(step), relative=1e-3) is None


def test_a_norm_measured_a_little_differently_does_not_split_the_voters(log):
    """The declared norm, near the measured one, is what clips are computed from."""
    grown(log)
    candidates = [log.next_candidate(n, norm=1 + 9 * (n == 3)) for n in range(4)]
    step = log.plan(candidates)
    assert min(c.clip for c in step.contributions) < 1
    measured = {c.delta: c.norm * (1 + 9e-5 * (-1) ** i) for i, c in enumerate(candidates)}
    assert check_outer_step(log.state, log.spec, step, measured) is None


def test_refusing_a_delta_that_is_in_time_is_a_lie(make_log):
    log = grown(make_log(outer={"staleness_max": 2}))
    late = log.next_candidate(8, base=2)
    step = log.plan([late, log.next_candidate(1)])
    forged = replace(step, refused=(replace(step.refused[0], base_version=3),))
    assert "not too late" in check_outer_step(log.state, log.spec, forged, norms_of(step))
    forged = replace(step, refused=(replace(step.refused[0], reason="OUTLIER"),))
    assert "OUTLIER" in check_outer_step(log.state, log.spec, forged, norms_of(step))


def test_listing_a_delta_that_is_too_late_is_a_lie(make_log):
    log = grown(make_log(outer={"staleness_max": 2}))
    forged = contribution_with(base_version=2)(log.plan([log.next_candidate(1)]))
    assert "too late" in check_outer_step(log.state, log.spec, forged, norms_of(forged))


def test_a_revoked_peer_is_refused(log):
    grown(log)
    step = log.plan([log.next_candidate(1)])
    state = after_owner(log.state, OwnerWord("revoke", 1, 0, step.contributions[0].peer, bytes(64)))
    assert "revoked" in check_outer_step(state, log.spec, step, norms_of(step))


def test_goodbyes_are_sorted_and_checked(log, name_peer):
    grown(log)
    step = log.plan([log.next_candidate(0), log.next_candidate(1)], left=(2, 3))
    assert step.t_full == 20
    backwards = replace(step, left=step.left[::-1])
    assert "goodbyes" in check_outer_step(log.state, log.spec, backwards, norms_of(step))
    added = replace(step, left=(Left(name_peer(2), NO_DIGEST),))
    assert "T_full" in check_outer_step(log.state, log.spec, added, norms_of(step))
