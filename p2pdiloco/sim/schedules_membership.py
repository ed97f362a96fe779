"""Directed schedules around the committee: growing, shrinking, handing over, being replaced.

Cited: protocol.md 3 and 4.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

from p2pdiloco.ids import PeerId
from p2pdiloco.protocol.actions import Action, InstallEntry, SaveEntries, Send
from p2pdiloco.sim.checkers import Violation
from p2pdiloco.sim.machine import Machine
from p2pdiloco.sim.stage import Stage, proposes_committee, proposes_last
from p2pdiloco.wire.log import Membership, open_body
from p2pdiloco.wire.messages import Ack, Entries


def grows_to_five(stage: Stage) -> None:
    """1, 3, 5: never 2 or 4; incoming voters are caught up when they are given a seat."""
    stage.start(6)
    stage.committee(5, 120.0)
    for certified in stage.checkers.chain:
        content = certified.body.content
        if isinstance(content, Membership) and content.committee.size not in (1, 3, 5):
            raise Violation("committee sizes", str(content.committee.size))
    stage.versions(6, 8 * stage.round_s, "with a committee of five")
    stage.nobody_holds_back()


def two_of_five_die(stage: Stage) -> None:
    """Five go on with three."""
    stage.start(5)
    members = stage.committee(5, 90.0)
    leader = stage.leader()
    other = next(m for m in members if m not in (leader, stage.world.witness))
    leader.crash()
    other.crash()
    stage.versions(1, stage.failover_s, "after two of five died")
    stage.versions(6, 10 * stage.round_s, "with two of five dead")


def absent_voter_is_replaced(stage: Stage) -> None:
    """Its lease runs out and somebody steady takes the seat; when it returns it follows."""
    stage.start(3)
    members = stage.committee(3)
    lost = next(m for m in members if m is not stage.world.witness)
    lost.crash()
    lease_s = stage.world.run.spec.committee.voter_lease_s
    stage.expect(
        lease_s + 2 * stage.failover_s,
        "another voter in the absent one's seat",
        lambda: lost.id not in stage.checkers.committee.members,
    )
    stage.versions(3, 6 * stage.round_s, "with the new voter")
    lost.start()
    stage.nobody_holds_back()
    stage.versions(3, 6 * stage.round_s, "with the old voter back")


def absent_voter_keeps_its_seat(stage: Stage) -> None:
    """Nobody can replace it: three with one away have their majority (committee of witness and two nodes)."""
    nodes = stage.start(2)
    stage.committee(3)
    nodes[0].crash()
    stage.versions(1, stage.failover_s, "with one of two nodes dead")
    stage.run(3 * stage.world.run.spec.committee.voter_lease_s)
    if stage.checkers.committee.size != 3:
        raise Violation("it shrinks only after a goodbye", f"size {stage.checkers.committee.size}")
    stage.versions(4, 6 * stage.round_s, "long after")
    nodes[0].start()
    stage.nobody_holds_back()


def goodbye_shrinks_to_the_witness(stage: Stage) -> None:
    """From three, one leaves and nobody can take the seat: the witness alone is left, and the run goes on."""
    nodes = stage.start(2)
    stage.committee(3)
    nodes[1].leave()
    stage.expect(stage.failover_s + 10, "a committee of one", lambda: stage.checkers.committee.size == 1)
    stage.expect(30.0, "the leaver gone", lambda: nodes[1].gone)
    if stage.checkers.committee.members != (stage.world.witness.id,):
        raise Violation("the seat left is the witness's", "")
    stage.versions(4, 8 * stage.round_s, "with one node and the witness")


def shrinking_waits_for_the_one_left(stage: Stage) -> None:
    """The witness lacks deltas when a voter leaves: it is not left alone with what it cannot apply."""
    nodes = stage.start(2)
    stage.committee(3)
    stage.versions(1, 4 * stage.round_s, "first")
    witness = stage.world.witness
    for node in nodes:
        stage.world.network.slow[(node.id, witness.id)] = (60.0, 60.0)
    stage.versions(2, 6 * stage.round_s, "while the witness lags")
    nodes[1].leave()
    stage.run(10.0)
    if stage.checkers.committee.size == 1:
        made = next(i for i, c in enumerate(stage.checkers.chain) if c.committee.size == 1 and i > 0)
        if witness.state.index < made:
            raise Violation("who is left is caught up", f"the witness at {witness.state.index} of {made}")
    stage.world.network.slow.clear()
    stage.versions(2, 60.0 + stage.failover_s + 4 * stage.round_s, "with the node left and the witness")


def goodbye_with_the_witness_away(stage: Stage) -> None:
    """The witness is away for its lease, then one of two nodes leaves: the other one's seat is left."""
    nodes = stage.start(2)
    stage.committee(3)
    stage.versions(2, 6 * stage.round_s, "first")
    stage.world.witness.crash()
    stage.run(stage.world.run.spec.committee.voter_lease_s + 3)
    stage.versions(1, stage.failover_s, "without the witness")
    nodes[1].leave()
    stage.expect(
        2 * stage.failover_s, "a committee of the node left",
        lambda: stage.checkers.committee.members == (nodes[0].id,),
    )  # fmt: skip
    stage.versions(3, 8 * stage.round_s, "alone")
    stage.world.witness.start()
    stage.nobody_holds_back()


