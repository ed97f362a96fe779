"""The node behind its one door: parts put together, written before said, everything idempotent."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from p2pdiloco import limits
from p2pdiloco.ids import NO_DIGEST, Digest
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol.actions import (
    Action,
    AdoptState,
    AllowDelta,
    EvaluateState,
    FetchDelta,
    LeaveDone,
    RememberPeer,
    RunEnded,
    SaveEntries,
    SaveRecord,
    Say,
    Send,
    Settled,
    SettleDelta,
    TakeSnapshot,
    UploadDelta,
)
from p2pdiloco.protocol.context import Restored
from p2pdiloco.wire import messages as msg
from p2pdiloco.wire.codec import encode
from p2pdiloco.wire.log import Committee, Membership

from .builders import (
    NODES,
    WITNESS,
    Chain,
    Driven,
    Parts,
    body_of,
    header,
    heartbeat,
    held,
    installed,
    make_run,
    owner_word,
    plan,
    roots,
    said,
    sent,
    sign_ack,
    sign_proposal,
    take,
)

A, B, C, D = NODES[:4]
RUN = make_run(A, B)
BEAT = RUN.spec.committee.heartbeat_s
X = held(header(RUN, C), C)


def restored_at(chain: Chain, **more: Any) -> Restored:
    return Restored(
        entries=tuple(chain.entries), state_index=chain.log.index, rules=encode(chain.state),
        params_root=roots(chain.state.version)[0], momentum_root=roots(chain.state.version)[1], **more,
    )  # fmt: skip


def settled(actions: list[Action]) -> list[tuple[bytes, Settled]]:
    return [(a.delta, a.how) for a in take(actions, SettleDelta)]


def arrived(delta: Digest) -> ev.DeltaArrived:
    return ev.DeltaArrived(delta, msg.Outcome.HELD, 1.0)


# Written before said


def leader() -> Driven:
    """A leads term 2 and holds X, which a majority HAVE."""
    node = Driven(RUN, A)
    node.hear(B, msg.Vote(node.node.log.committee_digest, 2, 0, None))
    assert node.node.leading
    return node


def places(actions: list[Action], kind: type[Any]) -> list[int]:
    return [
        i for i, a in enumerate(actions)
        if isinstance(a, kind) or (isinstance(a, Send) and isinstance(a.message, kind))
    ]  # fmt: skip


def test_record_before_proposal_and_ack_and_entry_before_everything_about_it() -> None:
    node = leader()
    node.deliver(X)
    actions = node.wait(RUN.spec.outer.deadline_passes * RUN.spec.inner.pass_s)
    (proposal,) = sent(actions, msg.Proposal, B.peer_id)
    assert places(actions, SaveRecord)[0] < places(actions, msg.Proposal)[0]
    assert places(actions, SaveRecord)[0] < places(actions, msg.Ack)[0]
    actions = node.hear(B, sign_ack(node.node.log, B, proposal.body, 2))
    assert installed(actions) == [1]
    entries = places(actions, SaveEntries)[0]
    assert entries < min(places(actions, msg.Entries))
    assert take(actions, SaveEntries)[0].entries == node.node.log.entries_from(1, 1)
    assert node.node.version == 1
    assert take(actions, AdoptState) == [AdoptState(1, 32, RUN.spec.target_tokens, 0, False)]


def test_an_entry_of_others_is_durable_before_the_next_ack() -> None:
    """Not so: 7 % of random schedules lost an entry (protocol.md 4)."""
    chain = Chain(RUN)
    chain.step(X, term=2)
    second = plan(RUN, chain.state, [held(header(RUN, A, base=1), A)])
    proposal = sign_proposal(chain.log, A, body_of(chain.log, second), 2)
    node = Driven(RUN, WITNESS)
    node.deliver(X)
    node.hear(A, msg.Entries(tuple(chain.entries), 1))
    node.deliver(held(header(RUN, A, base=1), A))
    later = node.hear(A, proposal)
    assert sent(later, msg.Ack, A.peer_id)
    fresh = Driven(RUN, WITNESS)
    for d in (X, held(header(RUN, A), A)):
        fresh.deliver(d)
    fresh.hear(A, sign_proposal(Parts(RUN, A).log, A, chain.entries[0].body, 2))
    actions = fresh.hear(A, msg.Entries(tuple(chain.entries), 1))
    assert places(actions, SaveEntries) == [0]


# Messages


def test_a_head_that_anybody_may_pass_on_changes_nothing() -> None:
    """Served to whoever asks: as a heartbeat it would say that its sender wants no seat."""
    node = leader()
    before = node.node.deadline()
    assert node.hear(B, msg.Head(2**62, bytes(32), 2**62), boot=9) == []
    assert (node.node.deadline(), node.node.term, node.node.leading) == (before, 2, True)
    assert sent(node.hear(B, heartbeat(), boot=1), msg.Heartbeat) == [], "boot 9 was not believed"


def test_a_bad_message_never_gets_further() -> None:
    """L4 and others: said, and nothing else happens."""
    node = Driven(RUN, A)
    rubbish = msg.Proposal(2, b"\xc1 no body", False, bytes(64))
    assert said(node.hear(B, rubbish)) == ["peer_error"]
    chain = Chain(RUN)
    other = Chain(make_run(A, B, rotation=5))
    chain.step(X)
    other.step(held(header(other.run, C), C))
    assert said(node.hear(B, msg.Entries(tuple(other.entries), 1))) == ["peer_error"]
    assert node.node.certified_index == 0
    node.hear(B, msg.Entries(tuple(chain.entries), 1))
    assert node.node.certified_index == 1


def test_the_good_entries_before_a_bad_one_are_kept() -> None:
    chain = Chain(RUN)
    chain.steps(2)
    bad = msgspec.structs.replace(chain.entries[1].certificate, acks=chain.entries[1].certificate.acks[:1])
    node = Driven(RUN, A)
    entries = (chain.entries[0], msgspec.structs.replace(chain.entries[1], certificate=bad))
    actions = node.hear(B, msg.Entries(entries, 2))
    assert said(actions) == ["peer_error"]
    assert take(actions, SaveEntries)[0].entries == (chain.entries[0],)
    assert node.node.certified_index == 1


def test_headers_are_for_voters_and_haves_are_theirs_alone() -> None:
    node = Driven(RUN, WITNESS)
    actions = node.hear(C, X.header)
    assert take(actions, AllowDelta) == [AllowDelta(X.header, C.peer_id, C.public_key)]
    assert sent(actions, msg.DeltaReceipt, C.peer_id)[0].outcome is msg.Outcome.NOTED
    follower = Driven(RUN, D)
    assert follower.hear(C, X.header) == []
    actions = node.do(arrived(Digest(X.header.delta)))
    assert sent(actions, msg.DeltaReceipt, C.peer_id)[0].outcome is msg.Outcome.HELD
    assert (
        sent(actions, msg.Have, A.peer_id)
        == sent(actions, msg.Have, B.peer_id)
        == [msg.Have((X.header.delta,))]
    )


@pytest.mark.parametrize("outcome", ["NOT_FINITE", "BAD_SHAPE", "TOO_BIG"])
def test_a_bad_blob_is_told_to_its_sender_and_listed_by_nobody(outcome: str) -> None:
    """D1."""
    node = leader()
    node.hear(C, X.header)
    actions = node.do(ev.DeltaArrived(Digest(X.header.delta), msg.Outcome(outcome), 0.0))
    assert [r.outcome for r in sent(actions, msg.DeltaReceipt, C.peer_id)] == [msg.Outcome(outcome)]
    node.hear(B, msg.Have((X.header.delta,)))
    assert sent(node.wait(100.0), msg.Proposal) == []


def test_who_is_behind_is_brought_up_and_who_is_ahead_is_asked() -> None:
    chain = Chain(RUN)
    chain.steps(2)
    node = Driven(RUN, WITNESS, restored_at(chain))
    assert sent(node.hear(B, heartbeat(1), boot=2), msg.Entries, B.peer_id) == [
        msg.Entries((chain.entries[1],), 2)
    ]
    assert sent(node.hear(B, heartbeat(3), boot=2), msg.EntriesWanted, B.peer_id) == [msg.EntriesWanted(3)]
    assert sent(node.hear(B, heartbeat(2), boot=2), msg.Entries) == []
    assert sent(node.hear(D, msg.EntriesWanted(1)), msg.Entries, D.peer_id) == [
        msg.Entries(tuple(chain.entries), 2)
    ]


def test_peer_records_are_kept_as_they_came() -> None:
    node = Driven(RUN, A)
    record = msg.PeerRecord(("10.0.0.1",), 1, "c", "node", 1)
    event = ev.MessageReceived(C.peer_id, C.public_key, 1, record, b"sealed")
    assert take(node.do(event), RememberPeer) == [RememberPeer(C.peer_id, b"sealed")]


# Own deltas


def test_a_pass_is_offered_checked_and_its_blob_withheld_until_a_majority_noted_it() -> None:
    node = Driven(RUN, C)
    actions = node.do(ev.PassFinished(X.header))
    assert {a.peer for a in take(actions, Send) if a.message == X.header} == set(RUN.committee.members)
    assert take(actions, UploadDelta) == []
    assert [f.donors for f in take(actions, FetchDelta)] == [()]  # its own blob is checked like any other
    noted = msg.DeltaReceipt(X.header.delta, msg.Outcome.NOTED, "", 0.0)
    assert take(node.hear(A, noted), UploadDelta) == []
    assert {u.peer for u in take(node.hear(B, noted), UploadDelta)} == {A.peer_id, B.peer_id}


def test_a_training_voters_judgement_of_its_own_delta_is_one_of_the_majority() -> None:
    """D1, with the third voter away: otherwise the delta would hold its slot for sixteen rounds."""
    node = Driven(RUN, A)
    own = header(RUN, A)
    node.do(ev.PassFinished(own))
    bad = ev.DeltaArrived(Digest(own.delta), msg.Outcome.NOT_FINITE, 0.0)
    assert settled(node.do(bad)) == []
    receipt = msg.DeltaReceipt(own.delta, msg.Outcome.NOT_FINITE, "", 0.0)
    assert settled(node.hear(WITNESS, receipt)) == [(own.delta, Settled.NOT_FINITE)]
    assert node.node.in_flight == ()


def test_a_pass_under_way_when_the_owner_revoked_this_node_goes_to_nobody() -> None:
    chain = Chain(RUN)
    chain.step(held(X.header, C))
    revoked = msgspec.structs.replace(chain.state, revoked=(C.peer_id,))
    node = Driven(RUN, C, msgspec.structs.replace(restored_at(chain), rules=encode(revoked)))
    own = header(RUN, C, 9, base=1)
    actions = node.do(ev.PassFinished(own))
    assert settled(actions) == [(own.delta, Settled.REFUSED)]
    assert sent(actions, msg.DeltaHeader) == []


def test_what_the_log_settled_before_a_crash_is_settled_at_the_next_start() -> None:
    """The state on disk contains the entry, the trainer's record does not know it."""
    one, two, three = (header(RUN, C, n) for n in (1, 2, 3))
    chain = Chain(RUN)
    chain.step(held(two, C))
    node = Driven(RUN, C, restored_at(chain, in_flight=(one, two, three)), boot=2)
    assert sorted(settled(node.began)) == sorted(
        [(one.delta, Settled.PASSED_OVER), (two.delta, Settled.LISTED)]
    )
    assert node.node.in_flight == (three,)
    adopted = [i for i, a in enumerate(node.began) if isinstance(a, AdoptState)]
    assert max(places(node.began, SettleDelta)) < min(adopted)


