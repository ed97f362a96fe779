"""One simulated machine: a driver around a real brain, with a virtual disk, a network and a trainer.

It performs actions as `p2pdiloco_node.driver` does, one at a time and in order, and may die or freeze
between any two of them: that is where crash bugs live. What each order means is in orders.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from p2pdiloco.errors import PeerError
from p2pdiloco.ids import Digest, PeerId
from p2pdiloco.protocol import events as fact
from p2pdiloco.protocol.actions import Action
from p2pdiloco.protocol.context import Identity, Restored
from p2pdiloco.protocol.events import Event
from p2pdiloco.sim.brain import Brain
from p2pdiloco.sim.disk import Disk, DiskFull, StateFiles
from p2pdiloco.sim.orders import PERFORM
from p2pdiloco.sim.trainer import Trainer
from p2pdiloco.wire.envelope import ANYBODY, open_envelope, receiver_of, seal
from p2pdiloco.wire.log import OuterStep, open_body
from p2pdiloco.wire.messages import DeltaHeader, Message, PeerRecord, Peers
from p2pdiloco.wire.signing import Signer

if TYPE_CHECKING:
    from p2pdiloco.sim.world import World

TICK_FLOOR_S = 0.002  # a deadline that stays in the past may not stop time

Change = Callable[["Machine", list[Action]], list[Action]]


class Machine:
    """A node or the witness. `up`, `frozen`, `gone` are what faults and schedules look at."""

    def __init__(
        self, world: World, name: str, role: str, signer: Signer, disk: Disk, *, speed: float
    ) -> None:
        self.world = world
        self.name = name
        self.role = role
        self.signer = signer
        self.id = signer.peer_id
        self.disk = disk
        self.brain: Brain | None = None
        self.up = False
        self.frozen = False
        self.leaving = False  # was asked to leave
        self.gone = False  # left for good
        self.ended = False  # was told that the run is over
        self.honest = True  # False: a liar, whose own disk and words need not agree
        self.sent = 0  # messages, in all lives
        self.life = 0  # counts starts and stops; long work of an earlier life ends in nothing
        self.boot = 0
        self.clock_offset_s = 0.0
        self.clock_rate = 1.0
        self.change: Change | None = None  # a liar's or a planted bug's hand in the actions
        self.doom: tuple[int, str, float] | None = None  # (actions until then, "crash" or "freeze", seconds)
        self.address_book: dict[PeerId, bytes] = {}
        self.trainer = Trainer(self, speed) if role == "node" else None
        # The process's memory: gone with it.
        self.state: StateFiles = disk.state
        self.prepared: dict[Digest, StateFiles] = {}
        self.allowed: dict[Digest, tuple[DeltaHeader, PeerId]] = {}
        self.revealed: set[Digest] = set()
        self.senders: dict[Digest, tuple[PeerId, bytes]] = {}  # whose an allowed delta is, with the key
        self._n = 0
        self._timer_at = float("inf")
        self._latest = float("-inf")
        self._inbox: deque[Event] = deque()
        self._rest: list[Action] = []
        self._busy = False

    # Life and death

    def now(self) -> float:
        """This machine's monotonic clock: its own offset and drift, never backwards."""
        self._latest = max(self._latest, self.clock_offset_s + self.world.now * self.clock_rate)
        return self._latest

    def start(self) -> None:
        """Boot from what the disk holds. A full disk keeps it down."""
        if self.up or self.gone:
            return
        try:
            self.boot = self.disk.count_boot()
        except DiskFull:
            return
        self.life += 1
        self.up, self.frozen, self.ended, self.leaving = True, False, False, False
        self._timer_at = float("inf")
        self.disk.state = self.state = self.disk.newest_state()
        # What the log names is served from the start, as the real server does after a restart.
        bodies = (open_body(entry.body).content for entry in self.disk.entries)
        self.revealed = {Digest(c.delta) for b in bodies if isinstance(b, OuterStep) for c in b.contributions}
        world = self.world
        identity = Identity(world.run.run, world.run.spec, self.signer, self.boot, self.role, world.verify)
        self.brain = world.make_brain(identity, self._restored(), world.chance.random)
        if self.trainer is not None:
            self.trainer.start()
        world.note(self, "start", self.boot)
        world.checkers.started(self)
        self.post(fact.Started())
        world.introduce(self)

    def _restored(self) -> Restored:
        disk, root_of = self.disk, self.world.arithmetic.root_of
        return Restored(
            record=disk.record,
            entries=tuple(disk.entries),
            state_index=disk.state.index,
            rules=disk.state.rules,
            params_root=root_of(disk.state.params),
            momentum_root=root_of(disk.state.momentum),
            in_flight=disk.own.in_flight,
            held=tuple(disk.held.values()),
            snapshots=tuple(offer for offer, _ in disk.snapshots),
            adopted_version=disk.own.adopted_version,
        )

    def crash(self) -> None:
        """kill -9, or the power: the process is gone and so is what was not synced."""
        if not self.up:
            return
        self.world.note(self, "crash", self.life)
        self.stop()
        self.disk.crash()

    def freeze(self, seconds: float) -> None:
        """Stopped without knowing it; everything that comes waits."""
        if not self.up or self.frozen:
            return
        self.world.note(self, "freeze", round(seconds, 3))
        self.frozen = True
        life = self.life
        self.world.at(seconds, lambda: self.thaw() if self.life == life else None)

    def thaw(self) -> None:
        """It goes on where it stopped, and only then learns what came meanwhile."""
        if not self.frozen:
            return
        self.frozen = False
        rest, self._rest = self._rest, []
        self._perform(rest)
        self._drain()

    def stop(self) -> None:
        """The process ends; what is on the disk stays."""
        self.up = self.frozen = False
        self.brain = None
        self.life += 1
        self._inbox.clear()
        self._rest = []
        self.prepared.clear()
        self.allowed.clear()
        self.revealed.clear()
        self.senders.clear()
        self.doom = None
        if self.trainer is not None:
            self.trainer.stop()

    def leave(self, reason: str = "asked to") -> None:
        if self.up:
            self.leaving = True
            self.post(fact.GoodbyeWanted(reason))

    # The one door in

    def post(self, event: Event) -> None:
        """An event for the brain; it waits while the machine is frozen or in the middle of something."""
        if not self.up:
            return
        self._inbox.append(event)
        if not self._busy and not self.frozen:
            self._drain()

    def later(self, delay_s: float, event: Event) -> None:
        """The one event that ends long work of this life."""
        life = self.life
        self.world.at(delay_s, lambda: self.post(event) if self.life == life else None)

    def _drain(self) -> None:
        while self._inbox and self.up and not self.frozen:
            self._handle(self._inbox.popleft())
        self._arm()

    def _handle(self, event: Event) -> None:
        assert self.brain is not None
        world = self.world
        world.note_event(self, event)
        actions = list(self.brain.handle(event, self.now()))
        if self.change is not None:
            actions = self.change(self, actions)
        self._perform(actions)
        if self.up:
            world.checkers.after(self)

    def _arm(self) -> None:
        if not self.up or self.frozen:
            return
        assert self.brain is not None
        due = (self.brain.deadline() - self.clock_offset_s) / self.clock_rate
        if due < self._timer_at:
            at, life = max(due, self.world.now + TICK_FLOOR_S), self.life
            self._timer_at = at
            self.world.at(at - self.world.now, lambda: self._tick(at, life))

    def _tick(self, at: float, life: int) -> None:
        if self.life != life or at != self._timer_at or self.brain is None:
            return
        self._timer_at = float("inf")
        if self.frozen:
            return  # armed again after the thaw
        deadline, now = self.brain.deadline(), self.now()
        if deadline <= now + 1e-6:
            self._latest = max(now, deadline)  # the rounding of the clock may not tick too early
            self._inbox.append(fact.Ticked())
        self._drain()

    # The one door out

    def _perform(self, actions: list[Action]) -> None:
        """In order; a full disk ends the process, as the real driver's OperatorError does."""
        if not actions:
            return
        self._busy = True
        try:
            for place, action in enumerate(actions):
                if self.doom is not None and self._doomed(actions, place):
                    return
                self.world.note_action(self, action)
                PERFORM[type(action)](self, action)
                if not self.up:
                    return
        except DiskFull:
            self.crash()
        finally:
            self._busy = False

    def _doomed(self, actions: list[Action], place: int) -> bool:
        assert self.doom is not None
        left, how, seconds = self.doom
        if left > 0:
            self.doom = (left - 1, how, seconds)
            return False
        self.doom = None
        if how == "crash":
            self.crash()
        else:
            self._rest = actions[place:]
            self.freeze(seconds)
        return True

    # Envelopes

    @property
    def epoch(self) -> int:
        """What the driver seals its messages with."""
        return self.brain.epoch if self.brain is not None else 0

    def seal(self, message: Message, peer: PeerId) -> bytes:
        self._n += 1
        return seal(
            message, self.signer, run=self.world.run.run, epoch=self.epoch, boot=self.boot, n=self._n,
            to=receiver_of(message, peer),
        )  # fmt: skip

    def own_record(self) -> bytes:
        """What this machine announces to the tracker."""
        return self.seal(PeerRecord(("127.0.0.1",), 1, self.name, self.role, self.boot), ANYBODY)

    def receive(
        self, sender: PeerId, key: bytes, boot: int, message: Message, sealed: bytes, epoch: int
    ) -> None:
        """What a transport does with a message: open it, then hand it on."""
        world = self.world
        if world.real_keys:
            opened = open_envelope(sealed, world.verify, run=world.run.run, me=self.id)
            sender, key, boot, message = opened.sender, opened.key, opened.boot, opened.message
            epoch = opened.epoch
        if isinstance(message, Peers):
            self.receive_records(message.records)
        else:
            self.post(fact.MessageReceived(sender, key, boot, message, sealed, epoch))

    def receive_records(self, records: tuple[bytes, ...]) -> None:
        """Peer records passed on: each is opened as if its owner had sent it."""
        for record in records:
            try:
                opened = open_envelope(record, self.world.verify, run=self.world.run.run, me=self.id)
            except PeerError:
                continue
            if opened.sender != self.id and isinstance(opened.message, PeerRecord):
                self.post(
                    fact.MessageReceived(
                        opened.sender, opened.key, opened.boot, opened.message, record, opened.epoch
                    )
                )
