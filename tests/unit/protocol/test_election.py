"""Terms, votes, pre-votes and hand-over (protocol.md 4)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from p2pdiloco import limits
from p2pdiloco.errors import PeerError
from p2pdiloco.ids import NO_DIGEST, digest_of
from p2pdiloco.protocol.actions import SaveRecord, VoterRecord
from p2pdiloco.protocol.context import Restored
from p2pdiloco.wire.log import Committee, Membership, body_digest, open_body
from p2pdiloco.wire.messages import (
    Ack,
    EntriesWanted,
    LastAck,
    NewerTerm,
    PreVote,
    PreVoteAnswer,
    RequestVotes,
    Vote,
)

from .builders import (
    NODES,
    WITNESS,
    Chain,
    Parts,
    aggregator_of,
    body_of,
    header,
    held,
    last_ack,
    make_run,
    plan,
    sent,
    sign_ack,
    take,
)

A, B, C, D = NODES[:4]
RUN = make_run(A, B)  # A leads even terms, B odd ones
DIGEST = Parts(RUN, A).log.committee_digest
MIN, MAX = RUN.spec.committee.timeout_s_min, RUN.spec.committee.timeout_s_max


def vote(term: int, index: int = 0, ack: LastAck | None = None) -> Vote:
    return Vote(DIGEST, term, index, ack)


def some_body(parts: Parts, name: bytes = b"") -> bytes:
    delta = held(header(RUN, A, name=name), A)
    return body_of(parts.log, plan(RUN, parts.applied.rules, [delta]))


# Who can lead


def test_the_aggregator_of_a_term_is_arithmetic() -> None:
    committee = Committee(WITNESS.peer_id, (C.peer_id, A.peer_id, B.peer_id))
    assert [aggregator_of(committee, t) for t in range(4)] == [C, A, B, C]
    alone = Committee(WITNESS.peer_id, ())
    assert {aggregator_of(alone, t) for t in range(4)} == {WITNESS}


def test_votes_of_a_majority_make_the_leader_and_nobody_elses_term() -> None:
    parts = Parts(RUN, A)
    parts.election.on_vote(B.peer_id, vote(3), current=True)  # B's own term
    parts.election.on_vote(B.peer_id, vote(4), current=True)
    assert parts.election.leading == 4
    assert parts.ballot.term == 4
    other = Parts(RUN, A)
    other.election.on_vote(B.peer_id, vote(3), current=True)
    assert (other.election.leading, other.ballot.term) == (None, 0)


def test_in_five_seats_two_votes_are_not_enough() -> None:
    run = make_run(A, B, C, D, size_max=5)
    parts = Parts(run, A)
    digest = parts.log.committee_digest
    parts.election.on_vote(B.peer_id, Vote(digest, 4, 0, None), current=True)
    parts.election.on_vote(B.peer_id, Vote(digest, 4, 0, None), current=True)  # the same again
    assert parts.election.leading is None
    parts.election.on_vote(C.peer_id, Vote(digest, 4, 0, None), current=True)
    assert parts.election.leading == 4


def test_votes_of_another_committee_or_of_outsiders_do_not_count() -> None:
    parts = Parts(RUN, A)
    parts.election.on_vote(B.peer_id, Vote(NO_DIGEST, 4, 0, None), current=True)
    parts.election.on_vote(C.peer_id, vote(4), current=True)
    assert (parts.election.leading, parts.ballot.term) == (None, 0)


def test_an_old_vote_is_answered_with_the_newer_term() -> None:
    parts = Parts(RUN, A)
    parts.ballot.raise_term(6)
    parts.election.on_vote(B.peer_id, vote(4), current=True)
    assert sent(parts.drain(), NewerTerm, B.peer_id) == [NewerTerm(6)]
    assert parts.election.leading is None


def test_nobody_leads_before_everything_certified_is_applied() -> None:
    parts = Parts(RUN, A)
    parts.election.on_vote(B.peer_id, vote(4), current=False)
    assert parts.election.leading is None
    parts.election.try_all(current=True)
    assert parts.election.leading == 4


def test_a_vote_from_further_on_is_fetched_up_to_first() -> None:
    parts = Parts(RUN, A)
    chain = Chain(RUN)
    chain.step(held(header(RUN, A), A))
    parts.election.on_vote(B.peer_id, vote(4, index=1), current=True)
    assert parts.election.leading is None
    assert EntriesWanted(1) in sent(parts.drain(), EntriesWanted, B.peer_id)
    parts.log.append(chain.entries[0])
    parts.election.try_all(current=True)
    assert parts.election.leading == 4


def test_a_liar_that_claims_more_entries_keeps_nobody_from_leading() -> None:
    parts = Parts(RUN, A)
    parts.election.on_vote(B.peer_id, vote(4, index=10**6), current=True)
    assert parts.election.leading is None  # its vote does not count before its entries are here
    parts.election.on_vote(WITNESS.peer_id, vote(4), current=True)
    assert parts.election.leading == 4


def test_votes_are_not_refused_for_an_older_log() -> None:
    chain = Chain(RUN)
    chain.step(held(header(RUN, A), A))
    parts = Parts(RUN, B, Restored(entries=tuple(chain.entries)))
    parts.election.on_request_votes(A.peer_id, RequestVotes(DIGEST, 2, 0))
    assert sent(parts.drain(), Vote, A.peer_id) == [vote(2, index=1)]


def test_the_own_durable_ack_counts_and_the_term_is_durable_before_the_vote() -> None:
    parts = Parts(RUN, B)
    ack = last_ack(parts.log, A, some_body(parts), 2)
    parts.ballot.promise(ack, 1, DIGEST)
    parts.drain()
    parts.election.on_request_votes(A.peer_id, RequestVotes(DIGEST, 4, 0))
    actions = parts.drain()
    assert sent(actions, Vote, A.peer_id) == [vote(4, ack=ack)]
    (save,) = take(actions, SaveRecord)
    assert save.record.term == 4
    assert actions.index(save) == 0


# Proposing again


def test_the_ack_of_the_highest_term_is_proposed_again() -> None:
    run = make_run(A, B, C, D, size_max=5)  # A leads terms 0, 4, 8
    parts = Parts(run, A)
    digest, log = parts.log.committee_digest, parts.log
    old, new = (
        body_of(log, plan(run, parts.applied.rules, [held(header(run, A, name=n), A)])) for n in (b"o", b"n")
    )
    parts.ballot.promise(last_ack(log, B, old, 1), 1, digest)
    parts.election.on_vote(C.peer_id, Vote(digest, 8, 0, last_ack(log, D, new, 3)), current=True)
    parts.election.on_vote(D.peer_id, Vote(digest, 8, 0, last_ack(log, C, old, 2)), current=True)
    assert (parts.election.leading, parts.election.again[0]) == (8, body_digest(new))


@pytest.mark.parametrize("voted", [True, False])
def test_the_own_ack_is_proposed_again_even_if_no_vote_shows_one(*, voted: bool) -> None:
    """Also where the others are a majority without a vote of its own."""
    parts = Parts(RUN, A)
    body = some_body(parts)
    parts.ballot.promise(last_ack(parts.log, B, body, 3), 1, DIGEST)
    if not voted:
        parts.ballot.raise_term(4)
    parts.lead(4)
    assert parts.election.again == [body_digest(body)]


def test_acks_of_certified_entries_leave_the_leader_free() -> None:
    chain = Chain(RUN)
    before = Parts(RUN, A)
    entry = chain.step(held(header(RUN, A), A), term=2)
    ack = last_ack(before.log, A, entry.body, 2)
    parts = Parts(RUN, A, Restored(entries=(entry,), record=VoterRecord(2, 1, DIGEST, ack)))
    parts.election.on_vote(B.peer_id, vote(4, index=1, ack=ack), current=True)
    assert (parts.election.leading, parts.election.again) == (4, [])


def test_an_ack_counted_as_a_vote_needs_its_body_before_anybody_leads() -> None:
    """A hand-over ack names its body by digest: free to lead it would be wrong."""
    parts = Parts(RUN, A)
    body = some_body(parts)
    ack = sign_ack(parts.log, B, body, 3, last=True)
    parts.election.on_last_ack(B.peer_id, ack)
    parts.election.on_last_ack(WITNESS.peer_id, sign_ack(parts.log, WITNESS, body, 3, last=True))
    parts.election.try_all(current=True)
    assert parts.election.leading is None
    assert RequestVotes(DIGEST, 4, 0) in sent(parts.drain(), RequestVotes)
    parts.election.on_vote(B.peer_id, vote(4, ack=last_ack(parts.log, B, body, 3, last=True)), current=True)
    assert parts.election.again == [body_digest(body)]  # and now it leads


@pytest.mark.parametrize("lie", ["a proposer who could not lead", "a term to come", "another chain"])
def test_a_vote_cannot_make_up_an_ack(lie: str) -> None:
    """Otherwise one liar's body would be proposed instead of one that may be certified already."""
    parts = Parts(RUN, A)
    good = some_body(parts)
    parts.ballot.promise(last_ack(parts.log, A, good, 2), 1, DIGEST)
    bad = {
        "a proposer who could not lead": last_ack(parts.log, B, some_body(parts, b"x"), 4),
        "a term to come": last_ack(parts.log, B, some_body(parts, b"x"), 7),
        "another chain": last_ack(
            parts.log, B, body_of(parts.log, open_body(good).content, previous=digest_of(b"x")), 5
        ),
    }[lie]
    with pytest.raises(PeerError, match="BAD_VOTE"):
        parts.election.on_vote(B.peer_id, vote(6, ack=bad), current=True)
    parts.lead(6)
    assert parts.election.again == [body_digest(good)]