@pytest.mark.parametrize(("evaluated_version", "times"), [(-1, 1), (0, 1), (4, 0)])
def test_a_version_that_an_earlier_life_evaluated_is_not_evaluated_again(
    evaluated_version: int, times: int
) -> None:
    """After a crash the last entry is applied again to the arrays of the one before."""
    run = make_run(A, B, eval_every=4)
    before, chain = Chain(run), Chain(run)
    before.steps(3)
    *_, last = chain.steps(4)
    restored = restored_at(before, evaluated_version=evaluated_version, held=(last,))
    node = Driven(run, A, msgspec.structs.replace(restored, entries=tuple(chain.entries)))
    assert node.node.version == 4
    assert len(take(node.began, EvaluateState)) == times


def test_a_snapshot_settles_own_deltas_by_the_entries_it_jumps_over() -> None:
    own = header(RUN, C, 1)
    chain = Chain(RUN)
    chain.step(held(own, C))
    chain.steps(17)
    node = Driven(RUN, C, Restored(in_flight=(own,)))
    actions = node.hear(A, msg.Entries(tuple(chain.entries[:16]), 18))
    assert sent(actions, msg.SnapshotWanted) == []
    actions = node.hear(A, msg.Entries(tuple(chain.entries[16:]), 18))
    assert sent(actions, msg.SnapshotWanted, A.peer_id) == [msg.SnapshotWanted()]
    assert take(actions, FetchDelta) == []


