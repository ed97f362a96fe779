"""A simulator is worth what it finds: each rule left out is found within a few seeds, and none without.

The rules are those of protocol.md 4 whose loss model checking showed to be fatal. The same seeds keep all
promises when nothing is planted: test_seeds.py runs them every day.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from p2pdiloco.ids import Digest, PeerId
from p2pdiloco.protocol import node as node_module
from p2pdiloco.protocol.actions import Action, SaveRecord, Send, VoterRecord
from p2pdiloco.protocol.ballot import Ballot
from p2pdiloco.protocol.election import Election
from p2pdiloco.protocol.membership import Membership
from p2pdiloco.protocol.node import Node
from p2pdiloco.protocol.snapshot_sync import SnapshotSync
from p2pdiloco.rules.outer_step import Candidate, plan_outer_step
from p2pdiloco.rules.state import after_outer_step, rules_digest
from p2pdiloco.sim.checkers import Violation
from p2pdiloco.sim.machine import Machine
from p2pdiloco.sim.schedules import run_schedule
from p2pdiloco.sim.stage import Stage
from p2pdiloco.sim.swarm import SeedReport, run_seed
from p2pdiloco.sim.world import World
from p2pdiloco.wire.codec import encode
from p2pdiloco.wire.log import Membership as MembershipEntry
from p2pdiloco.wire.log import OuterStep, body_digest, open_body, state_root
from p2pdiloco.wire.messages import LastAck, Proposal, Vote
from p2pdiloco.wire.signing import proposal_statement
from p2pdiloco_node.lab.seeds import generator

Plant = Callable[[pytest.MonkeyPatch], Callable[[World], None] | None]


def found(seeds: range, prepare: Callable[[World], None] | None) -> SeedReport | None:
    """The first of `seeds` in which a promise is broken."""
    reports = (run_seed(seed, generator(seed), Node, prepare=prepare) for seed in seeds)
    return next((r for r in reports if r.violation), None)


# Bugs in the rules: parts of the real brain, one of them with one rule left out.


class KeepsItsTerm(Ballot):
    """A hand-over ack does not raise the own term."""

    def promise(self, ack: LastAck, index: int, committee: Digest) -> None:
        self._save(VoterRecord(max(self.term, ack.term), index, committee, ack))


class AcksTwice(Ballot):
    """One body for each index and term: forgotten."""

    def refuses(self, term: int, index: int) -> str | None:
        return "own term is newer" if term < self.term else None


class ProposesAfresh(Election):
    """What voters acked in an earlier term is not proposed again."""

    @property
    def again(self) -> list[Digest]:
        return []

    @again.setter
    def again(self, bodies: list[Digest]) -> None:
        pass


class GoesOn(Election):
    """The old committee's leader leads the new one without a vote."""

    def installed(self, content: Any, term: int, *, last: bool, current: bool) -> None:
        if not isinstance(content, MembershipEntry):
            super().installed(content, term, last=last, current=current)


class ComparesLogs(Election):
    """A vote from somebody whose ack is newer than the own one is not taken."""

    def on_vote(self, sender: Any, m: Vote, *, current: bool) -> None:
        if _age(m.last_ack) <= _age(self._ballot.last_ack):
            super().on_vote(sender, m, current=current)


def _age(ack: LastAck | None) -> tuple[int, int]:
    return (ack.term, open_body(ack.body).index) if ack is not None else (0, 0)


def part(name: str, kind: type) -> Plant:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(node_module, name, kind)

    return plant


# Bugs in the driver: what it does with the brain's actions, or forgets to sync.


def forgets(what: str) -> Plant:
    return lambda _: lambda world: world.plant(forgets=frozenset({what}))


def says_before_it_writes(_: Machine, actions: list[Action]) -> list[Action]:
    """Proposals leave before the own ack is on the disk."""
    said = [a for a in actions if isinstance(a, Send) and isinstance(a.message, Proposal)]
    return [*said, *(a for a in actions if a not in said)] if said else actions


def never_saves_votes(_: Machine, actions: list[Action]) -> list[Action]:
    """The record is kept in memory only."""
    return [a for a in actions if not isinstance(a, SaveRecord)]


def hand(change: Callable[[Machine, list[Action]], list[Action]]) -> Plant:
    return lambda _: lambda world: world.plant(change=change)


