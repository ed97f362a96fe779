"""A stranger's word sets no loss on the page: only the peer that the log chooses may give it."""

from __future__ import annotations

import pytest

from p2pdiloco import limits
from p2pdiloco.rules.evaluation import evaluation_order
from p2pdiloco.rules.state import after_outer_step, genesis_state
from p2pdiloco.status.evaluators import Evaluators
from p2pdiloco.wire.log import open_body
from tests.conftest import peer_of

LIAR = 9
ALL = [(1, 10_000, 3.0), (2, 10_000, 3.0), (3, 10_000, 3.0)]


def points(run) -> list[tuple[int, float]]:
    learning = run.builder.build(run.now).learning
    return [(p.version, p.loss) for p in learning.evaluations]


def steps(run, n: int) -> None:
    for _ in range(n):
        run.step(ALL)


@pytest.fixture
def run(fake_run):
    """Three nodes train and a liar is announced."""
    made = fake_run()
    for i in (1, 2, 3, LIAR):
        made.node(i)
    made.listed()
    return made


def test_the_chosen_one_is_believed_and_a_liar_is_not_whoever_is_first(run):
    steps(run, 4)
    run.evaluated(0.01, by=LIAR)
    assert points(run) == []
    chosen = run.builder.evaluators.order(4)[0]
    others = [i for i in (1, 2, 3) if run.builder.evaluators.order(4).index(peer_of(i)) > 0]
    for i in others:  # contributors, but it is not their turn
        run.evaluated(0.02, by=i)
    assert points(run) == []
    run.evaluated(2.9)
    run.evaluated(0.03)  # once
    assert points(run) == [(4, 2.9)]
    steps(run, 4)
    assert run.builder.evaluators.order(8)[0] != chosen  # they take turns


def test_versions_that_nobody_evaluates_are_not_taken(run):
    steps(run, 5)
    run.evaluated(0.01, by=1, version=5)
    run.evaluated(0.01, by=1, version=3)
    assert points(run) == []


def test_the_next_in_order_stands_in_after_two_passes(run):
    steps(run, 4)
    second, third = (
        next(i for i in (1, 2, 3) if peer_of(i) == p) for p in run.builder.evaluators.order(4)[1:]
    )
    run.now += 2 * run.spec.inner.pass_s - 0.1
    run.evaluated(2.5, by=second)
    assert points(run) == []
    run.now += 0.1
    run.evaluated(0.01, by=LIAR)
    run.evaluated(0.02, by=third)
    assert points(run) == []
    run.evaluated(2.5, by=second)
    assert points(run) == [(4, 2.5)]


def test_the_last_version_is_due_whatever_the_cadence(run):
    steps(run, 5)
    run.owner("finish")
    run.evaluated(0.01, by=LIAR)
    run.evaluated(2.2)
    assert points(run) == [(5, 2.2)]


def test_of_version_0_the_first_whom_the_log_lists(run):
    """Nobody is chosen yet, so its reports wait; the demo's first loss must not be a stranger's."""
    run.evaluated(0.01, by=LIAR)
    run.evaluated(5.5, by=2)
    run.evaluated(5.6, by=1)
    assert points(run) == []
    run.step(ALL)
    assert points(run) == [(0, 5.5)]
    run.evaluated(0.02, by=1, version=0)
    assert points(run) == [(0, 5.5)]


def test_of_version_0_a_contributor_may_report_late(run):
    run.step(ALL)
    run.evaluated(0.01, by=LIAR, version=0)
    run.evaluated(5.5, by=3, version=0)
    assert points(run) == [(0, 5.5)]


def test_strangers_reports_of_version_0_are_bounded(run, monkeypatch):
    monkeypatch.setattr(limits, "peers_max", 5)
    for i in range(10, 30):
        run.evaluated(0.01, by=i)
    assert len(run.builder.evaluators._of_genesis) == 5


def test_versions_that_wait_are_bounded(run, monkeypatch):
    monkeypatch.setattr(limits, "evaluations_due_max", 2)
    steps(run, 12)
    assert [v for v in range(13) if run.builder.evaluators.order(v)] == [8, 12]


def test_it_chooses_as_the_whole_rules_state_would(run):
    """It follows the log without peers' sequences and trust; those must not matter."""
    rules = genesis_state(run.spec)
    lean = Evaluators(run.spec, 0.0)
    for v in range(1, 41):
        here = [d for d in ALL if v < 20 or d[0] != 2] + ([(4, 500, 3.0)] if v % 7 == 0 else [])
        run.step(here)
        step = open_body(run.entries[-1][0].body).content
        rules = after_outer_step(rules, step, run.spec)
        lean.entry_applied(step, None)
        if v % run.spec.eval_every == 0:
            assert lean.order(v) == evaluation_order(rules)
