"""What the aggregator of a term proposes next (algorithm.md 4; protocol.md 3, 4, 7)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from p2pdiloco import limits
from p2pdiloco.ids import NO_DIGEST, digest_of
from p2pdiloco.protocol.aggregation import Aggregation
from p2pdiloco.rules.state import after_owner
from p2pdiloco.wire.log import (
    FINISH,
    Committee,
    Content,
    Membership,
    OuterStep,
    OwnerEntry,
    OwnerWord,
    body_digest,
)
from p2pdiloco.wire.messages import Proposal, Vote

from .builders import (
    NODES,
    OWNER,
    WITNESS,
    Parts,
    body_of,
    certify,
    header,
    heartbeat,
    held,
    last_ack,
    make_run,
    open_proposal,
    owner_word,
    plan,
    rooted,
    sent,
)

A, B, C, D = NODES[:4]
RUN = make_run(A, B)
PASS = RUN.spec.inner.pass_s
DEADLINE = RUN.spec.outer.deadline_passes * PASS


class Leader:
    """A leads term 2; everybody was heard a moment ago."""

    def __init__(self, *present: Any, run: Any = RUN, lead: bool = True) -> None:
        self.p = Parts(run, A)
        self.agg = Aggregation(
            self.p.ctx, self.p.log, self.p.election, self.p.applied, self.p.pool, self.p.membership,
            self.p.proposals,
        )  # fmt: skip
        self.present = present or (WITNESS, B, C)
        self.agg.started()
        self.p.membership.started()
        self.hear()
        if lead:
            self.p.lead(2)
        self.p.drain()

    def hear(self) -> None:
        for peer in self.present:
            self.p.membership.heard(peer.peer_id, 1, heartbeat(0))

    def proposed(self, *, at: float | None = None) -> Content | None:
        """What is proposed when it looks (now, or later)."""
        if at is not None:
            self.p.ctx.now = at
            self.hear()
        self.agg.consider()
        self.p.prepare()
        self.p.proposals.resume()
        found = sent(self.p.drain(), Proposal, WITNESS.peer_id)
        return open_proposal(found[0]) if found else None

    def hold(self, *who: Any, **kw: Any) -> None:
        self.p.hold(*[held(header(self.p.run, w, **kw), w) for w in who])


def peers(step: Any) -> set[bytes]:
    assert isinstance(step, OuterStep)
    return {c.peer for c in step.contributions}


# Closing


def test_nothing_without_a_delta_and_nothing_without_leading() -> None:
    leader = Leader()
    assert leader.proposed(at=100.0) is None
    assert leader.agg.reason == "no delta yet"
    follower = Leader(lead=False)
    follower.hold(A, B, C)
    assert follower.proposed(at=100.0) is None


def test_the_first_step_waits_for_everybody_or_the_deadline() -> None:
    leader = Leader()
    leader.hold(A, B)
    assert leader.proposed(at=1.0) is None
    assert leader.agg.wake_at == DEADLINE
    leader.hold(C)
    assert peers(leader.proposed()) == {A.peer_id, B.peer_id, C.peer_id}
    late = Leader()
    late.hold(B)
    assert late.proposed(at=DEADLINE - 0.1) is None
    assert peers(late.proposed(at=DEADLINE)) == {B.peer_id}


def test_alone_it_goes_on_with_its_own_delta() -> None:
    """A2."""
    leader = Leader(WITNESS)
    leader.hold(A)
    assert peers(leader.proposed()) == {A.peer_id}


@pytest.mark.parametrize("why", ["goodbye", "silence", "revoked"])
def test_who_is_gone_is_not_waited_for(why: str) -> None:
    leader = Leader()
    leader.hold(A, B)
    if why == "goodbye":
        leader.p.membership.said_goodbye(C.peer_id, 9)
    elif why == "silence":
        leader.present = (WITNESS, B)
        leader.agg._last_step_at = 2 * PASS  # not the deadline
        leader.p.ctx.now = 2 * PASS + 0.1
    else:
        leader.p.applied.rules = msgspec.structs.replace(leader.p.applied.rules, revoked=(C.peer_id,))
    assert peers(leader.proposed(at=leader.p.ctx.now)) == {A.peer_id, B.peer_id}


def test_one_content_at_a_time() -> None:
    leader = Leader()
    leader.hold(A, B, C)
    assert leader.proposed() is not None
    assert leader.proposed() is None
    assert leader.p.proposals.busy


# What comes before an outer step


def test_an_owners_word_comes_first_and_in_order() -> None:
    leader = Leader()
    leader.hold(A, B, C)
    leader.agg.heard_word(owner_word(RUN, "extend", 2, value=2**41))
    leader.agg.heard_word(owner_word(RUN, "pause", 1))
    content = leader.proposed()
    assert isinstance(content, OwnerEntry)
    assert (content.word.kind, content.word.owner_sequence) == ("pause", 1)


def test_a_paused_run_makes_no_outer_step_and_does_not_stall() -> None:
    leader = Leader()
    leader.p.applied.rules = after_owner(leader.p.applied.rules, owner_word(RUN, "pause"))
    leader.hold(A, B, C)
    assert leader.proposed(at=100.0) is None
    assert not leader.agg.stalled()


def test_targets_end_the_run_and_a_finished_one_proposes_nothing() -> None:
    run = make_run(A, B, target_tokens=64)
    leader = Leader(run=run)
    leader.hold(A, B, C)
    leader.p.applied.rules = msgspec.structs.replace(leader.p.applied.rules, clock=64)
    content = leader.proposed()
    assert isinstance(content, OwnerEntry)
    assert content.word == FINISH
    over = Leader(run=run)
    over.p.applied.rules = msgspec.structs.replace(over.p.applied.rules, finished=True)
    over.hold(A, B, C)
    assert over.proposed(at=100.0) is None


def test_a_committee_to_be_mended_comes_before_the_outer_step() -> None:
    leader = Leader(WITNESS, B, C)
    for t in range(1, 7):
        leader.p.ctx.now = float(t)
        leader.hear()
    leader.hold(A, B, C)
    leader.p.membership.said_goodbye(B.peer_id, 9)
    content = leader.proposed()
    assert isinstance(content, Membership)
    assert content.committee == Committee(WITNESS.peer_id, (A.peer_id, C.peer_id))


def test_an_acked_body_comes_before_everything() -> None:
    leader = Leader(lead=False)
    body = body_of(leader.p.log, plan(RUN, leader.p.applied.rules, [held(header(RUN, B), B)]))
    leader.hold(A, B, C)
    leader.agg.heard_word(owner_word(RUN, "pause", 1))
    leader.p.lead(2)
    leader.p.proposals._bodies[body_digest(body)] = body
    leader.p.election.again = [body_digest(body)]
    leader.p.drain()
    assert peers(leader.proposed()) == {B.peer_id}


# The owner's words


def test_what_an_owners_word_needs() -> None:
    leader = Leader()
    refuses = leader.agg.refuses_word
    word = owner_word(RUN, "pause", 3)
    assert refuses(word) is None
    assert refuses(msgspec.structs.replace(word, kind="resume")) == "not signed by the owner"
    assert refuses(msgspec.structs.replace(word, signature=B.sign(word.statement(RUN.id, 0)))) is not None
    other_run = msgspec.structs.replace(word, signature=OWNER.sign(word.statement(digest_of(b"x"), 0)))  # type: ignore[arg-type]
    assert refuses(other_run) == "not signed by the owner"
    leader.p.log.append(certify(leader.p.log, OwnerEntry(word, NO_DIGEST), [A, B]))
    assert refuses(word) == "an owner's word that was followed already"
    assert refuses(owner_word(RUN, "resume", 2)) == "an owner's word that was followed already"
    assert refuses(owner_word(RUN, "resume", 4)) is None


def test_finish_is_warranted_by_the_targets_alone() -> None:
    """Integers only: the very token at which it is reached."""
    run = make_run(A, B, target_tokens=64)
    leader = Leader(run=run)
    step = plan(run, leader.p.applied.rules, [held(header(run, B), B)])
    leader.p.log.append(certify(leader.p.log, msgspec.structs.replace(step, clock=63), [A, B]))
    assert leader.agg.refuses_word(FINISH) is not None
    step = msgspec.structs.replace(step, version=2, clock=64)
    leader.p.log.append(certify(leader.p.log, step, [A, B]))
    assert leader.agg.refuses_word(FINISH) is None
    assert leader.agg.refuses_word(OwnerWord("pause", 0, 0, b"", b"")) is not None
    leader.p.applied.rules = msgspec.structs.replace(leader.p.applied.rules, finished=True)
    assert leader.agg.refuses_word(FINISH) == "the run is over"


def test_nobody_is_revoked_by_a_short_name() -> None:
    leader = Leader()
    assert leader.agg.refuses_word(owner_word(RUN, "revoke", 1, peer=b"short")) is not None
    assert leader.agg.refuses_word(owner_word(RUN, "revoke", 1, peer=B.peer_id)) is None


def test_a_word_that_is_not_kept_is_no_news() -> None:
    """Else each voter would pass it on to all others, and they again, for as long as it waits."""
    leader = Leader()
    for number in range(1, limits.words_waiting_max + 1):
        assert leader.agg.heard_word(owner_word(RUN, "pause", number))
    assert not leader.agg.heard_word(owner_word(RUN, "pause", limits.words_waiting_max + 1))
    assert len(leader.agg.words) == limits.words_waiting_max


def test_a_made_up_ack_does_not_hide_a_real_one() -> None:
    """The highest acked term is looked at first; where its body is invalid the next one counts."""
    leader = Leader(lead=False)
    p = leader.p
    deltas = [held(header(RUN, w), w) for w in (B, C)]
    p.hold(*deltas)
    good = rooted(RUN, p.applied.rules, plan(RUN, p.applied.rules, deltas))
    acked = body_of(p.log, good)
    p.ballot.promise(last_ack(p.log, A, acked, 2), 1, p.log.committee_digest)
    junk = body_of(p.log, msgspec.structs.replace(good, clock=1))
    p.election.on_vote(
        B.peer_id, Vote(p.log.committee_digest, 4, 0, last_ack(p.log, B, junk, 3)), current=True
    )
    assert p.election.leading == 4
    leader.agg.consider()
    p.prepare()
    p.proposals.resume()
    (proposal,) = sent(p.drain(), Proposal, WITNESS.peer_id)
    assert proposal.body == acked


# Rotation and stalling


def rotation(served: int, *, successor_heard: bool = True) -> bool:
    """Whether the next outer step hands over after `served` of rotation 3."""
    leader = Leader(*((WITNESS, B, C) if successor_heard else (WITNESS, C)))
    leader.hold(A, B, C)
    leader.agg._term, leader.agg._served = 2, served
    if not successor_heard:
        leader.p.ctx.now = RUN.spec.committee.timeout_s_min
        leader.hear()
    leader.agg.consider()
    leader.p.prepare()
    leader.p.proposals.resume()
    (proposal, *_) = sent(leader.p.drain(), Proposal, WITNESS.peer_id)
    return proposal.last


def test_the_last_outer_step_of_a_rotation_hands_over() -> None:
    assert RUN.spec.committee.rotation == 3
    assert [rotation(n) for n in range(4)] == [False, False, True, True]


def test_nobody_hands_over_to_a_successor_that_is_not_there() -> None:
    assert not rotation(2, successor_heard=False)


def test_an_entry_that_does_not_come_although_deltas_are_there_is_a_stall() -> None:
    voter = Leader(lead=False)
    assert not voter.agg.stalled()
    voter.hold(B)
    voter.agg._pool.ready(voter.p.applied.rules, voter.p.log.committee)  # complete now
    voter.p.ctx.now = 2 * DEADLINE - 0.1
    assert not voter.agg.stalled()
    voter.p.ctx.now = 2 * DEADLINE + 0.1
    assert voter.agg.stalled()
    idle = Leader(lead=False)
    idle.p.ctx.now = 10 * DEADLINE
    assert not idle.agg.stalled()  # nothing to list


def test_a_round_begins_when_a_pause_ends() -> None:
    """Else its first step would close with whoever is there, while others are still in their pass."""
    leader = Leader()
    word = OwnerWord("resume", 2, 0, bytes(64), b"")
    leader.p.ctx.now = 10 * DEADLINE
    leader.hear()
    leader.agg.installed(OwnerEntry(word, NO_DIGEST), 2)
    leader.hold(B)
    assert leader.proposed() is None
    assert peers(leader.proposed(at=11 * DEADLINE)) == {B.peer_id}


def passed_over(listed: list[Any], terms: list[int]) -> bool:
    """Whether voter A complains after steps of these terms that list `listed`, with C's delta held before."""
    voter = Leader(lead=False)
    rules = voter.p.applied.rules
    voter.hold(C)
    voter.agg._pool.ready(rules, voter.p.log.committee)
    step = plan(RUN, rules, [held(header(RUN, w), w) for w in listed])
    for n, term in enumerate(terms):
        voter.p.ctx.now = (n + 1) * 0.1
        voter.agg.installed(step, term)
        voter.p.ballot.raise_term(term)
    return voter.agg.stalled()


