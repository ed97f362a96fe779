"""What a node says of itself."""

from __future__ import annotations

import logging

import pytest

from p2pdiloco.ids import Digest, PeerId, RunId
from p2pdiloco.protocol.actions import InstallEntry
from p2pdiloco.protocol.tracker import why_bad
from p2pdiloco.status.read_model import to_json
from p2pdiloco.wire.log import Contribution, OuterStep, Refused, Scalars
from p2pdiloco.wire.messages import DeltaReceipt, Outcome
from p2pdiloco_node.telemetry import BrainView, NodeStatus, Telemetry

ME, OTHER = PeerId(b"m" * 32), PeerId(b"o" * 32)
BRAIN = BrainView(
    index=3,
    version=2,
    term=4,
    leads=True,
    aggregator=ME,
    members=((OTHER, True), (ME, False)),
    clock=100,
    in_flight=1,
    peers=1,
    root=Digest(b"r" * 32),
)


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def telemetry(clock: Clock) -> Telemetry:
    return Telemetry(
        "n", ME, RunId(b"x" * 32), "run", role="node", pid=1, inner_steps=4, clock=clock, wall=clock
    )


def status(telemetry: Telemetry) -> NodeStatus:
    return telemetry.status(BRAIN, bytes_up=1, bytes_down=2, bytes_setup=0, lag_s_max=0.1)


def test_it_says_since_when_the_tracker_is_away(telemetry: Telemetry, clock: Clock) -> None:
    assert status(telemetry).tracker == "ok"
    telemetry.tracker_failed("refused")
    clock.now += 30
    telemetry.tracker_failed("refused")
    assert status(telemetry).tracker == "unreachable since 30 s"
    assert status(telemetry).tracker_silent_s == 30
    telemetry.tracker_answered()
    assert status(telemetry).tracker == "ok"
    assert [s.kind for s in status(telemetry).said] == ["tracker", "tracker"]


def test_a_delta_that_several_voters_refuse_counts_once(telemetry: Telemetry) -> None:
    for outcome in (Outcome.NOTED, Outcome.RATE_LIMITED, Outcome.BAD_SHAPE, Outcome.BAD_SHAPE):
        telemetry.receipt(DeltaReceipt(b"d" * 32, outcome, "", 0.0))
    telemetry.receipt(DeltaReceipt(b"e" * 32, Outcome.RUN_OVER, "", 0.0))
    assert status(telemetry).refused == {"BAD_SHAPE": 1, "RUN_OVER": 1}
    assert status(telemetry).last_outcome == "RUN_OVER"


def test_the_last_delta_is_in_the_page_s_words_and_nothing_is_held_when_the_run_is_over(
    telemetry: Telemetry,
) -> None:
    def contribution(staleness: float) -> Contribution:
        return Contribution(b"d" * 32, ME, 0, 1, 5, 100, 1.0, staleness, 1.0, 1.0, bytes(32), bytes(64))

    def certified(*contributions: Contribution, refused: tuple[Refused, ...] = ()) -> str:
        step = OuterStep(1, 0, contributions, refused, (), Scalars(1, 1, 1, 1, 1), 100, 100, bytes(32))
        telemetry.installed(InstallEntry(1, 1, None, b"", step))
        return status(telemetry).last_outcome

    assert certified(contribution(0.4)) == "ACCEPTED"
    assert certified(contribution(1.25)) == "STALE by 1.2 rounds"
    too_late = Refused(b"d" * 32, ME, 0, 1, 5, "TOO_LATE", bytes(32), bytes(64))
    assert certified(refused=(too_late,)) == "TOO_LATE"
    for outcome, words in ((Outcome.NOTED, "announced"), (Outcome.HELD, "held")):
        telemetry.receipt(DeltaReceipt(b"e" * 32, outcome, "", 0.0))
        assert status(telemetry).last_outcome == words
    telemetry.waiting("waiting for the swarm: 2 deltas are not settled yet")
    telemetry.run_ended(1)
    telemetry.receipt(DeltaReceipt(b"e" * 32, Outcome.HELD, "", 0.0))
    telemetry.waiting("waiting for the swarm")
    assert (status(telemetry).last_outcome, status(telemetry).state.why) == ("", "")


def test_steps_gaps_and_a_loss_that_is_not_finite(telemetry: Telemetry, clock: Clock) -> None:
    telemetry.stepped(2, 4, 3.5, 100.0, 0.2, 1)
    telemetry.stepped(4, 4, float("nan"), 100.0, 1.2, 1)
    telemetry.stepped(1, 4, 3.0, 100.0, 0.1, 2)
    said = status(telemetry)
    assert said.inner_steps_done == 5
    assert said.longest_inner_gap_s == 1.2
    assert [(g.at_monotonic_s, g.seconds) for g in said.gaps] == [(50.0, 1.2)]
    assert said.state.word == "training"
    telemetry.stepped(2, 4, float("inf"), 100.0, 0.1, 2)
    assert status(telemetry).loss is None
    assert b"null" in to_json(status(telemetry))


def test_seats_and_when_they_were_heard(telemetry: Telemetry, clock: Clock) -> None:
    assert [s.heard_s for s in status(telemetry).committee] == [None, 0.0]
    telemetry.heard(OTHER)
    clock.now += 2
    assert [s.heard_s for s in status(telemetry).committee] == [2.0, 0.0]


def test_every_state_makes_a_report_that_the_tracker_takes(telemetry: Telemetry) -> None:
    for change in ("joining", "training", "waiting", "down", "braked", "leaving", "over"):
        match change:
            case "training":
                telemetry.stepped(1, 4, 2.0, 10.0, 0.1, 1)
            case "waiting":
                telemetry.waiting("no quorum")
            case "down" | "braked":
                telemetry.trainer_down("exit status 1", 2.0, braked=change == "braked")
            case "leaving":
                telemetry.state = "leaving"
            case "over":
                telemetry.run_ended(2)
        assert why_bad(telemetry.report(2, bytes_up=1, bytes_down=2)) == "", change


def test_versions_fill_no_terminal(
    telemetry: Telemetry, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    one = Contribution(b"d" * 32, ME, 0, 1, 5, 100, 1.0, 0.0, 1.0, 1.0, bytes(32), bytes(64))
    with caplog.at_level(logging.INFO, logger="p2pdiloco.node"):
        for version in range(1, 41):
            step = OuterStep(version, 0, (one,), (), (), Scalars(1, 1, 1, 1, 1), 100, 100, bytes(32))
            telemetry.installed(InstallEntry(version, version, None, b"", step))
            clock.now += 0.25
    assert [r.getMessage().split(":")[0] for r in caplog.records] == [f"version {n}" for n in (1, 13, 25, 37)]
    assert caplog.records[0].getMessage().startswith("version 1: 1 delta, 0 refused"), "one is not many"
