"""One random swarm from one seed: a life full of faults, then a healing in which it must go on.

Safety is watched all the time (checkers.py). When the faults stop and a majority of the newest committee
lives, the log must advance within a bounded time (R2), and nothing that a majority held may be lost (R3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from p2pdiloco.ids import Digest, PeerId, short
from p2pdiloco.protocol.node import Node
from p2pdiloco.run_spec import RunSpec
from p2pdiloco.sim.brain import MakeBrain
from p2pdiloco.sim.checkers import Violation
from p2pdiloco.sim.faults import Faults, draw_rates
from p2pdiloco.sim.machine import Machine
from p2pdiloco.sim.owner import Owner
from p2pdiloco.sim.tiny_run import Timings
from p2pdiloco.sim.world import World
from p2pdiloco.words import count_of

SHORT_PASSES = 0.15  # share of seeds
CARELESS = 0.15  # share of seeds in which the owner recovers a run that may live
RECOVERY_S = 12.0  # and then about so often
MANY = 7  # nodes from which a swarm lives for a shorter time
LEDGER_ROUNDS = 8  # deadlines after which what a majority held must be settled
HEALED_ENTRIES = 3  # certified entries after which a healed swarm counts as going on


class SeedReport(NamedTuple):
    """What one seed showed. Times in simulated seconds."""

    seed: int
    violation: str  # "" or the broken promise
    trace: tuple[str, ...]  # the last lines before a violation
    nodes: int
    entries: int  # certified
    version: int
    memberships: int
    committee: int  # the largest size that governed
    starts: int
    messages: int
    events: int
    seconds: float
    recovery_s: float  # from the end of the faults to the next certified entry
    failover_s: float  # what target R2 allows for that in 99 of 100


def run_seed(
    seed: int,
    rng: np.random.Generator,
    make_brain: MakeBrain,
    *,
    real_keys: bool = False,
    prepare: Callable[[World], None] | None = None,
    keep_trace: bool = False,
) -> SeedReport:
    """Live through one seed. `rng` is made from `seed` by the caller; `prepare` plants a bug or a liar."""
    draw = np.random.Generator(np.random.PCG64(rng.integers(2**63)))
    pick = [float(x) for x in draw.random(8)]
    nodes = (1, 2, 3, 3, 3, 4, 4, 4, 5, 5, 6, 16)[int(pick[0] * 12)] if pick[1] > 0.02 else 16
    world = World(
        rng,
        make_brain,
        real_keys=real_keys,
        size_max=(1, 3, 3, 3, 5)[int(pick[2] * 5)],
        rotation=(1, 2, 3, 8)[int(pick[3] * 4)],
        # Short passes in some: enough versions for snapshots, and for falling far behind.
        timings=Timings(
            pass_s=1.2 if pick[6] < SHORT_PASSES and nodes < MANY else 4.0,
            voter_standing_s=(2.0, 4.0)[int(pick[4] * 2)],
        ),
        codec=("topk64", "fp16", "fp16", "fp16", "int4", "int4", "int4", "int4")[int(pick[5] * 8)],
        keep_trace=keep_trace,
    )
    if prepare is not None:
        prepare(world)
    life = _Life(world, nodes, careless=pick[7] < CARELESS)
    violation = ""
    try:
        life.live()
    except Violation as broken:
        violation = str(broken)
    except AssertionError as broken:
        violation = where_raised(broken)
    return life.report(seed, violation)


def where_raised(error: AssertionError) -> str:
    """A broken assertion of ours in one line."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = f"{trace.tb_frame.f_code.co_qualname}:{trace.tb_lineno}" if trace is not None else "?"
    return f"assertion: {error} ({place})"


def failover_s(spec: RunSpec) -> float:
    """Target R2: two election timeouts and one fetch, and a deadline for the deltas that an entry needs."""
    return 2 * spec.committee.timeout_s_max + 1.0 + spec.outer.deadline_passes * spec.inner.pass_s


