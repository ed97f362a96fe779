"""Targets R1, B3: a lying aggregator gets no certificate, is replaced, and the run goes on."""

from __future__ import annotations

import pytest

from p2pdiloco.protocol.actions import Action, FetchDelta, Send
from p2pdiloco.protocol.delta_pool import Arrived, DeltaPool
from p2pdiloco.protocol.node import Node
from p2pdiloco.sim.liars import LIES, Liar
from p2pdiloco.sim.machine import Machine
from p2pdiloco.sim.stage import Stage
from p2pdiloco.wire.messages import Ack, Proposal
from p2pdiloco_node.lab.seeds import generator


def stage_with_a_liar_seated(rotation: int = 3) -> tuple[Stage, Machine]:
    stage = Stage(generator(5), Node, rotation=rotation)
    stage.start(4)
    members = stage.committee(3)
    stage.versions(1, 4 * stage.round_s, "first")
    return stage, next(m for m in members if m is not stage.world.witness)


@pytest.mark.parametrize("lie", LIES)
def test_a_false_body_gets_no_certificate(lie: str) -> None:
    stage, machine = stage_with_a_liar_seated(rotation=2)
    liar = Liar(machine, LIES[lie])
    stage.versions(5, 4 * (stage.failover_s + 4 * stage.round_s), "beside a liar")
    assert liar.told, "it never came to lie"
    assert not liar.told & {c.digest for c in stage.checkers.chain}


def test_an_aggregator_that_withholds_its_proposals_is_replaced() -> None:
    stage, liar = stage_with_a_liar_seated()
    liar.honest = False
    liar.change = lambda _, actions: [
        a for a in actions if not (isinstance(a, Send) and isinstance(a.message, Proposal | Ack))
    ]
    stage.versions(5, 4 * (stage.failover_s + 4 * stage.round_s), "beside one that says nothing")


def test_an_aggregator_that_drops_a_victim_does_not_silence_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, liar = stage_with_a_liar_seated(rotation=3)
    victim = next(m for m in stage.world.nodes() if m is not liar)
    assert isinstance(liar.brain, Node)
    honest = DeltaPool.ready

    def ready(pool: DeltaPool, *about: object) -> list[Arrived]:
        found = honest(pool, *about)  # type: ignore[arg-type]
        mine = liar.brain is not None and pool is liar.brain._pool  # type: ignore[attr-defined]
        return [a for a in found if not (mine and a.sender == victim.id)]

    monkeypatch.setattr(DeltaPool, "ready", ready)
    before = stage.checkers.sequences.get(victim.id, 0)
    stage.expect(
        4 * (stage.failover_s + 4 * stage.round_s),
        "the victim's deltas counted by others",
        lambda: stage.checkers.sequences.get(victim.id, 0) >= before + 2,
    )


def test_voters_fetch_what_a_proposal_lists_and_they_lack() -> None:
    """One node's uploads to a voter are all lost: the voter gets the blobs from those that HAVE them."""
    stage, _ = stage_with_a_liar_seated()
    members = [stage.machine(p) for p in stage.checkers.committee.members]
    sender = next(m for m in stage.world.nodes() if m not in members)
    voter = next(m for m in members if m is not stage.world.witness)
    stage.world.network.cut([(sender.id, voter.id)])
    fetched: list[Action] = []

    def watch(machine: Machine, actions: list[Action]) -> list[Action]:
        if machine is voter:
            fetched.extend(a for a in actions if isinstance(a, FetchDelta) and a.donors)
        return actions

    voter.change = watch
    before = stage.checkers.sequences.get(sender.id, 0)
    stage.expect(
        8 * stage.round_s + 2 * stage.failover_s,
        "its deltas counted",
        lambda: stage.checkers.sequences.get(sender.id, 0) >= before + 2,
    )
    stage.run(2 * stage.round_s)
    assert fetched
    assert voter.state.index >= stage.checkers.index - 1
