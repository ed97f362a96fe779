"""Own deltas: offered, delivered, settled; each row of algorithm.md 6's table."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from p2pdiloco import limits
from p2pdiloco.ids import Digest
from p2pdiloco.protocol.actions import (
    Action,
    AllowPasses,
    RevealDelta,
    Send,
    Settled,
    SettleDelta,
    UploadDelta,
)
from p2pdiloco.protocol.context import Restored
from p2pdiloco.rules.state import genesis_state
from p2pdiloco.wire.log import Committee, Refused
from p2pdiloco.wire.messages import DeltaHeader, DeltaReceipt, Outcome

from .builders import NODES, WITNESS, Parts, header, held, make_run, plan, said, sent, take

A, B, C = NODES[:3]
RUN = make_run(A, B)
SEATS = RUN.committee
BEAT = RUN.spec.committee.heartbeat_s
ONE, TWO = header(RUN, C, 1), header(RUN, C, 2)
VOTERS = (WITNESS, A, B)


def trainer(*in_flight: DeltaHeader, who: Any = C) -> Parts:
    return Parts(RUN, who, Restored(in_flight=in_flight))


def receipt(h: DeltaHeader, outcome: Outcome) -> DeltaReceipt:
    return DeltaReceipt(h.delta, outcome, "", 0.0)


def hear(p: Parts, voter: Any, outcome: Outcome, h: DeltaHeader = ONE) -> list[Action]:
    p.delivery.on_receipt(voter.peer_id, receipt(h, outcome), SEATS)
    return p.drain()


def offer(p: Parts, *held_here: bytes) -> list[Action]:
    p.delivery.offer(SEATS, held_here=held_here)
    return p.drain()


def settled(actions: list[Action]) -> list[tuple[bytes, Settled]]:
    return [(a.delta, a.how) for a in take(actions, SettleDelta)]


# Offering and delivering


def test_every_voter_is_offered_the_header_until_it_answers() -> None:
    p = trainer(ONE)
    assert {a.peer for a in take(offer(p), Send)} == set(SEATS.members)
    hear(p, A, Outcome.NOTED)
    assert {a.peer for a in take(offer(p), Send)} == {WITNESS.peer_id, B.peer_id}
    hear(p, B, Outcome.HELD)
    assert {a.peer for a in take(offer(p), Send)} == {WITNESS.peer_id}


def test_commit_before_reveal() -> None:
    """No blob leaves before a majority of the voters has the header (protocol.md 5)."""
    p = trainer(ONE)
    assert hear(p, C, Outcome.NOTED) == []  # no seat
    assert take(hear(p, A, Outcome.NOTED), UploadDelta) == []
    assert take(hear(p, A, Outcome.NOTED), UploadDelta) == []  # the same one again
    actions = hear(p, B, Outcome.NOTED)
    assert take(actions, RevealDelta) == [RevealDelta(Digest(ONE.delta))]
    assert {(u.peer, u.delta, u.size) for u in take(actions, UploadDelta)} == {
        (A.peer_id, ONE.delta, ONE.size), (B.peer_id, ONE.delta, ONE.size),
    }  # fmt: skip
    late = hear(p, WITNESS, Outcome.NOTED)
    assert take(late, RevealDelta) == []
    assert [u.peer for u in take(late, UploadDelta)] == [WITNESS.peer_id]


def test_a_voter_that_lost_its_seat_is_none_of_the_majority() -> None:
    p = trainer(ONE)
    hear(p, A, Outcome.NOTED)
    new = Committee(WITNESS.peer_id, (B.peer_id, NODES[3].peer_id))
    p.delivery.on_receipt(B.peer_id, receipt(ONE, Outcome.NOTED), new)
    assert take(p.drain(), UploadDelta) == []
    p.delivery.on_receipt(WITNESS.peer_id, receipt(ONE, Outcome.NOTED), new)
    assert {u.peer for u in take(p.drain(), UploadDelta)} == {WITNESS.peer_id, B.peer_id}


def test_a_training_voter_is_one_of_the_majority() -> None:
    own = header(RUN, A)
    p = trainer(own, who=A)
    assert {a.peer for a in take(offer(p), Send)} == {WITNESS.peer_id, B.peer_id}
    assert [u.peer for u in take(hear(p, B, Outcome.NOTED, own), UploadDelta)] == [B.peer_id]


def test_one_upload_at_a_time_to_a_voter_and_none_after_it_has_it() -> None:
    p = trainer(ONE)
    hear(p, A, Outcome.NOTED)
    hear(p, B, Outcome.NOTED)
    assert take(offer(p), UploadDelta) == []
    p.delivery.uploaded(Digest(ONE.delta), A.peer_id)
    hear(p, B, Outcome.HELD)
    assert take(offer(p), UploadDelta) == []


def test_an_upload_that_failed_is_offered_again_after_a_pause() -> None:
    p = trainer(ONE)
    hear(p, A, Outcome.NOTED)
    hear(p, B, Outcome.NOTED)
    p.delivery.not_uploaded(Digest(ONE.delta), A.peer_id, 7.0)
    assert sent(offer(p), DeltaHeader, A.peer_id) == []
    p.ctx.now = 6.9
    assert sent(offer(p), DeltaHeader, A.peer_id) == []
    p.ctx.now = 7.0
    assert sent(offer(p), DeltaHeader, A.peer_id) == [ONE]
    assert [u.peer for u in take(hear(p, A, Outcome.NOTED), UploadDelta)] == [A.peer_id]


def test_a_voter_that_started_again_is_offered_again() -> None:
    p = trainer(ONE)
    for v in VOTERS:
        hear(p, v, Outcome.HELD)
    assert sent(offer(p), DeltaHeader) == []
    p.delivery.reborn(A.peer_id)
    assert {a.peer for a in take(offer(p), Send)} == {A.peer_id}


def test_whatever_is_unsettled_is_offered_again_each_pass() -> None:
    p = trainer(ONE)
    for v in VOTERS:
        hear(p, v, Outcome.HELD)
    p.delivery.finished(TWO)
    assert sent(offer(p), DeltaHeader, A.peer_id) == [ONE, TWO]


def test_at_most_two_in_flight() -> None:
    """The bound on solo work (algorithm.md 3)."""
    assert limits.in_flight_max == 2
    p = trainer()
    allowed = []
    for h in (None, ONE, TWO):
        if h is not None:
            p.delivery.finished(h)
        p.delivery.allow()
        allowed += take(p.drain(), AllowPasses)
    assert [a.allowed for a in allowed] == [2, 1, 0]
    assert [bool(a.why) for a in allowed] == [False, False, True]
    assert "waiting for the swarm" in allowed[-1].why


def test_an_owners_pause_holds_whatever_else_happens() -> None:
    p = trainer(ONE, TWO)
    assert p.delivery.obey(replace(genesis_state(RUN.spec), paused=True))
    p.delivery.allow()
    p.delivery.settle_by(plan(RUN, genesis_state(RUN.spec), [held(ONE, C)]))
    allowed = [(a.allowed, a.prolong) for a in take(p.drain(), AllowPasses)]
    assert allowed == [(0, False), (1, False)]  # the pass under way may be sent, as far as there is room


def test_whom_the_owner_revoked_gives_up_its_work_says_so_once_and_makes_no_more() -> None:
    p = trainer(ONE, TWO)
    revoked = replace(genesis_state(RUN.spec), revoked=(C.peer_id,))
    assert p.delivery.obey(revoked)
    p.delivery.allow()
    actions = p.drain()
    assert settled(actions) == [(ONE.delta, Settled.REFUSED), (TWO.delta, Settled.REFUSED)]
    assert said(actions) == ["revoked"]
    last = take(actions, AllowPasses)[-1]
    assert (last.allowed, last.prolong) == (0, False)
    assert "owner revoked this node" in last.why
    assert not p.delivery.obey(revoked)
    assert said(p.drain()) == []


def test_another_nodes_revocation_changes_nothing_here() -> None:
    p = trainer(ONE)
    assert not p.delivery.obey(replace(genesis_state(RUN.spec), revoked=(A.peer_id,)))
    p.delivery.allow()
    assert take(p.drain(), AllowPasses) == [AllowPasses(1, "")]


# What settles (the table)


def test_listed() -> None:
    p = trainer(ONE, TWO)
    p.delivery.settle_by(plan(RUN, genesis_state(RUN.spec), [held(ONE, C), held(header(RUN, A), A)]))
    actions = p.drain()
    assert settled(actions) == [(ONE.delta, Settled.LISTED)]
    assert take(actions, AllowPasses)[-1].allowed == 1
    assert p.delivery.in_flight == (TWO,)
    assert p.delivery.last_outcome is Outcome.ACCEPTED


def test_passed_over_once() -> None:
    p = trainer(ONE, TWO)
    step = plan(RUN, genesis_state(RUN.spec), [held(TWO, C)])
    p.delivery.settle_by(step)
    assert sorted(settled(p.drain())) == sorted(
        [(TWO.delta, Settled.LISTED), (ONE.delta, Settled.PASSED_OVER)]
    )
    p.delivery.settle_by(step)  # replayed at a restart
    assert settled(p.drain()) == []


def test_an_entry_of_others_settles_nothing_here() -> None:
    p = trainer(ONE)
    p.delivery.settle_by(plan(RUN, genesis_state(RUN.spec), [held(header(RUN, A, 9), A)]))
    assert settled(p.drain()) == []


@pytest.mark.parametrize("outcome", ["BAD_SHAPE", "BAD_SIGNATURE", "TOO_BIG", "NOT_ADMITTED"])
def test_refused_at_the_door_by_a_majority(outcome: str) -> None:
    p = trainer(ONE)
    assert settled(hear(p, A, Outcome(outcome))) == []
    assert settled(hear(p, A, Outcome(outcome))) == []  # the same voter again
    assert settled(hear(p, C, Outcome(outcome))) == []  # no seat
    assert settled(hear(p, B, Outcome(outcome))) == [(ONE.delta, Settled.REFUSED)]


def test_not_finite_by_a_majority() -> None:
    """D1: it also resets the trainer."""
    p = trainer(ONE, TWO)
    hear(p, A, Outcome.NOT_FINITE)
    assert settled(hear(p, WITNESS, Outcome.NOT_FINITE)) == [(ONE.delta, Settled.NOT_FINITE)]
    assert p.delivery.in_flight == (TWO,)


def test_only_the_same_refusal_by_a_majority_settles() -> None:
    """One lying voter's NOT_FINITE beside another's NOT_ADMITTED would clear the error feedback."""
    p = trainer(ONE)
    assert settled(hear(p, A, Outcome.NOT_FINITE)) == []
    assert settled(hear(p, B, Outcome.NOT_ADMITTED)) == []
    assert settled(hear(p, WITNESS, Outcome.NOT_ADMITTED)) == [(ONE.delta, Settled.REFUSED)]


def test_a_refusal_by_less_than_a_majority_is_asked_again_next_pass() -> None:
    p = trainer(ONE)
    hear(p, A, Outcome.BAD_SHAPE)
    assert sent(offer(p), DeltaHeader, A.peer_id) == []
    p.delivery.finished(TWO)
    assert sent(offer(p), DeltaHeader, A.peer_id) == [ONE, TWO]


@pytest.mark.parametrize(
    "outcome",
    ["RATE_LIMITED", "TOO_EARLY", "OUTLIER", "DUPLICATE", "TOO_LATE", "RUN_OVER", "STALE", "ACCEPTED"],
)
def test_whatever_else_a_majority_says_settles_nothing(outcome: str) -> None:
    """It stays in flight and is offered again after a heartbeat."""
    p = trainer(ONE)
    for v in VOTERS:
        assert settled(hear(p, v, Outcome(outcome))) == []
    assert sent(offer(p), DeltaHeader) == []
    p.ctx.now = BEAT
    assert len(sent(offer(p), DeltaHeader)) == 3
    assert p.delivery.in_flight == (ONE,)


def test_too_late_in_the_log() -> None:
    p = trainer(ONE)
    step = plan(RUN, genesis_state(RUN.spec), [held(header(RUN, A), A)])
    late = Refused(ONE.delta, C.peer_id, 0, 1, 4, "TOO_LATE", C.public_key, ONE.signature)
    p.delivery.settle_by(msgspec.structs.replace(step, refused=(late,)))
    assert settled(p.drain()) == [(ONE.delta, Settled.TOO_LATE)]
    assert p.delivery.last_outcome is Outcome.TOO_LATE


def test_a_base_older_than_staleness_max_at_the_state_that_stands() -> None:
    p = trainer(ONE, header(RUN, C, 2, base=20))
    state = genesis_state(RUN.spec)
    full = 100
    clocks = tuple(full * v for v in range(41))
    edge = msgspec.structs.replace(state, version=17, clock=1700, t_full=full, clocks=clocks[:18])
    p.delivery.settle_late(edge)
    assert settled(p.drain()) == []  # k = 16 exactly
    beyond = msgspec.structs.replace(edge, version=18, clock=1801, clocks=(*clocks[:18], 1801))
    p.delivery.settle_late(beyond)
    assert settled(p.drain()) == [(ONE.delta, Settled.TOO_LATE)]
    assert [h.sequence for h in p.delivery.in_flight] == [2]


def test_long_absence_discards_everything_without_settling() -> None:
    p = trainer(ONE, TWO)
    p.delivery.clear()
    assert p.drain() == []
    assert p.delivery.in_flight == ()


def test_receipts_for_strange_deltas_are_nothing() -> None:
    p = trainer(ONE)
    assert hear(p, A, Outcome.NOT_FINITE, header(RUN, A)) == []
    assert p.delivery.last_outcome is None
