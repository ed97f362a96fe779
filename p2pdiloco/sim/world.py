"""A whole swarm in one thread from one seed: a heap of things to come, and machines that they happen to.

Nothing here decides anything: faults and schedules do, by calling what the machines and the network offer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from p2pdiloco.ids import PeerId
from p2pdiloco.protocol.actions import Action, Say
from p2pdiloco.protocol.events import Event, MessageReceived
from p2pdiloco.sim.arithmetic import Arithmetic
from p2pdiloco.sim.brain import MakeBrain
from p2pdiloco.sim.chance import Chance
from p2pdiloco.sim.checkers import Checkers, Violation
from p2pdiloco.sim.clock import Clock
from p2pdiloco.sim.disk import Disk, StateFiles
from p2pdiloco.sim.keys import signer_named, verify_fast
from p2pdiloco.sim.machine import Change, Machine
from p2pdiloco.sim.network import Network
from p2pdiloco.sim.tiny_run import Timings, tiny_run
from p2pdiloco.wire.signing import verify_ed25519

ANNOUNCE_S = 2.0  # a local run's interval
EVENTS_MAX = 200_000  # of one world: more means that something spins
_TRACE_LINES = 400  # kept for the report of a violation


class World:
    """Machines, network, time. `run_until` makes things happen; everything else is set up around it."""

    def __init__(
        self,
        rng: np.random.Generator,
        make_brain: MakeBrain,
        *,
        real_keys: bool = False,
        size_max: int = 3,
        rotation: int = 3,
        timings: Timings = Timings(),  # noqa: B008 (an immutable tuple)
        codec: str = "fp16",
        target_version: int = 0,
        keep_trace: bool = False,
    ) -> None:
        self._clock = Clock()
        self.chance = Chance(rng)
        self.noise = rng
        self.make_brain = make_brain
        self.real_keys = real_keys
        self.verify = verify_ed25519 if real_keys else verify_fast
        witness = signer_named("witness", real=real_keys)
        self.run = tiny_run(
            signer_named("owner", real=real_keys), witness.peer_id, size_max=size_max, rotation=rotation,
            timings=timings, codec=codec, target_version=target_version,
        )  # fmt: skip
        self.arithmetic = Arithmetic(self.run)
        self.network = Network(self.chance, self.at)
        self.checkers = Checkers(self)
        self.machines: dict[PeerId, Machine] = {}
        self.tracker_up = True
        self._directory: dict[PeerId, bytes] = {}
        self._forgets: frozenset[str] = frozenset()
        self._change: Change | None = None
        self.snapshots_fetched = 0
        self.events = 0
        self.trace: deque[str] = deque(maxlen=None if keep_trace else _TRACE_LINES)
        self.keep_trace = keep_trace
        self.witness = self.add("witness", role="witness")

    # Set-up

    def add(self, name: str, *, role: str = "node", speed: float = 1.0) -> Machine:
        """A machine with an empty disk, not started yet."""
        genesis = StateFiles(0, 0, self.run.params, self.run.momentum, b"")
        signer = signer_named(name, real=self.real_keys)
        machine = Machine(self, name, role, signer, Disk(genesis, self._forgets), speed=speed)
        machine.change = self._change
        self.machines[machine.id] = machine
        return machine

    def plant(self, *, change: Change | None = None, forgets: frozenset[str] = frozenset()) -> None:
        """A bug in every driver: a hand in its actions, or writes that its disk forgets to sync."""
        self._change, self._forgets = change, forgets
        for machine in self.machines.values():
            machine.change = change
            machine.disk.forgets = forgets

    def nodes(self) -> list[Machine]:
        return [m for m in self.machines.values() if m.role == "node"]

    # Time

    @property
    def now(self) -> float:
        return self._clock.now

    def at(self, delay_s: float, happen: Callable[[], None]) -> None:
        """`happen` after `delay_s` seconds of simulated time."""
        self._clock.at(delay_s, happen)

    def run_until(self, time_s: float, until: Callable[[], bool] | None = None) -> bool:
        """Let time pass up to `time_s`, or until `until` holds. True if it held (or none was given).

        Raises: Violation.
        """
        while self._clock.advance(time_s):
            self.events += 1
            if until is not None and until():
                return True
            if self.events > EVENTS_MAX:
                raise Violation("runaway", f"{EVENTS_MAX} events in {self.now:.1f} s: something spins")
        return until is None

    def run_for(self, seconds: float, until: Callable[[], bool] | None = None) -> bool:
        return self.run_until(self.now + seconds, until)

    # The tracker: a directory that says who else is there

    def introduce(self, machine: Machine) -> None:
        """The machine announces itself, now and every interval of this life."""
        life = machine.life
        known: set[PeerId] = set()
        record = machine.own_record()

        def announce() -> None:
            if machine.life != life:
                return
            if self.tracker_up and not machine.frozen:
                self._directory[machine.id] = record
                fresh = [p for p in self._directory if p != machine.id and p not in known]
                known.update(fresh)
                machine.receive_records(tuple(self._directory[p] for p in fresh))
            if machine.life == life:
                self.at(ANNOUNCE_S, announce)

        # The address book on the disk is read at start, whether the tracker answers or not.
        machine.receive_records(tuple(machine.address_book.values()))
        self.at(self.chance.uniform(0.0, 0.2), announce)

    # The story, for people and for the test of determinism

    def note(self, machine: Machine, what: str, detail: object) -> None:
        self.trace.append(f"{self.now:9.3f} {machine.name:>8} {what} {detail}")

    def note_event(self, machine: Machine, event: Event) -> None:
        if self.keep_trace:
            if isinstance(event, MessageReceived):
                sender = self.machines.get(event.sender)  # or the owner
                self.note(machine, f"<- {sender.name if sender else 'owner'}", told(event.message))
            else:
                self.note(machine, "*", told(event))

    def note_action(self, machine: Machine, action: Action) -> None:
        if isinstance(action, Say):
            self.note(machine, f"says {action.kind}:", action.text)
        elif self.keep_trace:
            self.note(machine, "  ->", told(action))


def told(thing: object) -> str:
    """One line about an event, an action or a message; bytes by their first four."""
    if isinstance(thing, bytes):
        return thing[:4].hex() or "-"
    if isinstance(thing, tuple):
        return "(" + " ".join(told(t) for t in thing) + ")"
    fields = getattr(thing, "__struct_fields__", None)
    if fields is None:
        return str(thing)
    return f"{type(thing).__name__}[{' '.join(told(getattr(thing, f)) for f in fields)}]"
