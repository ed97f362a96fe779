"""The one caller of a node's brain: next event or deadline, `handle`, perform the actions in order.

Nothing interleaves inside a rule, because only this task calls `handle`. Whatever takes long runs beside
it, in a thread or a task of the TaskGroup, and comes back as exactly one event (architecture.md 3). The
same driver serves a training node and a witness; a witness has no trainer.

Three lanes keep order where order matters, one thread each, first in first out:

- *saves*: the voter's record and the log. The driver itself waits for them, so nothing after a `Save...`
  starts before it is durable: written before said.
- *state*: prepare, install, snapshot. A step prepared on index i never meets the arrays of i + 1.
- *checks*: decoding and measuring deltas that arrived.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar, assert_never

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError, P2PDiLoCoError, PeerError, TransportError
from p2pdiloco.exit_codes import RUN
from p2pdiloco.ids import Digest, PeerId
from p2pdiloco.protocol import actions as do
from p2pdiloco.protocol import events as fact
from p2pdiloco.protocol.actions import Action, Settled
from p2pdiloco.protocol.context import HeldDelta
from p2pdiloco.protocol.events import Event
from p2pdiloco.wire.messages import DeltaHeader, Outcome, SnapshotOffer
from p2pdiloco_node.ports import (
    Array,
    BlobStore,
    CheckedDelta,
    Journal,
    Purpose,
    Roots,
    StateKeeper,
    Transport,
)
from p2pdiloco_node.process.flight_recorder import FlightRecorder

log = logging.getLogger("p2pdiloco.driver")
T = TypeVar("T")

TICK_FLOOR_S = 0.005  # a deadline that stays in the past may not spin the loop
LAG_PROBE_S = 0.1
LAG_SAID_EVERY_S = 60.0


class Brain(Protocol):
    """`p2pdiloco.protocol.node.Node`, as the driver sees it."""

    def handle(self, event: Event, now: float) -> Sequence[Action]: ...
    def deadline(self) -> float: ...


class DeltaDoor(Protocol):
    """The part of the server that lets deltas in and out."""

    def allow(self, header: DeltaHeader, sender: PeerId) -> None: ...
    def reveal(self, delta: Digest) -> None: ...
    def forget(self, delta: Digest) -> None: ...
    def strike(self, sender: PeerId, outcome: Outcome) -> None:
        """A delta that this peer signed for turned out bad: it counts against the peer (scenario D1)."""
        ...


class Desk(Protocol):
    """Where this node's own work is kept in step with the log; calls return at once and keep their order."""

    def known(self, sequence: int) -> None:
        """The rules are about to hear of the own delta with this sequence."""
        ...

    def settle(self, delta: Digest, how: Settled) -> None: ...
    def adopt(self, order: do.AdoptState, params: Awaitable[Array]) -> None: ...
    def allow(self, allowed: int, why: str, *, prolong: bool) -> None: ...
    def evaluate(self, version: int, state_root: Digest, params: Awaitable[Array]) -> None: ...
    def run_ended(self, version: int) -> None: ...


class Shelf(Protocol):
    """Headers of the deltas held here, durable; called in the checks lane."""

    def keep(self, held: HeldDelta) -> None: ...
    def drop(self, delta: Digest) -> None: ...


class Watcher(Protocol):
    """Whoever shows to people what happens here: log, status, page."""

    def installed(self, action: do.InstallEntry) -> None: ...
    def say(self, kind: str, text: str) -> None: ...
    def run_ended(self, version: int) -> None: ...


class Ports(NamedTuple):
    """The world of one driver."""

    me: PeerId
    key: bytes  # own public key
    journal: Journal
    keeper: StateKeeper
    blobs: BlobStore
    transport: Transport
    door: DeltaDoor
    shelf: Shelf
    watcher: Watcher
    desk: Desk | None  # None: a witness
    chunk_bytes_max: int  # what the run's model makes of its arrays, and not a byte more
    keeps_delta: Callable[[Digest], bool]  # an archive keeps what the rules no longer need


