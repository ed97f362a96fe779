"""Figures by hand, and how they are written."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import ModuleType

import msgspec
import pytest

from p2pdiloco.sim.lab.experiment import Experiment, Model, Outer, Run, Swarm
from p2pdiloco.sim.lab.result import Point, Result
from p2pdiloco_node.lab.progress import StudyProgress
from p2pdiloco_node.lab.report import hours_to, summarize, upper_bound_90
from p2pdiloco_node.lab.study import Study
from p2pdiloco_node.lab.tables import duration, in_markdown, in_words, size

BASE = Experiment(name="barrier", swarm=Swarm(nodes=2, speeds=(1.0, 0.5)), run=Run(rounds=10))
ARMS = (
    msgspec.structs.replace(BASE, outer=Outer(policy="barrier")),
    msgspec.structs.replace(BASE, name="quorum"),
)


def pair(seeds: tuple[int, ...] = (1, 2, 3)) -> Study:
    return Study("pair", "", seeds, ARMS)


def made(fake: ModuleType, study: Study, losses: Mapping[tuple[str, int], float | None]) -> list[Result]:
    by_name = {a.name: a for a in study.arms}
    return [
        msgspec.structs.replace(fake.result(by_name[arm], seed), final_loss=loss)
        for (arm, seed), loss in losses.items()
    ]


def gap_line(said: str) -> str:
    """The row of the second arm against the first."""
    return said.partition("Against")[2].splitlines()[2]


def test_the_paired_gap_is_that_of_the_seeds_one_by_one(fake: ModuleType) -> None:
    losses = {("barrier", 1): 2.00, ("barrier", 2): 2.10, ("barrier", 3): 2.30,
              ("quorum", 1): 2.01, ("quorum", 2): 2.13, ("quorum", 3): 2.32}  # fmt: skip
    (gap,) = summarize(pair(), made(fake, pair(), losses)).gaps
    assert gap.loss is not None
    assert gap.upper_90 is not None
    assert gap.perplexity_percent is not None
    assert gap.loss.mean == pytest.approx(0.02)  # (0.01 + 0.03 + 0.02) / 3
    assert gap.loss.sd == pytest.approx(0.01)
    # t with 2 degrees of freedom, one-sided 90 %: 1.886.
    assert gap.upper_90 == pytest.approx(0.02 + 1.886 * 0.01 / math.sqrt(3))
    assert gap.perplexity_percent == pytest.approx(2.0201, abs=1e-4)
    assert gap.hours == pytest.approx(0.5)


def test_only_seeds_of_both_arms_are_paired(fake: ModuleType) -> None:
    losses = {("barrier", 1): 2.0, ("barrier", 2): 9.0, ("quorum", 1): 2.5, ("quorum", 3): 0.1}
    (gap,) = summarize(pair(), made(fake, pair(), losses)).gaps
    assert gap.seeds == (1,)
    assert gap.loss is not None
    assert (gap.loss.mean, gap.loss.sd, gap.upper_90) == (0.5, None, None)


def test_bounds_follow_students_t_and_need_two_values() -> None:
    assert upper_bound_90([0.1]) is None
    assert upper_bound_90([0.0, 0.2]) == pytest.approx(0.1 + 3.078 * 0.1)
    many = [(-1.0) ** n for n in range(100)]
    assert upper_bound_90(many) == pytest.approx(0.131, abs=0.002)


@pytest.mark.parametrize("wild", [math.nan, math.inf, -math.inf])
def test_a_gap_that_is_not_finite_has_no_bound(wild: float) -> None:
    assert upper_bound_90([0.1, wild, 0.2]) == math.inf
    assert upper_bound_90([math.inf, -math.inf]) == math.inf


def test_time_to_a_loss_is_on_the_line_between_two_points() -> None:
    curve = [Point(0, 0.0, 0, 5.0), Point(1, 1.0, 1, 3.0), Point(2, 3.0, 2, 2.0)]
    assert hours_to(curve, 4.0) == pytest.approx(0.5)
    assert hours_to(curve, 2.5) == pytest.approx(2.0)
    assert hours_to(curve, 5.5) == 0.0
    assert hours_to(curve, 1.9) is None
    after_a_jump = [Point(0, 0.0, 0, math.inf), Point(1, 1.0, 1, 3.0)]
    assert hours_to(after_a_jump, 4.0) == 1.0


def test_time_to_the_references_loss_is_a_ratio(fake: ModuleType) -> None:
    ways = {"barrier": [(0.0, 5.0), (5.0, 3.0), (10.0, 2.0)], "quorum": [(0.0, 5.0), (3.0, 3.0), (6.0, 1.0)]}
    results = []
    for arm in ARMS:
        curve = [Point(n, hours, n, loss) for n, (hours, loss) in enumerate(ways[arm.name])]
        results.append(msgspec.structs.replace(fake.result(arm, 1), curve=tuple(curve)))
    (gap,) = summarize(pair((1,)), results).gaps
    assert gap.hours_to_loss == pytest.approx(0.45)  # 4.5 of 10 hours
    assert gap.reached == 1


@pytest.mark.parametrize(
    ("far", "ratio", "said"),
    [(3, 1.0, "1.00 x"), (2, None, "by 2 of 3 seeds"), (0, None, "not reached")],
)
def test_time_to_a_loss_is_of_all_seeds_or_none(
    fake: ModuleType, far: int, ratio: float | None, said: str
) -> None:
    """The mean over those that came so far would flatter an arm for failing."""
    results = []
    for arm in ARMS:
        for seed in (1, 2, 3):
            end = 2.0 if arm is ARMS[0] or seed <= far else 2.1
            curve = (Point(0, 0.0, 0, 5.0), Point(1, 10.0, 1, end))
            results.append(msgspec.structs.replace(fake.result(arm, seed), curve=curve, final_loss=end))
    summary = summarize(pair(), results)
    (gap,) = summary.gaps
    assert (gap.hours_to_loss, gap.reached) == (ratio, far)
    assert gap_line(in_words(pair(), summary)).endswith(said)


def test_traffic_is_per_pass_and_per_version(fake: ModuleType) -> None:
    study = pair((1,))
    row = summarize(study, [fake.result(ARMS[0], 1)]).arms[0]
    assert row.passes == pytest.approx(10)
    assert row.pass_bytes_up == pytest.approx(1e6 / 10)
    assert row.version_bytes_down == pytest.approx(2e6 / 200)
    assert row.data_parallel_ratio == pytest.approx(900)
    assert row.up_busy is None


def test_links_in_use_are_told_where_they_have_a_rate(fake: ModuleType) -> None:
    arm = msgspec.structs.replace(BASE, swarm=Swarm(nodes=2, up_mbit=0.08))
    study = Study("s", "", (1,), (arm,))
    summary = summarize(study, [msgspec.structs.replace(fake.result(arm, 1), hours=1.0)])
    assert summary.arms[0].up_busy == pytest.approx(1e6 / (0.01e6 * 3600))
    assert "barrier 3 % up, - down" in in_words(study, summary)


def test_a_loss_that_ran_away_is_said_and_breaks_nothing(fake: ModuleType) -> None:
    for wild in (math.nan, math.inf, 1e6):
        losses = {("barrier", 1): 2.0, ("quorum", 1): wild}
        summary = summarize(pair(), made(fake, pair(), losses))
        said = in_words(pair(), summary)
        assert ("diverged" in said) == (not math.isfinite(wild))
        msgspec.json.encode(summary)


@pytest.mark.parametrize("wild", [math.nan, math.inf])
def test_an_arm_that_diverged_once_stays_in_the_tables_and_is_infinitely_worse(
    fake: ModuleType, wild: float
) -> None:
    losses = {(arm, seed): 2.0 + seed / 100 for arm in ("barrier", "quorum") for seed in (1, 2, 3)}
    summary = summarize(pair(), made(fake, pair(), losses | {("quorum", 2): wild}))
    (gap,) = summary.gaps
    assert gap.loss is not None
    assert (gap.seeds, gap.loss.mean, gap.upper_90) == ((1, 2, 3), math.inf, math.inf)
    assert (summary.arms[1].seeds, summary.arms[1].diverged) == ((1, 2, 3), 1)
    said = in_words(pair(), summary)
    assert "1 of 3 diverged" in said
    assert gap_line(said).split()[:3] == ["quorum", "3", "diverged"]


def test_a_reference_that_diverged_proves_nothing(fake: ModuleType) -> None:
    losses = {(arm, seed): 2.0 + seed / 100 for arm in ("barrier", "quorum") for seed in (1, 2, 3)}
    summary = summarize(pair(), made(fake, pair(), losses | {("barrier", 2): math.inf}))
    (gap,) = summary.gaps
    assert gap.loss is not None
    assert (gap.loss.mean, gap.upper_90, gap.perplexity_percent) == (-math.inf, math.inf, None)
    said = " ".join(in_words(pair(), summary).split())
    assert "barrier diverged with 1 of 3 seeds: there is no gap to it." in said
    # Both, with different seeds: the arm is not excused.
    both = losses | {("barrier", 2): math.inf, ("quorum", 3): math.inf}
    (gap,) = summarize(pair(), made(fake, pair(), both)).gaps
    assert gap.loss is not None
    assert gap.loss.mean == math.inf


@pytest.mark.parametrize(("more", "marked"), [(1.0, False), (1.009, False), (0.95, True), (1.05, True)])
def test_arms_that_trained_on_unlike_numbers_of_tokens_make_no_claim(
    fake: ModuleType, more: float, marked: bool
) -> None:
    """One seed is enough: the gap is taken seed by seed."""
    losses = {(arm, seed): 2.0 + seed / 100 for arm in ("barrier", "quorum") for seed in (1, 2, 3)}
    results = [
        msgspec.structs.replace(
            r, tokens=10**6, trained_tokens=round(10**6 * more) if (r.arm, r.seed) == ("quorum", 2) else 10**6
        )
        for r in made(fake, pair(), losses)
    ]
    summary = summarize(pair(), results)
    assert summary.gaps[0].trained == pytest.approx(more)
    assert summary.gaps[0].fair is not marked
    said = " ".join(in_words(pair(), summary).split())
    assert (" +0.0000 * " in said) is marked
    words = (
        f"*: did not train on equally many tokens as barrier (quorum by up to {100 * (more - 1):+.1f} %), so"
    )
    assert (words in said) is marked


def test_trained_tokens_are_told_where_the_clock_counts_fewer(fake: ModuleType) -> None:
    results = [
        msgspec.structs.replace(fake.result(arm, 1), tokens=10**6, trained_tokens=trained)
        for arm, trained in zip(ARMS, (10**6, 1_200_000), strict=True)
    ]
    summary = summarize(pair((1,)), results)
    assert [row.trained_tokens for row in summary.arms] == [1e6, 1.2e6]
    said = " ".join(in_words(pair((1,)), summary).split())
    assert "Trained tokens, before caps: quorum 1.20 M; in the other arms all count." in said
    equal = [msgspec.structs.replace(r, trained_tokens=r.tokens) for r in results]
    assert "before caps" not in in_words(pair((1,)), summarize(pair((1,)), equal))


def test_no_claim_with_fewer_than_three_seeds(fake: ModuleType) -> None:
    two = made(fake, pair(), {("barrier", 1): 2.0, ("barrier", 2): 2.1})
    assert "no claim about loss" in in_words(pair(), summarize(pair(), two))
    three = [*two, *made(fake, pair(), {("barrier", 3): 2.2})]
    assert "no claim about loss" not in in_words(pair(), summarize(pair(), three))


def test_without_a_model_nothing_is_said_of_loss(fake: ModuleType) -> None:
    arm = msgspec.structs.replace(BASE, model=Model(kind="none"))
    study = Study("plan", "", (1,), (arm,))
    said = in_words(study, summarize(study, [fake.result(arm, 1)]))
    assert "loss" not in said
    assert "goodput" in said
    assert "By speed" in said


def test_tables_fit_a_hundred_columns_and_pages_have_the_same_cells(fake: ModuleType) -> None:
    arms = tuple(msgspec.structs.replace(a, name=f"a long name for an arm {a.name}") for a in ARMS)
    study = Study("s", "", (1, 2, 3), arms)
    results = [
        msgspec.structs.replace(
            fake.result(a, s), bytes_up=9.99e11, bytes_down=9.99e11, data_parallel_bytes=9e15
        )
        for a in arms
        for s in study.seeds
    ]
    summary = summarize(study, results)
    said = in_words(study, summary)
    assert max(map(len, said.splitlines())) <= 100, said
    page = in_markdown(study, summary)
    assert "| a long name for an arm quorum | 3 |" in page
    assert "999 GB" in said
    assert "999 GB" in page


@pytest.mark.parametrize(
    ("hours", "said"), [(0.01, "36 s"), (0.5, "30.0 min"), (3, "3.0 h"), (100, "4.2 d"), (0, "0 s")]
)
def test_times_for_people(hours: float, said: str) -> None:
    assert duration(hours) == said


@pytest.mark.parametrize(
    ("number", "said"), [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (12345, "12.3 kB"), (1.5e8, "150 MB")]
)
def test_sizes_for_people(number: float, said: str) -> None:
    assert size(number) == said


def test_one_run_is_one() -> None:
    assert StudyProgress(["a"], 0, clock=lambda: 0.0).words() == "0 of 1 run done"


def test_progress_counts_runs_of_now_for_its_rate() -> None:
    now = [0.0]
    progress = StudyProgress(["a", "b", "c", "d"], 2, clock=lambda: now[0])
    assert progress.words() == "2 of 6 runs done (2 from the cache)"
    now[0] = 1800.0
    progress.ended(0)
    progress.told(1, 0.5, "")
    assert progress.words() == "3 of 6 runs done (2 from the cache), 3.0 an hour, 50 min to go"
