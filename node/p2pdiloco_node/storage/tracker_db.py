"""The tracker's history in SQLite: what the page shows survives a restart (product.md 4).

One connection in one thread of its own, rollback journal, synchronous=FULL: SQLite libraries up to 3.51.2
can corrupt a WAL that two connections share (design: traps.md). Only the page depends on it, so a damaged
file is moved aside with a log line, and a new one begins; the log still has every count.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self, TypeVar

import msgspec

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.exit_codes import RESOURCES, RUN
from p2pdiloco.ids import RunId
from p2pdiloco.status.read_model import Credit, EvalPoint, EventLine, Samples, VersionPoint

log = logging.getLogger(__name__)
T = TypeVar("T")

# Each migration takes the database from user_version i to i + 1. Never change one; add the next.
MIGRATIONS = (
    """
    CREATE TABLE meta (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
    CREATE TABLE versions (version INTEGER PRIMARY KEY, point BLOB NOT NULL);
    CREATE TABLE evaluations (version INTEGER PRIMARY KEY, point BLOB NOT NULL);
    CREATE TABLE contributions (
        version INTEGER NOT NULL, peer BLOB NOT NULL, point BLOB NOT NULL, PRIMARY KEY (version, peer)
    ) WITHOUT ROWID;
    CREATE TABLE events (id INTEGER PRIMARY KEY, point BLOB NOT NULL);
    """,
    "CREATE TABLE samples (version INTEGER PRIMARY KEY, point BLOB NOT NULL);",
)
APPLICATION_ID = 0x70326464  # "p2dd": a file of another program is not ours to change
DAMAGED_KEPT = 3


class Kept(NamedTuple):
    """History in order of version or time; of the curves the newest limits.points_kept points."""

    versions: tuple[VersionPoint, ...]
    contributions: tuple[Credit, ...]
    evaluations: tuple[EvalPoint, ...]
    samples: tuple[Samples, ...]
    events: tuple[EventLine, ...]
    epoch: int = 0  # of the log that the rows were made from


class TrackerDb:
    """`async with TrackerDb(path, run) as db`. Every call runs in the database's own thread."""

    def __init__(self, path: Path, run: RunId, *, rows_max: int = limits.history_rows_max) -> None:
        self._path = path
        self._run = run
        self._rows_max = rows_max
        self._connection: sqlite3.Connection | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tracker-db")

    async def __aenter__(self) -> Self:
        """Open, or begin anew beside a damaged file.

        Raises: OperatorError when the folder cannot be written, the file is another program's, another
            run's, or a newer build's.
        """
        try:
            await self._in_thread(self._open)
        except BaseException:
            self._thread.shutdown()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._in_thread(self._close)
        finally:
            self._thread.shutdown()

    async def load(self) -> Kept:
        """What there is; rows of a kind that cannot be read any more are left out."""
        return await self._in_thread(lambda: self._mended(self._load))

    async def forget_after(self, version: int) -> None:
        """Drop what came after `version`: the owner's recovery went on from there. Raises: OperatorError."""

        def forget() -> None:
            self._db.execute("BEGIN IMMEDIATE")
            for table in ("versions", "contributions", "evaluations", "samples"):
                self._db.execute(f"DELETE FROM {table} WHERE version > ?", (version,))  # noqa: S608
            self._db.execute("COMMIT")

        await self._in_thread(lambda: self._mended(forget))

    async def save(
        self,
        *,
        versions: Sequence[VersionPoint] = (),
        contributions: Sequence[Credit] = (),
        evaluations: Sequence[EvalPoint] = (),
        samples: Sequence[Samples] = (),
        events: Sequence[EventLine] = (),
        epoch: int = 0,
    ) -> None:
        """All or nothing, durable on return. Saving the same again changes nothing (events excepted).

        `epoch`: of the log that the rows were made from; a life that ended early is known by it.

        Raises: OperatorError (exit code 6) when the disk is full or failing; nothing was saved then, and
            the page goes on without it.
        """
        rows = Kept(
            tuple(versions), tuple(contributions), tuple(evaluations), tuple(samples), tuple(events), epoch
        )
        if any(rows[:-1]):
            await self._in_thread(lambda: self._mended(lambda: self._save(rows)))

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    # In the thread

    def _open(self) -> None:
        log.info("history database %s, SQLite %s", self._path, sqlite3.sqlite_version)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._connect()
        except sqlite3.OperationalError as error:
            self._close()
            raise OperatorError(
                f"the history database {self._path} cannot be opened ({error}): check the folder's owner and "
                "free space",
                exit_code=RESOURCES,
            ) from None
        except sqlite3.DatabaseError as error:
            self._begin_anew(str(error))

    def _connect(self) -> None:
        self._connection = db = sqlite3.connect(self._path, isolation_level=None, timeout=5.0)
        db.execute("PRAGMA journal_mode=DELETE")
        db.execute("PRAGMA synchronous=FULL")
        version = int(db.execute("PRAGMA user_version").fetchone()[0])
        owner = int(db.execute("PRAGMA application_id").fetchone()[0])
        if (version or _tables(db)) and owner != APPLICATION_ID:
            raise OperatorError(f"{self._path} belongs to another program: name another --run folder")
        if version > len(MIGRATIONS):
            raise OperatorError(
                f"{self._path} was written by a newer p2pdiloco (history format {version}, this build knows "
                f"{len(MIGRATIONS)}): pip install --upgrade p2pdiloco",
                exit_code=RUN,
            )
        problem = db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if problem != "ok":
            raise sqlite3.DatabaseError(problem)
        for i in range(version, len(MIGRATIONS)):
            db.executescript(
                f"BEGIN; {MIGRATIONS[i]} PRAGMA application_id={APPLICATION_ID}; "
                f"PRAGMA user_version={i + 1}; COMMIT;"
            )
        db.execute("INSERT OR IGNORE INTO meta VALUES ('run', ?)", (self._run,))
        run = db.execute("SELECT value FROM meta WHERE key = 'run'").fetchone()[0]
        if run != self._run:
            raise OperatorError(
                f"{self._path} holds the history of run {bytes(run).hex()[:16]}, not of "
                f"{self._run.hex()[:16]}: a tracker serves one run from one folder",
                exit_code=RUN,
            )

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _begin_anew(self, why: str) -> None:
        """Move the damaged file and its journal aside; an old damaged one makes room."""
        self._close()
        names = [self._path.with_name(f"{self._path.name}.damaged-{i}") for i in range(1, DAMAGED_KEPT + 1)]
        aside = next((n for n in names if not n.exists()), names[-1])
        self._path.replace(aside)
        journal = self._path.with_name(self._path.name + "-journal")
        if journal.exists():
            # Left here it would be replayed into the new file.
            journal.replace(aside.with_name(aside.name + "-journal"))
        log.error(
            "history database %s is damaged (%s): moved to %s; the page's curve begins anew, the run itself "
            "is not touched",
            self._path,
            why,
            aside.name,
        )
        self._connect()

    def _mended(self, call: Callable[[], T]) -> T:
        """Do it, if the file turns out damaged once more with a new one."""
        try:
            return call()
        except sqlite3.OperationalError as error:
            raise OperatorError(
                f"the history database {self._path} cannot be written ({error}): free some space; the page "
                "goes on without history until then",
                exit_code=RESOURCES,
            ) from None
        except sqlite3.DatabaseError as error:
            self._begin_anew(str(error))
            return call()

    @property
    def _db(self) -> sqlite3.Connection:
        assert self._connection is not None, "entered, and not left"
        return self._connection

    def _load(self) -> Kept:
        newest = limits.points_kept
        return Kept(
            versions=self._points("versions", "version", VersionPoint, newest),
            contributions=self._points("contributions", "version", Credit, self._rows_max),
            evaluations=self._points("evaluations", "version", EvalPoint, newest),
            samples=self._points("samples", "version", Samples, limits.samples_kept),
            events=self._points("events", "id", EventLine, limits.events_kept),
            epoch=self._epoch(),
        )

    def _epoch(self) -> int:
        found = self._db.execute("SELECT value FROM meta WHERE key = 'epoch'").fetchone()
        return int(found[0]) if found is not None else 0

    def _points(self, table: str, key: str, kind: type[T], newest: int) -> tuple[T, ...]:
        # The names come from this module, never from outside.
        rows = self._db.execute(f"SELECT point FROM {table} ORDER BY {key} DESC LIMIT ?", (newest,))  # noqa: S608
        points = []
        for (data,) in rows:
            try:
                points.append(msgspec.msgpack.decode(data, type=kind))
            except (msgspec.DecodeError, TypeError):  # a row of an older shape: its place stays empty
                continue
        return tuple(reversed(points))

    def _save(self, rows: Kept) -> None:
        db, pack = self._db, msgspec.msgpack.encode
        db.execute("BEGIN IMMEDIATE")
        try:
            db.executemany(
                "INSERT OR REPLACE INTO versions VALUES (?, ?)",
                [(p.version, pack(p)) for p in rows.versions],
            )
            db.executemany(
                "INSERT OR REPLACE INTO contributions VALUES (?, ?, ?)",
                [(c.version, bytes.fromhex(c.peer), pack(c)) for c in rows.contributions],
            )
            db.executemany(
                "INSERT OR REPLACE INTO evaluations VALUES (?, ?)",
                [(p.version, pack(p)) for p in rows.evaluations],
            )
            db.executemany(
                "INSERT OR REPLACE INTO samples VALUES (?, ?)",
                [(s.version, pack(s)) for s in rows.samples],
            )
            db.executemany("INSERT INTO events (point) VALUES (?)", [(pack(e),) for e in rows.events])
            db.execute("INSERT OR REPLACE INTO meta VALUES ('epoch', ?)", (rows.epoch,))
            self._trim()
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise

    def _trim(self) -> None:
        """Oldest rows go, so that the file is bounded."""
        bounds = (
            ("versions", "version", self._rows_max),
            ("evaluations", "version", self._rows_max),
            ("samples", "version", limits.samples_kept),
            ("events", "id", self._rows_max),
        )
        for table, key, rows_max in bounds:
            self._db.execute(
                f"DELETE FROM {table} WHERE {key} <= (SELECT {key} FROM {table} ORDER BY {key} DESC "  # noqa: S608
                "LIMIT 1 OFFSET ?)",
                (rows_max,),
            )
        self._db.execute(
            "DELETE FROM contributions WHERE version <= (SELECT version FROM contributions "
            "ORDER BY version DESC LIMIT 1 OFFSET ?)",
            (self._rows_max,),
        )


def _tables(db: sqlite3.Connection) -> int:
    return int(db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0])