# Hand-over


def test_acks_of_the_last_body_make_the_successor_without_a_timeout() -> None:
    """The successor leads when they are a majority and it has applied the entry."""
    chain = Chain(RUN)
    entry = chain.step(held(header(RUN, A), A), term=3, last=True)
    parts = Parts(RUN, A)
    for voter in (B, WITNESS):
        parts.election.on_last_ack(voter.peer_id, sign_ack(parts.log, voter, entry.body, 3, last=True))
    parts.election.try_all(current=True)
    assert parts.election.leading is None
    parts.log.append(entry)
    parts.election.certified_in(3)
    parts.election.installed(chain.log.content(1), 3, last=True, current=True)
    assert parts.election.leading == 4
    assert parts.ballot.term == 4
    assert parts.election.again == []


def test_a_handed_over_term_is_not_led_by_one_whose_own_term_is_higher() -> None:
    parts = Parts(RUN, A)
    parts.ballot.raise_term(5)
    ack = sign_ack(parts.log, B, some_body(parts), 3, last=True)
    parts.election.on_last_ack(B.peer_id, ack)
    parts.election.on_last_ack(WITNESS.peer_id, ack)
    parts.election.try_all(current=True)
    assert parts.election.leading is None


def test_who_did_not_ack_the_last_body_votes_when_it_is_certified() -> None:
    chain = Chain(RUN)
    entry = chain.step(held(header(RUN, A), A), term=3, last=True)
    parts = Parts(RUN, WITNESS)
    parts.log.append(entry)
    parts.election.certified_in(3)
    parts.drain()
    parts.election.installed(chain.log.content(1), 3, last=True, current=True)
    assert sent(parts.drain(), Vote, A.peer_id) == [vote(4, index=1)]
    assert parts.ballot.term == 4


