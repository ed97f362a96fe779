"""A stranger's word sets no loss on the page, and one liar among those whom the log chose moves none."""

from __future__ import annotations

import math

import pytest

from p2pdiloco import limits
from p2pdiloco.errors import PeerError
from p2pdiloco.ids import digest_of
from p2pdiloco.rules.evaluation import evaluators
from p2pdiloco.rules.state import after_membership, after_outer_step, genesis_state
from p2pdiloco.run_spec import BYTES, BlobRef, DataSpec, EvaluationSet, SampleSpec
from p2pdiloco.status.evaluators import Evaluators
from p2pdiloco.wire.log import OuterStep, open_body

LIAR = 9
ALL = [(i, 10_000, 3.0) for i in (1, 2, 3, 4)]
PROMPTS = SampleSpec(("def main(", "Once"), 8)


def learning(run):
    return run.builder.build(run.now).learning


def points(run) -> list[tuple[int, float]]:
    return [(p.version, p.loss) for p in learning(run).evaluations]


def steps(run, n: int) -> None:
    for _ in range(n):
        run.step(ALL)


def refused(run, reason: str, loss: float, **said: object) -> None:
    with pytest.raises(PeerError) as caught:
        run.evaluated(loss, **said)
    assert caught.value.reason == reason


def held_out(name: str, tokens: int, text_bytes: int) -> EvaluationSet:
    return EvaluationSet(name, BlobRef(digest_of(name.encode()), 4096, tokens), text_bytes)


@pytest.fixture
def run(fake_run):
    """Four nodes train, three of them are the committee, and a liar is announced."""
    made = fake_run(samples=PROMPTS)
    for i in (1, 2, 3, 4, LIAR):
        made.node(i)
    made.listed()
    steps(made, 1)
    made.seats(1, 2, 3, witness=False)
    steps(made, 2)
    return made


def test_the_training_voters_are_believed_and_nobody_else(run):
    steps(run, 1)
    refused(run, "NOT_CHOSEN", 0.01, by=LIAR)
    refused(run, "TOO_EARLY", 0.02, by=4)  # stands in, but they have time
    assert points(run) == []
    run.evaluated(2.9, by=2)
    assert points(run) == [(4, 2.9)]
    run.evaluated(0.03, by=2)  # once
    assert points(run) == [(4, 2.9)]


def test_one_lying_evaluator_of_three_moves_nothing(run):
    steps(run, 1)
    for i, loss in ((1, 2.90), (2, 0.001), (3, 2.91)):
        run.evaluated(loss, by=i, samples=["a", "lie" if i == 2 else "b"])
    shown = learning(run).evaluation
    assert (shown.loss, len(shown.reports), shown.asked, shown.agreeing) == (2.9, 3, 3, 2)
    assert [(s.text, s.agreeing) for s in learning(run).samples[0].samples] == [("a", 3), ("b", 2)]
    steps(run, 4)
    for i, loss in ((1, 99.0), (2, 2.80), (3, 2.81)):
        run.evaluated(loss, by=i)
    assert points(run) == [(4, 2.9), (8, 2.81)]


@pytest.mark.parametrize(("said", "shown"), [((3.0,), 3.0), ((3.0, 3.5), 3.25), ((3.0, 3.5, 9.0), 3.5)])
def test_of_one_or_two_the_mean_is_shown(run, said, shown):
    steps(run, 1)
    for i, loss in enumerate(said):
        run.evaluated(loss, by=i + 1)
    point = learning(run).evaluation
    assert (point.loss, len(point.reports)) == (shown, len(said))
    assert point.agreeing == (len(said) == 1) + (len(said) == 3)


def test_versions_that_nobody_evaluates_are_not_taken(run):
    steps(run, 2)
    refused(run, "NOT_CHOSEN", 0.01, by=1, version=5)
    refused(run, "NOT_CHOSEN", 0.01, by=1, version=3)
    assert points(run) == []


