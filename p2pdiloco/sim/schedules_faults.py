"""Directed schedules around faults: who dies, hangs, is cut off or comes late, and what must go on.

Cited: shared scenarios (A1, A2, B1, B4, L1, S5..., S9, T3) and targets R1b, R2.
"""

from __future__ import annotations

from p2pdiloco.protocol import events as fact
from p2pdiloco.protocol.actions import Action, SaveRecord, Send
from p2pdiloco.sim.checkers import Violation
from p2pdiloco.sim.machine import Machine
from p2pdiloco.sim.stage import Stage
from p2pdiloco.wire.log import OuterStep
from p2pdiloco.wire.messages import Ack, DeltaHeader, Entries, Proposal, Vote
from p2pdiloco.words import count_of


def alone(stage: Stage) -> None:
    """A2: one node and the witness. Versions advance; the committee stays the witness alone."""
    stage.start(1)
    stage.versions(8, 14 * stage.round_s, "alone")
    if stage.checkers.committee.size != 1:
        raise Violation("never two seats", f"size {stage.checkers.committee.size}")


def alone_with_the_witness_away(stage: Stage) -> None:
    """It trains within its bound, says so, and goes on when the witness is back."""
    (node,) = stage.start(1)
    stage.versions(2, 6 * stage.round_s, "first")
    stage.world.witness.crash()
    assert node.trainer is not None
    made = node.trainer.made
    stage.run(20 * stage.world.run.spec.inner.pass_s)
    if node.trainer.made - made > 2:
        raise Violation(
            "bound on solo work", f"{count_of(node.trainer.made - made, 'delta')} without an entry"
        )
    stage.world.witness.start()
    stage.versions(3, stage.failover_s + 6 * stage.round_s, "when the witness is back")


def late_second_node(stage: Stage) -> None:
    """One node alone for a long time; a second one joins far behind, by one snapshot, and takes a seat."""
    stage.start(1)
    stage.versions(40, 60 * stage.round_s, "alone")
    second = stage.join()
    stage.committee(3, 90.0)
    if second.state.version < 40:
        raise Violation("the second node is caught up", f"version {second.state.version}")
    if stage.world.snapshots_fetched > 1:
        raise Violation("at most one snapshot", f"{stage.world.snapshots_fetched} fetched")
    stage.versions(4, 8 * stage.round_s, "together")


def moving_target(stage: Stage) -> None:
    """L1: the run moves on while a joiner's link takes half a minute for the snapshot."""
    stage.start(3)
    stage.committee(3)
    stage.versions(36, 60 * stage.round_s, "before the joiner")
    joiner = stage.join()
    for machine in stage.world.machines.values():
        stage.world.network.slow[(machine.id, joiner.id)] = (1.0, 30.0)
    stage.expect(
        90.0, "the joiner at most three versions behind",
        lambda: joiner.state.version > 0 and joiner.state.version >= stage.checkers.version - 3,
    )  # fmt: skip
    if stage.world.snapshots_fetched > 1:
        raise Violation("at most one snapshot", f"{stage.world.snapshots_fetched} fetched")


def straggler(stage: Stage) -> None:
    """A1: one of four is four times slower in steps; it holds up nobody and is counted."""
    nodes = stage.start(4, speeds=(1.0, 1.0, 1.0, 0.25))
    stage.committee(3)
    took = stage.versions(8, 12 * stage.round_s, "with a straggler")
    if took > 8 * stage.round_s:
        raise Violation("nobody waits", f"8 versions took {took:.0f} s")
    slow = nodes[3].id
    counted = [
        c
        for certified in stage.checkers.chain
        if isinstance(certified.body.content, OuterStep)
        for c in certified.body.content.contributions
        if c.peer == slow
    ]
    if not counted:
        raise Violation("the straggler is counted", "no delta of it was listed")


def tracker_and_witness_away(stage: Stage) -> None:
    """B1: four nodes go on for at least three versions, and take both back when they return."""
    stage.start(4)
    stage.committee(3)
    stage.world.tracker_up = False
    stage.world.witness.crash()
    stage.versions(1, stage.failover_s, "without tracker and witness")
    stage.versions(5, 8 * stage.round_s, "still without")
    stage.world.tracker_up = True
    stage.world.witness.start()
    stage.versions(3, 6 * stage.round_s, "with both back")
    stage.nobody_holds_back()