def test_the_old_aggregator_stops_at_its_last_entry() -> None:
    chain = Chain(RUN)
    entry = chain.step(held(header(RUN, A), A), term=3, last=True)
    parts = Parts(RUN, B)
    parts.lead(3)
    parts.log.append(entry)
    parts.election.installed(chain.log.content(1), 3, last=True, current=True)
    assert parts.election.leading is None
    assert sent(parts.drain(), Vote, A.peer_id)


# Membership


def test_a_membership_entry_ends_leadership_votes_and_term() -> None:
    chain = Chain(RUN)
    content = Membership(Committee(WITNESS.peer_id, (A.peer_id, C.peer_id)), NO_DIGEST)
    entry = chain.add(content, term=4)
    parts = Parts(RUN, A)
    parts.election.on_vote(B.peer_id, vote(6), current=False)  # collected before the change
    parts.lead(6)
    parts.log.append(entry)
    parts.ballot.told_seen(C.peer_id, epoch=0, boot=0, term=0, ack_index=0)
    parts.drain()
    parts.election.installed(content, 4, last=False, current=True)
    assert parts.election.leading is None
    assert parts.ballot.term == 6
    new = parts.log.committee_digest
    assert RequestVotes(new, 6, 1) in sent(parts.drain(), RequestVotes, C.peer_id)
    parts.election.on_vote(B.peer_id, Vote(new, 6, 1, None), current=True)  # has no seat any more
    assert parts.election.leading is None
    parts.election.on_vote(C.peer_id, Vote(new, 6, 1, None), current=True)
    assert parts.election.leading == 6


def test_votes_collected_before_a_membership_entry_are_dropped() -> None:
    """Also those of voters who keep their seats: they were given to lead under the old committee."""
    chain = Chain(RUN)
    content = Membership(Committee(WITNESS.peer_id, (A.peer_id, C.peer_id)), NO_DIGEST)
    entry = chain.add(content, term=4)
    parts = Parts(RUN, A)
    parts.election.on_vote(WITNESS.peer_id, vote(6), current=False)  # with its own a majority
    assert parts.election.leading is None
    parts.log.append(entry)
    parts.election.installed(content, 4, last=False, current=True)
    assert parts.election.leading is None
    new = Vote(parts.log.committee_digest, 6, 1, None)
    parts.election.on_vote(WITNESS.peer_id, new, current=True)
    assert parts.election.leading == 6


