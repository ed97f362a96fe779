"""Directed schedules around the owner: a majority that is gone, and what comes back; a pause.

Cited: protocol.md 3. Whatever machines do, the checkers see that no epoch ever has two certified bodies at
one index, that only an ended epoch is dropped, and that all replicas have the same bits.
"""

from __future__ import annotations

from p2pdiloco.protocol.actions import Action, CutLog, FetchSnapshot
from p2pdiloco.rules.state import RulesState, last_sequence
from p2pdiloco.sim.checkers import Violation
from p2pdiloco.sim.machine import Machine
from p2pdiloco.sim.owner import Owner
from p2pdiloco.sim.stage import Stage
from p2pdiloco.wire.codec import decode
from p2pdiloco.wire.log import Entry, open_body
from p2pdiloco.words import count_of


def _rescued(owner: Owner, among: list[Machine], seats: list[Machine] | None = None) -> Entry:
    entry = owner.rescue(among, seats)
    if entry is None:
        raise Violation("a run can be rescued", "nobody has a state")
    return entry


def _rules(machine: Machine) -> RulesState:
    return decode(machine.state.rules, RulesState)


def _level(stage: Stage, within_s: float = 60.0) -> None:
    """Everybody who is up ends in the newest epoch at its newest entry, with the same bits."""

    def level() -> bool:
        newest = stage.checkers.newest
        up = [m for m in stage.world.machines.values() if m.up]
        return all(m.epoch == newest.epoch and m.state.index >= newest.index - 1 for m in up)

    stage.expect(within_s, "everybody in the newest epoch", level)


def _up(stage: Stage) -> list[Machine]:
    return [m for m in stage.world.machines.values() if m.up]


def _majority_lost(stage: Stage, nodes: int, seats: int) -> list[Machine]:
    """A committee of `seats`, of which as many die as it takes, the witness among them. Who is dead."""
    stage.start(nodes)
    members = stage.committee(seats, 120.0)
    stage.versions(3, 8 * stage.round_s, "first")
    quorum = stage.checkers.committee.quorum
    dead = [stage.world.witness, *(m for m in members if m is not stage.world.witness)][:quorum]
    for machine in dead:
        machine.crash()
    index = stage.checkers.index
    stage.run(2 * stage.failover_s)
    if stage.checkers.index > index + 1:
        raise Violation("no entry without a majority", f"{stage.checkers.index - index} of them")
    return dead


def lost_majority_of_three(stage: Stage) -> None:
    """Two of three voters are gone for good; the owner puts those in charge who are left."""
    dead = _majority_lost(stage, 4, 3)
    _rescued(Owner(stage.world), _up(stage))
    stage.versions(4, stage.failover_s + 8 * stage.round_s, "after the recovery")
    if set(stage.checkers.committee.members) & {m.id for m in dead}:
        raise Violation("the dead have no seat", "")
    _level(stage)


def lost_majority_of_five(stage: Stage) -> None:
    _majority_lost(stage, 7, 5)
    _rescued(Owner(stage.world), _up(stage))
    stage.versions(4, stage.failover_s + 8 * stage.round_s, "after the recovery")
    _level(stage)


def _left_behind(stage: Stage) -> tuple[list[Machine], list[Machine]]:
    """A majority that certified alone for a while, and the rest, which knows nothing of it; then apart."""
    nodes = stage.start(4)
    members = stage.committee(3)
    stage.versions(2, 6 * stage.round_s, "first")
    majority = [m for m in members if m is not stage.world.witness]
    rest = [stage.world.witness, *(n for n in nodes if n not in majority)]
    stage.world.network.split([m.id for m in majority], [m.id for m in rest])
    stage.versions(3, stage.failover_s + 6 * stage.round_s, "on the majority's side")
    return majority, rest