def aggregator_dies_at(stage: Stage, step: int, how: str) -> None:
    """B4, S5e, R2: the aggregator dies or hangs after `step` more actions of an outer step's making."""
    stage.start(4)
    stage.committee(3)
    stage.versions(1, 4 * stage.round_s, "first")

    def hit(machine: Machine, _: Action) -> None:
        machine.doom = (step, how, 40.0)

    done = stage.when(lambda _, a: isinstance(a, SaveRecord) and a.record.ack is not None, hit)
    stage.expect(40.0, "an ack", lambda: bool(done))
    stage.run(0.5)
    stage.versions(1, stage.failover_s + stage.round_s, f"after {done[0].name} had {how} at {step}")
    stage.versions(3, 6 * stage.round_s, "later")
    if how == "crash":
        done[0].start()
    stage.run(45.0)
    stage.nobody_holds_back()


def aggregator_only_beats(stage: Stage) -> None:
    """R2: it sends heartbeats and never proposes; the others notice by the deltas that wait."""
    stage.start(3)
    stage.committee(3)
    stage.versions(1, 4 * stage.round_s, "first")
    lazy = stage.leader()

    def idle(_: Machine, actions: list[Action]) -> list[Action]:
        return [a for a in actions if not (isinstance(a, Send) and isinstance(a.message, Proposal))]

    lazy.change = idle
    stage.versions(3, 4 * stage.round_s + 2 * stage.failover_s, "in spite of an idle aggregator")


def old_aggregator_wakes_up(stage: Stage) -> None:
    """S5c: paused in one term, it resumes in a later one, is told and follows."""
    stage.start(4)
    stage.committee(3)
    stage.versions(1, 4 * stage.round_s, "first")
    sleeper = stage.leader()
    sleeper.freeze(60.0)
    stage.versions(1, stage.failover_s + stage.round_s, "without the sleeper")
    stage.run(61.0)
    stage.versions(3, 6 * stage.round_s, "after it woke up")
    stage.nobody_holds_back()


def split_in_halves(stage: Stage) -> None:
    """S5: no majority of the committee on one side means no entry there; one lineage after the heal."""
    nodes = stage.start(4)
    members = stage.committee(3)
    outside = [n for n in nodes if n not in members]
    minority = [next(m for m in members if m in nodes), *outside]
    majority = [m for m in stage.world.machines.values() if m not in minority]
    stage.world.network.split([m.id for m in minority], [m.id for m in majority])
    stage.versions(2, stage.failover_s + 4 * stage.round_s, "on the majority's side")
    behind = max(m.state.index for m in minority)
    stage.run(30.0)
    if max(m.state.index for m in minority) > behind:
        raise Violation("no entry without a majority", "the minority's side moved")
    stage.world.network.mend()
    stage.versions(3, stage.failover_s + 4 * stage.round_s, "after the heal")
    stage.nobody_holds_back()


def one_cut_off(stage: Stage) -> None:
    """S5b: three go on; what the one made meanwhile is counted once or refused, never twice."""
    nodes = stage.start(4)
    stage.committee(3)
    lone = nodes[3]
    stage.world.network.split([lone.id], [m.id for m in stage.world.machines.values() if m is not lone])
    stage.run(60.0)
    stage.world.network.mend()
    stage.versions(4, stage.failover_s + 6 * stage.round_s, "after the heal")
    stage.nobody_holds_back()


def partial_partition(stage: Stage) -> None:
    """Two voters cannot reach each other, both reach the third: the log goes on."""
    stage.start(3)
    members = [m for m in stage.committee(3) if m is not stage.world.witness]
    stage.world.network.split([members[0].id], [members[1].id])
    stage.versions(5, 3 * stage.failover_s + 6 * stage.round_s, "with one link down")
    stage.world.network.mend()
    stage.nobody_holds_back()


def returning_node_deposes_nobody(stage: Stage) -> None:
    """Pre-vote: a voter that was cut off for a while comes back, and the term stays."""
    stage.start(4)
    members = stage.committee(3)
    leader = stage.leader()
    lone = next(m for m in members if m is not leader and m is not stage.world.witness)
    others = [m.id for m in stage.world.machines.values() if m is not lone]
    stage.world.network.split([lone.id], others)
    stage.run(10.0)
    stage.world.network.mend()
    before = max(m.brain.term for m in members if m.brain is not None and m is not lone)
    stage.run(3.0)
    assert lone.brain is not None
    if lone.brain.term > before + 1:
        raise Violation("pre-vote", f"a returning voter moved on to term {lone.brain.term} from {before}")
    stage.versions(2, stage.failover_s + 2 * stage.round_s, "with the voter back")