class _Life:
    """The phases of a seed."""

    def __init__(self, world: World, nodes: int, *, careless: bool = False) -> None:
        """`careless`: the owner recovers now and then, whatever goes on."""
        self.world = world
        self.count = nodes
        self.recovery_s = float("nan")
        self.owner = Owner(world)
        self.careless = careless
        self.largest = 1

    def live(self) -> None:
        world, chance = self.world, self.world.chance
        for i in range(self.count):
            world.add(f"n{i + 1}", speed=chance.choice((1.0, 1.0, 0.8, 0.5, 0.25)))
        # A big swarm lives for a shorter time, so that all seeds cost about the same.
        fault_s = chance.uniform(40.0, 90.0) if self.count < MANY else 30.0
        faults = Faults(world, draw_rates(chance))
        faults.start()
        world.witness.start()
        for node in world.nodes():
            late = 0.0 if chance.happens(0.7) else chance.uniform(0.0, fault_s)
            world.at(late, node.start)
        if self.careless:
            world.at(chance.uniform(5.0, RECOVERY_S), self._recover)
        world.run_until(fault_s)
        self.careless = False
        faults.stop()
        self._heal()

    def _recover(self) -> None:
        """From whatever some machines have, whoever else is alive; only these hear of it at first."""
        world = self.world
        if not self.careless:
            return
        world.at(world.chance.uniform(0.3, 1.7) * RECOVERY_S, self._recover)
        up = [m for m in world.machines.values() if m.up and not m.frozen]
        if up:
            self.owner.rescue(world.chance.sample(up, 1 + world.chance.below(len(up))))

    def _heal(self) -> None:
        """Start everybody but a random minority of the newest committee, and expect progress."""
        world = self.world
        dead = self._minority()
        for machine in world.machines.values():
            if machine.id in dead:
                machine.crash()
            elif not machine.up:
                machine.start()
        living = [m for m in world.nodes() if m.up]
        before = world.checkers.index
        began = world.now
        committee = world.checkers.committee
        if not living:
            return  # nothing to train
        spec = world.run.spec
        if len(self._away()) > committee.size - committee.quorum:
            # A majority is gone for good.
            if not self._rescued():
                return  # nobody has a state: nothing is promised
            before, began = world.checkers.index, world.now
        elif not self._heard():
            # Crashes took a recovery from all who were shown it: the owner's tool looks again.
            world.run_for(2 * failover_s(spec), self._heard)
            if not self._heard() and not self._rescued():
                return
            before, began = world.checkers.index, world.now
        bound = 2 * failover_s(spec)  # R2 allows one in a hundred to be later than once that
        world.run_for(bound, lambda: world.checkers.index > before)
        if world.checkers.index > before:
            self.recovery_s = world.now - began
            more = bound + HEALED_ENTRIES * spec.outer.deadline_passes * spec.inner.pass_s
            world.run_for(more, lambda: world.checkers.index >= before + HEALED_ENTRIES)
        if world.checkers.index < before + HEALED_ENTRIES:
            raise Violation(
                "the log goes on when faults stop",
                f"{count_of(world.checkers.index - before, 'entry', 'entries')} in "
                f"{world.now - began:.0f} s, committee "
                f"{self._names(world.checkers.committee.members)}, dead {self._names(sorted(dead))}",
            )
        self._ledger()

    def _heard(self) -> bool:
        """Whether somebody follows the owner's newest recovery."""
        brains = [m.brain for m in self.world.machines.values() if m.up]
        return any(isinstance(b, Node) and b.epoch >= self.owner.epoch for b in brains)

    def _rescued(self) -> bool:
        """The owner puts those in charge who are there."""
        world = self.world
        world.run_for(2 * failover_s(world.run.spec))  # let what is known spread first
        return self.owner.rescue([m for m in world.machines.values() if m.up]) is not None

    def _ledger(self) -> None:
        """What a majority held at this moment is settled some outer steps later (R3)."""
        world = self.world
        living = [m for m in world.machines.values() if m.up]
        due = world.checkers.unsettled(living)
        index = world.checkers.index
        if not due:
            return
        spec = world.run.spec
        bound = LEDGER_ROUNDS * spec.outer.deadline_passes * spec.inner.pass_s

        def still() -> list[Digest]:
            held = set(world.checkers.unsettled([m for m in world.machines.values() if m.up]))
            return [d for d in due if d in held]

        world.run_for(bound, lambda: world.checkers.index > index and not still())
        lost = still()
        if lost:
            raise Violation(
                "nothing acknowledged is lost",
                f"{count_of(len(lost), 'delta')} ({short(lost[0])}) after {bound:.0f} s",
            )

    def _away(self) -> list[PeerId]:
        """Members of the newest committee who have left, or are about to, and will not be back."""
        members = [self.world.machines[p] for p in self.world.checkers.committee.members]
        return [m.id for m in members if m.gone or m.leaving]

    def _minority(self) -> set[bytes]:
        world = self.world
        committee = world.checkers.committee
        away = self._away()
        spare = committee.size - committee.quorum - len(away)
        candidates = [m for m in committee.members if m not in away]
        dead = set(world.chance.sample(candidates, max(0, spare)))
        # Somebody alive must hold the newest entry, or an ack of it: else the promise is off (protocol.md 3).
        index = world.checkers.index
        for machine in world.machines.values():
            record = machine.disk.durable_record
            if machine.id not in dead and not machine.gone:
                acked = record is not None and record.ack_index >= index
                if acked or machine.disk.durable_index >= index:
                    return {bytes(d) for d in dead}
        return set()

    def _names(self, peers: object) -> str:
        assert isinstance(peers, tuple | list)
        return " ".join(self.world.machines[p].name for p in peers)

    def report(self, seed: int, violation: str) -> SeedReport:
        world = self.world
        sizes = [c.committee.size for c in world.checkers.chain]
        changes = sum(1 for c in world.checkers.chain if type(c.body.content).__name__ == "Membership")
        machines: list[Machine] = list(world.machines.values())
        return SeedReport(
            seed, violation, tuple(world.trace) if violation or world.keep_trace else (), self.count,
            world.checkers.index, world.checkers.version, changes, max(sizes, default=1),
            sum(m.disk.boot for m in machines), world.network.sent, world.events, world.now,
            self.recovery_s, failover_s(world.run.spec),
        )  # fmt: skip