def old_majority_comes_back(stage: Stage) -> None:
    """What only dead voters knew is lost: when they return, they drop it and follow."""
    majority, rest = _left_behind(stage)
    for machine in majority:
        machine.crash()
    known = max(m.disk.durable_index for m in majority)
    entry = _rescued(Owner(stage.world), rest)
    if open_body(entry.body).index > known:
        raise Violation("expected", "a base before what the dead know")
    stage.world.network.mend()
    stage.versions(3, stage.failover_s + 8 * stage.round_s, "after the recovery")
    dropped = _watch(stage, CutLog)
    for machine in majority:
        machine.start()
    _level(stage)
    if {m.id for m in dropped} != {m.id for m in majority}:
        raise Violation("expected", "the returning voters to drop what the recovery left behind")
    stage.versions(3, stage.failover_s + 6 * stage.round_s, "with them back")


def two_epochs_alive(stage: Stage) -> None:
    """The owner was wrong, the old majority lives, cut off: both go on; where they meet, the newer holds."""
    _, rest = _left_behind(stage)
    _rescued(Owner(stage.world), rest)
    old = stage.checkers.epochs[0]
    before = old.index
    stage.versions(3, stage.failover_s + 8 * stage.round_s, "in the new epoch")
    stage.expect(4 * stage.round_s, "the old epoch going on", lambda: old.index >= before + 2)
    stage.world.network.mend()
    _level(stage)
    before = old.index
    stage.versions(4, stage.failover_s + 6 * stage.round_s, "together")
    if old.index > before:
        raise Violation(
            "an ended epoch is over",
            f"{count_of(old.index - before, 'entry', 'entries')} after all were told",
        )


def disjoint_committees_meet(stage: Stage) -> None:
    """Nobody sits in both committees: the dismissed one learns of it all the same."""
    nodes = stage.start(5)
    members = stage.committee(3)
    stage.versions(2, 6 * stage.round_s, "first")
    rest = [n for n in nodes if n not in members]
    stage.world.network.split([m.id for m in members], [m.id for m in rest])
    stage.versions(2, stage.failover_s + 6 * stage.round_s, "on the old side")
    _rescued(Owner(stage.world), rest)
    stage.versions(2, stage.failover_s + 6 * stage.round_s, "on the new side")
    stage.world.network.mend()
    _level(stage)


def witness_alone(stage: Stage) -> None:
    """Only the witness answers: it goes on alone, and takes nodes in again as they come."""
    nodes = stage.start(3)
    stage.committee(3)
    stage.versions(2, 6 * stage.round_s, "first")
    for node in nodes:
        node.crash()
    stage.run(stage.failover_s)
    _rescued(Owner(stage.world), [stage.world.witness])
    if stage.checkers.committee.members != (stage.world.witness.id,):
        raise Violation("expected", "the witness alone")
    fresh = [stage.join(), stage.join()]
    stage.versions(3, stage.failover_s + 10 * stage.round_s, "with newcomers")
    stage.committee(3, 90.0)
    nodes[0].start()
    _level(stage)
    if not all(f.state.index for f in fresh):
        raise Violation("a newcomer after a recovery is caught up", "")


def two_recoveries(stage: Stage) -> None:
    """A first recovery reaches one machine alone; the second stands further on, on the branch that it left.

    So the one that knows the first has to go back before it and up again: of two, the higher epoch wins.
    """
    majority, rest = _left_behind(stage)
    owner, first = Owner(stage.world), rest[1]
    stage.world.network.split([first.id], [m.id for m in rest if m is not first])
    _rescued(owner, [first])
    stage.versions(2, stage.failover_s + 6 * stage.round_s, "alone in the first epoch")
    first.crash()
    stage.world.network.mend()
    old = stage.checkers.epochs[0]
    stage.expect(
        60.0, "the others on the old branch",
        lambda: all(m.state.index >= old.index - 1 for m in _up(stage)),
    )  # fmt: skip
    for machine in majority:
        machine.crash()
    stage.run(1.0)
    entry = _rescued(owner, _up(stage))
    base = next(i for i, c in enumerate(stage.checkers.epochs[1].chain) if c.body.epoch == 1)
    if open_body(entry.body).epoch != 2 or open_body(entry.body).index - 1 <= base:
        raise Violation("expected", "a second recovery beyond the first one's base")
    stage.versions(3, stage.failover_s + 8 * stage.round_s, "in the second epoch")
    for machine in (first, *majority):
        machine.start()
    _level(stage)
    stage.versions(3, stage.failover_s + 8 * stage.round_s, "with everybody back")


