"""Scenario D1: who sends a delta that cannot be used is named on the page, and it counts against it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from p2pdiloco.ids import Digest, short
from p2pdiloco.protocol import events as fact
from p2pdiloco.protocol.actions import Say
from p2pdiloco.wire import messages as msg
from p2pdiloco_node.taking_part.participant import _Door
from p2pdiloco_node.transport.guards import Strikes
from tests.unit.protocol.builders import NODES, WITNESS, Driven, header, make_run, sent, take


def test_the_voter_s_event_names_the_sender_and_the_sender_is_told() -> None:
    sender = NODES[3]
    run = make_run()
    voter = Driven(run, WITNESS)
    bad = header(run, sender)
    voter.hear(sender, bad)
    actions = voter.do(fact.DeltaArrived(Digest(bad.delta), msg.Outcome.NOT_FINITE, 0.0))
    (said,) = [a for a in take(actions, Say) if a.kind == "refused"]
    assert short(sender.peer_id) in said.text
    assert "NOT_FINITE" in said.text
    assert [r.outcome for r in sent(actions, msg.DeltaReceipt, sender.peer_id)] == [msg.Outcome.NOT_FINITE]


def test_the_door_counts_it_against_the_sender_s_key() -> None:
    server: Any = SimpleNamespace(strikes=Strikes(lambda: 0.0))
    _Door(server).strike(NODES[3].peer_id, msg.Outcome.NOT_FINITE)
    assert server.strikes.total(NODES[3].peer_id) == 1
    assert server.strikes.listed()[NODES[3].peer_id].last_reason == "NOT_FINITE"
