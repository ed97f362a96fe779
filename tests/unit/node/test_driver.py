"""The driver: order, exactly one event for each long work, and what happens when things fail."""

from __future__ import annotations

import asyncio
import gc
import threading
import warnings
from collections.abc import Awaitable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from p2pdiloco.errors import OperatorError, TransportError
from p2pdiloco.ids import Digest, PeerId
from p2pdiloco.protocol import actions as do
from p2pdiloco.protocol import events as fact
from p2pdiloco.protocol.actions import Action, Settled, VoterRecord
from p2pdiloco.protocol.context import HeldDelta
from p2pdiloco.protocol.events import Event
from p2pdiloco.wire.log import Entry, OuterStep
from p2pdiloco.wire.messages import DeltaHeader, Goodbye, Message, Outcome, SnapshotOffer
from p2pdiloco_node.driver import Driver, Ports
from p2pdiloco_node.ports import Array, CheckedDelta, Purpose, Roots
from p2pdiloco_node.process.flight_recorder import FlightRecorder, read_flight

PEER = PeerId(b"p" * 32)
DELTA = Digest(b"d" * 32)
RECORD = VoterRecord(3, 0, bytes(32), None)
HEADER = DeltaHeader(DELTA, 10, "int4", 0, 0, 1, 5, 0, 5, 1.0, bytes(64))
OFFER = SnapshotOffer(4, (b"a" * 32, b"b" * 32), (b"b" * 32,), b"rules")


