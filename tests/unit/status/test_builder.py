"""What the page says, from what happened."""

from __future__ import annotations

import json
import re

import pytest

from p2pdiloco import limits
from p2pdiloco.errors import PeerError
from p2pdiloco.status import to_json
from p2pdiloco.status.read_model import RunStatus


def say(run, after_s: float = 1.0) -> RunStatus:
    return run.builder.build(run.now + after_s)


def row(status: RunStatus, name: str):
    (found,) = [n for n in status.nodes if n.who.name == name]
    return found


def kinds(status: RunStatus) -> list[str]:
    return [e.kind for e in reversed(status.events)]


def test_before_the_first_fact_there_is_a_reason_and_no_number(fake_run):
    status = say(fake_run())
    assert (status.state.word, status.progress.version) == ("waiting", 0)
    assert "No node is connected" in status.state.why
    assert status.learning.loss is status.rates.tokens_per_s is status.progress.eta_s is None
    assert status.health.data_age_s is None
    assert json.loads(to_json(status))["learning"]["loss"] is None


def test_the_curve_is_weighted_by_tokens_so_that_who_comes_and_goes_does_not_move_it(fake_run):  # S22
    run = fake_run()
    true = {1: 4.2, 2: 4.0, 3: 3.8}
    for v in range(30):
        here = [1, 2, 3] if v < 10 or v >= 20 else [1, 3]
        run.step([(i, 10_000, true[i]) for i in here])
    assert say(run).learning.curve.losses == pytest.approx([4.0] * 30)
    run.step([(1, 30_000, 4.2), (3, 10_000, 3.8)])
    assert say(run).learning.loss == pytest.approx(4.1)


def test_losses_that_are_no_numbers_are_left_out(fake_run):  # P8
    run = fake_run()
    run.step([(1, 1000, float("nan")), (2, 1000, 3.0)])
    assert say(run).learning.loss == 3.0
    run.step([(1, 1000, float("inf")), (2, 1000, 1e300), (3, 1000, -4.0)])
    run.node(1, loss=float("inf"), tokens_per_s=float("nan"), offset_s=float("nan"))
    run.listed()
    for absurd in (float("nan"), float("inf"), 1e9):
        with pytest.raises(PeerError, match="BAD_REPORT"):
            run.evaluated(absurd)
    text = to_json(say(run)).decode()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert json.loads(text)["nodes"][0]["loss"] is None
    assert json.loads(text)["learning"]["curve"]["losses"] == [3.0]
    assert json.loads(text)["learning"]["evaluations"] == []


def test_rates_follow_the_clock_and_fall_while_nothing_comes(fake_run):
    run = fake_run(target_tokens=1_000_000)
    for _ in range(20):
        run.step([(1, 20_000, 3.0)])
    status = say(run)
    assert status.rates.tokens_per_s == pytest.approx(5000)
    assert status.rates.tokens_per_s_24h == pytest.approx(19 * 20_000 / 77)
    assert status.progress.eta_s == pytest.approx(600_000 / 5000)
    assert status.progress.share == pytest.approx(0.4)
    assert say(run, 600).rates.tokens_per_s == pytest.approx(160_000 / 632)
    run.builder.paused = True
    assert say(run).progress.eta_s is None  # nobody knows when it goes on


def test_a_day_counts_only_what_came_in_it(fake_run):
    run = fake_run(target_tokens=10**12)
    run.step([(1, 5_000_000, 3.0)])
    run.step([(1, 43_200_000, 3.0)], after_s=2 * 86400)
    run.step([(1, 43_200_000, 3.0)], after_s=10_000)
    assert say(run, 0).rates.tokens_per_s_24h == pytest.approx(1000)
    run.node(1)
    run.listed()
    assert say(run, 0).nodes[0].tokens_24h == 86_400_000
    assert say(run, 0).nodes[0].tokens == 91_400_000