@pytest.mark.parametrize(
    "report",
    [
        {"loss": float("nan")},
        {"loss": float("inf")},
        {"loss": limits.loss_shown_max * 1.01},
        {"loss": 2.0, "losses": [2.0]},
        {"loss": 2.0, "samples": ["one of two"]},
    ],
)
def test_figures_that_cannot_be_are_refused(run, report):
    steps(run, 1)
    refused(run, "BAD_REPORT", by=1, **report)
    assert points(run) == []
    assert learning(run).samples == ()


def test_the_next_in_order_counts_after_two_passes_where_a_chosen_one_is_silent(run):
    steps(run, 1)
    for i in (1, 2):
        run.evaluated(2.9, by=i)
    run.now += 2 * run.spec.inner.pass_s - 0.1
    refused(run, "TOO_EARLY", 2.5, by=4)
    run.now += 0.1
    refused(run, "NOT_CHOSEN", 0.01, by=LIAR)
    run.evaluated(2.5, by=4)
    assert len(learning(run).evaluation.reports) == 3
    run.evaluated(2.8, by=3)  # and no longer when the last of those chosen has spoken
    assert sorted(w.losses for w in learning(run).evaluation.reports) == [(2.8,), (2.9,), (2.9,)]


def test_the_last_version_is_due_whatever_the_cadence(run):
    run.owner("finish")
    refused(run, "NOT_CHOSEN", 0.01, by=LIAR)
    run.evaluated(2.2)
    assert points(run) == [(3, 2.2)]


def test_who_evaluates_a_version_is_chosen_once(run):
    """A node evaluates what it was told to, whatever the owner says of that version later."""
    steps(run, 1)
    run.seats(4, witness=False)
    run.owner("finish")
    run.evaluated(2.2, by=1)
    assert points(run) == [(4, 2.2)]


def test_of_version_0_those_whom_the_log_lists(fake_run):
    """Nobody is chosen yet, so its reports wait; the demo's first loss must not be a stranger's."""
    run = fake_run()
    run.evaluated(0.01, by=LIAR)
    for i, loss in ((2, 5.5), (1, 5.6), (3, 5.7), (4, 0.1)):
        run.evaluated(loss, by=i)
    assert points(run) == []
    steps(run, 1)
    assert points(run) == [(0, 5.6)]  # the median of the first three
    run.evaluated(0.02, by=4, version=0)
    assert points(run) == [(0, 5.6)]


def test_of_version_0_a_contributor_may_report_late_but_not_for_ever(fake_run):
    run = fake_run()
    steps(run, 1)
    run.evaluated(0.01, by=LIAR, version=0)
    run.evaluated(5.5, by=3, version=0)
    assert points(run) == [(0, 5.5)]
    steps(run, limits.genesis_reports_version_max)
    refused(run, "NOT_CHOSEN", 0.01, by=4, version=0)


def test_strangers_reports_of_version_0_are_bounded(fake_run, monkeypatch):
    run = fake_run()
    monkeypatch.setattr(limits, "peers_max", 5)
    for i in range(10, 30):
        run.evaluated(0.01, by=i)
    assert len(run.builder.evaluators._of_genesis) == 5
    steps(run, limits.genesis_reports_version_max + 1)
    assert run.builder.evaluators._of_genesis == {}


def test_versions_that_wait_are_bounded(run, monkeypatch):
    monkeypatch.setattr(limits, "evaluations_due_max", 2)
    for v in range(1, 13):
        steps(run, 1)
        if run.version % 4 == 0:
            run.evaluated(float(v))
    waiting = [v for v in range(16) if run.builder.evaluators.chosen(v).chosen]
    assert waiting == [8, 12]
    assert list(run.builder.evaluators._said) == [8, 12]
    assert len(points(run)) == 3


