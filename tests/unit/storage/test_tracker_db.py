"""History that survives restarts, full disks and damage."""

from __future__ import annotations

import logging
import sqlite3
from pathlib import Path

import msgspec
import pytest

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.ids import RunId, digest_of
from p2pdiloco.status.read_model import Credit, EvalPoint, EventLine, PeerName, Sample, Samples, VersionPoint
from p2pdiloco_node.storage import tracker_db
from p2pdiloco_node.storage.tracker_db import TrackerDb

RUN = RunId(digest_of(b"run"))
WHO = PeerName(name="one", fingerprint="0" * 8)


def point(version: int) -> VersionPoint:
    return VersionPoint(
        version=version, when_unix=1e9 + version, tokens=version * 1000, t_full=1000, loss=3.0, deltas=2,
        stale=0, refused=0, staleness_max=0.0, term=1, aggregator=WHO,
    )  # fmt: skip


def credit(version: int, peer: bytes = b"p") -> Credit:
    return Credit(
        version=version, when_unix=None, peer=digest_of(peer).hex(), name="one", tokens=500, steps=5,
        staleness=0.0, weight=500.0, loss=None,
    )  # fmt: skip


def evaluation(version: int) -> EvalPoint:
    return EvalPoint(version=version, when_unix=1e9, loss=2.5, tokens=4096, by=WHO)


def samples(version: int) -> Samples:
    said = Sample(prompt="def", text=f"main {version}", agreeing=3)
    return Samples(version=version, when_unix=1e9, samples=(said,), evaluators=3)


def event(text: str) -> EventLine:
    return EventLine(when_unix=1e9, kind="joined", text=text, version=0)


def contents(path: Path) -> bytes:
    return path.read_bytes()