def leaving_voter_hands_its_seat_over(stage: Stage) -> None:
    """Somebody steady is there: the size stays, and nothing waits for a timeout."""
    nodes = stage.start(4)
    members = stage.committee(3)
    leaving = next(m for m in members if m in nodes)
    stage.versions(1, 4 * stage.round_s, "first")
    leaving.leave()
    stage.expect(30.0, "the leaver gone", lambda: leaving.gone)
    if stage.checkers.committee.size != 3 or leaving.id in stage.checkers.committee.members:
        raise Violation("a leaving voter hands its seat over", "")
    stage.versions(4, 8 * stage.round_s, "after the goodbye")


def _sides(stage: Stage) -> tuple[list[Machine], list[Machine]]:
    """Old committee, and the machines outside it."""
    old = [stage.machine(p) for p in stage.checkers.committee.members]
    return old, [m for m in stage.world.machines.values() if m not in old]


def old_majority_dies_before_the_new_stored(stage: Stage) -> None:
    """The entry that makes a new committee is certified and nobody of the new one but the leader has it.

    While the old ones are dead nothing is promised but safety; when they return it goes on.
    """
    stage.start(3)
    old, _ = _sides(stage)

    def stored(_: Machine, action: Action) -> bool:
        return isinstance(action, SaveEntries) and any(
            isinstance(open_body(e.body).content, Membership) for e in action.entries
        )

    def die(machine: Machine, action: Action) -> list[Action]:
        stage.world.at(0.0, machine.crash)
        return [action]  # it is on its disk; nobody was told

    hit = stage.when(stored, die)
    stage.expect(40.0, "a membership entry on one disk", lambda: bool(hit))
    stage.run(60.0)
    for machine in old:
        machine.start()
    stage.entries(2, 3 * stage.failover_s, "when the old majority is back")
    stage.nobody_holds_back()


def old_leader_goes_on_alone(stage: Stage) -> None:
    """The leader of the old committee is cut off as its membership proposal leaves, then comes back."""
    nodes = stage.start(4)
    stage.committee(3)
    lost = next(m for m in nodes if m.id in stage.checkers.committee.members)
    lost.crash()  # so that a replacement becomes due

    def isolate(machine: Machine, _: Action) -> None:
        everybody = [p for p in stage.world.machines if p != machine.id]

        def cut() -> None:
            stage.world.network.split([machine.id], everybody)

        # The proposal is out and acks come back to nobody.
        stage.world.at(0.15, cut)

    hit = stage.when(proposes_committee, isolate)
    stage.expect(60.0, "a membership proposal", lambda: bool(hit))
    stage.run(2 * stage.failover_s + stage.world.run.spec.committee.voter_lease_s)
    stage.world.network.mend()
    lost.start()
    stage.versions(3, 2 * stage.failover_s + 4 * stage.round_s, "after the old leader came back")
    stage.nobody_holds_back()


def new_voters_never_hear_of_it(stage: Stage) -> None:
    """All word of the certified membership entry to the incoming voters is lost for a while."""
    stage.start(3)

    def deaf(machine: Machine, actions: list[Action]) -> list[Action]:
        if stage.world.now > 40.0 or machine is not stage.world.witness:
            return actions
        return [a for a in actions if not (isinstance(a, Send) and isinstance(a.message, Entries))]

    for machine in stage.world.machines.values():
        machine.change = deaf
    stage.world.run_until(40.0)
    stage.versions(3, 2 * stage.failover_s + 4 * stage.round_s, "once they hear again")
    stage.nobody_holds_back()


def handover_costs_nothing(stage: Stage) -> None:
    """Rotation without a timeout: no gap between entries that a pass does not explain."""
    stage.start(3)
    stage.committee(3)
    stage.versions(2, 6 * stage.round_s, "first")
    began = stage.checkers.index
    stage.versions(9, 14 * stage.round_s, "over several terms")
    chain = stage.checkers.chain[began:]
    terms = {c.term for c in chain}
    if len(terms) < 3:
        raise Violation("the aggregator rotates", f"terms {sorted(terms)}")
    spec = stage.world.run.spec
    gaps = [b.at - a.at for a, b in pairwise(chain)]
    if max(gaps) > spec.inner.pass_s + spec.committee.timeout_s_min:
        raise Violation("a hand-over costs nothing", f"{max(gaps):.1f} s between two entries")