def test_each_source_has_its_own_loss_in_bits_of_its_own_text(fake_run):
    """One token stands for so many bytes of code, and for so many of prose."""
    sets = (held_out("all", 4096, 8192), held_out("code <b>", 4096, 4096), held_out("prose", 4096, 16384))
    shard = BlobRef(digest_of(b"s"), 4096, 4096)
    run = fake_run(data=DataSpec(BYTES, 1, (shard,), sets), evaluators_max=1)
    steps(run, 4)
    run.evaluated(2 * math.log(2), losses=[math.log(2), 4 * math.log(2)])
    said = learning(run)
    assert [(s.name, s.bits_per_byte) for s in said.sets] == [
        ("all", pytest.approx(1.0)), ("code <b>", pytest.approx(1.0)), ("prose", pytest.approx(1.0)),
    ]  # fmt: skip
    assert [s.perplexity for s in said.sets] == pytest.approx([4.0, 2.0, 16.0])
    assert (said.perplexity, said.bits_per_byte) == (said.sets[0].perplexity, said.sets[0].bits_per_byte)
    assert said.evaluations[0].losses == (2 * math.log(2), math.log(2), 4 * math.log(2))
    refused(run, "BAD_REPORT", 1.0, losses=[1.0, 1.0, 1.0])
    steps(run, run.spec.eval_every)
    run.evaluated(1.5, losses=[1.25])  # not finished: the sets that are done are shown
    assert [(s.name, s.loss) for s in learning(run).sets] == [("all", 1.5), ("code <b>", 1.25)]


def test_hostile_continuations_are_text_of_bounded_size(run):
    steps(run, 1)
    bidi = "\u202egnp.exe\x00\x1b[31m<script>alert(1)</script>"
    run.evaluated(2.0, samples=[bidi, "line\n" * 100 + "x" * 200])
    first, second = learning(run).samples[0].samples
    assert first.text == "gnp.exe[31m<script>alert(1)</script>"  # for the page to escape
    assert second.text.count("\n") == limits.sample_lines_max
    assert second.text.endswith("…")


def test_only_the_newest_continuations_are_kept(run):
    steps(run, 1)
    for _ in range(limits.samples_kept + 3):
        run.evaluated(2.0, samples=[f"v{run.version}", ""])
        steps(run, 4)
    shown = learning(run).samples
    newest = run.version - 4
    assert [s.version for s in shown] == [newest - 4 * i for i in range(limits.samples_kept)]
    assert shown[0].samples[0].text == f"v{newest}"


def test_after_a_restart_a_late_report_joins_the_others(run):
    steps(run, 1)
    run.evaluated(2.90, by=1, samples=["a", "b"])
    run.evaluated(2.92, by=2, samples=["a", "b"])
    saved = run.builder.take_unsaved()
    run.builder = run.new_builder()
    run.builder.restore(
        versions=saved.versions, earned=saved.credits, evaluations=saved.evaluations[-1:], events=(),
        samples=saved.samples[-1:],
    )  # fmt: skip
    for entry, _, _ in run.entries:
        run.builder.entry_applied(entry, when_unix=None)
    assert points(run) == [(4, 2.91)]
    run.evaluated(0.5, by=1)  # it has spoken
    run.evaluated(9.0, by=3, samples=["lie", "lie"])
    assert points(run) == [(4, 2.92)]
    assert len(learning(run).evaluation.reports) == 3
    assert [s.text for s in learning(run).samples[0].samples] == ["a", "b"], (
        "one does not replace what two wrote"
    )


def test_only_the_newest_point_names_who_said_what(run):
    steps(run, 1)
    run.evaluated(2.9)
    steps(run, 4)
    run.evaluated(2.8)
    said = learning(run)
    assert [p.reports for p in said.evaluations] == [(), ()]
    assert said.evaluation.reports[0].losses == (2.8,)


def test_it_chooses_as_the_whole_rules_state_would(run):
    rules = genesis_state(run.spec)
    lean = Evaluators(run.spec, 0.0)
    for v in range(4, 41):
        here = [d for d in ALL if v < 20 or d[0] != 2] + ([(5, 500, 3.0)] if v % 7 == 0 else [])
        run.step(here)
    checked = 0
    for entry, _, _ in run.entries:
        content = open_body(entry.body).content
        if isinstance(content, OuterStep):
            rules = after_outer_step(rules, content, run.spec)
        else:
            rules = after_membership(rules, content.committee)
        lean.entry_applied(content, None)
        if isinstance(content, OuterStep) and rules.version % run.spec.eval_every == 0:
            assert lean.chosen(rules.version) == evaluators(rules, run.spec)
            checked += 1
    assert checked == 10