def test_an_incoming_voter_votes_at_once_in_the_next_term() -> None:
    chain = Chain(RUN)
    content = Membership(Committee(WITNESS.peer_id, (A.peer_id, C.peer_id)), NO_DIGEST)
    entry = chain.add(content, term=4)
    parts = Parts(RUN, C)
    parts.log.append(entry)
    parts.election.certified_in(4)
    parts.election.installed(content, 4, last=False, current=True)
    # Term 5 is led by entry 5 mod 2 of the new committee: C itself, which asks for votes.
    assert parts.ballot.term == 5
    assert RequestVotes(parts.log.committee_digest, 5, 1) in sent(parts.drain(), RequestVotes, A.peer_id)


# Timeouts and pre-votes


def test_silence_asks_first_and_moves_on_only_with_a_majority() -> None:
    parts = Parts(RUN, WITNESS)
    parts.election.arm()
    parts.ctx.now = MIN - 0.1
    parts.election.tick(current=True, stalled=False)
    assert parts.drain() == []
    parts.ctx.now = MAX
    parts.election.tick(current=True, stalled=False)
    actions = parts.drain()
    assert sent(actions, PreVote, A.peer_id) == sent(actions, PreVote, B.peer_id) == [PreVote(DIGEST, 1, 0)]
    assert parts.ballot.term == 0
    no = PreVoteAnswer(DIGEST, 1, False, 0, 0)
    parts.election.on_pre_vote_answer(A.peer_id, no, current=True)
    assert parts.ballot.term == 0
    parts.election.on_pre_vote_answer(B.peer_id, PreVoteAnswer(DIGEST, 1, True, 0, 0), current=True)
    assert parts.ballot.term == 1
    assert sent(parts.drain(), Vote, B.peer_id) == [vote(1)]


def test_a_pre_vote_does_not_depose_a_working_aggregator() -> None:
    parts = Parts(RUN, WITNESS)
    parts.ctx.now = 50.0
    parts.election.heard_aggregator(A.peer_id, 2)
    parts.ctx.now += MIN - 0.1
    parts.drain()
    parts.election.on_pre_vote(B.peer_id, PreVote(DIGEST, 3, 0), stalled=False)
    assert sent(parts.drain(), PreVoteAnswer, B.peer_id) == [PreVoteAnswer(DIGEST, 3, False, 2, 0)]
    assert parts.ballot.term == 2


@pytest.mark.parametrize("stalled", [True, False], ids=["it only beats", "it is silent"])
def test_a_pre_vote_is_granted_when_the_aggregator_does_not_work(*, stalled: bool) -> None:
    parts = Parts(RUN, WITNESS)
    parts.ctx.now = 50.0
    parts.election.heard_aggregator(A.peer_id, 2)
    parts.ctx.now += 0.1 if stalled else MIN
    parts.election.on_pre_vote(B.peer_id, PreVote(DIGEST, 3, 0), stalled=stalled)
    (answer,) = sent(parts.drain(), PreVoteAnswer, B.peer_id)
    assert answer.granted
    parts.election.on_pre_vote(B.peer_id, PreVote(DIGEST, 2, 0), stalled=stalled)
    (answer,) = sent(parts.drain(), PreVoteAnswer, B.peer_id)
    assert not answer.granted  # not above the own term


def test_a_leader_hears_itself() -> None:
    parts = Parts(RUN, A)
    parts.lead(4)
    parts.drain()
    parts.ctx.now += 10 * MAX
    parts.election.tick(current=True, stalled=False)
    assert sent(parts.drain(), PreVote) == []
    parts.election.tick(current=True, stalled=True)
    assert sent(parts.drain(), PreVote, B.peer_id) == [PreVote(DIGEST, 5, 0)]


def test_a_returning_node_follows_the_newer_term() -> None:
    parts = Parts(RUN, WITNESS)
    parts.election.on_pre_vote_answer(A.peer_id, PreVoteAnswer(DIGEST, 1, False, 8, 0), current=True)
    assert parts.ballot.term == 8
    assert sent(parts.drain(), Vote, A.peer_id) == [vote(8)]