# Boot counters


def test_only_voters_tell_the_boot_counter() -> None:
    """R1b; a stranger's lie silences nobody."""
    node = Driven(RUN, B, boot=2, told=False)
    node.hear(D, heartbeat(boot_seen=2**40))
    ask = msg.RequestVotes(node.node.log.committee_digest, 2, 0)
    assert sent(node.hear(A, ask), msg.Vote) == []  # nobody has told it yet
    node.hear(A, heartbeat(boot_seen=2))
    assert len(sent(node.hear(A, ask), msg.Vote, A.peer_id)) == 1


def test_a_rolled_back_disk_neither_votes_nor_acks_nor_wants_a_seat() -> None:
    node = Driven(RUN, B, boot=2, told=False)
    for voter in (A, WITNESS):
        node.hear(voter, heartbeat(boot_seen=3))
    assert sent(node.hear(A, msg.RequestVotes(node.node.log.committee_digest, 2, 0)), msg.Vote) == []
    node.deliver(X)
    chain = Chain(RUN)
    proposal = sign_proposal(chain.log, A, body_of(chain.log, plan(RUN, chain.state, [X])), 2)
    assert sent(node.hear(A, proposal), msg.Ack) == []
    assert [h.willing for h in sent(node.wait(BEAT), msg.Heartbeat, A.peer_id)] == [False]