def test_traffic_against_data_parallel(fake_run):
    run = fake_run()
    for i in (1, 2):
        run.node(i, bytes_up=500, bytes_down=0)  # before the first report here: not counted
    run.listed()
    for _ in range(10):
        run.step([(1, 20_480, 3.0), (2, 20_480, 3.0)])
    for i in (1, 2):
        run.node(i, bytes_up=500 + 3_000_000, bytes_down=1_000_000)
    run.listed()
    rates = say(run).rates
    assert rates.bytes_per_node_per_step == 400_000
    assert rates.bytes_per_node_per_token == pytest.approx(4_000_000 / 204_800)
    # 200 inner steps of 2 x 2(N-1)/N x 2 bytes x 870,000 parameters, N = 2
    assert rates.times_less_than_bf16_data_parallel == pytest.approx(200 * 2 * 2 * 870_000 / 4_000_000)
    run.node(2, bytes_up=10, bytes_down=0)  # its process was started again
    run.listed()
    assert say(run).rates.bytes_per_node_per_step == pytest.approx(400_000, rel=1e-4)


def test_one_liar_does_not_move_the_figures(fake_run):
    run = fake_run()
    for n in (0, 1_000_000):
        for i in (1, 2, 3):
            run.node(i, bytes_up=n if i < 3 else n * 10**9)
        run.listed()
        run.step([(i, 1024, 3.0) for i in (1, 2, 3)])
    assert say(run).rates.bytes_per_node_per_step == 1_000_000


@pytest.mark.parametrize(
    ("facts", "word", "why"),
    [
        ({"state": "joining", "report": False}, "joining", "just arrived"),
        ({"state": "syncing"}, "syncing", ""),
        ({"state": "training"}, "training", ""),
        ({"state": "training", "version": 2}, "late", "rounds behind"),
        ({"state": "waiting", "why": "waiting for the swarm (no quorum, 2/5)"}, "waiting", "no quorum, 2/5"),
        ({"state": "paused", "why": "on battery"}, "paused", "on battery"),
        ({"state": "training", "reachable": False}, "unreachable", "does not answer"),
        ({"state": "training", "live": False, "silent_s": 130.0}, "offline", "silent for 2 min"),
        ({"state": "training", "live": False, "left": "good night"}, "offline", "left: good night"),
        ({"state": "training", "bad": "unknown state 'x'"}, "training", "bad report: unknown state"),
        ({"state": "training", "offset_s": -90.0}, "training", "clock is 90 s behind"),
    ],
)
def test_each_state_has_its_word_and_its_reason(fake_run, facts, word, why):  # P1
    run = fake_run()
    for _ in range(8):
        run.step([(1, 40_000, 3.0)])
    run.node(5, "here", **facts)
    run.listed()
    state = row(say(run), "here").state
    assert state.word == word
    assert why in state.why
    assert state.tone == "warn" if facts.get("bad") else state.tone != "bad" or word == "unreachable"


def test_a_straggler_is_behind_and_says_so(fake_run):  # A1
    run = fake_run()
    run.step([(1, 1000, 3.0)])
    run.node(4, "slow")
    run.listed()
    run.step([(1, 1000, 3.0), (4, 1000, 3.0)], staleness={4: 0.9})
    slow = row(say(run), "slow")
    assert (slow.versions_behind, slow.last_outcome) == (1, "STALE by 0.9 rounds, version 2")
    assert say(run).totals.stale == 1


def test_the_run_says_what_it_waits_for(fake_run):
    run = fake_run()
    run.node(1, state="syncing")
    run.listed()
    assert say(run).state.word == "starting"
    run.node(1)
    run.node(2)
    run.listed()
    assert "first pass" in say(run).state.why
    run.step([(1, 1000, 3.0), (2, 1000, 3.0)])
    run.step([(1, 1000, 3.0), (2, 1000, 3.0)])
    assert say(run).state.why == "2 nodes are training, an outer step every 4.0 s."
    run.now += 60
    run.listed()
    assert say(run, 0).state.word == "stalled"
    assert "No outer step for 60 s; one was due within 12 s" in say(run, 0).state.why
    run.owner("pause")
    assert say(run).state.word == "paused"
    run.owner("resume")
    run.owner("finish")
    assert (say(run).state.word, say(run).progress.share) == ("finished", 4000 / 2_000_000)  # by its owner


