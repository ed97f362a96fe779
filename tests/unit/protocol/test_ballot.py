"""A voter's durable promises (protocol.md 3, targets.md R1b)."""

from __future__ import annotations

import pytest

from p2pdiloco.ids import digest_of
from p2pdiloco.protocol.actions import SaveRecord, VoterRecord
from p2pdiloco.protocol.context import Restored
from p2pdiloco.wire.log import body_digest

from .builders import NODES, WITNESS, Parts, body_of, header, held, last_ack, make_run, plan, said, take

A, B, C = NODES[:3]
RUN = make_run(A, B)


def acked(parts: Parts, term: int, *, last: bool = False) -> bytes:
    """This voter acks an outer step in `term`."""
    body = body_of(parts.log, plan(RUN, parts.applied.rules, [held(header(RUN, A), A)]))
    parts.ballot.promise(last_ack(parts.log, A, body, term, last=last), 1, parts.log.committee_digest)
    return body


def test_an_ack_raises_the_own_term_durably() -> None:
    parts = Parts(RUN, B)
    acked(parts, 6)
    (save,) = take(parts.drain(), SaveRecord)
    assert (save.record.term, save.record.ack_index) == (6, 1)
    assert save.record.ack_committee == parts.log.committee_digest
    assert parts.ballot.term == 6


def test_an_ack_of_the_last_body_is_the_vote_for_the_next_term() -> None:
    parts = Parts(RUN, B)
    acked(parts, 6, last=True)
    (save,) = take(parts.drain(), SaveRecord)
    assert (save.record.term, parts.ballot.term) == (7, 7)


def test_one_body_and_last_for_each_index_and_term() -> None:
    parts = Parts(RUN, B)
    body = acked(parts, 6)
    digest = body_digest(body)
    assert parts.ballot.is_repeat(6, 1, digest, last=False)
    assert not parts.ballot.is_repeat(6, 1, digest, last=True)
    assert not parts.ballot.is_repeat(6, 1, digest_of(b"another"), last=False)
    assert not parts.ballot.is_repeat(7, 1, digest, last=False)
    assert not parts.ballot.is_repeat(6, 2, digest, last=False)
    assert "already acked" in (parts.ballot.refuses(6, 1) or "")


def test_the_next_index_in_the_same_term_and_any_index_in_a_higher_one_are_free() -> None:
    parts = Parts(RUN, B)
    acked(parts, 6)
    assert parts.ballot.refuses(6, 2) is None
    assert parts.ballot.refuses(7, 1) is None


def test_no_ack_below_the_own_term() -> None:
    parts = Parts(RUN, B)
    assert parts.ballot.raise_term(5)
    assert "own term is 5" in (parts.ballot.refuses(4, 1) or "")
    assert parts.ballot.refuses(5, 1) is None


def test_a_broken_promise_is_our_own_fault() -> None:
    parts = Parts(RUN, B)
    acked(parts, 6)
    with pytest.raises(AssertionError):
        acked(parts, 6, last=True)


def test_raising_the_term_keeps_the_last_ack_and_never_goes_back() -> None:
    parts = Parts(RUN, B)
    acked(parts, 3)
    ack = parts.ballot.last_ack
    assert parts.ballot.raise_term(9)
    parts.drain()
    assert not parts.ballot.raise_term(9)
    assert not parts.ballot.raise_term(2)
    assert parts.drain() == []
    assert (parts.ballot.term, parts.ballot.last_ack, parts.ballot.ack_index) == (9, ack, 1)


def test_a_restart_keeps_every_promise() -> None:
    before = Parts(RUN, B)
    body = acked(before, 6, last=True)
    (save,) = take(before.drain(), SaveRecord)
    after = Parts(RUN, B, Restored(record=save.record), boot=2)
    assert after.ballot.term == 7
    assert after.ballot.is_repeat(6, 1, body_digest(body), last=True)
    assert after.ballot.refuses(6, 1) is not None


def test_no_vote_before_a_majority_told_the_boot_counter() -> None:
    """R1b: this node itself is one of the majority; strangers are not."""
    five = make_run(A, B, C, NODES[3], size_max=5)
    parts = Parts(five, B, boot=4, told=False)
    assert not parts.ballot.may_vote(five.committee)
    parts.ballot.told_seen(A.peer_id, epoch=0, boot=4, term=0, ack_index=0)
    assert not parts.ballot.may_vote(five.committee)
    parts.ballot.told_seen(NODES[7].peer_id, epoch=0, boot=4, term=0, ack_index=0)
    assert not parts.ballot.may_vote(five.committee)
    parts.ballot.told_seen(WITNESS.peer_id, epoch=0, boot=3, term=0, ack_index=0)
    assert parts.ballot.may_vote(five.committee)


@pytest.mark.parametrize(
    "seen", [{"boot": 1, "term": 9, "ack_index": 0}, {"boot": 1, "term": 0, "ack_index": 4}]
)
def test_an_image_of_this_very_life_is_noticed_by_its_promises(seen: dict[str, int]) -> None:
    """Taken and restored within one life the boot counter looks right; terms and acks do not."""
    parts = Parts(RUN, B, told=False)
    parts.ballot.told_seen(A.peer_id, epoch=0, **seen)
    assert parts.ballot.rolled_back
    assert not parts.ballot.may_vote(parts.log.committee)


def test_a_rolled_back_disk_never_votes_again_in_this_life() -> None:
    parts = Parts(RUN, B, boot=4)
    assert parts.ballot.may_vote(RUN.committee)
    parts.ballot.told_seen(A.peer_id, epoch=0, boot=5, term=0, ack_index=0)
    assert not parts.ballot.may_vote(RUN.committee)
    parts.ballot.told_seen(A.peer_id, epoch=0, boot=4, term=0, ack_index=0)
    parts.ballot.told_seen(A.peer_id, epoch=0, boot=6, term=0, ack_index=0)
    assert not parts.ballot.may_vote(RUN.committee)
    assert said(parts.drain()) == ["rolled_back"]


def test_what_was_seen_in_another_epoch_says_nothing_about_the_disk() -> None:
    """The acks of an epoch that is over are not on the disk; in the new one a majority has to tell again."""
    parts = Parts(RUN, B)
    acked(parts, 6)
    parts.ballot.begin_epoch(1)
    assert not parts.ballot.may_vote(RUN.committee)
    parts.ballot.told_seen(A.peer_id, epoch=0, boot=1, term=6, ack_index=1)
    assert not parts.ballot.rolled_back
    assert not parts.ballot.may_vote(RUN.committee)
    parts.ballot.told_seen(A.peer_id, epoch=1, boot=1, term=6, ack_index=0)
    assert parts.ballot.may_vote(RUN.committee)
    parts.ballot.told_seen(WITNESS.peer_id, epoch=1, boot=1, term=6, ack_index=1)
    assert parts.ballot.rolled_back


def test_the_only_voter_needs_nobody_to_tell_it() -> None:
    alone = make_run()
    assert Parts(alone, WITNESS, told=False).ballot.may_vote(alone.committee)


def test_a_first_start_has_promised_nothing() -> None:
    parts = Parts(RUN, B)
    assert (parts.ballot.term, parts.ballot.last_ack, parts.ballot.ack_index) == (0, None, 0)
    record = VoterRecord(3, 0, bytes(32), None)
    assert Parts(RUN, B, Restored(record=record)).ballot.term == 3