def overwrite(path: Path, data: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "history.db"


async def fill(path: Path, versions: range) -> None:
    async with TrackerDb(path, RUN) as db:
        await db.save(
            versions=[point(v) for v in versions],
            contributions=[credit(v, p) for v in versions for p in (b"p", b"q")],
            evaluations=[evaluation(v) for v in versions],
            samples=[samples(v) for v in versions],
            events=[event(f"event {v}") for v in versions],
        )


async def test_everything_is_back_after_a_restart_in_order(path: Path) -> None:
    await fill(path, range(1, 6))
    async with TrackerDb(path, RUN) as db:
        kept = await db.load()
    assert kept.versions == tuple(point(v) for v in range(1, 6))
    assert kept.evaluations == tuple(evaluation(v) for v in range(1, 6))
    assert kept.samples == tuple(samples(v) for v in range(1, 6))
    assert [e.text for e in kept.events] == [f"event {v}" for v in range(1, 6)]
    assert sorted(c.version for c in kept.contributions) == sorted([*range(1, 6)] * 2)


async def test_saving_a_version_again_makes_no_second_row(path: Path) -> None:
    await fill(path, range(1, 4))
    await fill(path, range(2, 5))
    async with TrackerDb(path, RUN) as db:
        kept = await db.load()
    assert [p.version for p in kept.versions] == [1, 2, 3, 4]
    assert len(kept.contributions) == 8


async def test_a_file_of_the_build_before_is_taken_over(path: Path) -> None:
    """Its evaluations say less, and it has no continuations."""
    path.parent.mkdir()
    db = sqlite3.connect(path)
    db.executescript(
        f"{tracker_db.MIGRATIONS[0]} PRAGMA application_id={tracker_db.APPLICATION_ID}; "
        "PRAGMA user_version=1;"
    )
    old = {
        "version": 4,
        "when_unix": 1e9,
        "loss": 2.5,
        "tokens": 4096,
        "by": {"name": "a", "fingerprint": "f"},
    }
    db.execute("INSERT INTO evaluations VALUES (4, ?)", (msgspec.msgpack.encode(old),))
    db.commit()
    db.close()
    async with TrackerDb(path, RUN) as opened:
        kept = await opened.load()
        assert [(e.loss, e.losses, e.asked, e.reports) for e in kept.evaluations] == [(2.5, (), 1, ())]
        await opened.save(samples=[samples(8)])
        assert (await opened.load()).samples == (samples(8),)


async def test_of_which_epoch_the_rows_are_is_saved_with_them(path: Path) -> None:
    async with TrackerDb(path, RUN) as db:
        assert (await db.load()).epoch == 0
        await db.save(versions=[point(1)], epoch=2)
        await db.save(epoch=3)  # no rows
    async with TrackerDb(path, RUN) as db:
        assert (await db.load()).epoch == 2


async def test_the_file_is_bounded(path: Path) -> None:
    async with TrackerDb(path, RUN, rows_max=10) as db:
        for v in range(1, 40):
            await db.save(
                versions=[point(v)],
                contributions=[credit(v)],
                evaluations=[evaluation(v)],
                samples=[samples(v)],
                events=[event(str(v))],
            )
        kept = await db.load()
    assert [len(rows) for rows in kept[:-1]] == [10, 10, 10, limits.samples_kept, 10]
    assert kept.versions[-1].version == 39


@pytest.mark.parametrize("damage", ["text", "zeros", "half", "middle"])
async def test_a_damaged_file_is_moved_aside_and_said(path: Path, damage: str, caplog) -> None:
    await fill(path, range(1, 500))
    data = contents(path)
    middle = bytearray(data)
    middle[4096 : 4096 * 8] = b"\xff" * (4096 * 7)
    ways = {
        "text": b"not a database" * 99,
        "zeros": bytes(100) + data[100:],
        "half": data[: len(data) // 2],
        "middle": bytes(middle),
    }
    overwrite(path, ways[damage])
    damaged = contents(path)
    with caplog.at_level(logging.ERROR):
        await fill(path, range(7, 9))
    assert "is damaged" in caplog.text
    assert contents(path.with_name("history.db.damaged-1")) == damaged
    caplog.clear()
    async with TrackerDb(path, RUN) as db:  # and not again at the next start
        assert [p.version for p in (await db.load()).versions] == [7, 8]
    assert caplog.text == ""


async def test_damage_found_while_running_does_not_stop_the_tracker(path: Path, caplog) -> None:
    await fill(path, range(1, 2000))
    async with TrackerDb(path, RUN) as db:
        data = contents(path)
        overwrite(path, data[:4096] + b"\xff" * (len(data) - 4096))
        await db._in_thread(lambda: db._db.execute("PRAGMA shrink_memory"))  # pages in memory were still good
        await db.save(versions=[point(5000)])
        assert [p.version for p in (await db.load()).versions] == [5000]
    assert "is damaged" in caplog.text


async def test_many_damaged_files_do_not_fill_the_disk(path: Path) -> None:
    for _ in range(6):
        overwrite(path, b"rubbish" * 1000)
        async with TrackerDb(path, RUN):
            pass
    assert len(list(path.parent.iterdir())) == tracker_db.DAMAGED_KEPT + 1


async def test_a_torn_transaction_is_rolled_back(path: Path, monkeypatch) -> None:
    await fill(path, range(1, 4))
    async with TrackerDb(path, RUN) as db:
        monkeypatch.setattr(db, "_trim", lambda: (_ for _ in ()).throw(RuntimeError("killed here")))
        with pytest.raises(RuntimeError):
            await db.save(versions=[point(4)], events=[event("lost")])
        monkeypatch.undo()
        kept = await db.load()
    assert [p.version for p in kept.versions] == [1, 2, 3]
    assert len(kept.events) == 3


async def test_a_full_disk_is_one_sentence_and_the_rest_is_kept(path: Path) -> None:
    await fill(path, range(1, 4))
    async with TrackerDb(path, RUN) as db:
        await db._in_thread(lambda: db._db.execute("PRAGMA max_page_count=1"))  # as small as it can be now
        with pytest.raises(OperatorError, match="free some space") as caught:
            await db.save(versions=[point(v) for v in range(4, 5000)])
        assert caught.value.exit_code == 6
        await db._in_thread(lambda: db._db.execute("PRAGMA max_page_count=100000"))
        await db.save(versions=[point(4)])
        assert [p.version for p in (await db.load()).versions] == [1, 2, 3, 4]


async def test_files_that_are_not_ours_are_left_alone(path: Path) -> None:
    path.parent.mkdir()
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE recipes (x)")
    other.close()
    before = contents(path)
    with pytest.raises(OperatorError, match="another program"):
        await TrackerDb(path, RUN).__aenter__()
    assert contents(path) == before


async def test_another_run_and_a_newer_build_are_refused_in_one_sentence(path: Path) -> None:
    await fill(path, range(1, 2))
    with pytest.raises(OperatorError, match="one run from one folder"):
        await TrackerDb(path, RunId(digest_of(b"other"))).__aenter__()
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version=99")
    db.close()
    with pytest.raises(OperatorError, match="newer p2pdiloco"):
        await TrackerDb(path, RUN).__aenter__()


async def test_rows_of_an_unknown_shape_are_left_out(path: Path) -> None:
    await fill(path, range(1, 4))
    db = sqlite3.connect(path)
    db.execute("UPDATE versions SET point = ? WHERE version = 2", (b"\x81\xa1x\x01",))
    db.commit()
    db.close()
    async with TrackerDb(path, RUN) as reader:
        assert [p.version for p in (await reader.load()).versions] == [1, 3]