def test_a_peer_in_a_new_life_is_told_its_boot_counter_at_once() -> None:
    node = Driven(RUN, A)
    answer = sent(node.hear(D, heartbeat(), boot=7), msg.Heartbeat, D.peer_id)
    assert [h.boot_seen for h in answer] == [7]
    assert sent(node.hear(D, heartbeat(), boot=7), msg.Heartbeat, D.peer_id) == []


# Snapshots, the end, leaving


def test_every_sixteenth_version_is_a_snapshot() -> None:
    chain = Chain(RUN)
    deltas = chain.steps(17, C)
    node = Driven(RUN, WITNESS)
    taken = []
    for d, entry in zip(deltas, chain.entries, strict=True):
        node.deliver(d)
        taken += take(node.hear(A, msg.Entries((entry,), 0)), TakeSnapshot)
    assert taken == [TakeSnapshot(16, 16)]
    assert node.node.version == 17


def test_the_run_ends_once_its_target_is_reached_and_late_deltas_are_told() -> None:
    run = make_run(A, B, target_version=1)
    node = Driven(run, A)
    node.hear(B, msg.Vote(node.node.log.committee_digest, 2, 0, None))
    node.deliver(held(header(run, C), C))
    (proposal,) = sent(node.wait(10.0), msg.Proposal, B.peer_id)
    actions = node.hear(B, sign_ack(node.node.log, B, proposal.body, 2))
    (finish,) = sent(actions, msg.Proposal, B.peer_id)  # right after the entry that reaches it
    ended = node.hear(B, sign_ack(node.node.log, B, finish.body, 2))
    assert take(ended, RunEnded) == [RunEnded(1)]
    assert "the target is reached: finish at index 2" in [say.text for say in take(ended, Say)]
    assert "owner" not in said(ended), "the owner did nothing"
    assert node.node.state.finished
    actions = node.hear(C, header(run, C, 2, base=1))
    assert [r.outcome for r in sent(actions, msg.DeltaReceipt, C.peer_id)] == [msg.Outcome.RUN_OVER]
    assert sent(node.wait(100.0), msg.Proposal) == []