def test_an_old_aggregator_that_wakes_up_is_told_and_follows() -> None:
    """S5c."""
    parts = Parts(RUN, WITNESS)
    parts.ballot.raise_term(8)
    parts.election.heard_aggregator(B.peer_id, 7)
    assert sent(parts.drain(), NewerTerm, B.peer_id) == [NewerTerm(8)]
    old = Parts(RUN, B)
    old.lead(7)
    old.ctx.now += MIN
    old.election.on_newer_term(WITNESS.peer_id, NewerTerm(8), current=True)
    assert (old.election.leading, old.ballot.term) == (None, 8)


def test_the_only_voter_elects_itself() -> None:
    alone = make_run()
    parts = Parts(alone, WITNESS)
    parts.election.tick(current=True, stalled=False)
    assert (parts.election.leading, parts.ballot.term) == (1, 1)


def test_who_may_not_vote_says_nothing() -> None:
    parts = Parts(RUN, B, told=False)
    parts.ctx.now = 10 * MAX
    parts.election.tick(current=True, stalled=True)
    parts.election.on_request_votes(A.peer_id, RequestVotes(DIGEST, 4, 0))
    parts.election.on_pre_vote(A.peer_id, PreVote(DIGEST, 4, 0), stalled=True)
    assert parts.drain() == []
    outsider = Parts(RUN, C)
    outsider.ctx.now = 10 * MAX
    outsider.election.tick(current=True, stalled=True)
    outsider.election.on_request_votes(A.peer_id, RequestVotes(DIGEST, 4, 0))
    assert outsider.drain() == []


# A liar with a seat


def test_no_one_message_burns_the_terms() -> None:
    far = 2 * (limits.term_jump_max + 1)  # even: A leads it
    ways: list[Callable[[Parts], None]] = [
        lambda p: p.election.heard_aggregator(A.peer_id, far),
        lambda p: p.election.on_request_votes(A.peer_id, RequestVotes(DIGEST, far, 0)),
        lambda p: p.election.on_vote(A.peer_id, vote(far + 1), current=True),
        lambda p: p.election.on_last_ack(A.peer_id, Ack(DIGEST, far, 1, NO_DIGEST, True, bytes(64))),
    ]
    for say in ways:
        parts = Parts(RUN, B)
        say(parts)
        assert parts.ballot.term == 0
        assert sent(parts.drain(), Vote) == []
    parts = Parts(RUN, B)
    parts.election.on_newer_term(A.peer_id, NewerTerm(2**62), current=True)
    assert parts.ballot.term == limits.term_jump_max
    parts.election.on_newer_term(C.peer_id, NewerTerm(2**62), current=True)  # no seat
    assert parts.ballot.term == limits.term_jump_max


def test_one_liar_deposes_an_aggregator_once_in_a_while_only() -> None:
    """A word that raises a term shows no election."""
    leader = Parts(RUN, A)
    leader.election.on_newer_term(B.peer_id, NewerTerm(3), current=True)
    assert leader.ballot.term == 3
    leader.election.on_newer_term(B.peer_id, NewerTerm(5), current=True)
    leader.election.heard_aggregator(B.peer_id, 5)
    leader.election.on_request_votes(B.peer_id, RequestVotes(DIGEST, 5, 0))
    leader.election.on_vote(B.peer_id, vote(4), current=True)
    assert leader.ballot.term == 3
    leader.election.on_vote(WITNESS.peer_id, vote(4), current=True)
    assert leader.ballot.term == 4  # another voter is believed
    leader.election.certified_in(4)
    leader.election.on_newer_term(B.peer_id, NewerTerm(5), current=True)
    assert leader.ballot.term == 5  # and so is everybody once the log goes on


def test_a_duplicate_vote_changes_nothing() -> None:
    """T3: idempotent, also after the term was led and left."""
    parts = Parts(RUN, A)
    parts.lead(4)
    parts.drain()
    parts.election.on_vote(B.peer_id, vote(4), current=True)
    assert parts.election.leading == 4
    assert parts.drain() == []
    parts.election.on_newer_term(B.peer_id, NewerTerm(5), current=True)
    assert parts.election.leading is None
    parts.drain()
    parts.election.on_vote(B.peer_id, vote(4), current=True)
    assert parts.election.leading is None
    assert sent(parts.drain(), NewerTerm, B.peer_id) == [NewerTerm(5)]


def test_resigning_ends_leadership_without_a_newer_term() -> None:
    parts = Parts(RUN, A)
    parts.lead(4)
    parts.election.resign()
    parts.election.try_all(current=True)
    assert parts.election.leading is None