class World:
    """Every port in one: writes down what was asked of it, in order, and holds what a test holds."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.sizes_max: list[int] = []
        self.of_spec: list[bool] = []
        self.fail: dict[str, Exception] = {}
        self.hold: dict[str, threading.Event] = {}
        self.blobs: set[Digest] = set()
        self.outcome = Outcome.HELD

    def _do(self, what: str) -> None:
        if what in self.hold:
            assert self.hold[what].wait(5)
        if what in self.fail:
            raise self.fail[what]
        self.done.append(what)

    # Journal
    def save_record(self, record: VoterRecord) -> None:
        self._do(f"record {record.term}")

    def load_record(self) -> VoterRecord | None:
        return None

    def append_entries(self, entries: Sequence[Entry]) -> None:
        self._do(f"entries {len(entries)}")

    def load_entries(self) -> list[Entry]:
        return []

    def cut(self, index: int) -> None:  # journal and keeper alike
        self._do(f"cut {index}")

    def enter_epoch(self, epoch: int) -> None:
        self._do(f"epoch {epoch}")

    def next_boot(self) -> int:
        return 1

    # StateKeeper
    def params(self) -> Array:
        self._do("params")
        return np.zeros(3, np.float32)

    def check_delta(
        self, header: DeltaHeader | None, delta: Digest, sender: PeerId | None = None
    ) -> CheckedDelta:
        self._do("check")
        return CheckedDelta(self.outcome, 2.0)

    def prepare(self, ticket: Digest, step: OuterStep) -> Roots:
        self._do("prepare")
        return Roots(Digest(b"P" * 32), Digest(b"M" * 32))

    def install(self, index: int, version: int, ticket: Digest | None, rules: bytes) -> None:
        self._do(f"install {index}")

    def take_snapshot(self, index: int, version: int) -> SnapshotOffer:
        self._do(f"snapshot {index}")
        return OFFER

    def install_snapshot(self, offer: SnapshotOffer, version: int) -> None:
        self._do("install snapshot")

    # BlobStore, as far as the driver uses it
    def has(self, digest: Digest) -> bool:
        return digest in self.blobs

    def delete(self, digest: Digest) -> None:
        self._do("delete")

    # Transport
    async def send(self, peer: PeerId, message: Message) -> None:
        self._do(f"send {message.reason if isinstance(message, Goodbye) else type(message).__name__}")

    async def upload(self, peer: PeerId, delta: Digest, size: int) -> None:
        self._do("upload")

    async def fetch(
        self,
        digest: Digest,
        size_max: int,
        donors: Sequence[PeerId],
        purpose: Purpose = Purpose.DELTA,
        *,
        of_spec: bool = False,
    ) -> None:
        self.sizes_max.append(size_max)
        self.of_spec.append(of_spec)
        await asyncio.to_thread(self._do, f"fetch {digest[:1].decode()}")

    def remember(self, peer: PeerId, sealed: bytes) -> None:
        self._do("remember")

    # DeltaDoor
    def allow(self, header: DeltaHeader, sender: PeerId) -> None:
        self._do("allow")

    def reveal(self, delta: Digest) -> None:
        self._do("reveal")

    def forget(self, delta: Digest) -> None:
        self._do("forget")

    def strike(self, sender: PeerId, outcome: Outcome) -> None:
        self._do(f"strike {sender[:1].decode()} {outcome}")

    # Shelf
    def keep(self, held: HeldDelta) -> None:
        self._do(f"keep {held.norm}")

    def drop(self, delta: Digest) -> None:
        self._do("drop")

    # Watcher
    def installed(self, action: do.InstallEntry) -> None:
        self._do(f"installed {action.index}")

    def say(self, kind: str, text: str) -> None:
        self._do(f"say {kind}")

    def run_ended(self, version: int) -> None:
        self._do("run ended")


class Desk:
    def __init__(self, world: World) -> None:
        self._world = world

    def known(self, sequence: int) -> None:
        self._world.done.append(f"known {sequence}")

    def settle(self, delta: Digest, how: Settled) -> None:
        self._world.done.append(f"settle {how}")

    def adopt(self, order: do.AdoptState, params: Awaitable[Array]) -> None:
        self._world.done.append(f"adopt {order.version}")

    def allow(self, allowed: int, why: str, *, prolong: bool) -> None:
        self._world.done.append(f"allow passes {allowed}")

    def evaluate(self, version: int, state_root: Digest, params: Awaitable[Array]) -> None:
        self._world.done.append(f"evaluate {version}")

    def run_ended(self, version: int) -> None:
        self._world.done.append("desk: run ended")


class Script:
    """A brain that answers `Started` with the given actions and leaves after `enough` further events."""

    def __init__(self, actions: Sequence[Action], enough: int) -> None:
        self._actions = list(actions)
        self._enough = enough
        self.seen: list[Event] = []

    def handle(self, event: Event, now: float) -> Sequence[Action]:
        if isinstance(event, fact.Started):
            return [*self._actions, *([do.LeaveDone()] if self._enough == 0 else [])]
        self.seen.append(event)
        return [do.LeaveDone()] if len(self.seen) >= self._enough else []

    def deadline(self) -> float:
        return float("inf")


def make(
    world: World,
    brain: Script,
    *,
    keeps: bool = False,
    desk: bool = True,
    recorder: FlightRecorder | None = None,
) -> Driver:
    ports = Ports(
        me=PEER, key=b"k" * 32, journal=world, keeper=world, blobs=world, transport=world, door=world,  # type: ignore[arg-type]
        shelf=world, watcher=world, desk=Desk(world) if desk else None, chunk_bytes_max=640,
        keeps_delta=lambda _: keeps,
    )  # fmt: skip
    return Driver(brain, ports, recorder or FlightRecorder())


async def live(
    world: World, actions: Sequence[Action], enough: int, *, keeps: bool = False, desk: bool = True
) -> list[Event]:
    brain = Script(actions, enough)
    async with asyncio.timeout(10):
        await make(world, brain, keeps=keeps, desk=desk).run()
    return brain.seen


async def test_nothing_after_a_save_starts_before_it_is_durable() -> None:
    world = World()
    world.hold["record 3"] = threading.Event()
    brain = Script([do.Send(PEER, Goodbye("before")), do.SaveRecord(RECORD), do.Send(PEER, Goodbye("after")),
                    do.RevealDelta(DELTA)], 0)  # fmt: skip
    life = asyncio.create_task(make(world, brain).run())
    for _ in range(100):
        await asyncio.sleep(0)
    assert world.done == ["send before"]
    world.hold["record 3"].set()
    await asyncio.wait_for(life, 5)
    assert world.done == ["send before", "record 3", "send after", "reveal"]


async def test_a_save_that_fails_ends_the_life_with_its_sentence_and_nothing_is_sent() -> None:
    world = World()
    world.fail["entries 0"] = OperatorError("the disk is full", 6)
    with pytest.raises(ExceptionGroup) as caught:
        await live(world, [do.SaveEntries(()), do.Send(PEER, Goodbye("after"))], 0)
    assert isinstance(caught.value.exceptions[0], OperatorError)
    assert world.done == []


@pytest.mark.parametrize(
    ("action", "fails", "event"),
    [
        (do.UploadDelta(PEER, DELTA, 10), None, fact.DeltaUploaded(DELTA, PEER)),
        (do.UploadDelta(PEER, DELTA, 10), "upload", fact.DeltaNotUploaded(DELTA, PEER, 7.0, "gone")),
        (do.FetchDelta(HEADER, DELTA, 10, (PEER,)), None, fact.DeltaArrived(DELTA, Outcome.HELD, 2.0)),
        (do.FetchDelta(None, DELTA, 10, (PEER,)), "fetch d", fact.DeltaNotFetched(DELTA, "gone")),
        (do.FetchDelta(None, DELTA, 10, (PEER,)), "check", fact.DeltaNotFetched(DELTA, "gone")),
        (do.TakeSnapshot(4, 4), None, fact.SnapshotTaken(OFFER)),
        (do.FetchSnapshot(OFFER, 4, (PEER,)), None, fact.SnapshotFetched(4)),
        (do.FetchSnapshot(OFFER, 4, (PEER,)), "fetch b", fact.SnapshotNotFetched(4, "gone")),
        (do.FetchSnapshot(OFFER, 4, (PEER,)), "install snapshot", fact.SnapshotNotFetched(4, "gone")),
    ],
)
async def test_long_work_ends_in_exactly_one_event(action: Action, fails: str | None, event: Event) -> None:
    world = World()
    if fails:
        world.fail[fails] = TransportError("gone", 7.0)
    assert await live(world, [action], 1) == [event]


async def test_a_chunk_of_a_snapshot_is_no_larger_than_the_model_makes_it() -> None:
    world = World()
    await live(world, [do.FetchSnapshot(OFFER, 4, (PEER,))], 1)
    assert set(world.sizes_max) == {640}


@pytest.mark.parametrize("index", [0, 4])
async def test_a_version_0_that_its_owner_made_wrong_ends_the_node(index: int) -> None:
    """Of a later snapshot the RunSpec says nothing."""
    world = World()
    offer = msgspec.structs.replace(OFFER, index=index)
    await live(world, [do.FetchSnapshot(offer, 4, (PEER,))], 1)
    assert set(world.of_spec) == {index == 0}
    world.fail["fetch b"] = OperatorError("the run's owner has to make the run anew", 5)
    with pytest.raises(ExceptionGroup) as caught:
        await live(world, [do.FetchSnapshot(offer, 4, (PEER,))], 1)
    assert caught.group_contains(OperatorError, match="the run's owner")


async def test_work_that_was_ordered_in_the_last_moment_is_given_up_without_a_warning() -> None:
    """Python warns of what is never awaited, and people read that where they stopped a tracker."""
    world = World()
    world.hold["snapshot 4"] = threading.Event()
    brain = Script([do.TakeSnapshot(4, 4), do.LeaveDone()], 1)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        await asyncio.wait_for(make(world, brain).run(), 5)
        gc.collect()
    world.hold["snapshot 4"].set()
    assert [str(w.message) for w in warned] == []


async def test_an_upload_that_ends_behind_the_driver_is_for_the_next_life() -> None:
    """Its HTTP request outlives the driver for a moment."""
    driver = make(World(), Script([do.AllowDelta(HEADER, PEER, b"k" * 32), do.LeaveDone()], 1))
    await asyncio.wait_for(driver.run(), 5)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        driver.delta_whole(DELTA)
        gc.collect()
    assert [str(w.message) for w in warned] == []


async def test_a_prepared_step_reports_its_roots_and_a_failure_says_why() -> None:
    step = do.PrepareOuterStep(DELTA, 0, None)
    world = World()
    assert await live(world, [step], 1) == [
        fact.OuterStepPrepared(DELTA, Digest(b"P" * 32), Digest(b"M" * 32))
    ]
    world.fail["prepare"] = TransportError("a blob is gone")
    assert await live(world, [step], 1) == [fact.OuterStepNotPrepared(DELTA, "a blob is gone")]


async def test_an_allowed_delta_that_is_here_already_is_checked_at_once() -> None:
    world = World()
    world.blobs.add(DELTA)
    assert await live(world, [do.AllowDelta(HEADER, PEER, b"k" * 32)], 1) == [
        fact.DeltaArrived(DELTA, Outcome.HELD, 2.0)
    ]
    assert world.done[-2:] == ["check", "keep 2.0"]


@pytest.mark.parametrize("outcome", [Outcome.NOT_FINITE, Outcome.BAD_SHAPE, Outcome.TOO_BIG])
async def test_a_bad_delta_counts_against_its_sender_and_is_not_kept(outcome: Outcome) -> None:
    """D1: the signed header names the digest, so what it holds is the sender's fault and no donor's."""
    world = World()
    world.blobs.add(DELTA)
    world.outcome = outcome
    seen = await live(world, [do.AllowDelta(HEADER, PeerId(b"q" * 32), b"k" * 32)], 1)
    assert seen == [fact.DeltaArrived(DELTA, outcome, 2.0)]
    assert world.done == ["allow", "check", f"strike q {outcome}"]
    # A node may judge its own delta; it does not strike itself.
    world.done.clear()
    await live(world, [do.AllowDelta(HEADER, PEER, b"k" * 32)], 1)
    assert world.done == ["allow", "check"]
    # Only its digest is known, from the log: whose fault it is nobody can say.
    world = World()
    world.outcome = outcome
    await live(world, [do.FetchDelta(None, DELTA, 10, (PEER,))], 1)
    assert not any("strike" in what for what in world.done)


async def test_an_upload_that_nobody_allowed_is_not_checked() -> None:
    world = World()
    brain = Script([do.TakeSnapshot(1, 1)], 1)
    driver = make(world, brain)
    driver.delta_whole(DELTA)
    await asyncio.wait_for(driver.run(), 5)
    assert "check" not in world.done


async def test_the_state_lane_keeps_the_order_of_install_snapshot_and_adoption() -> None:
    world = World()
    world.hold["install 1"] = threading.Event()
    actions: list[Action] = [
        do.InstallEntry(1, 1, None, b"", None),
        do.SettleDelta(DELTA, Settled.LISTED),
        do.AdoptState(1, 100, 1000, 0, False),
        do.TakeSnapshot(1, 1),
    ]
    life = asyncio.create_task(live(world, actions, 1))
    for _ in range(100):
        await asyncio.sleep(0)
    assert world.done == ["settle LISTED", "adopt 1"]
    world.hold["install 1"].set()
    await life
    lane = [what for what in world.done if what.split()[0] in ("install", "params", "snapshot")]
    assert lane[:3] == ["install 1", "params", "snapshot 1"]


async def test_what_a_recovery_left_behind_is_dropped_before_anything_is_said() -> None:
    world = World()
    world.hold["install 5"] = threading.Event()
    actions = [
        do.InstallEntry(5, 5, None, b"", None), do.CutLog(3), do.EnterEpoch(1), do.SaveEntries(()),
        do.Send(PEER, Goodbye("after")),
    ]  # fmt: skip
    life = asyncio.create_task(make(world, Script(actions, 0)).run())
    for _ in range(100):
        await asyncio.sleep(0)
    assert world.done == []
    world.hold["install 5"].set()
    await asyncio.wait_for(life, 5)
    # Files of the state, then the log, then whoever shows it; then the epoch, and what is said in it.
    order = [done for done in world.done if done != "installed 5"]
    assert order == ["install 5", "cut 3", "cut 3", "epoch 1", "entries 0", "send after"]


async def test_the_end_of_the_run_is_said_after_the_version_that_reached_it() -> None:
    world = World()
    world.hold["install 1"] = threading.Event()
    actions: list[Action] = [
        do.InstallEntry(1, 1, None, b"", None),
        do.Say("run", "the target is reached"),
        do.RunEnded(1),
        do.TakeSnapshot(1, 1),
    ]
    life = asyncio.create_task(live(world, actions, 1))
    for _ in range(100):
        await asyncio.sleep(0)
    world.hold["install 1"].set()
    await life
    told = [what for what in world.done if what.split()[0] in ("installed", "say", "run")]
    assert told == ["installed 1", "say run", "run ended"]


async def test_an_archive_keeps_what_the_rules_drop() -> None:
    for keeps in (False, True):
        world = World()
        await live(world, [do.DropDelta(DELTA), do.FetchDelta(None, DELTA, 1, ())], 1, keeps=keeps)
        assert ("delete" in world.done) is not keeps
        assert "forget" in world.done


async def test_a_witness_has_no_desk() -> None:
    world = World()
    await live(
        world, [do.AdoptState(1, 1, 9, 0, False), do.AllowPasses(1, ""), do.RunEnded(3)], 0, desk=False
    )
    assert world.done == ["run ended"]


async def test_messages_wait_in_a_bounded_queue_but_own_events_always_get_in() -> None:
    driver = make(World(), Script([], 0))
    message = fact.MessageReceived(PEER, b"", 1, Goodbye(""))
    taken = 0
    while driver.put(message):
        taken += 1
    assert taken == 4096
    assert driver.put(fact.GoodbyeWanted("now"))


async def test_a_due_deadline_and_waiting_messages_take_turns() -> None:
    class Impatient(Script):
        def deadline(self) -> float:
            return 0.0

    brain = Impatient([], 8)
    driver = make(World(), brain)
    for _ in range(4):
        driver.put(fact.TrainerNotFinite())
    await asyncio.wait_for(driver.run(), 5)
    assert [type(e).__name__ for e in brain.seen] == ["Ticked", "TrainerNotFinite"] * 4


async def test_a_broken_rule_crashes_and_the_recorder_has_the_story(tmp_path: Path) -> None:
    class Broken(Script):
        def handle(self, event: Event, now: float) -> Sequence[Action]:
            if isinstance(event, fact.MessageReceived):
                raise AssertionError("two certified bodies")  # noqa: TRY004 - a broken rule, not a type
            return []

    recorder = FlightRecorder()
    driver = make(World(), Broken([], 9), recorder=recorder)
    story: list[Event] = [
        fact.PassFinished(HEADER),
        fact.SnapshotTaken(OFFER),
        fact.DeltaArrived(DELTA, Outcome.HELD, 1.5),
        fact.MessageReceived(PEER, b"k" * 32, 2, HEADER, b"sealed"),
    ]
    for event in story:
        driver.put(event)
    with pytest.raises(ExceptionGroup) as caught:
        await driver.run()
    assert caught.group_contains(AssertionError, match="two certified bodies")
    recorder.write(tmp_path / "flight")
    assert [moment.event for moment in read_flight(tmp_path / "flight")] == [fact.Started(), *story]


def test_the_recorder_forgets_the_oldest_first() -> None:
    recorder = FlightRecorder(bytes_max=200)
    for n in range(100):
        recorder.note(float(n), fact.SnapshotFetched(n))
    assert recorder._bytes <= 200
    assert len(recorder._ring) > 1