def acked_body_is_proposed_again(stage: Stage) -> None:
    """An aggregator dies when one voter has acked its body: the same body is what gets certified."""
    stage.start(3)
    stage.committee(3)
    stage.versions(1, 4 * stage.round_s, "first")

    def note(machine: Machine, _: Action) -> None:
        # The first ack of another voter is on its disk; the aggregator dies before it hears of it.
        for other in stage.world.machines.values():
            if other is not machine and other.brain is not None and other.brain.leading:
                stage.world.at(0.0, other.crash)
        stage.world.network.cut((machine.id, p) for p in stage.world.machines)
        stage.world.at(0.5, stage.world.network.mend)

    def voter_acks(machine: Machine, action: Action) -> bool:
        if not isinstance(action, SaveRecord) or action.record.ack is None or machine.brain is None:
            return False
        record = machine.disk.record
        fresh = record is None or record.ack != action.record.ack
        return fresh and action.record.ack.proposer_key != machine.signer.public_key

    hit = stage.when(voter_acks, note)
    stage.expect(40.0, "an ack", lambda: bool(hit))
    stage.versions(2, stage.failover_s + 3 * stage.round_s, "after the aggregator died")
    for machine in stage.world.machines.values():
        machine.start()
    stage.nobody_holds_back()


def everything_twice(stage: Stage) -> None:
    """S9: each message twice and out of order; each delta counts once."""
    stage.world.network.weather = stage.world.network.weather._replace(duplicate=1.0, delay_s_max=0.5)
    stage.start(3)
    stage.committee(3)
    stage.versions(6, 10 * stage.round_s, "with everything said twice")


def replayed_headers(stage: Stage) -> None:
    """T3: captured headers and entries are sent again after ten seconds and after minutes."""
    stage.start(3)
    captured: list[tuple[Machine, Send]] = []

    def capture(machine: Machine, actions: list[Action]) -> list[Action]:
        captured.extend(
            (machine, a)
            for a in actions
            if isinstance(a, Send) and isinstance(a.message, DeltaHeader | Entries | Proposal)
        )
        return actions

    for machine in stage.world.machines.values():
        machine.change = capture

    def replay() -> None:
        for machine, order in captured[-400:]:
            target = stage.machine(order.peer)
            if target.up:
                sealed = machine.seal(order.message, order.peer)
                event = fact.MessageReceived(
                    machine.id, machine.signer.public_key, machine.boot, order.message, sealed, machine.epoch
                )
                target.post(event)

    stage.committee(3)
    stage.world.at(10.0, replay)
    stage.world.at(120.0, replay)
    stage.versions(6, 10 * stage.round_s, "through the first replay")
    stage.run(120.0)
    stage.versions(3, 6 * stage.round_s, "after the second replay")


def whole_swarm_restarts(stage: Stage) -> None:
    """F3: everybody stops at once and starts again in any order: same state, and it goes on."""
    stage.start(4)
    stage.committee(3)
    stage.versions(4, 8 * stage.round_s, "first")
    index = stage.checkers.index
    machines = list(stage.world.machines.values())
    for machine in machines:
        machine.crash()
    stage.run(5.0)
    for machine in stage.world.chance.sample(machines, len(machines)):
        stage.world.at(stage.world.chance.uniform(0.0, 3.0), machine.start)
    stage.entries(2, stage.failover_s + 4 * stage.round_s, "after the restart")
    if stage.checkers.index <= index:
        raise Violation("the log goes on", "")
    stage.nobody_holds_back()


def rolled_back_voter_does_not_vote(stage: Stage) -> None:
    """R1b: one voter's whole disk is put back to an old image; it neither votes nor acks again."""
    stage.start(3)
    members = stage.committee(3)
    victim = next(m for m in members if m is not stage.world.witness and m is not stage.leader())
    # Two restarts, so that the others have seen a boot counter beyond what the image leads to.
    image = victim.disk.image()
    for _ in range(2):
        victim.crash()
        victim.start()
        stage.run(3.0)
    stage.versions(2, stage.failover_s + 4 * stage.round_s, "with the voter restarted")
    victim.crash()
    victim.disk.restore(image)
    stage.checkers.forget_said(victim)
    said: list[Action] = []

    def listen(_: Machine, actions: list[Action]) -> list[Action]:
        said.extend(a for a in actions if isinstance(a, Send) and isinstance(a.message, Ack | Vote))
        return actions

    victim.change = listen
    victim.start()
    stage.versions(4, stage.failover_s + 6 * stage.round_s, "with a rolled back voter")
    if said:
        raise Violation("a rolled back disk does not vote", victim.name)


def run_ends(stage: Stage) -> None:
    """The target version is reached: `finish` is certified and everybody is told."""
    stage.start(3)
    stage.expect(
        20 * stage.round_s, "the end of the run",
        lambda: all(m.ended for m in stage.world.machines.values()),
    )  # fmt: skip
    if stage.checkers.version != stage.world.run.spec.target_version:
        raise Violation("the target is kept", f"version {stage.checkers.version}")