def handover_with_lost_acks(stage: Stage) -> None:
    """The acks that are votes for the next term are lost on their way to the successor."""
    stage.start(3)
    stage.committee(3)

    def lose(machine: Machine, actions: list[Action]) -> list[Action]:
        successor = stage.checkers.committee.aggregator_of((machine.brain.term if machine.brain else 0) + 1)
        current = stage.checkers.committee.aggregator_of(machine.brain.term if machine.brain else 0)
        return [
            a
            for a in actions
            if not (
                isinstance(a, Send)
                and isinstance(a.message, Ack)
                and a.message.last
                and a.peer in (successor, current)
                and stage.world.chance.happens(0.8)
            )
        ]

    for machine in stage.world.machines.values():
        machine.change = lose
    stage.versions(4, 6 * stage.failover_s + 4 * stage.round_s, "with hand-over acks lost")
    for machine in stage.world.machines.values():
        machine.change = None
    stage.versions(3, stage.failover_s + 4 * stage.round_s, "afterwards")


def successor_is_dead(stage: Stage) -> None:
    """The successor dies as the last proposal of a term leaves."""
    stage.start(4)
    stage.committee(3)

    def kill(_: Machine, action: Action) -> None:
        assert isinstance(action, Send)
        term = action.message.term  # type: ignore[union-attr]
        successor = stage.machine(stage.checkers.committee.aggregator_of(term + 1))
        stage.world.at(0.0, successor.crash)

    hit = stage.when(proposes_last, kill)
    stage.expect(60.0, "a last proposal", lambda: bool(hit))
    stage.versions(1, stage.failover_s, "in spite of the dead successor")
    stage.versions(4, 2 * stage.failover_s + 6 * stage.round_s, "later")


def whole_committee_is_replaced(stage: Stage) -> None:
    """One after another, every voter that trains leaves or dies and newcomers follow; the chain is one."""
    nodes = stage.start(3)
    stage.committee(3)

    def caught_up(fresh: Machine) -> bool:
        return fresh.state.index > 0 and fresh.state.index >= stage.checkers.index - 1

    def has_no_seat(old: Machine) -> bool:
        return old.id not in stage.checkers.committee.members

    lease_s = stage.world.run.spec.committee.voter_lease_s
    for turn in range(4):
        fresh = stage.join()
        stage.expect(60.0, "the newcomer caught up", partial(caught_up, fresh))
        stage.run(4.0)
        old = next(m for m in nodes if m.up and m.id in stage.checkers.committee.members)
        if turn % 2:
            old.crash()
        else:
            old.leave()
        stage.expect(lease_s + 3 * stage.failover_s, "its seat taken", partial(has_no_seat, old))
        nodes.append(fresh)
    stage.versions(4, stage.failover_s + 6 * stage.round_s, "with nobody of the first committee")
    stage.nobody_holds_back()


def witness_returns_to_its_seat(stage: Stage) -> None:
    """Away for longer than its lease it loses its seat to a steady node, and takes one when it is back."""
    stage.start(4)
    stage.committee(3)
    witness = stage.world.witness
    witness.crash()
    lease_s = stage.world.run.spec.committee.voter_lease_s
    stage.expect(
        2 * lease_s + 2 * stage.failover_s, "the witness's seat taken",
        lambda: witness.id not in stage.checkers.committee.members,
    )  # fmt: skip
    stage.versions(3, 6 * stage.round_s, "without the witness")
    witness.start()
    stage.expect(
        40.0 + 2 * stage.failover_s, "the witness in its seat",
        lambda: witness.id in stage.checkers.committee.members,
    )  # fmt: skip
    stage.versions(3, 6 * stage.round_s, "with the witness")


def newcomer_is_slow_to_catch_up(stage: Stage) -> None:
    """A node far behind on a slow link gets a seat only when it has caught up."""
    stage.start(1)
    stage.versions(5, 12 * stage.round_s, "alone")
    first = stage.join()
    slow = stage.join()
    for link in ((m.id, slow.id) for m in stage.world.machines.values()):
        stage.world.network.slow[link] = (2.0, 10.0)

    def installed_late(machine: Machine, action: Action) -> bool:
        return machine is slow and isinstance(action, InstallEntry)

    stage.when(installed_late, lambda _machine, _action: None)
    stage.committee(3, 120.0)
    at_seat = next(i for i, c in enumerate(stage.checkers.chain) if c.committee.size == 3)
    for peer in stage.checkers.chain[at_seat].committee.voters:
        voter = stage.machine(PeerId(peer))
        if voter.disk.durable_index < at_seat:
            raise Violation("caught up before a seat", voter.name)
    stage.versions(3, stage.failover_s + 6 * stage.round_s, "after all joined")
    assert first.up