def test_who_passes_a_delta_over_twice_is_moved_on_from() -> None:
    """B3: an aggregator that drops a victim. HAVE is a local view, so one step is given."""
    assert not passed_over([B], [3, 3])
    assert passed_over([B], [3, 3, 3])
    assert not passed_over([B], [3, 3, 3, 5])  # the next term starts anew
    assert not passed_over([B, C], [3, 3, 3])


def test_goodbyes_go_into_the_next_outer_step_once() -> None:
    leader = Leader()
    rules = leader.p.applied.rules
    recent = (((B.peer_id, 32), (C.peer_id, 32)),)
    leader.p.applied.rules = msgspec.structs.replace(rules, recent=recent, t_full=64)
    goodbye = digest_of(b"goodbye")
    leader.agg.heard_goodbye(C.peer_id, goodbye)
    leader.agg.heard_goodbye(D.peer_id, goodbye)  # is in no T_full: nothing to remember
    leader.hold(A, B)
    step = leader.proposed(at=DEADLINE)
    assert isinstance(step, OuterStep)
    assert [(gone.peer, gone.goodbye) for gone in step.left] == [(C.peer_id, goodbye)]
    leader.agg.installed(step, 2)
    assert not leader.agg._goodbyes
    leader.p.applied.rules = msgspec.structs.replace(rules, recent=recent, t_full=64)
    leader.agg.heard_goodbye(B.peer_id, goodbye)
    leader.agg.is_back(B.peer_id)
    assert not leader.agg._goodbyes


def test_fresh_state_roots_are_left_to_the_proposals() -> None:
    leader = Leader()
    leader.hold(A, B, C)
    step = leader.proposed()
    assert isinstance(step, OuterStep)
    assert step.state_root != NO_DIGEST


def test_when_every_delta_is_too_late_there_is_no_outer_step() -> None:
    """D6: never 0/0."""
    leader = Leader()
    leader.hold(B, C)
    far = RUN.spec.outer.staleness_max + 1
    clocks = tuple(64 * v for v in range(far + 1))
    rules = msgspec.structs.replace(
        leader.p.applied.rules,
        version=far,
        clock=64 * far + 1,
        t_full=64,
        clocks=(*clocks[:-1], 64 * far + 1),
    )
    leader.p.applied.rules = rules
    assert len(leader.p.pool.ready(rules, leader.p.log.committee)) == 2
    assert leader.proposed(at=100.0) is None
    assert leader.agg.reason == "no delta yet"