class Driver:
    """Entering nothing, holding one brain: `await Driver(...).run()` is a node's life."""

    def __init__(
        self,
        brain: Brain,
        ports: Ports,
        recorder: FlightRecorder,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._brain = brain
        self._ports = ports
        self._recorder = recorder
        self._clock = clock
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._left = asyncio.Event()
        self._known: dict[Digest, tuple[DeltaHeader, PeerId, bytes]] = {}  # header, sender, its key
        self._checking: set[Digest] = set()
        self._saves = ThreadPoolExecutor(1, "saves")
        self._state = ThreadPoolExecutor(1, "state")
        self._checks = ThreadPoolExecutor(1, "checks")
        self._group: asyncio.TaskGroup | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._installs = self._installs_done = 0  # ordered; and done, in the same order
        self._afterwards: deque[tuple[int, Callable[[], None]]] = deque()  # after so many installs
        self._just_ticked = False
        self.lag_s_max = 0.0  # longest time for which the event loop was held up

    # What the world puts in.

    def put(self, event: Event) -> bool:
        """Queue an event. False: the node is drowning in messages; the sender may try again later."""
        if isinstance(event, fact.MessageReceived) and self._events.qsize() >= limits.events_waiting_max:
            return False
        self._events.put_nowait(event)
        return True

    def delta_whole(self, delta: Digest) -> None:
        """An allowed upload is complete and its digest is right: check what it holds."""
        if delta in self._known:
            self._start(self._check(self._known[delta][0], delta))

    # The loop.

    async def run(self) -> None:
        """Until the brain says LeaveDone. Raises: OperatorError (disk), AssertionError (ours)."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                self._begin(self._watch_loop())
                await self._step(fact.Started())
                while not self._left.is_set():
                    await self._step(await self._next())
                for task in self._tasks:
                    task.cancel()  # uploads and fetches resume in the next life
        finally:
            for lane in (self._saves, self._state, self._checks):
                lane.shutdown(wait=False, cancel_futures=True)

    async def _next(self) -> Event:
        wait_s = self._brain.deadline() - self._clock()
        # A due deadline goes before waiting messages, but not twice in a row: neither starves the other.
        if wait_s <= 0 and not self._just_ticked:
            self._just_ticked = True
            return fact.Ticked()
        self._just_ticked = False
        try:
            async with asyncio.timeout(max(wait_s, TICK_FLOOR_S)):
                return await self._events.get()
        except TimeoutError:
            self._just_ticked = True
            return fact.Ticked()

    async def _step(self, event: Event) -> None:
        now = self._clock()
        self._recorder.note(now, event)
        if isinstance(event, fact.PassFinished):
            header = event.header
            self._known[Digest(header.delta)] = (header, self._ports.me, self._ports.key)
            if self._ports.desk is not None:
                self._ports.desk.known(header.sequence)
        await self._perform(self._brain.handle(event, now))

    async def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, do.SaveRecord):
                await self._in(self._saves, self._ports.journal.save_record, action.record)
            elif isinstance(action, do.SaveEntries):
                await self._in(self._saves, self._ports.journal.append_entries, action.entries)
            elif isinstance(action, do.CutLog):
                # In the state lane, behind every install that came before, and before the log: a start never
                # finds a state of what was cut off.
                await self._in(self._state, self._ports.keeper.cut, action.index)
                await self._in(self._saves, self._ports.journal.cut, action.index)
            elif isinstance(action, do.Send):
                await self._ports.transport.send(action.peer, action.message)
            else:
                self._order(action)

    def _order(self, action: Action) -> None:
        """Everything that does not hold up what follows."""
        ports = self._ports
        match action:
            case do.EnterEpoch(epoch):
                ports.transport.enter_epoch(epoch)
            case do.RememberPeer(peer, sealed):
                ports.transport.remember(peer, sealed)
            case do.UploadDelta():
                self._start(self._upload(action))
            case do.FetchDelta():
                self._start(self._fetch(action))
            case do.AllowDelta(header, sender, key):
                self._known[Digest(header.delta)] = (header, sender, key)
                ports.door.allow(header, sender)
                self._start(self._check_if_here(header))
            case do.RevealDelta(delta):
                ports.door.reveal(delta)
            case do.DropDelta(delta):
                self._known.pop(delta, None)
                ports.door.forget(delta)
                self._begin(self._wait(self._in(self._checks, self._drop, delta)))
            case do.PrepareOuterStep():
                done = self._in(self._state, ports.keeper.prepare, action.ticket, action.step)
                self._start(self._prepared(action, done))
            case do.InstallEntry(index, version, ticket, rules):
                done_ = self._in(self._state, ports.keeper.install, index, version, ticket, rules)
                self._installs += 1
                self._start(self._installed(action, done_))
            case do.TakeSnapshot(index, version):
                taken = self._in(self._state, ports.keeper.take_snapshot, index, version)
                self._start(self._snapshot_taken(taken))
            case do.FetchSnapshot():
                self._start(self._fetch_snapshot(action))
            case do.Say(kind, text):
                self._after_installs(partial(ports.watcher.say, kind, text))
            case do.RunEnded(version):
                self._after_installs(partial(self._run_ended, version))
            case do.LeaveDone():
                self._left.set()
            case do.SettleDelta() | do.AdoptState() | do.AllowPasses() | do.EvaluateState():
                self._own_work(action)
            case do.SaveRecord() | do.SaveEntries() | do.CutLog() | do.Send():
                raise AssertionError(f"{action} is performed in order")
            case _:
                assert_never(action)

    def _own_work(self, action: do.SettleDelta | do.AdoptState | do.AllowPasses | do.EvaluateState) -> None:
        desk = self._ports.desk
        if desk is None:
            return
        match action:
            case do.SettleDelta(delta, how):
                desk.settle(delta, how)
            case do.AdoptState():
                # Read in the state lane: behind the install that this adoption follows.
                desk.adopt(action, self._in(self._state, self._ports.keeper.params))
            case do.AllowPasses(allowed, why, prolong):
                desk.allow(allowed, why, prolong=prolong)
            case do.EvaluateState(version, _, state_root):
                desk.evaluate(version, state_root, self._in(self._state, self._ports.keeper.params))

    # Long work: each ends in exactly one event.

    def _start(self, work: Coroutine[object, object, Event | None]) -> None:
        task = self._begin(work)
        if task is not None:
            task.add_done_callback(self._to_event)

    def _begin(self, work: Coroutine[object, object, T]) -> asyncio.Task[T] | None:
        """None: this life is ending, and what comes now is for the next."""
        assert self._group is not None, "the driver is not running"
        try:
            task = self._group.create_task(work)
        except RuntimeError:
            work.close()
            return None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _to_event(self, task: asyncio.Task[Event | None]) -> None:
        """The group has what a task raised."""
        if not task.cancelled() and task.exception() is None and (event := task.result()) is not None:
            self._events.put_nowait(event)

    async def _upload(self, action: do.UploadDelta) -> Event:
        delta, peer = action.delta, action.peer
        try:
            await self._ports.transport.upload(peer, delta, action.size)
        except TransportError as error:
            return fact.DeltaNotUploaded(delta, peer, error.retry_after_s or limits.retry_after_s, str(error))
        except (PeerError, OperatorError) as error:
            return fact.DeltaNotUploaded(delta, peer, limits.retry_after_s, str(error))
        return fact.DeltaUploaded(delta, peer)

    async def _fetch(self, action: do.FetchDelta) -> Event | None:
        try:
            if not self._ports.blobs.has(action.delta):
                await self._ports.transport.fetch(action.delta, action.size_max, action.donors)
        except P2PDiLoCoError as error:
            return fact.DeltaNotFetched(action.delta, str(error))
        return await self._check(action.header, action.delta)

    async def _check_if_here(self, header: DeltaHeader) -> Event | None:
        """A blob that came earlier (a re-offer, a restart) needs no upload."""
        delta = Digest(header.delta)
        if not self._ports.blobs.has(delta):
            return None  # the upload's end will call `delta_whole`
        return await self._check(header, delta)

    async def _check(self, header: DeltaHeader | None, delta: Digest) -> Event | None:
        if delta in self._checking:
            return None  # somebody else's upload of the same blob ends in the one event
        self._checking.add(delta)
        try:
            checked = await self._in(self._checks, self._checked, header, delta)
        except P2PDiLoCoError as error:
            return fact.DeltaNotFetched(delta, str(error))
        finally:
            self._checking.discard(delta)
        # Its sender's fault alone: who fetched it for the log had it from a donor, and its digest was right.
        # Which peer that was, the rules say for log and page.
        known = self._known.get(delta)
        if checked.outcome is not Outcome.HELD and known is not None and known[1] != self._ports.me:
            self._ports.door.strike(known[1], checked.outcome)
        return fact.DeltaArrived(delta, checked.outcome, checked.norm)

    def _checked(self, header: DeltaHeader | None, delta: Digest) -> CheckedDelta:
        """In the checks lane: what is good is kept with its header before anybody hears of it."""
        known = self._known.get(delta)
        checked = self._ports.keeper.check_delta(header, delta, known[1] if known is not None else None)
        if known is not None and checked.outcome is Outcome.HELD:
            self._ports.shelf.keep(HeldDelta(*known, checked.norm))
        return checked

    def _drop(self, delta: Digest) -> None:
        self._ports.shelf.drop(delta)
        if not self._ports.keeps_delta(delta):
            self._ports.blobs.delete(delta)

    async def _prepared(self, action: do.PrepareOuterStep, done: Awaitable[Roots]) -> Event:
        try:
            roots = await done
        except P2PDiLoCoError as error:
            return fact.OuterStepNotPrepared(action.ticket, str(error))
        return fact.OuterStepPrepared(action.ticket, roots.params, roots.momentum)

    async def _installed(self, action: do.InstallEntry, done: Awaitable[None]) -> None:
        await done  # the state could not be kept: an OperatorError here ends the process with its sentence
        self._ports.watcher.installed(action)
        self._installs_done += 1
        while self._afterwards and self._afterwards[0][0] <= self._installs_done:
            self._afterwards.popleft()[1]()

    # What people read follows the line of the entry that it is about.

    def _after_installs(self, work: Callable[[], None]) -> None:
        if self._installs_done == self._installs:
            work()
        else:
            self._afterwards.append((self._installs, work))

    def _run_ended(self, version: int) -> None:
        self._ports.watcher.run_ended(version)
        if self._ports.desk is not None:
            self._ports.desk.run_ended(version)

    async def _snapshot_taken(self, taken: Awaitable[SnapshotOffer]) -> Event | None:
        try:
            offer = await taken
        except OperatorError as error:
            self._ports.watcher.say("snapshot", f"No snapshot was written: {error}")
            return None
        return fact.SnapshotTaken(offer)

    async def _fetch_snapshot(self, action: do.FetchSnapshot) -> Event:
        offer = action.offer
        fetch = self._ports.transport.fetch
        slots = asyncio.Semaphore(limits.fetches_per_node_max)

        most, of_spec = self._ports.chunk_bytes_max, offer.index == 0

        async def one(chunk: Digest) -> None:
            async with slots:
                await fetch(chunk, most, action.donors, Purpose.SNAPSHOT, of_spec=of_spec)

        wanted = [Digest(c) for c in dict.fromkeys((*offer.params, *offer.momentum))]
        failures = await asyncio.gather(*(one(chunk) for chunk in wanted), return_exceptions=True)
        for failure in failures:
            if isinstance(failure, OperatorError) and failure.exit_code == RUN:
                raise failure  # no donor has another one
            if isinstance(failure, P2PDiLoCoError):
                return fact.SnapshotNotFetched(offer.index, str(failure))
            if failure is not None:
                raise failure
        try:
            await self._in(self._state, self._ports.keeper.install_snapshot, offer, action.version)
        except P2PDiLoCoError as error:
            return fact.SnapshotNotFetched(offer.index, str(error))
        return fact.SnapshotFetched(offer.index)

    # Threads and watching.

    def _in(self, lane: ThreadPoolExecutor, work: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
        """Queue `work` in a lane now; the order of calls is the order of execution."""
        return asyncio.get_running_loop().run_in_executor(lane, lambda: work(*arguments))

    async def _wait(self, done: Awaitable[None]) -> None:
        await done

    async def _watch_loop(self) -> None:
        """Notice when something holds up the event loop: heavy work belongs into a lane (target P4)."""
        said_at = float("-inf")
        while True:
            before = self._clock()
            await asyncio.sleep(LAG_PROBE_S)
            now = self._clock()
            lag_s = now - before - LAG_PROBE_S
            self.lag_s_max = max(self.lag_s_max, lag_s)
            if lag_s > limits.loop_lag_s_max and now - said_at > LAG_SAID_EVERY_S:
                said_at = now
                log.warning(
                    "The event loop was held up for %.1f s (a busy machine, or heavy work on it).", lag_s
                )
