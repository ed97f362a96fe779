"""One body becomes the next entry: what is acked, what is refused, what is said first (protocol.md 3)."""

from __future__ import annotations

from typing import Any

import msgpack
import msgspec
import pytest

from p2pdiloco import limits
from p2pdiloco.ids import NO_DIGEST, Digest, digest_of
from p2pdiloco.protocol.actions import FetchDelta, PrepareOuterStep, SaveRecord
from p2pdiloco.protocol.context import Restored
from p2pdiloco.rules.float32 import f32
from p2pdiloco.wire.log import Committee, Membership, OuterStep, Refused, body_digest, open_body
from p2pdiloco.wire.messages import Ack, EntriesWanted, NewerTerm, Proposal

from .builders import (
    NODES,
    WITNESS,
    Chain,
    Parts,
    body_of,
    header,
    held,
    last_ack,
    make_run,
    plan,
    rooted,
    roots,
    said,
    sent,
    sign_ack,
    sign_proposal,
    take,
)

A, B, C = NODES[:3]
RUN = make_run(A, B)  # A leads even terms, B odd ones
DELTAS = [held(header(RUN, A), A), held(header(RUN, C), C, norm=2.0)]


def voter(*deltas: Any, who: Any = WITNESS) -> Parts:
    parts = Parts(RUN, who)
    parts.hold(*(deltas or DELTAS))
    parts.drain()
    return parts


def propose(parts: Parts, body: bytes, *, term: int = 2, by: Any = A, last: bool = False) -> list[Any]:
    """The proposal comes, and what it needs is computed."""
    m = sign_proposal(parts.log, by, body, term, last=last)
    parts.proposals.on_proposal(by.peer_id, by.public_key, m)
    out = parts.drain()
    for action in take(out, PrepareOuterStep):
        parts.applied.prepared(action.ticket, *roots(action.step.version))
    parts.proposals.resume()
    return out + parts.drain()


def good_step(parts: Parts) -> OuterStep:
    return plan(RUN, parts.applied.rules, DELTAS)


def changed(parts: Parts, **changes: Any) -> bytes:
    """The good step with other fields, its root right for what it says."""
    step = msgspec.structs.replace(good_step(parts), **changes)
    return body_of(parts.log, rooted(RUN, parts.applied.rules, step))


# Voters


def test_a_voter_acks_what_it_recomputed_and_its_record_is_durable_first() -> None:
    parts = voter()
    body = body_of(parts.log, good_step(parts))
    out = propose(parts, body)
    acks = sent(out, Ack, A.peer_id)
    assert acks == [sign_ack(parts.log, WITNESS, body, 2)]
    assert sent(out, Ack, B.peer_id) == acks
    (save,) = [a for a in take(out, SaveRecord) if a.record.ack is not None]
    assert save.record.ack == last_ack(parts.log, A, body, 2)
    places = [i for i, a in enumerate(out) if isinstance(getattr(a, "message", None), Ack)]
    assert out.index(save) < min(places)
    assert parts.ballot.term == 2


def test_an_ack_of_the_last_body_says_so_and_raises_the_term_beyond() -> None:
    parts = voter()
    body = body_of(parts.log, good_step(parts))
    assert sent(propose(parts, body, last=True), Ack, A.peer_id) == [
        sign_ack(parts.log, WITNESS, body, 2, last=True)
    ]
    assert parts.ballot.term == 3


def listed(parts: Parts, place: int = 0, **changes: Any) -> dict[str, Any]:
    contributions = list(good_step(parts).contributions)
    contributions[place] = msgspec.structs.replace(contributions[place], **changes)
    return {"contributions": tuple(contributions)}


def scalars(parts: Parts, **changes: Any) -> dict[str, Any]:
    return {"scalars": msgspec.structs.replace(good_step(parts).scalars, **changes)}