@pytest.mark.parametrize("live", [True, False])
def test_a_revoked_node_is_marked_and_named(fake_run, live):
    """Its row went on as before, and the event named nobody."""
    run = fake_run()
    run.node(1, "mallory")
    run.node(2, "ada")
    run.listed()
    run.step([(1, 1000, 3.0), (2, 1000, 3.0)])
    run.owner("revoke", node=1)
    run.step([(2, 1000, 3.0)])
    run.node(1, "mallory", live=live)
    run.listed()
    status = say(run)
    gone = row(status, "mallory")
    assert (gone.state.word, gone.state.tone) == ("revoked", "bad")
    assert "owner refuses its deltas" in gone.state.why
    assert gone.last_outcome == "NOT_ADMITTED since version 1"
    assert gone.tokens == 1000, "what it gave before counts"
    assert status.nodes_by_state["revoked"] == 1
    (event,) = [e for e in status.events if e.kind == "owner"]
    assert event.text.startswith(f"the owner revoked mallory ({gone.who.fingerprint}):")
    assert (row(status, "ada").state.word, row(status, "ada").last_outcome) == (
        "training",
        "ACCEPTED, version 2",
    )


def test_who_was_never_heard_of_is_revoked_by_its_fingerprint(fake_run):
    run = fake_run()
    run.owner("revoke", node=9)
    (event,) = [e for e in say(run).events if e.kind == "owner"]
    assert re.fullmatch("the owner revoked [0-9a-f]{8}: its deltas are refused from now on", event.text)


def test_progress_counts_what_it_says_it_counts(fake_run):
    run = fake_run(target_version=4, target_tokens=8_000)
    run.step([(1, 1000, 3.0)])
    p = say(run).progress
    assert (p.measure, p.share, p.version / p.target_version) == ("version", 0.25, 0.25)
    run.step([(1, 5000, 3.0)])
    p = say(run).progress  # the tokens will end it first
    assert (p.measure, p.share, p.tokens / p.target_tokens) == ("tokens", 0.75, 0.75)
    run = fake_run(target_tokens=8_000)
    run.step([(1, 1000, 3.0)])
    assert (say(run).progress.measure, say(run).progress.share) == ("tokens", 0.125)


def test_no_quorum_is_counted(fake_run):
    run = fake_run()
    for i in (1, 2, 3, 4):
        run.node(i, live=i in (1, 4))
    run.seats(1, 2, 3, witness=False)
    run.listed()
    run.step([(1, 1000, 3.0)])
    status = say(run)
    assert status.state.word == "no quorum"
    assert "1 of 3 committee members answer and 2 are needed" in status.state.why
    run.builder.heard(next(m for m in run.committee.members if m in run.rows and not run.rows[m].live),
                      when_unix=run.now)  # fmt: skip
    assert say(run).state.word == "training"  # the witness hears one whom the tracker lost


