"""Which figures go to TensorBoard and W&B, and at which place of the run's token clock."""

from __future__ import annotations

from typing import Any

import pytest

from p2pdiloco.ids import Digest
from p2pdiloco.protocol.actions import InstallEntry
from p2pdiloco.run_spec import SampleSpec
from p2pdiloco.wire.log import OuterStep, open_body
from p2pdiloco_node.tracking.boards import Point
from p2pdiloco_node.tracking.figures import OfNode, OfRun, about_run
from p2pdiloco_node.training.frames import Evaluated, Stepped
from tests.conftest import peer_of

ALL = [(i, 10_000, 3.0) for i in (1, 2, 3)]


class Watched:
    """A run, and what its tracker tracked."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self.of_run = OfRun(run.spec, lambda version: run.builder.tokens_at(version))

    def take(self) -> list[Point]:
        builder = self.run.builder
        return self.of_run.points(builder.take_unsaved(), builder.build(self.run.now))


@pytest.fixture
def watched(fake_run: Any) -> Watched:
    """Three training voters, at version 3 of a run that evaluates every fourth."""
    run = fake_run(samples=SampleSpec(("def ",), 8))
    for i in (1, 2, 3):
        run.node(i, tokens_per_s=5000.0)
    run.listed()
    run.step(ALL)
    run.seats(1, 2, 3, witness=False)
    run.step(ALL)
    run.step([(1, 10_000, 2.0)], staleness={1: 1.5}, refused=[(2, "OUTLIER")])
    return Watched(run)


def test_every_outer_step_is_a_point_on_the_token_clock(watched: Watched) -> None:
    points = watched.take()
    assert [p.step for p in points] == [30_000, 60_000, 70_000]
    last = points[-1].scalars
    assert (last["version"], last["loss"], last["deltas"], last["refused"]) == (3, 2.0, 1, 1)
    assert last["staleness_max"] == 1.5
    assert last["nodes"] == 3
    rate = watched.run.builder.build(watched.run.now).rates.tokens_per_s
    assert last["tokens_per_s"] == rate
    assert last["goodput"] == pytest.approx(rate / 15_000)
    assert points[-1].when_unix == watched.run.now
    assert watched.take() == []


def test_an_evaluation_is_tracked_when_all_have_spoken(watched: Watched) -> None:
    run = watched.run
    run.step(ALL)
    watched.take()
    run.evaluated(2.9, by=1, samples=["a"])
    run.evaluated(2.8, by=2, samples=["b"])
    assert watched.take() == []
    run.evaluated(9.0, by=3, samples=["b"])
    (point,) = watched.take()
    assert point.step == 100_000
    assert point.scalars["evaluation/all/loss"] == 2.9
    assert point.scalars["evaluation/all/perplexity"] == pytest.approx(18.174, abs=1e-3)
    assert point.scalars["evaluation/all/bits_per_byte"] == pytest.approx(4.184, abs=1e-3)
    assert (point.scalars["evaluation/evaluators"], point.scalars["evaluation/agreeing"]) == (3, 1)
    assert point.texts == {"samples/1": "def b"}


def test_where_one_stays_silent_the_next_evaluation_or_the_end_is_waited_for(watched: Watched) -> None:
    run = watched.run
    run.step(ALL)
    run.evaluated(2.9, by=1)
    watched.take()
    for _ in range(4):
        run.step(ALL)
    run.evaluated(2.7, by=1)
    points = [p for p in watched.take() if "evaluation/all/loss" in p.scalars]
    assert [(p.step, p.scalars["evaluation/all/loss"]) for p in points] == [(100_000, 2.9)]
    (last,) = watched.of_run.last(run.builder.build(run.now))
    assert (last.step, last.scalars["evaluation/all/loss"]) == (220_000, 2.7)
    assert watched.of_run.last(run.builder.build(run.now)) == []


def test_version_0_stands_at_the_beginning(watched: Watched) -> None:
    run = watched.run
    run.evaluated(5.5, by=1, version=0)
    watched.take()
    run.step(ALL)
    run.evaluated(2.9, by=1)
    assert [p.step for p in watched.take() if "evaluation/all/loss" in p.scalars] == [0]


def of_node(run: Any) -> tuple[OfNode, list[Point]]:
    points: list[Point] = []
    return OfNode(run.spec, peer_of(1), points.append, lambda: 1e9), points


def stepped(step: int, clock: int, **changes: Any) -> Stepped:
    fields = {"loss": 2.0, "tokens_per_s": 800.0, "longest_gap_s": 0.1, "version": 3, "lr": 1e-3}
    return Stepped(step=step, inner_steps=20, clock=clock, **(fields | changes))


def install(run: Any) -> InstallEntry:
    content = open_body(run.entries[-1][0].body).content
    assert isinstance(content, OuterStep)
    return InstallEntry(run.index, run.version, Digest(bytes(32)), b"", content)


def test_a_nodes_steps_and_what_became_of_its_deltas(fake_run: Any) -> None:
    run = fake_run()
    node, points = of_node(run)
    step_tokens = run.spec.tokens_per_inner_step
    node.stepped(stepped(5, 5 * step_tokens))
    node.stepped(stepped(20, 20 * step_tokens, loss=1.5))
    assert [(p.step, p.scalars["loss"]) for p in points] == [(5 * step_tokens, 2.0), (20 * step_tokens, 1.5)]
    assert points[0].scalars == {"loss": 2.0, "lr": 1e-3, "tokens_per_s": 800.0, "version": 3}
    run.step([(2, 1000, 3.0)])
    node.installed(install(run))
    assert len(points) == 2, "somebody else's"
    run.step([(1, 10 * step_tokens, 3.0)], staleness={1: 0.75})
    node.installed(install(run))
    assert points[-1].scalars == {"staleness": 0.75, "goodput": 0.5}
    node.stepped(stepped(20, 40 * step_tokens))  # the next pass
    run.step([(1, 60 * step_tokens, 3.0)])
    node.installed(install(run))
    assert points[-1].scalars["goodput"] == 1.0  # of an earlier life, too
    node.installed(InstallEntry(9, 3, None, b"", None))  # a membership entry


def test_a_nodes_own_evaluations(fake_run: Any) -> None:
    run = fake_run(samples=SampleSpec(("def ",), 8))
    node, points = of_node(run)
    run.step(ALL)
    node.installed(install(run))
    node.stepped(stepped(1, 99_000))
    node.evaluated(Evaluated(1, bytes(32), (2.5,), (4096,), ("main",)))
    assert points[-1].step == 30_000  # where that version was made
    assert points[-1].scalars["evaluation/all/loss"] == 2.5
    assert points[-1].texts == {"samples/1": "def main"}


def test_what_is_said_of_the_run_is_plain(fake_run: Any) -> None:
    said = about_run(fake_run().spec)
    assert (said["model"], said["params"], said["lr"]) == ("1m", fake_run().spec.model.params, 1e-3)
    assert all(isinstance(value, str | int | float) for value in said.values())