def lone_voter_in_between(stage: Stage) -> None:
    """A committee of one is shown a recovery on a branch that it has not: nobody else could hold it back."""
    majority, rest = _left_behind(stage)
    owner, first = Owner(stage.world), rest[1]
    others = [m for m in (*rest, *majority) if m is not first]
    stage.world.network.mend()
    stage.world.network.split([first.id], [m.id for m in others])
    _rescued(owner, [first])
    stage.versions(2, stage.failover_s + 6 * stage.round_s, "alone in the first epoch")
    old, alone = stage.checkers.epochs[0], stage.checkers.epochs[1]
    stage.expect(
        60.0, "the others on the old branch", lambda: all(m.state.index >= old.index - 1 for m in others)
    )
    entry = _rescued(owner, others)
    stage.versions(2, stage.failover_s + 6 * stage.round_s, "in the second epoch")
    before = alone.index
    owner.show(entry, [first])
    stage.run(6 * stage.round_s)
    if alone.index > before:
        raise Violation(
            "an ended epoch is over",
            f"{count_of(alone.index - before, 'entry', 'entries')} by one who was told",
        )
    stage.world.network.mend()
    _level(stage)


def newcomer_after_a_recovery(stage: Stage) -> None:
    """Long after it somebody joins by a snapshot, and learns the committee from the chain."""
    _majority_lost(stage, 4, 3)
    _rescued(Owner(stage.world), _up(stage))
    stage.versions(20, 40 * stage.round_s, "after the recovery")
    before = stage.world.snapshots_fetched
    fresh = stage.join()
    stage.expect(
        90.0, "the newcomer at the newest entry", lambda: fresh.state.index >= stage.checkers.index - 1
    )
    if stage.world.snapshots_fetched <= before:
        raise Violation("expected", "a join by a snapshot")
    _level(stage)


def all_restart_after_a_recovery(stage: Stage) -> None:
    """Everybody stops and starts again, the dismissed ones as well: the epoch is on the disks."""
    dead = _majority_lost(stage, 4, 3)
    _rescued(Owner(stage.world), _up(stage))
    stage.versions(2, stage.failover_s + 6 * stage.round_s, "after the recovery")
    for machine in stage.world.machines.values():
        machine.crash()
    stage.run(3.0)
    for machine in (*dead, *stage.world.machines.values()):
        stage.world.at(stage.world.chance.uniform(0.0, 3.0), machine.start)
    stage.run(4.0)
    if any(m.epoch != 1 for m in stage.world.machines.values() if m not in dead):
        raise Violation("an epoch survives a restart", "")
    stage.versions(3, 2 * stage.failover_s + 6 * stage.round_s, "after the restart")
    _level(stage)


def crash_while_following(stage: Stage, step: int) -> None:
    """A returning voter dies between any two actions of dropping its branch, and follows in its next life."""
    majority, rest = _left_behind(stage)
    for machine in majority:
        machine.crash()
    _rescued(Owner(stage.world), rest)
    stage.world.network.mend()
    stage.versions(2, stage.failover_s + 8 * stage.round_s, "after the recovery")
    victim = majority[0]

    def hit(machine: Machine, _: Action) -> None:
        machine.doom = (step, "crash", 0.0)

    done = stage.when(lambda m, a: m is victim and isinstance(a, CutLog), hit)
    for machine in majority:
        machine.start()
    stage.expect(30.0, "the branch dropped", lambda: bool(done))
    stage.run(5.0)
    if victim.up and step < 3:
        raise Violation("expected", f"a crash {count_of(step, 'action')} after the log was cut")
    victim.doom = None
    victim.start()
    _level(stage)