@pytest.mark.parametrize(
    ("plant", "rule", "seeds"),
    [
        pytest.param(forgets("record"), "a vote is saved before it is said", 3, id="vote not synced"),
        pytest.param(hand(never_saves_votes), "only what is certified is kept", 3, id="vote not saved"),
        pytest.param(part("Election", ProposesAfresh), "one certified body", 60, id="no re-proposal"),
        pytest.param(part("Ballot", KeepsItsTerm), "raises the own term", 10, id="hand-over keeps the term"),
        pytest.param(forgets("entries"), "not durable before the next", 3, id="certificate not durable"),
        pytest.param(hand(says_before_it_writes), "acks before it proposes", 3, id="proposal before own ack"),
        pytest.param(part("Election", GoesOn), "led in a later term", 10, id="old leader goes on"),
        pytest.param(part("Election", ComparesLogs), "the log goes on", 120, id="logs are compared"),
    ],
)
def test_a_rule_left_out_is_found(
    plant: Plant, rule: str, seeds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = found(range(1, seeds + 1), plant(monkeypatch))
    assert report is not None, f"not found in {seeds} seeds"
    assert rule in report.violation
    monkeypatch.undo()
    assert run_seed(report.seed, generator(report.seed), Node).violation == ""


# Bugs around a recovery show in the lives that are written for it.


class StaysWhereItIs(SnapshotSync):
    """The state is not taken back when its entries are dropped."""

    def go_back(self) -> None:
        pass


class VotesOn(Election):
    """A voter that knows of a newer epoch goes on voting in the one that its log is in."""

    def may_vote(self) -> bool:
        whole = self._log.index >= self._ballot.ack_index - 1
        return self.is_voter and whole and self._ballot.may_vote(self._log.committee)


class HoldsOldAcks(Membership):
    """What was acked in an ended epoch is held against its voter: it looks like a restored disk."""

    def epoch_began(self) -> None:
        pass


@pytest.mark.parametrize(
    ("name", "kind", "schedule", "rule"),
    [
        ("SnapshotSync", StaysWhereItIs, "old_majority_comes_back", "an outer step out of turn"),
        ("Election", VotesOn, "lone_voter_in_between", "an ended epoch is over"),
        ("Membership", HoldsOldAcks, "two_recoveries", "expected: 3 more versions"),
    ],
)
def test_a_rule_of_recoveries_left_out_is_found(
    name: str, kind: type, schedule: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, name, kind)
    assert rule in run_schedule(schedule, generator(1), Node).violation
    monkeypatch.undo()
    assert run_schedule(schedule, generator(1), Node).violation == ""


# A voter that acks twice shows only under an aggregator that asks twice.


def other_step(machine: Machine, step: OuterStep) -> OuterStep | None:
    """An outer step that is as good as `step`, with one contribution fewer."""
    assert isinstance(machine.brain, Node)
    spec, rules = machine.world.run.spec, machine.brain.state
    fewer = [
        Candidate(
            Digest(c.delta), PeerId(c.peer), c.base_version, c.sequence, c.steps, c.norm, c.key, c.signature
        )
        for c in step.contributions[1:]
    ]
    other = plan_outer_step(rules, spec, fewer, [])
    if other is None:
        return None
    made = machine.world.arithmetic.step(machine.state, other, machine.disk.blobs)
    assert made is not None
    root_of = machine.world.arithmetic.root_of
    after = rules_digest(after_outer_step(rules, other, spec))
    return replace(other, state_root=state_root(root_of(made.params), root_of(made.momentum), after))


def asks_twice(machine: Machine, actions: list[Action]) -> list[Action]:
    """Two bodies for one index in one term, both valid, both signed."""
    asked: list[Action] = []
    for action in actions:
        if isinstance(action, Send) and isinstance(action.message, Proposal):
            p = action.message
            body = open_body(p.body)
            other = other_step(machine, body.content) if isinstance(body.content, OuterStep) else None
            if other is not None:
                twin = encode(replace(body, content=other))
                statement = proposal_statement(
                    machine.world.run.run, body.epoch, Digest(body.committee), p.term, body.index,
                    body_digest(twin), last=p.last,
                )  # fmt: skip
                signature = machine.signer.sign(statement)
                asked.append(Send(action.peer, Proposal(p.term, twin, p.last, signature)))
        asked.append(action)
    return asked


def live_under_two_faces(seed: int) -> None:
    stage = Stage(generator(seed), Node, rotation=8)
    stage.start(4)
    stage.committee(3)
    liar = stage.leader()
    liar.honest = False
    liar.change = asks_twice
    # Slow enough that both proposals may be there before a majority has answered either.
    stage.world.network.weather = stage.world.network.weather._replace(delay_s_max=0.6)
    stage.versions(6, 6 * stage.failover_s, "under an aggregator with two faces")


def test_a_voter_that_acks_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    live_through(range(1, 6))  # honest voters ack one of the two
    monkeypatch.setattr(node_module, "Ballot", AcksTwice)
    with pytest.raises(Violation, match="one ack for each index and term"):
        live_through(range(1, 6))


def live_through(seeds: range) -> None:
    for seed in seeds:
        live_under_two_faces(seed)