def test_an_owners_word_from_anybody_is_taken_if_the_owner_signed_it() -> None:
    node = leader()
    word = owner_word(RUN, "pause")
    forged = msgspec.structs.replace(word, kind="finish")
    assert sent(node.hear(D, msg.OwnerWordMessage(forged)), msg.Proposal) == []
    assert len(sent(node.hear(D, msg.OwnerWordMessage(word)), msg.Proposal, B.peer_id)) == 1


def test_a_follower_leaves_at_once_and_says_goodbye() -> None:
    node = Driven(RUN, C)
    actions = node.do(ev.GoodbyeWanted("stopped"))
    assert {a.peer for a in take(actions, Send) if a.message == msg.Goodbye("stopped")} == set(
        RUN.committee.members
    )
    assert take(actions, LeaveDone) == [LeaveDone()]


def test_a_voter_hands_its_seat_over_first_but_not_for_ever() -> None:
    node = Driven(RUN, B)
    assert take(node.do(ev.GoodbyeWanted("stopped")), LeaveDone) == []
    assert node.do(ev.GoodbyeWanted("again")) == []
    assert take(node.wait(limits.leave_s_max - 0.1), LeaveDone) == []
    assert take(node.wait(0.1), LeaveDone) == [LeaveDone()]
    assert take(node.wait(10.0), LeaveDone) == []


def test_a_voter_whose_seat_is_taken_leaves_when_a_majority_of_the_new_committee_stored_it() -> None:
    chain = Chain(RUN)
    content = Parts(RUN, A).applied

    change = Membership(Committee(WITNESS.peer_id, (A.peer_id, C.peer_id)), NO_DIGEST)
    entry = chain.add(
        msgspec.structs.replace(change, state_root=content.root_after(change) or NO_DIGEST), term=2
    )
    node = Driven(RUN, B)
    node.do(ev.GoodbyeWanted("stopped"))
    assert take(node.hear(A, msg.Entries((entry,), 1)), LeaveDone) == []
    assert take(node.hear(A, heartbeat(1)), LeaveDone) == []  # one of three
    assert take(node.hear(C, heartbeat(1)), LeaveDone) == [LeaveDone()]


def test_the_witness_keeps_its_seat_when_it_stops() -> None:
    node = Driven(RUN, WITNESS)
    actions = node.do(ev.GoodbyeWanted("stopped"))
    assert sent(actions, msg.Goodbye) == []
    assert take(actions, LeaveDone) == [LeaveDone()]


# Time


def test_heartbeats_on_their_clock_and_a_clock_may_start_below_zero() -> None:
    node = Driven(RUN, C, now=-50.0)
    assert node.node.deadline() == -50.0 + BEAT
    beats = sent(node.wait(BEAT), msg.Heartbeat)
    assert len(beats) == 3
    assert {b.term for b in beats} == {0}  # no seat
    assert sent(node.wait(BEAT / 2), msg.Heartbeat) == []


def test_a_heartbeat_says_what_a_voter_has() -> None:
    node = Driven(RUN, WITNESS)
    node.deliver(X)
    (beat,) = sent(node.wait(BEAT), msg.Heartbeat, A.peer_id)
    assert beat.have == (X.header.delta,)
    assert (beat.index, beat.head) == (0, node.node.log.head)