def snapshot_on_its_way(stage: Stage) -> None:
    """A snapshot of the branch that is dropped arrives after the recovery: it never stands as the state."""
    majority, rest = _left_behind(stage)
    late = rest[1]
    stage.versions(20, 30 * stage.round_s, "on the majority's side")
    fetching = _watch(stage, FetchSnapshot)
    for m in majority:  # one who lags is let through to the old branch, and fetches slowly
        stage.world.network.slow[(m.id, late.id)] = (0.2, 8.0)
    stage.world.network.mend()
    stage.world.network.split([m.id for m in majority], [m.id for m in rest if m is not late])
    stage.expect(30.0, "a snapshot on its way", lambda: late in fetching)
    others = [m for m in rest if m is not late]
    owner = Owner(stage.world)
    owner.show(_rescued(owner, others), [late])
    stage.run(12.0)
    stage.world.network.mend()
    _level(stage)
    stage.versions(3, stage.failover_s + 6 * stage.round_s, "later")


def forged_recovery(stage: Stage) -> None:
    """A recovery that somebody else signs begins nothing."""
    nodes = stage.start(3)
    stage.committee(3)
    stage.versions(2, 6 * stage.round_s, "first")
    liar = Owner(stage.world, nodes[0].signer)
    liar.show(liar.entry(nodes[1:], nodes[1:]), _up(stage))
    stage.versions(3, 6 * stage.round_s, "in spite of a forged recovery")
    if any(m.epoch for m in _up(stage)):
        raise Violation("an epoch is the owner's", "")
    _rescued(Owner(stage.world), _up(stage))
    stage.versions(2, stage.failover_s + 6 * stage.round_s, "after a true one")


def _watch(stage: Stage, kind: type[Action]) -> list[Machine]:
    """Who performs an action of this kind from now on, each time."""
    seen: list[Machine] = []

    def change(machine: Machine, actions: list[Action]) -> list[Action]:
        seen.extend(machine for a in actions if isinstance(a, kind))
        return actions

    for machine in stage.world.machines.values():
        machine.change = change
    return seen


def paused_by_its_owner(stage: Stage) -> None:
    """Passes under way end, once each, and their deltas wait with the voters: they count when it goes on.

    A node that goes away meanwhile has not trained in vain.
    """
    nodes = stage.start(3)
    voters = stage.committee(3)
    owner = Owner(stage.world)
    owner.say("pause", voters)
    stage.expect(20.0, "a pause", lambda: all(_rules(m).paused for m in (*voters, *nodes)))
    version = stage.checkers.version
    made = {m.id: m.trainer.made for m in nodes if m.trainer is not None}
    stage.run(6 * stage.round_s)
    if stage.checkers.version != version:
        raise Violation("a paused run stands still", f"version {stage.checkers.version}")
    for m in nodes:
        assert m.trainer is not None
        if m.trainer.made - made[m.id] > 1:
            raise Violation("a pause ends passes", f"{m.trainer.made - made[m.id]} of {m.name}")
        if m.disk.own.sequence <= last_sequence(_rules(voters[0]), m.id):
            raise Violation("passes under way end", f"not the one of {m.name}")
    gone = next(m for m in nodes if m not in voters)
    sequence = gone.disk.own.sequence
    gone.crash()
    owner.say("resume", voters)
    stage.versions(2, stage.failover_s + 6 * stage.round_s, "when the run goes on")
    stage.expect(
        2 * stage.round_s, f"what was made in a pause counts: delta {sequence} of {gone.name}",
        lambda: last_sequence(_rules(voters[0]), gone.id) >= sequence,
    )  # fmt: skip
