"""The run's data on this disk: fetched in the order in which it is read, within the quota, opened in time.

One task decides (`run`); what is wanted and what gives way is arithmetic (training/shard_plan.py). The
trainer reads the files that are here and passes over the others, so nothing in this module ever makes it
wait: a shard that nobody has is asked for again and again, a damaged file is made anew, a full disk is said.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError, PeerError, TransportError
from p2pdiloco.exit_codes import RUN
from p2pdiloco.ids import Digest
from p2pdiloco.run_spec import BlobRef, DataSpec
from p2pdiloco_node.data.news import Failing, Said, ShardNews
from p2pdiloco_node.data.opened_shards import OpenedShards
from p2pdiloco_node.ports import Purpose
from p2pdiloco_node.training.data import DataOrder
from p2pdiloco_node.training.shard_plan import Plan, costs_of, gives_way, make_plan, shortfall

log = logging.getLogger("p2pdiloco.node")
DISK_RETRY_S = 60.0  # after a full disk
LOOK_EVERY_S = 30.0  # the disk's free room may change by itself


class Store(Protocol):
    """What is asked of the blob store. Safe to use from several threads."""

    def digests(self, purpose: Purpose) -> list[Digest]: ...
    def unfinished(self, purpose: Purpose) -> list[Digest]: ...
    def delete(self, digest: Digest) -> None: ...


class Source(Protocol):
    """Where shards come from."""

    async def fetch_shard(self, ref: BlobRef) -> None:
        """Into the store, checked. Raises: TransportError, PeerError; OperatorError: the disk."""
        ...

    @property
    def deltas_on_the_way(self) -> bool:
        """Whether this node sends or fetches a delta just now."""
        ...


class Disk(NamedTuple):
    """What the data may take."""

    quota: int  # bytes in all (--data-disk)
    free: Callable[[], int]  # bytes on the disk that they may still take; asked in a thread


class _Decision(NamedTuple):
    plan: Plan
    bounds: tuple[int, int]  # cursors of the window in use: its first, and the next one's
    room: int  # bytes; what the plan wants has room
    idle: list[int]  # shards that are here and not wanted, the first to go first


class Shards:
    """An item is a shard by its number in the RunSpec; behind them come evaluation sets and the pieces of the
    tokenizer, which are always wanted. `changed(gone)` is called when the trainer should look at its files.
    """

    def __init__(
        self,
        data: DataSpec,
        order: DataOrder,
        store: Store,
        opened: OpenedShards,
        source: Source,
        said: Said,
        disk: Disk,
        *,
        cursor: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`order`: nobody else's; `cursor`: where a trainer begins."""
        self._data = data
        self._order = order
        self._store = store
        self._files = opened
        self._source = source
        self._disk = disk
        self._clock = clock
        self._live = self._durable = cursor
        self._costs = costs_of(data)
        self._count = len(data.shards)
        self._refs: tuple[BlobRef, ...] = data.blobs
        self._fixed = range(self._count, len(self._refs))
        self._here: set[int] = set()  # blobs
        self._opened: set[int] = set()
        self._coming: set[int] = set()
        self._failing: dict[int, Failing] = {}
        self._suspect: set[int] = set()  # opened, and to be looked at again
        self._decision = _Decision(Plan((), (), ()), (0, 0), 0, [])
        self._disk_retry_at = 0.0
        self._ahead_fails = 0  # in a row
        self._ahead_retry_at = 0.0
        self._first_at: float | None = None  # when the first shard was opened
        self._news = ShardNews(data, said, clock)
        self._woken = asyncio.Event()
        self.changed: Callable[[Sequence[int]], None] = lambda _gone: None
        self.ready = asyncio.Event()
        """The trainer may begin: its first window is here, or a part of it and patience is over."""

    # What the trainer's side asks and tells.

    @property
    def paths(self) -> list[Path]:
        """Where each shard of the RunSpec is, or will be, for the trainer."""
        return [self._files.path(ref) for ref in self._data.shards]

    @property
    def evaluation_paths(self) -> list[Path]:
        """Of each evaluation set."""
        return [self._files.path(e.shard) for e in self._data.evaluations]

    @property
    def tokenizer_paths(self) -> list[Path]:
        """The pieces of the tokenizer's file, in their order; none for bytes."""
        return [self._files.path(ref) for ref in self._data.tokenizer.pieces]

    def at(self, cursor: int) -> None:
        """The trainer reads here now."""
        self._live = cursor
        first, behind = self._decision.bounds
        if not first <= cursor < behind:
            self._woken.set()

    def passed(self, cursor: int) -> None:
        """A pass up to here is durable: a trainer that starts again reads from here on."""
        self._durable = cursor
        self._woken.set()

    def evaluation_failed(self) -> None:
        """An evaluation set could not be read."""
        self._suspect |= self._opened.intersection(self._fixed)
        self._woken.set()

    def missed(self, shards: Iterable[int]) -> None:
        """The trainer could not read these: their files may be gone or damaged."""
        self._suspect |= self._opened.intersection(shards)
        self._woken.set()

    def trainer_failed(self) -> None:
        """Whatever the reason was: a damaged file is one, and the next trainer begins at what is durable."""
        self._live = self._durable
        self._suspect |= self._opened
        self._woken.set()

    # The task.

    async def run(self) -> None:
        """Until cancelled. Raises: OperatorError: a shard is not what its run says (exit code 5)."""
        await asyncio.to_thread(self._find)
        async with asyncio.TaskGroup() as group:
            while True:
                self._woken.clear()
                await self._arrange(group)
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._next_look_s()):
                        await self._woken.wait()

    def _find(self) -> None:
        """What an earlier life left. In a thread."""
        stored = set(self._store.digests(Purpose.SHARD))
        self._here = {item for item, ref in enumerate(self._refs) if ref.digest in stored}
        plan = self._decide(frozenset(self._here), frozenset()).plan
        wanted = [*self._fixed, *plan.read]
        found = self._files.find([self._refs[item] for item in wanted])
        self._opened = {item for item in wanted if Digest(self._refs[item].digest) in found}
        keep = {Digest(self._refs[item].digest) for item in (*wanted, *plan.ahead)}
        for digest in self._store.unfinished(Purpose.SHARD):
            if digest not in keep:
                self._store.delete(digest)

    def _decide(self, here: Collection[int], opened: Collection[int]) -> _Decision:
        """In a thread, with copies of what changes."""
        live, costs = self._live, self._costs
        shards = {s for s in here if s < self._count}
        on_disk = shortfall(costs, read=opened, here=shards, room=0)
        room = min(self._disk.quota, on_disk + self._disk.free())
        plan = make_plan(self._order, costs, live=live, durable=self._durable, here=shards, room=room)
        needed = shortfall(costs, read=plan.read, here=(*plan.read, *plan.ahead), room=0)
        idle = gives_way(self._order, plan, shards, live=live)
        return _Decision(plan, self._order.bounds(live), max(room, needed), idle)

    async def _arrange(self, group: asyncio.TaskGroup) -> None:
        copies = frozenset(self._here), frozenset(self._opened)
        self._decision = await asyncio.to_thread(self._decide, *copies)
        await self._check_suspects()
        await self._close()
        await self._give_way(())
        await self._begin_fetches(group)
        await self._open()
        self._tell()

    async def _check_suspects(self) -> None:
        suspects, self._suspect = self._suspect & self._opened, set()
        for item in sorted(suspects):
            if not await asyncio.to_thread(self._files.is_whole, self._refs[item]):
                log.warning("The opened %s is gone or damaged; it is made anew.", self._news.name(item))
                self._opened.discard(item)
                # Its blob may be gone as well, and nobody may have it: nothing damaged is left to be read.
                await asyncio.to_thread(self._files.remove, [self._refs[item]])
                if item < self._count:
                    self.changed((item,))

    async def _close(self) -> None:
        """Tokens of shards that are not read soon are not kept: a moment's work brings them back."""
        closed = sorted(s for s in self._opened if s < self._count and s not in self._decision.plan.read)
        if closed:
            self._opened.difference_update(closed)
            self.changed(closed)
            await asyncio.to_thread(self._files.remove, [self._refs[s] for s in closed])

    async def _give_way(self, arriving: Collection[int]) -> bool:
        """Drop what is not wanted until the rest and `arriving` have room; whether they have."""
        plan, _, room, idle = self._decision
        here = {s for s in (*self._here, *self._coming, *arriving) if s < self._count}
        short = shortfall(self._costs, read=plan.read, here=here, room=room)
        dropped = []
        while short > 0 and idle:
            shard = idle.pop(0)
            if shard in self._here:
                dropped.append(shard)
                short -= self._costs.blobs[shard]
        if dropped:
            self._here.difference_update(dropped)
            await asyncio.to_thread(self._delete, dropped)
        return short <= 0

    def _delete(self, items: Sequence[int]) -> None:
        for item in items:
            self._store.delete(Digest(self._refs[item].digest))

    async def _begin_fetches(self, group: asyncio.TaskGroup) -> None:
        now, plan = self._clock(), self._decision.plan
        if now < self._disk_retry_at:
            return
        ahead = plan.ahead if self.ready.is_set() and now >= self._ahead_retry_at else ()
        for item in (*self._fixed, *plan.read, *ahead):
            one_at_a_time = self.ready.is_set() and self._source.deltas_on_the_way
            if len(self._coming) >= (1 if one_at_a_time else limits.shard_fetches_max):
                return
            failing = self._failing.get(item)
            if item in self._here or item in self._coming or (failing and failing.retry_at > now):
                continue
            if item < self._count and not await self._give_way((item,)):
                return  # what was wanted before is still on its way; its end wakes this task
            self._coming.add(item)
            group.create_task(self._fetch(item))

    async def _fetch(self, item: int) -> None:
        ref = self._refs[item]
        try:
            await self._source.fetch_shard(ref)
        except (TransportError, PeerError) as error:
            self._failed(item, str(error))
        except OperatorError as error:
            if error.exit_code == RUN:
                raise
            self._disk_failed(error)
        else:
            self._here.add(item)
            self._failing.pop(item, None)
            self._ahead_fails = 0
            self._news.came(ref.size)
        finally:
            self._coming.discard(item)
            self._woken.set()

    async def _open(self) -> None:
        """Raises: OperatorError: a shard is not what its run says."""
        sets = self._count + len(self._data.evaluations)
        for item in (*self._fixed, *self._decision.plan.read):
            if item in self._opened or item not in self._here or self._clock() < self._disk_retry_at:
                continue
            # The pieces of a tokenizer are text, not tokens.
            width, vocab = (
                (self._data.token_bytes, self._data.tokenizer.vocab_size) if item < sets else (1, None)
            )
            open_one = partial(self._files.open, self._refs[item], token_bytes=width, vocab_size=vocab)
            try:
                await asyncio.to_thread(open_one)
            except TransportError as error:
                log.warning("%s: the %s is fetched again.", error, self._news.name(item))
                await asyncio.to_thread(self._delete, [item])
                self._here.discard(item)
                self._woken.set()
            except OperatorError as error:
                if error.exit_code == RUN:
                    raise
                self._disk_failed(error)
            else:
                self._opened.add(item)
                if item < self._count:
                    self._first_at = self._clock() if self._first_at is None else self._first_at
                    self.changed((item,))  # what a trainer may have open is the file before

    def _failed(self, item: int, why: str) -> None:
        now = self._clock()
        tries = self._failing[item].tries + 1 if item in self._failing else 1
        self._failing[item] = Failing(tries, now + _pause_s(tries), why)
        if item in self._decision.plan.ahead:  # thousands may be: none is worth a flood of questions
            self._ahead_fails += 1
            self._ahead_retry_at = now + _pause_s(self._ahead_fails)

    def _disk_failed(self, error: OperatorError) -> None:
        self._news.disk_failed(error)
        self._disk_retry_at = self._clock() + DISK_RETRY_S

    def _next_look_s(self) -> float:
        now = self._clock()
        times = [
            f.retry_at for i, f in self._failing.items() if i in self._fixed or i in self._decision.plan.read
        ]
        times += [self._disk_retry_at, self._ahead_retry_at]
        if not self.ready.is_set() and self._first_at is not None:
            times.append(self._first_at + limits.window_patience_s)
        return min([LOOK_EVERY_S, *(at - now for at in times if at > now)])

    def _tell(self) -> None:
        plan, first = self._decision.plan, self._first_at
        lacking = [s for s in plan.in_use if s not in self._opened]
        if not self.ready.is_set():
            self._news.first_window(len(plan.in_use) - len(lacking), len(plan.in_use))
            if not lacking or (first is not None and self._clock() >= first + limits.window_patience_s):
                self.ready.set()
                self._woken.set()  # now for what is ahead
        needed = [item for item in (*self._fixed, *plan.in_use) if item not in self._opened]
        self._news.lacking(needed, self._failing, training=self.ready.is_set())
        todo = sum(self._costs.blobs[s] for s in (*plan.read, *plan.ahead) if s not in self._here)
        self._news.progress(sum(s < self._count for s in self._here), todo)


def _pause_s(fails: int) -> float:
    return min(limits.shard_backoff_s_max, limits.shard_backoff_s_min * 2.0 ** min(fails - 1, 16))
