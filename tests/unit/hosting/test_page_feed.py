"""The page's builder follows the log, also over a recovery and over a crash in the middle of one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from p2pdiloco.errors import PeerError
from p2pdiloco.protocol.actions import InstallEntry
from p2pdiloco.status import StatusBuilder, join_hint
from p2pdiloco.wire.log import Content
from p2pdiloco_node.hosting import page_feed
from p2pdiloco_node.hosting.page_feed import PageFeed
from p2pdiloco_node.storage.tracker_db import TrackerDb
from tests.unit.protocol.builders import NODES, Chain, make_run, recover

RUN = make_run(NODES[0])


class Stage:
    """A witness with a log, and what the feed tells."""

    def __init__(self, db: TrackerDb) -> None:
        self.chain = Chain(RUN)
        self.told: list[int] = []
        self.meanwhile: dict[int, Callable[[], None]] = {}  # when this entry has been told
        self.back: list[int] = []
        self.said: list[str] = []
        self.feed = PageFeed(
            RUN.spec, db, log=lambda: self.chain.log, new_builder=self.new_builder, entry=self.entry,
            went_back=self.back.append, say=lambda _kind, text: self.said.append(text),
        )  # fmt: skip

    def new_builder(self) -> StatusBuilder:
        return StatusBuilder(
            RUN.id,
            RUN.spec,
            join=join_hint(RUN.id, "http://x", local=True, folder="x"),
            build="1",
            started_unix=1.0,
        )

    def entry(self, index: int, _content: Content, _when_unix: float) -> None:
        self.told.append(index)
        self.meanwhile.pop(index, lambda: None)()

    def install(self, index: int) -> None:
        self.feed.installed(InstallEntry(index, 0, None, b"", None))

    def steps(self, count: int) -> None:
        """As they are certified and installed."""
        for _ in range(count):
            self.chain.steps(1)
            self.install(self.chain.log.index)

    def recover(self, base: int) -> None:
        """The rules cut the log at once; nobody else has heard of it."""
        other = Chain(RUN)
        other.steps(base)
        entry = recover(other.log, other.state, base, RUN.committee)
        if base < self.chain.log.index:
            self.chain.log.cut(base)
        self.chain.log.append(entry)
        self.chain.state = other.state

    @property
    def versions(self) -> list[int]:
        return [point.version for point in self.feed.builder.history.points]


@pytest.fixture
async def db(tmp_path: Path) -> AsyncIterator[TrackerDb]:
    async with TrackerDb(tmp_path / "history.sqlite", RUN.id) as opened:
        yield opened


@pytest.fixture
def stage(db: TrackerDb) -> Stage:
    return Stage(db)


async def kept(db: TrackerDb) -> list[int]:
    return [point.version for point in (await db.load()).versions]


async def test_entries_are_told_once_each(stage: Stage, db: TrackerDb) -> None:
    stage.chain.steps(3)
    await stage.feed.begin()
    stage.steps(2)
    stage.install(4)
    assert stage.told == [1, 2, 3, 4, 5]
    assert stage.versions == [1, 2, 3, 4, 5]
    await stage.feed.save()
    assert await kept(db) == [1, 2, 3, 4, 5]
    assert stage.back == []


async def test_what_a_recovery_drops_is_forgotten_by_page_and_database(stage: Stage, db: TrackerDb) -> None:
    await stage.feed.begin()
    stage.steps(6)
    await stage.feed.save()
    stage.recover(3)
    # Installs that were on their way when the log was cut.
    stage.install(6)
    stage.install(7)
    assert stage.told == [1, 2, 3, 4, 5, 6]
    await stage.feed.look()
    assert stage.back == [3]
    assert stage.told[6:] == [1, 2, 3, 4]
    assert stage.versions == [1, 2, 3]
    assert await kept(db) == [1, 2, 3]
    await stage.feed.look()
    assert stage.back == [3], "once"


async def test_a_recovery_behind_all_that_was_seen_drops_nothing(stage: Stage) -> None:
    await stage.feed.begin()
    stage.steps(3)
    stage.recover(3)
    stage.install(4)
    await stage.feed.look()
    assert stage.back == []
    assert stage.told == [1, 2, 3, 4]


@pytest.mark.parametrize("further", [0, 5])
async def test_a_crash_before_the_database_heard_of_it_brings_nothing_back(
    stage: Stage, db: TrackerDb, further: int
) -> None:
    """Also where the new branch is longer by then than the old one was."""
    await stage.feed.begin()
    stage.steps(6)
    await stage.feed.save()
    stage.recover(3)
    for _ in range(further):
        stage.chain.steps(1)
    again = Stage(db)
    again.chain = stage.chain
    await again.feed.begin()
    assert await kept(db) == [1, 2, 3]
    await again.feed.save()
    points = again.feed.builder.history.points
    assert [p.version for p in points] == list(range(1, 4 + further))
    assert all(p.when_unix is None for p in points[3:]), "no times of the dropped branch"
    last = Stage(db)
    last.chain = stage.chain
    await last.feed.begin()
    last.steps(1)
    await last.feed.save()
    assert (await kept(db))[-1] == 4 + further


async def test_the_log_is_replayed_in_slices_and_new_entries_find_their_place(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_feed, "SLICE_S", 0.0)
    stage.chain.steps(20)
    turns = 0

    def early() -> None:
        with pytest.raises(PeerError, match="TOO_EARLY"):
            stage.feed.root_of(3, b"")

    async def vote() -> None:
        nonlocal turns
        while not replayed.done():
            await asyncio.sleep(0)
            turns += 0 < len(stage.told) < 20

    stage.meanwhile = {5: lambda: stage.steps(1), 6: early}
    replayed = asyncio.ensure_future(stage.feed.begin())
    await asyncio.gather(replayed, vote())
    assert turns >= 10
    assert stage.told == list(range(1, 22))
    assert stage.feed.builder.history.points[-1].when_unix is not None, "it came in this life"
    assert stage.feed.root_of(3, b"") is not None


async def test_a_recovery_during_the_replay_begins_it_anew(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_feed, "SLICE_S", 0.0)
    stage.chain.steps(20)
    stage.meanwhile = {10: lambda: stage.recover(5)}
    await stage.feed.begin()
    assert (await stage.feed.save()).versions == (), "the builder has seen what is gone"
    await stage.feed.look()
    assert stage.back == [5]
    assert stage.versions == [1, 2, 3, 4, 5]
