"""Helpers for directed schedules: set a swarm up, wait for a moment, hit exactly there, expect progress."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from p2pdiloco.ids import PeerId
from p2pdiloco.protocol.actions import Action, Send
from p2pdiloco.sim.brain import MakeBrain
from p2pdiloco.sim.checkers import Violation
from p2pdiloco.sim.machine import Machine
from p2pdiloco.sim.swarm import failover_s
from p2pdiloco.sim.tiny_run import Timings
from p2pdiloco.sim.world import World
from p2pdiloco.wire.log import Membership, open_body
from p2pdiloco.wire.messages import Message, Proposal
from p2pdiloco.words import count_of

Watch = Callable[[Machine, Action], bool]


class Stage:
    """One directed world. `expect` raises a Violation when a thing does not come about in time."""

    def __init__(
        self,
        rng: np.random.Generator,
        make_brain: MakeBrain,
        *,
        size_max: int = 3,
        rotation: int = 3,
        target_version: int = 0,
        timings: Timings = Timings(voter_standing_s=2.0),  # noqa: B008 (an immutable tuple)
        prepare: Callable[[World], None] | None = None,
    ) -> None:
        self.world = World(
            rng, make_brain, size_max=size_max, rotation=rotation, target_version=target_version,
            timings=timings,
        )  # fmt: skip
        if prepare is not None:
            prepare(self.world)
        self.checkers = self.world.checkers
        spec = self.world.run.spec
        self.round_s = spec.outer.deadline_passes * spec.inner.pass_s
        self.failover_s = failover_s(spec)

    def start(self, nodes: int, *, speeds: tuple[float, ...] = (1.0,)) -> list[Machine]:
        """The witness and `nodes` nodes, all up within a second."""
        self.world.witness.start()
        return [self.join(speeds[i % len(speeds)]) for i in range(nodes)]

    def join(self, speed: float = 1.0) -> Machine:
        name = f"n{len(self.world.machines)}"
        node = self.world.add(name, speed=speed)
        self.world.at(self.world.chance.uniform(0.0, 1.0), node.start)
        return node

    def machine(self, peer: PeerId) -> Machine:
        return self.world.machines[peer]

    def run(self, seconds: float) -> None:
        self.world.run_for(seconds)

    def expect(self, within_s: float, what: str, until: Callable[[], bool]) -> float:
        """Seconds that it took. Raises: Violation."""
        began = self.world.now
        if not until() and not self.world.run_for(within_s, until):
            raise Violation("expected", f"{what} within {within_s:.0f} s (from {began:.1f} s)")
        return self.world.now - began

    def entries(self, more: int, within_s: float, what: str) -> float:
        goal = self.checkers.index + more
        return self.expect(
            within_s,
            f"{count_of(more, 'more entry', 'more entries')} {what}",
            lambda: self.checkers.index >= goal,
        )

    def versions(self, more: int, within_s: float, what: str) -> float:
        goal = self.checkers.version + more
        return self.expect(
            within_s, f"{count_of(more, 'more version')} {what}", lambda: self.checkers.version >= goal
        )

    def committee(self, size: int, within_s: float = 60.0) -> list[Machine]:
        """Wait until a committee of `size` governs and everybody up has applied it."""

        def ready() -> bool:
            index = self.checkers.index
            return self.checkers.committee.size == size and all(
                m.state.index >= index for m in self.world.machines.values() if m.up and not m.frozen
            )

        self.expect(within_s, f"a committee of {size}", ready)
        return [self.machine(p) for p in self.checkers.committee.members]

    def leader(self, within_s: float = 40.0) -> Machine:
        """Whoever leads the newest committee, once somebody does."""
        found: list[Machine] = []

        def leads() -> bool:
            members = self.checkers.committee.members
            found[:] = [
                m
                for m in (self.machine(p) for p in members)
                if m.brain is not None and m.brain.leading and m.brain.committee == self.checkers.committee
            ]
            return bool(found)

        self.expect(within_s, "an aggregator", leads)
        return max(found, key=lambda m: m.brain.term if m.brain is not None else 0)

    def nobody_holds_back(self) -> None:
        """Everybody who is up ends at the newest entry, with the same bits (the checkers compare them)."""

        def level() -> bool:
            index = self.checkers.index
            return all(m.state.index >= index - 1 for m in self.world.machines.values() if m.up)

        self.expect(60.0, "everybody at the newest entry", level)

    def when(self, watch: Watch, then: Callable[[Machine, Action], list[Action] | None]) -> list[Machine]:
        """Once, at the first action of any machine for which `watch` holds: `then`, just before it.

        `then` may return what the machine does instead of the rest of its list. Returns a list that holds
        the machine as soon as it happened.
        """
        hit: list[Machine] = []

        def change(machine: Machine, actions: list[Action]) -> list[Action]:
            if hit:
                return actions
            for place, action in enumerate(actions):
                if watch(machine, action):
                    hit.append(machine)
                    rest = then(machine, action)
                    return actions if rest is None else actions[:place] + rest
            return actions

        for machine in self.world.machines.values():
            machine.change = change
        return hit


def says(kind: type[Message]) -> Watch:
    """The moment before the first message of that kind leaves."""
    return lambda _, action: isinstance(action, Send) and isinstance(action.message, kind)


def proposes_committee(_: Machine, action: Action) -> bool:
    """The moment before a membership proposal leaves."""
    if isinstance(action, Send) and isinstance(action.message, Proposal):
        return isinstance(open_body(action.message.body).content, Membership)
    return False


def proposes_last(_: Machine, action: Action) -> bool:
    """The moment before the proposal that hands over leaves."""
    return isinstance(action, Send) and isinstance(action.message, Proposal) and action.message.last
