"""What people read about a run's data: how far they are, which shard nobody has, that the disk is full."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from p2pdiloco.errors import OperatorError
from p2pdiloco.run_spec import DataSpec
from p2pdiloco.words import count_of

log = logging.getLogger("p2pdiloco.node")
PROGRESS_EVERY_S = 60.0
DISK_SAID_EVERY_S = 600.0
SAID_AFTER_TRIES = 3  # of one shard: before that it is no news
NAMED_MAX = 8


class Said(Protocol):
    """Who is told (Telemetry)."""

    def say(self, kind: str, text: str) -> None: ...
    def fetching(self, what: str, done: int, total: int) -> None: ...
    def lacks(self, what: str) -> None: ...


class Failing(NamedTuple):
    """An item that could not be fetched."""

    tries: int
    retry_at: float
    why: str


class ShardNews:
    """Items as in data/shards.py."""

    def __init__(self, data: DataSpec, said: Said, clock: Callable[[], float]) -> None:
        self._data = data
        self._said = said
        self._clock = clock
        self._told: set[int] = set()  # items that nobody has, said
        self._disk_said_at = float("-inf")
        self._since = clock()
        self._bytes = 0  # fetched since then
        self._complete = -1  # shards that were here when the last line said that this is all

    def name(self, item: int) -> str:
        count, sets = len(self._data.shards), self._data.evaluations
        if item < count:
            return f"data shard {item}"
        if item < count + len(sets):
            return f"evaluation set {sets[item - count].name!r}"
        return f"piece {item - count - len(sets)} of the tokenizer"

    def first_window(self, here: int, total: int) -> None:
        """Before the trainer begins."""
        self._said.fetching("data shards", here, total)

    def came(self, size: int) -> None:
        """A blob of so many bytes was fetched."""
        self._bytes += size

    def disk_failed(self, error: OperatorError) -> None:
        now = self._clock()
        if now - self._disk_said_at >= DISK_SAID_EVERY_S:
            self._disk_said_at = now
            self._said.say("disk", f"{error} Training goes on with the data that are here.")

    def lacking(self, needed: Sequence[int], failing: Mapping[int, Failing], *, training: bool) -> None:
        """`needed`: items that the trainer wants now and that are not here."""
        for item in needed:
            fails = failing.get(item)
            if fails is not None and fails.tries >= SAID_AFTER_TRIES and item not in self._told:
                self._told.add(item)
                meanwhile = "training goes on without it" if training else "nothing else waits for it"
                self._said.say(
                    "data",
                    f"Nobody gives the {self.name(item)} ({fails.why}); {meanwhile}, and it is asked for "
                    "again.",
                )
        for item in sorted(self._told.difference(needed)):
            self._told.discard(item)
            if item not in failing:
                self._said.say("data", f"The {self.name(item)} is here now.")
        nobody = [self.name(item) for item in needed if item in self._told]
        more = " and more" if len(nobody) > NAMED_MAX else ""
        self._said.lacks(f"nobody has {', '.join(nobody[:NAMED_MAX])}{more}" if nobody else "")

    def progress(self, here: int, todo: int) -> None:
        """`here`: shards; `todo`: bytes that are wanted and not here. A line a minute, and one at the end."""
        now, total = self._clock(), len(self._data.shards)
        shards = count_of(total, "shard is", "shards are")
        if todo == 0:
            if here > self._complete:
                enough = "" if here == total else ", as many as --data-disk and the disk allow"
                log.info("The run's data: %d of %s here%s.", here, shards, enough)
                self._complete = here
            self._bytes, self._since = 0, now
        elif now - self._since >= PROGRESS_EVERY_S:
            rate = self._bytes / (now - self._since)
            eta = (
                f"about {todo / rate / 60:,.0f} min for {todo / 1e6:,.0f} MB more" if rate else "nothing came"
            )
            log.info("The run's data: %d of %s here, %.1f MB/s, %s.", here, shards, rate / 1e6, eta)
            self._bytes, self._since = 0, now