WRONG: dict[str, Any] = {
    "a weight 1 percent off": lambda p: listed(p, weight=f32(good_step(p).contributions[0].weight * 1.01)),
    "a norm 1 percent off": lambda p: listed(p, norm=f32(good_step(p).contributions[0].norm * 1.01)),
    "more tokens": lambda p: listed(p, tokens=good_step(p).contributions[0].tokens + 1),
    "a clip": lambda p: listed(p, clip=0.5),
    "staleness": lambda p: listed(p, staleness=1.0),
    "rho": lambda p: scalars(p, rho=0.5),
    "eta": lambda p: scalars(p, eta=1.0),
    "the momentum's gain": lambda p: scalars(p, momentum_gain=2.0),
    "a figure that is no float32": lambda p: scalars(p, eta=good_step(p).scalars.eta * (1 + 1e-9)),
    "the clock": lambda p: {"clock": 1},
    "T_full": lambda p: {"t_full": 1},
    "the version": lambda p: {"version": 3},
    "one delta twice": lambda p: {"contributions": good_step(p).contributions[:1] * 2},
    "the order": lambda p: {"contributions": good_step(p).contributions[::-1]},
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_figure_gets_no_ack(what: str) -> None:
    parts = voter()
    step = msgspec.structs.replace(good_step(parts), **WRONG[what](parts))
    if what not in ("the version", "one delta twice", "the order"):
        step = rooted(RUN, parts.applied.rules, step)
    out = propose(parts, body_of(parts.log, step))
    assert sent(out, Ack) == []
    assert said(out) == ["refused_body"]
    assert parts.ballot.last_ack is None


def test_a_wrong_root_gets_no_ack() -> None:
    parts = voter()
    step = msgspec.structs.replace(good_step(parts), state_root=digest_of(b"x"))
    out = propose(parts, body_of(parts.log, step))
    assert sent(out, Ack) == []
    assert said(out) == ["refused_body"]
    assert sent(propose(parts, body_of(parts.log, good_step(parts))), Ack, A.peer_id)  # nothing was promised


def test_a_delta_counts_once() -> None:
    """S5e: a listed delta, or an older one of the same peer, is never listed again."""
    chain = Chain(RUN)
    second = held(header(RUN, A, 2), A)
    chain.step(second)
    for again in (second, held(header(RUN, A, 1), A)):
        parts = Parts(RUN, WITNESS, Restored(entries=tuple(chain.entries), held=(again,)))
        parts.applied.snapshot_installed(1, chain.state, *roots(1))
        forged = plan(RUN, Parts(RUN, A).applied.rules, [again])
        step = msgspec.structs.replace(forged, version=2, clock=64, state_root=NO_DIGEST)
        out = propose(parts, body_of(parts.log, step))
        assert sent(out, Ack) == []
        assert said(out) == ["refused_body"]


def test_a_delta_in_time_is_not_refused_as_too_late() -> None:
    parts = voter()
    c = DELTAS[0]
    late = Refused(c.header.delta, c.sender, 0, 1, 4, "TOO_LATE", c.key, c.header.signature)
    step = plan(RUN, parts.applied.rules, DELTAS[1:])
    step = rooted(RUN, parts.applied.rules, msgspec.structs.replace(step, refused=(late,)))
    out = propose(parts, body_of(parts.log, step))
    assert sent(out, Ack) == []
    assert said(out) == ["refused_body"]


def test_a_missing_delta_is_fetched_and_then_acked() -> None:
    """A voter that lacks a delta fetches it from those that HAVE it and acks late (protocol.md 3)."""
    parts = voter(DELTAS[0])
    missing = Digest(DELTAS[1].header.delta)
    parts.pool.heard_have(B.peer_id, [missing])
    body = body_of(parts.log, good_step(parts))
    out = propose(parts, body)
    assert sent(out, Ack) == []
    (fetch,) = take(out, FetchDelta)
    assert fetch.delta == missing
    assert set(fetch.donors) >= {A.peer_id, B.peer_id}
    parts.pool.arrived(missing, 2.0)
    parts.proposals.resume()
    parts.prepare()
    parts.proposals.resume()
    assert sent(parts.drain(), Ack, A.peer_id) == [sign_ack(parts.log, WITNESS, body, 2)]


@pytest.mark.parametrize(
    "change", [{"index": 2}, {"previous": NO_DIGEST}, {"committee": NO_DIGEST}, {"epoch": 1}]
)
def test_only_the_next_body_of_this_chain_under_this_committee(change: dict[str, Any]) -> None:
    parts = voter()
    body = body_of(parts.log, good_step(parts), **change)
    m = sign_proposal(parts.log, A, body, 2)
    parts.proposals.on_proposal(A.peer_id, A.public_key, m)
    out = parts.drain()
    assert sent(out, Ack) == []
    assert bool(sent(out, EntriesWanted, A.peer_id)) == ("index" in change)


def test_only_the_aggregator_of_the_term_proposes() -> None:
    parts = voter()
    assert propose(parts, body_of(parts.log, good_step(parts)), by=B) == []
    assert parts.ballot.term == 0


def test_a_proposal_of_an_older_term_is_fenced() -> None:
    parts = voter()
    parts.ballot.raise_term(3)
    parts.drain()
    out = propose(parts, body_of(parts.log, good_step(parts)))
    assert sent(out, Ack) == []
    assert sent(out, NewerTerm, A.peer_id) == [NewerTerm(3)]


def test_a_second_body_for_the_same_index_and_term_gets_no_ack() -> None:
    parts = voter()
    propose(parts, body_of(parts.log, good_step(parts)))
    other = body_of(parts.log, plan(RUN, parts.applied.rules, DELTAS[:1]))
    assert sent(propose(parts, other), Ack) == []
    # In a higher term it may be acked: the new aggregator has seen a majority's votes.
    assert sent(propose(parts, other, term=3, by=B), Ack, B.peer_id) == [
        sign_ack(parts.log, WITNESS, other, 3)
    ]


def test_a_replayed_proposal_is_answered_with_the_same_ack_and_nothing_is_saved() -> None:
    """T3, S9; also after the own term went on."""
    parts = voter()
    body = body_of(parts.log, good_step(parts))
    first = sent(propose(parts, body), Ack, A.peer_id)
    out = propose(parts, body)
    assert sent(out, Ack, A.peer_id) == first
    assert take(out, SaveRecord) == []
    parts.ballot.raise_term(9)
    parts.drain()
    out = propose(parts, body)
    assert sent(out, Ack, A.peer_id) == first
    assert take(out, SaveRecord) == []


def test_a_proposal_waits_until_the_voter_may_vote() -> None:
    """R1b: its boot counter is not told yet."""
    parts = Parts(RUN, WITNESS, told=False)
    parts.hold(*DELTAS)
    parts.drain()
    body = body_of(parts.log, good_step(parts))
    assert sent(propose(parts, body), Ack) == []
    parts.ballot.told_seen(B.peer_id, epoch=0, boot=1, term=0, ack_index=0)
    parts.proposals.resume()
    parts.prepare()
    parts.proposals.resume()
    assert sent(parts.drain(), Ack, A.peer_id) == [sign_ack(parts.log, WITNESS, body, 2)]


def test_who_has_no_seat_gives_no_ack() -> None:
    parts = voter(who=C)
    assert propose(parts, body_of(parts.log, good_step(parts))) == []


def test_other_kinds_are_judged_by_whom_they_concern() -> None:
    parts = voter()
    content = Membership(Committee(WITNESS.peer_id, (A.peer_id, C.peer_id)), NO_DIGEST)
    content = msgspec.structs.replace(content, state_root=parts.applied.root_after(content) or NO_DIGEST)
    parts.other_verdict = "not this one"
    out = propose(parts, body_of(parts.log, content))
    assert (sent(out, Ack), said(out)) == ([], ["refused_body"])
    parts.other_verdict = None
    assert sent(propose(parts, body_of(parts.log, content)), Ack, A.peer_id)


def test_a_borderline_figure_of_a_body_proposed_again_does_not_split_the_voters() -> None:
    """Within 1e-3 for the first body of a term, which may be a re-proposal; within 1e-4 afterwards."""
    chain = Chain(RUN)
    chain.step(held(header(RUN, B), B), term=2)
    for term, by, acked in ((3, B, True), (2, A, False)):
        parts = Parts(RUN, WITNESS, Restored(entries=tuple(chain.entries)))
        parts.applied.snapshot_installed(1, chain.state, *roots(1))
        delta = held(header(RUN, C), C)
        parts.hold(delta)
        step = plan(RUN, chain.state, [delta])
        off = msgspec.structs.replace(step.scalars, eta=f32(step.scalars.eta * 1.0005))
        step = rooted(RUN, chain.state, msgspec.structs.replace(step, scalars=off))
        out = propose(parts, body_of(parts.log, step), term=term, by=by)
        assert bool(sent(out, Ack)) is acked


# The aggregator


def start(parts: Parts, *, wants_last: bool = False) -> list[Any]:
    parts.proposals.start(
        msgspec.structs.replace(good_step(parts), state_root=NO_DIGEST), wants_last=wants_last
    )
    parts.prepare()
    parts.proposals.resume()
    return parts.drain()


def test_the_own_ack_is_durable_before_the_proposal_leaves() -> None:
    parts = voter(who=A)
    parts.lead(2)
    parts.drain()
    out = start(parts, wants_last=True)
    (save,) = [a for a in take(out, SaveRecord) if a.record.ack is not None]
    (proposal,) = sent(out, Proposal, B.peer_id)
    body = body_of(parts.log, good_step(parts))
    assert proposal == sign_proposal(parts.log, A, body, 2, last=True)
    assert sent(out, Proposal, WITNESS.peer_id) == [proposal]
    assert out.index(save) < min(i for i, a in enumerate(out) if getattr(a, "message", None) == proposal)
    assert (save.record.term, save.record.ack) == (3, last_ack(parts.log, A, body, 2, last=True))
    assert parts.proposals.busy


def test_a_majority_of_acks_makes_the_certificate() -> None:
    parts = voter(who=A)
    parts.lead(2)
    start(parts)
    body = body_of(parts.log, good_step(parts))
    assert parts.proposals.certified() is None
    ack = sign_ack(parts.log, B, body, 2)
    parts.proposals.on_ack(B.peer_id, B.public_key, ack)
    entry = parts.proposals.certified()
    assert entry is not None
    assert entry.body == body
    assert entry.certificate.term == 2
    assert {a.key for a in entry.certificate.acks} == {A.public_key, B.public_key}
    parts.log.append(entry)
    parts.proposals.appended(good_step(parts))
    assert parts.proposals.certified() is None
    assert not parts.proposals.busy


def test_acks_that_do_not_make_a_certificate() -> None:
    """Twice the same voter; an outsider; another term, body, last or committee."""
    parts = voter(who=A)
    parts.lead(2)
    start(parts)
    body = body_of(parts.log, good_step(parts))
    mine = sign_ack(parts.log, A, body, 2)
    good = sign_ack(parts.log, B, body, 2)
    parts.proposals.on_ack(A.peer_id, A.public_key, mine)
    parts.proposals.on_ack(C.peer_id, C.public_key, sign_ack(parts.log, C, body, 2))
    for change in (
        {"term": 4}, {"body": digest_of(b"x")}, {"last": True}, {"committee": NO_DIGEST},
        {"index": 2}, {"index": 0},
    ):  # fmt: skip
        parts.proposals.on_ack(B.peer_id, B.public_key, msgspec.structs.replace(good, **change))
    assert parts.proposals.certified() is None
    parts.proposals.on_ack(B.peer_id, B.public_key, good)
    assert parts.proposals.certified() is not None


def test_a_voter_with_many_acks_only_pushes_out_its_own() -> None:
    parts = voter(who=A)
    parts.lead(2)
    start(parts)
    body = body_of(parts.log, good_step(parts))
    good = sign_ack(parts.log, B, body, 2)
    for n in range(100):
        rubbish = msgspec.structs.replace(good, body=digest_of(b"%d" % n), term=4 + n)
        parts.proposals.on_ack(WITNESS.peer_id, WITNESS.public_key, rubbish)
    far = msgspec.structs.replace(good, term=3 + limits.term_jump_max)
    parts.proposals.on_ack(WITNESS.peer_id, WITNESS.public_key, far)
    parts.proposals.on_ack(B.peer_id, B.public_key, good)
    assert parts.proposals.certified() is not None
    assert len(parts.proposals._acks) <= 1 + limits.terms_counted_max


def test_an_acked_body_is_proposed_again_byte_for_byte() -> None:
    """Another encoding of the same content would be a second body for the index."""
    parts = voter(who=A)
    canonical = body_of(parts.log, good_step(parts))
    plain = msgpack.unpackb(canonical)
    odd = msgpack.packb(plain, use_single_float=True)
    assert odd != canonical
    assert open_body(odd) == open_body(canonical)
    parts.ballot.promise(last_ack(parts.log, B, odd, 1), 1, parts.log.committee_digest)
    parts.lead(2)
    assert parts.election.again == [body_digest(odd)]
    parts.drain()
    parts.proposals.start_again(body_digest(odd))
    parts.prepare()
    parts.proposals.resume()
    (proposal,) = sent(parts.drain(), Proposal, B.peer_id)
    assert (proposal.body, proposal.term, proposal.last) == (odd, 2, False)


def test_last_never_changes_afterwards() -> None:
    """The aggregator restarted in its term: what it acked as last is proposed as last."""
    parts = voter(who=A)
    body = body_of(parts.log, good_step(parts))
    parts.ballot.raise_term(2)
    parts.lead(2)
    parts.ballot.promise(last_ack(parts.log, A, body, 2, last=True), 1, parts.log.committee_digest)
    parts.drain()
    parts.proposals._bodies[body_digest(body)] = body
    parts.proposals.start_again(body_digest(body))
    parts.prepare()
    parts.proposals.resume()
    (proposal,) = sent(parts.drain(), Proposal, B.peer_id)
    assert proposal.last


def test_an_invalid_acked_body_is_never_proposed_again() -> None:
    parts = voter(who=A)
    body = body_of(parts.log, msgspec.structs.replace(good_step(parts), clock=1))
    parts.lead(2)
    parts.drain()
    parts.proposals._bodies[body_digest(body)] = body
    parts.proposals.start_again(body_digest(body))
    out = parts.drain()
    assert (sent(out, Proposal), said(out)) == ([], ["bad_body"])
    assert not parts.proposals.busy


def test_an_aggregator_that_may_not_ack_its_own_proposal_stops_leading() -> None:
    parts = voter(who=A)
    parts.lead(2)
    other = body_of(parts.log, plan(RUN, parts.applied.rules, DELTAS[:1]))
    parts.ballot.promise(last_ack(parts.log, A, other, 2), 1, parts.log.committee_digest)
    assert sent(start(parts), Proposal) == []
    assert parts.election.leading is None


def test_a_rolled_back_aggregator_proposes_nothing_more() -> None:
    parts = voter(who=A)
    parts.lead(2)
    parts.ballot.told_seen(B.peer_id, epoch=0, boot=7, term=0, ack_index=0)
    parts.drain()
    out = start(parts)
    assert sent(out, Proposal) == []
    assert take(out, SaveRecord) == []
    assert parts.election.leading is None


def test_lost_proposals_and_acks_are_said_again() -> None:
    parts = voter(who=A)
    parts.lead(2)
    first = start(parts)
    parts.proposals.say_again()
    again = parts.drain()
    assert sent(again, Proposal, B.peer_id) == sent(first, Proposal, B.peer_id)
    assert sent(again, Ack, B.peer_id) == sent(first, Ack, B.peer_id)
    assert take(again, SaveRecord) == []


def test_an_overtaken_proposal_is_not_said_again() -> None:
    """Its aggregator acked another body in a newer term since."""
    parts = voter(who=A)
    parts.lead(2)
    start(parts)
    other = body_of(parts.log, plan(RUN, parts.applied.rules, DELTAS[:1]))
    propose(parts, other, term=3, by=B)
    assert body_digest(other) == body_digest(parts.ballot.last_ack.body)  # type: ignore[union-attr]
    parts.proposals.say_again()
    out = parts.drain()
    assert sent(out, Proposal) == []
    assert sent(out, Ack, B.peer_id) == [sign_ack(parts.log, A, other, 3)]
