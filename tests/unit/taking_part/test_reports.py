"""Evaluations reach a tracker that is away, and count as done only then."""

from __future__ import annotations

import asyncio

import pytest

from p2pdiloco import limits
from p2pdiloco.errors import TransportError
from p2pdiloco.wire.messages import EvalReport, SetLoss
from p2pdiloco_node.taking_part.reports import Reports
from p2pdiloco_node.transport.contact import Refused


class Tracker:
    """Answers as it is told, and holds its reporters back between two sayings."""

    def __init__(self) -> None:
        self.answers: TransportError | None = None
        self.heard: list[EvalReport] = []
        self.taken: list[int] = []
        self.pauses: list[float] = []
        self.go_on = asyncio.Semaphore(0)
        self.reports = Reports(self.deliver, self.taken.append, self.pause)

    async def deliver(self, report: EvalReport) -> None:
        self.heard.append(report)
        if self.answers is not None:
            raise self.answers

    async def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        await self.go_on.acquire()

    async def sayings(self, number: int) -> None:
        """Until so many have come, by going on that often."""
        async with asyncio.timeout(5):
            while len(self.heard) < number:
                self.go_on.release()
                await asyncio.sleep(0)


def report(version: int) -> EvalReport:
    return EvalReport(version, bytes(32), (SetLoss(2.0, 10),))


@pytest.mark.parametrize("why", [TransportError("nobody there"), Refused("refused", "WRONG_EPOCH")])
async def test_a_tracker_that_is_away_gets_the_report_when_it_is_back(why: TransportError) -> None:
    tracker = Tracker()
    async with tracker.reports as reports:
        tracker.answers = why
        reports.say(report(4))
        await tracker.sayings(50)
        assert tracker.taken == []
        assert tracker.pauses[0] == limits.evaluation_unsaid_s
        assert max(tracker.pauses) == tracker.pauses[-1] == limits.evaluation_unsaid_s_max
        tracker.answers = None
        tracker.go_on.release()
        await reports.said(5)
    assert tracker.taken == [4]
    assert set(tracker.heard) == {report(4)}


async def test_each_saying_is_a_message_of_its_own() -> None:
    """The client seals one message once: the second saying was a replay, and no tracker looked at it."""
    tracker = Tracker()
    async with tracker.reports as reports:
        tracker.answers = TransportError("it is not certified here yet")
        reports.say(report(4))
        await tracker.sayings(5)
    assert len({id(one) for one in tracker.heard}) == 5


async def test_what_is_taken_is_said_once() -> None:
    tracker = Tracker()
    async with tracker.reports as reports:
        reports.say(report(4))
        await reports.said(5)
    assert (tracker.heard, tracker.taken, tracker.pauses) == ([report(4)], [4], [])


async def test_a_report_that_is_refused_is_neither_said_again_nor_counts_as_done() -> None:
    """A state of an epoch that the owner ended: the new epoch's state of that version is still to do."""
    tracker = Tracker()
    async with tracker.reports as reports:
        tracker.answers = Refused("refused", "WRONG_STATE")
        reports.say(report(4))
        await reports.said(5)
    assert (len(tracker.heard), tracker.taken, tracker.pauses) == (1, [], [])


async def test_a_node_that_leaves_waits_no_longer_than_it_says(caplog: pytest.LogCaptureFixture) -> None:
    tracker = Tracker()
    async with tracker.reports as reports:
        tracker.answers = TransportError("nobody there")
        reports.say(report(4))
        await reports.said(0)
    assert tracker.taken == []
    assert "The tracker was away: the evaluation of version 4 is not reported." in caplog.text


async def test_of_many_that_wait_the_oldest_gives_way() -> None:
    tracker = Tracker()
    async with tracker.reports as reports:
        tracker.answers = TransportError("nobody there")
        for version in range(limits.evaluations_due_max + 1):
            reports.say(report(version))
            await asyncio.sleep(0)
        tracker.answers = None
        tracker.heard.clear()
        await tracker.sayings(limits.evaluations_due_max)
        await reports.said(5)
    assert sorted(tracker.taken) == list(range(1, limits.evaluations_due_max + 1))