def test_who_aggregates_and_why_it_changed(fake_run):
    run = fake_run()
    run.node(1, "one")
    run.node(2, "two")
    run.listed()
    run.step([(1, 1000, 3.0)])
    assert say(run).committee.aggregator.name == "witness"
    run.seats(1, 2)
    run.step([(1, 1000, 3.0)])
    one, two = (
        ("one", "two") if run.committee.aggregator_of(run.term) == run.committee.voters[0] else ("two", "one")
    )
    committee = say(run).committee
    assert (committee.term, committee.aggregator.name, committee.steps_until_rotation) == (run.term, one, 2)
    run.step([(1, 1000, 3.0)], last=True)
    assert say(run).committee.aggregator.name == two
    run.term += 1  # it never certified anything
    run.step([(1, 1000, 3.0)])
    texts = [e.text for e in say(run).events if e.kind == "elected"]
    assert texts[0] == f"{one} aggregates, term {run.term}: term {run.term - 1} fell silent"
    assert texts[1:] == ["witness aggregates, term 1: the first"]  # handing over is no news
    assert [m.role for m in say(run).committee.members] == ["witness", "voter", "voter"]
    assert [r.version for r in say(run).rounds] == [4, 3, 2, 1]


def elections(run) -> list[str]:
    return [e.text for e in reversed(say(run).events) if e.kind == "elected"][1:]  # but for the first


@pytest.fixture
def trio(fake_run):
    """Three seats, an entry just certified."""
    run = fake_run()
    run.node(1, "one")
    run.node(2, "two")
    run.listed()
    run.seats(1, 2)
    run.step([(1, 1000, 3.0)])
    return run


def test_a_term_that_the_witness_sees_before_its_hand_over_is_certified_is_no_news(trio):
    """The witness acks a term's last body, and so follows the next one, before there is a certificate."""
    for after_s in (0.2, 60.0):  # seconds since the entry before: passes may be longer than timeouts
        old = trio.term
        trio.builder.term_seen(old + 1, when_unix=trio.now + after_s)
        trio.step([(1, 1000, 3.0)], last=True, after_s=after_s + 0.5)
        trio.builder.term_seen(old + 1, when_unix=trio.now + 30)
        assert say(trio).committee.term == old + 1
        assert elections(trio) == []
        trio.step([(1, 1000, 3.0)])
        assert (say(trio).committee.term, elections(trio)) == (old + 1, [])


def test_an_entry_of_an_older_term_takes_nobody_s_place(trio):
    old = trio.term
    trio.builder.term_seen(old + 1, when_unix=trio.now + 0.2)
    trio.step([(1, 1000, 3.0)], after_s=0.3)  # of the old one
    assert say(trio).committee.term == old + 1
    trio.term = old + 1
    trio.step([(1, 1000, 3.0)], after_s=0.3)
    who = say(trio).committee.aggregator.name
    assert elections(trio) == [f"{who} aggregates, term {old + 1}: it follows term {old}"]


def test_fell_silent_is_said_of_who_did(trio):
    old, last = trio.term, trio.now
    silence = trio.spec.committee.timeout_s_min
    trio.builder.term_seen(old + 1, when_unix=last + silence + 0.5)
    assert elections(trio) == []  # a certificate may still be on its way
    trio.term = old + 1
    trio.step([(1, 1000, 3.0)], after_s=silence + 1)
    who = say(trio).committee.aggregator.name
    expected = [f"{who} aggregates, term {old + 1}: term {old} fell silent"]
    assert elections(trio) == expected
    # A new aggregator that certifies nothing for long is told of as well, once, and the one after it.
    last = trio.now
    for after_s in (2.0, 3.0, 4.0, 5.0):
        trio.builder.term_seen(old + 2, when_unix=last + after_s)
    who = say(trio).committee.aggregator.name
    expected.append(f"{who} aggregates, term {old + 2}: term {old + 1} fell silent")
    assert elections(trio) == expected


def test_events_tell_who_came_went_and_returned(fake_run):
    run = fake_run()
    run.node(1, "one")
    run.listed()
    run.listed()
    run.node(1, "one", live=False, silent_s=9.0)
    run.listed()
    run.node(1, "one")
    run.listed()
    run.node(1, "one", live=False, left="\u202eevil\nbye")
    run.listed()
    assert kinds(say(run)) == ["joined", "offline", "back", "left"]
    assert say(run).events[0].text == "one left: evil bye"
    for _ in range(3 * limits.events_kept):
        run.builder.event("tracker", "x", when_unix=run.now)
    assert len(say(run).events) == limits.events_kept


