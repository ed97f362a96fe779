"""One epoch ends, the next begins: what a node drops, what it keeps, whom it tells (protocol.md 3)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from p2pdiloco import limits
from p2pdiloco.errors import PeerError
from p2pdiloco.ids import NO_DIGEST, Digest
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol.actions import (
    Action,
    AdoptState,
    CutLog,
    EnterEpoch,
    FetchSnapshot,
    SaveEntries,
    SaveRecord,
    Settled,
    SettleDelta,
    VoterRecord,
)
from p2pdiloco.protocol.context import Restored
from p2pdiloco.protocol.run_log import RunLog
from p2pdiloco.protocol.trainee import Trainee
from p2pdiloco.rules.state import RulesState, after_membership, after_owner, genesis_state
from p2pdiloco.wire import messages as msg
from p2pdiloco.wire.codec import encode
from p2pdiloco.wire.log import Committee, Entry, OwnerEntry, open_body

from .builders import (
    NODES,
    WITNESS,
    Chain,
    Driven,
    certify,
    header,
    heartbeat,
    held,
    last_ack,
    make_run,
    owner_word,
    recover,
    roots,
    said,
    sent,
    sign_ack,
    take,
)

A, B, C, D = NODES[:4]
RUN = make_run(A, B)  # and the witness
NEW = Committee(WITNESS.peer_id, (C.peer_id, D.peer_id))


class Branch:
    """A chain of `count` outer steps by C, with the rules state after each."""

    def __init__(self, count: int) -> None:
        self.chain = Chain(RUN)
        self.states: list[RulesState] = [genesis_state(RUN.spec)]
        self.deltas = []
        for version in range(count):
            self.deltas.append(held(header(RUN, C, version + 1, base=version), C))
            self.chain.step(self.deltas[-1])
            self.states.append(self.chain.state)

    def recovery(self, base: int, *, epoch: int = 1, committee: Committee = NEW) -> Entry:
        state = self.states[base]
        at = roots(base) if base else (RUN.spec.genesis.params_root, RUN.spec.genesis.momentum_root)
        return recover(self.chain.log, state, base, committee, epoch=epoch, at=at)


def voter_at(
    branch: Branch, who: object = WITNESS, index: int | None = None, *, known: int | None = None
) -> Driven:
    """A member of the old committee with every entry of the branch applied, or `index` of `known` ones."""
    index = len(branch.chain.entries) if index is None else index
    restored = Restored(
        entries=tuple(branch.chain.entries[: known or index]), state_index=index,
        rules=encode(branch.states[index]) if index else b"",
        params_root=roots(index)[0] if index else NO_DIGEST,
        momentum_root=roots(index)[1] if index else NO_DIGEST,
        held=tuple(branch.deltas[:index]),
    )  # fmt: skip
    return Driven(RUN, who, restored)  # type: ignore[arg-type]


def show(node: Driven, *entries: Entry, head: int = 0, epoch: int = 1) -> list[Action]:
    return node.hear(D, msg.Entries(entries, head), epoch=epoch)


def kinds(actions: Sequence[Action], *of: type[Action]) -> list[str]:
    return [type(a).__name__ for a in actions if isinstance(a, of)]


DURABLE = (SaveRecord, CutLog, SaveEntries, EnterEpoch)


def test_a_recovery_on_the_newest_entry_changes_epoch_and_committee_and_nothing_else() -> None:
    branch = Branch(3)
    node = voter_at(branch)
    before = node.node.root
    actions = show(node, branch.recovery(3), head=4)
    assert (node.node.epoch, node.node.index, node.node.committee) == (1, 4, NEW)
    assert kinds(actions, *DURABLE)[:3] == ["SaveRecord", "EnterEpoch", "SaveEntries"]
    assert take(actions, SaveRecord)[0].record.epoch == 1
    assert not take(actions, CutLog)
    assert node.node.state.version == 3
    assert node.node.root != before  # the rules state names the committee
    assert node.node.roots == roots(3)


def test_entries_behind_the_base_go_and_the_state_goes_back_to_a_snapshot() -> None:
    branch = Branch(5)
    node = voter_at(branch)
    actions = show(node, branch.recovery(2), head=3)
    assert kinds(actions, *DURABLE)[:4] == ["SaveRecord", "CutLog", "EnterEpoch", "SaveEntries"]
    assert [a.index for a in take(actions, CutLog)] == [2]
    (fetch,) = take(actions, FetchSnapshot)
    assert (fetch.offer.index, fetch.version) == (0, 0)  # no snapshot yet: version 0
    assert (node.node.index, node.node.certified_index) == (0, 3)
    assert node.node.roots is None
    assert "recovery" in said(actions)
    # The log is applied again, under the new committee.
    node.do(ev.SnapshotFetched(0))
    assert (node.node.index, node.node.version) == (3, 2)
    assert node.node.roots == roots(2)


def test_a_node_whose_work_stands_on_what_is_gone_begins_afresh() -> None:
    branch = Branch(4)
    restored = Restored(
        entries=tuple(branch.chain.entries), state_index=4, rules=encode(branch.states[4]),
        params_root=roots(4)[0], momentum_root=roots(4)[1], held=tuple(branch.deltas), adopted_version=4,
        in_flight=(header(RUN, D, 1, base=4),),
    )  # fmt: skip
    node = Driven(RUN, D, restored)
    show(node, branch.recovery(2), head=3)
    lost = header(RUN, D, 2, base=4)
    assert SettleDelta(Digest(lost.delta), Settled.REFUSED) in node.do(ev.PassFinished(lost))
    (adopt,) = take(node.do(ev.SnapshotFetched(0)), AdoptState)
    assert (adopt.version, adopt.reset) == (2, True)
    assert node.node.in_flight == ()


@pytest.mark.parametrize("applied", [5, 2])
def test_what_was_evaluated_behind_the_base_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, applied: int
) -> None:
    """Also where the state here had not come that far again after a restart."""
    branch, cuts = Branch(5), []
    node = voter_at(branch, D, applied, known=5)
    monkeypatch.setattr(Trainee, "cut", lambda _, version: cuts.append(version))
    show(node, branch.recovery(3), head=4)
    assert cuts == [3]


def test_what_was_listed_behind_the_base_may_be_listed_again() -> None:
    branch = Branch(3)
    node = voter_at(branch)
    show(node, branch.recovery(2), head=3)
    actions = node.do(ev.SnapshotFetched(0)) + node.wait(RUN.spec.committee.heartbeat_s)
    (beat, *_) = sent(actions, msg.Heartbeat)
    assert branch.deltas[2].header.delta in beat.have
    assert branch.deltas[1].header.delta not in beat.have


@pytest.mark.parametrize("epoch", [1, 2])
def test_of_two_recoveries_the_higher_epoch_holds(epoch: int) -> None:
    branch = Branch(3)
    node = voter_at(branch)
    show(node, branch.recovery(3, epoch=2), head=4, epoch=2)
    other = Committee(NO_DIGEST, (A.peer_id,))
    show(node, branch.recovery(2, epoch=epoch, committee=other), head=3, epoch=epoch)
    assert (node.node.epoch, node.node.certified_index, node.node.committee) == (2, 4, NEW)


def test_nobody_but_the_owner_begins_an_epoch() -> None:
    branch = Branch(2)
    node = voter_at(branch)
    forged = recover(branch.chain.log, branch.states[2], 2, NEW, owner=B, at=roots(2))
    show(node, forged, head=3)
    assert (node.node.epoch, node.node.index) == (0, 2)
    # Nor does a majority: a recovery among the entries of an epoch is no entry.
    word = OwnerEntry(owner_word(RUN, "recover"), NO_DIGEST)
    log = RunLog(RUN.id, RUN.spec, branch.chain.entries)
    with pytest.raises(PeerError, match="BAD_CERTIFICATE"):
        log.append(certify(log, word, [WITNESS, A, B]))


def test_acks_of_an_ended_epoch_bind_nobody_and_its_terms_go_on() -> None:
    branch = Branch(2)
    body = open_body(branch.chain.entries[1].body)
    log = RunLog(RUN.id, RUN.spec, branch.chain.entries[:1])
    ack = last_ack(log, A, branch.chain.entries[1].body, 6)
    record = VoterRecord(6, body.index, log.committee_digest, ack)
    restored = Restored(
        record=record, entries=tuple(branch.chain.entries[:1]), state_index=1,
        rules=encode(branch.states[1]), params_root=roots(1)[0], momentum_root=roots(1)[1],
    )  # fmt: skip
    node = Driven(RUN, WITNESS, restored)
    assert node.node.term == 6
    actions = show(node, branch.recovery(1), head=2)
    assert node.node.term >= 9  # the recovery's own term
    first = take(actions, SaveRecord)[0].record
    assert (first.term, first.ack, first.ack_index, first.epoch) == (6, None, 0, 1)
    # A heartbeat of the new epoch tells what was seen in it: the old ack is not held against the voter.
    node.hear(C, heartbeat(2, term_seen=6), epoch=1)
    assert "rolled_back" not in said(node.hear(D, heartbeat(2, ack_seen=0), epoch=1))


def test_a_crash_between_entry_and_record_forgets_old_acks_all_the_same() -> None:
    branch = Branch(1)
    log = RunLog(RUN.id, RUN.spec)
    record = VoterRecord(6, 1, log.committee_digest, last_ack(log, A, branch.chain.entries[0].body, 6))
    entry = branch.recovery(0)
    restored = Restored(record=record, entries=(entry,))
    node = Driven(RUN, WITNESS, restored)
    assert node.node.epoch == 1
    vote = [m for a in (node.began, node.wait(60.0)) for m in sent(a, msg.Vote)]
    assert all(v.last_ack is None for v in vote)
    assert node.node.term >= 6


def test_a_voter_that_knows_of_a_newer_epoch_never_acts_in_the_older_one() -> None:
    """The record was written, then the power failed: the log is still the old one."""
    branch = Branch(2)
    record = VoterRecord(3, 0, NO_DIGEST, None, 1)
    node = Driven(RUN, WITNESS, Restored(
        record=record, entries=tuple(branch.chain.entries), state_index=2, rules=encode(branch.states[2]),
        params_root=roots(2)[0], momentum_root=roots(2)[1],
    ))  # fmt: skip
    actions = node.wait(120.0) + node.hear(A, msg.RequestVotes(node.node.log.committee_digest, 4, 2))
    assert not sent(actions, msg.PreVote) + sent(actions, msg.Vote)
    show(node, branch.recovery(2), head=3)
    assert node.node.epoch == 1


def test_who_acts_in_an_ended_epoch_is_told_and_one_ahead_is_asked() -> None:
    branch = Branch(4)
    node = voter_at(branch)
    show(node, branch.recovery(2), head=3)
    told = node.hear(B, heartbeat(4), epoch=0)
    (entries,) = sent(told, msg.Entries, B.peer_id)
    assert [open_body(e.body).epoch for e in entries.entries] == [1]
    assert open_body(entries.entries[0].body).index == 3
    assert sent(node.hear(B, heartbeat(4), epoch=0), msg.Entries) == []  # not at every word
    node.wait(RUN.spec.committee.heartbeat_s)
    # One that lags as well gets what comes before.
    (entries,) = sent(node.hear(B, heartbeat(1), epoch=0), msg.Entries, B.peer_id)
    assert [open_body(e.body).index for e in entries.entries] == [2, 3]
    (wanted,) = sent(node.hear(A, heartbeat(9), epoch=2), msg.EntriesWanted, A.peer_id)
    assert wanted.first == 4


def test_messages_of_another_epoch_count_for_nothing() -> None:
    branch = Branch(1)
    node = voter_at(branch)
    show(node, branch.recovery(1), head=2)
    ack = sign_ack(RunLog(RUN.id, RUN.spec, branch.chain.entries), A, branch.chain.entries[0].body, 20)
    node.hear(C, heartbeat(2), epoch=1)  # a majority has told what it saw of this voter
    term = node.node.term
    node.hear(A, ack, epoch=0)
    node.hear(A, msg.NewerTerm(term + 5), epoch=0)
    node.hear(C, msg.NewerTerm(term + 5), epoch=0)
    assert node.node.term == term
    node.hear(C, msg.NewerTerm(term + 5), epoch=1)
    assert node.node.term == term + 5


def test_those_whom_the_recovery_dismissed_hear_heartbeats_until_they_answer() -> None:
    branch = Branch(1)
    node = voter_at(branch)
    show(node, branch.recovery(1), head=2)
    node.now += RUN.spec.committee.heartbeat_s
    beats = node.do(ev.Ticked())
    assert sent(beats, msg.Heartbeat, A.peer_id)
    assert sent(beats, msg.Heartbeat, B.peer_id)
    node.hear(A, heartbeat(2), epoch=1)
    beats = node.wait(RUN.spec.committee.heartbeat_s)
    assert not sent(beats, msg.Heartbeat, A.peer_id)
    assert sent(beats, msg.Heartbeat, B.peer_id)
    # After a restart they are known from the log.
    again = Driven(RUN, WITNESS, Restored(
        entries=(*branch.chain.entries, branch.recovery(1)), state_index=1, rules=encode(branch.states[1]),
        params_root=roots(1)[0], momentum_root=roots(1)[1],
    ))  # fmt: skip
    assert sent(again.wait(60.0), msg.Heartbeat, B.peer_id)


def test_a_recovery_on_a_branch_that_this_log_left_is_reached_by_going_back() -> None:
    """Epoch 1 began at 2; epoch 2 stands on the old branch, further on."""
    branch = Branch(5)
    node = voter_at(branch, index=2)
    show(node, branch.recovery(2), head=3)
    assert node.node.epoch == 1
    second = branch.recovery(5, epoch=2)
    actions = show(node, *branch.chain.entries[3:5], second, head=6, epoch=2)
    (wanted,) = sent(actions, msg.EntriesWanted)
    assert wanted.first == 3  # where epoch 1 left the branch
    assert take(actions, SaveRecord)[-1].record.epoch == 2
    assert node.node.epoch == 1
    # What the dead epoch's voters say leads nowhere now.
    assert not show(node, *branch.chain.entries[2:4], head=9, epoch=1)
    actions = show(node, *branch.chain.entries[2:5], second, head=6, epoch=2)
    assert [a.index for a in take(actions, CutLog)] == [2]
    assert (node.node.epoch, node.node.certified_index) == (2, 6)
    assert take(actions, EnterEpoch)[-1].epoch == 2


def test_a_node_far_back_asks_for_what_lies_between() -> None:
    branch = Branch(5)
    node = voter_at(branch, index=1)
    actions = show(node, branch.recovery(5), head=6)
    (wanted,) = sent(actions, msg.EntriesWanted)
    assert wanted.first == 2
    show(node, *branch.chain.entries[1:5], branch.recovery(5), head=6)
    assert (node.node.epoch, node.node.certified_index) == (1, 6)


def test_owner_s_words_of_the_old_epoch_are_over() -> None:
    branch = Branch(1)
    node = voter_at(branch)
    word = owner_word(RUN, "pause")
    assert sent(node.hear(D, msg.OwnerWordMessage(word)), msg.OwnerWordMessage)  # passed on
    show(node, branch.recovery(1), head=2)
    assert not sent(node.wait(RUN.spec.committee.heartbeat_s), msg.OwnerWordMessage)
    assert not sent(node.hear(D, msg.OwnerWordMessage(word)), msg.OwnerWordMessage)


def test_a_snapshot_of_what_was_dropped_never_stands_as_the_state() -> None:
    """It was on its way when the recovery came, and arrives afterwards."""
    count = limits.catch_up_versions_max + 4
    branch = Branch(count)
    chunks = tuple(bytes([n]) * 32 for n in (1, 2))
    node = voter_at(branch, index=1)
    entries = branch.chain.entries
    for first in range(1, count, limits.entries_per_message_max):
        part = entries[first : first + limits.entries_per_message_max]
        node.hear(A, msg.Entries(tuple(part), count))
    offer = msg.SnapshotOffer(count, chunks[:1], chunks[1:], encode(branch.states[count]))
    sync = node.node._sync
    sync._fetching = (offer, branch.states[count])
    actions = show(node, branch.recovery(3), head=4)
    assert not take(actions, FetchSnapshot)  # two at once would overtake each other
    actions = node.do(ev.SnapshotFetched(count))
    assert [a.offer.index for a in take(actions, FetchSnapshot)] == [0]
    node.do(ev.SnapshotFetched(0))
    assert node.node.roots is not None
    assert node.node.certified_index == 4


def test_rules_after_a_recovery_differ_in_committee_and_sequence_alone() -> None:
    state = genesis_state(RUN.spec)
    word = msgspec.structs.replace(owner_word(RUN, "recover", 4), committee=NEW)
    after = after_owner(state, word)
    assert after == msgspec.structs.replace(after_membership(state, NEW), owner_sequence=4)