def test_a_repeated_entry_counts_once(fake_run):
    run = fake_run()
    run.step([(1, 1000, 3.0)])
    entry, when, losses = run.entries[0]
    run.builder.entry_applied(entry, when_unix=when, losses=losses)
    assert say(run).totals.accepted == 1
    assert len(say(run).rounds) == 1


def test_a_restarted_tracker_shows_the_same_history(fake_run):  # S22
    run = fake_run()
    run.lifelike(20)
    before, saved = say(run), run.builder.take_unsaved()
    assert run.builder.take_unsaved() == ((), (), (), (), ())
    run.builder = run.new_builder()
    run.builder.restore(
        versions=saved.versions, earned=saved.credits, evaluations=saved.evaluations, events=saved.events,
        samples=saved.samples,
    )  # fmt: skip
    for entry, _, _ in run.entries:
        run.builder.entry_applied(entry, when_unix=None)
    after = say(run)
    assert after.learning == before.learning
    assert after.rounds == before.rounds
    assert after.events == before.events
    assert after.totals == before.totals
    assert after.rates.tokens_per_s_24h == before.rates.tokens_per_s_24h
    assert {n.state.word for n in after.nodes} == {"offline"}  # until they announce again
    assert sorted((n.who.name, n.tokens, n.tokens_24h) for n in after.nodes) == sorted(
        (n.who.name, n.tokens, n.tokens_24h) for n in before.nodes
    )
    run.listed()
    assert {n.state.word for n in say(run).nodes} == {"training"}
    assert run.builder.take_unsaved().versions == ()


def test_without_a_database_the_log_alone_still_gives_the_counts(fake_run):
    run = fake_run()
    run.lifelike(10)
    before = say(run)
    run.builder = run.new_builder()
    for entry, _, _ in run.entries:
        run.builder.entry_applied(entry, when_unix=None)
    after = say(run)
    assert after.progress.tokens == before.progress.tokens
    for what in ("accepted", "stale", "refused", "staleness", "terms"):
        assert getattr(after.totals, what) == getattr(before.totals, what)
    assert after.rates.tokens_per_s is after.rounds[0].seconds is None
    assert after.learning.curve.losses == ()


def test_a_long_history_stays_bounded(fake_run, monkeypatch):
    monkeypatch.setattr(limits, "points_kept", 100)
    monkeypatch.setattr(limits, "chart_points_max", 20)
    run = fake_run(target_tokens=10**9)
    for v in range(1000):
        run.step([(1, 1000, 9.0 - v / 200)])
    assert len(run.builder.history.points) <= 100
    curve = say(run).learning.curve
    assert len(curve.versions) <= 20
    assert curve.versions[-1] == 1000
    assert list(curve.losses) == sorted(curve.losses, reverse=True)


def test_the_page_knows_how_old_its_data_is(fake_run):  # P2
    run = fake_run()
    run.node(1)
    run.listed()
    assert not say(run, limits.data_age_s_max).health.stale
    late = say(run, limits.data_age_s_max + 1)
    assert (late.health.stale, late.health.data_age_s) == (True, limits.data_age_s_max + 1)
    assert late.generated_unix == run.now + limits.data_age_s_max + 1


def test_without_news_nothing_ticks(fake_run):  # S22
    run = fake_run()
    run.lifelike(8)
    fresh, old = say(run, 0), say(run, 500)
    assert old.health.stale
    for what in ("state", "progress", "rates", "nodes", "committee", "rounds"):
        assert getattr(old, what) == getattr(fresh, what), what


def test_no_address_is_in_the_read_model_but_the_join_line(fake_run):
    run = fake_run()
    run.lifelike(6)
    text = to_json(say(run)).decode()
    assert text.count("203.0.113.7") == 2  # and the line that exports
