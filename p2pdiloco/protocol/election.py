"""Who leads (protocol.md 4). The aggregator of a term is given by arithmetic; what is elected is the term.

A voter moves on after silence or stalling, first asking whether a majority would (pre-vote). Votes carry
the last ack, and the new aggregator proposes again what may already have been certified. A hand-over costs
nothing: the acks of a term's last body are the votes for the next term.
"""

from __future__ import annotations

import msgspec

from p2pdiloco import limits
from p2pdiloco.errors import PeerError
from p2pdiloco.ids import Digest, PeerId, peer_id_of
from p2pdiloco.protocol.ballot import Ballot
from p2pdiloco.protocol.context import Context
from p2pdiloco.protocol.run_log import RunLog
from p2pdiloco.wire.log import Content, body_digest, changes_committee, open_body
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


class Cast(msgspec.Struct, frozen=True):
    """A vote, or the ack of a term's last body counted as one (then `body` may not be known here)."""

    index: int  # certified by the voter
    ack_term: int
    ack_index: int
    ack_body: Digest | None
    body: bytes | None


class Election:
    """Terms, votes and timers of one voter."""

    def __init__(self, ctx: Context, log: RunLog, ballot: Ballot, bodies: dict[Digest, bytes]) -> None:
        """`bodies`: the bodies of recent proposals, by digest."""
        self._ctx = ctx
        self._log = log
        self._ballot = ballot
        self._bodies = bodies
        self.leading: int | None = None
        # Bodies that this term's aggregator must propose before it is free, the highest acked term first.
        self.again: list[Digest] = []
        self.due = 0.0
        self._heard_at = float("-inf")
        self._asked_at = float("-inf")
        self._votes: dict[int, dict[PeerId, Cast]] = {}
        self._pre_term = 0
        self._pre_votes: set[PeerId] = set()
        self._raised: dict[PeerId, float] = {}  # when the word of a voter raised the own term

    @property
    def own_term(self) -> int:
        return self._ballot.term

    @property
    def is_voter(self) -> bool:
        return self._ctx.me in self._log.committee.members

    def may_vote(self) -> bool:
        """A voter whose log lost entries that it acked (a damaged file) first fetches them again.

        Nor does it vote in an epoch that the owner ended, while the way to the next one is not here yet.
        """
        whole = self._log.index >= self._ballot.ack_index - 1 and self._ballot.epoch == self._log.epoch
        return self.is_voter and whole and self._ballot.may_vote(self._log.committee)

    def arm(self) -> None:
        """A fresh, randomised timeout."""
        c = self._ctx.spec.committee
        span = c.timeout_s_max - c.timeout_s_min
        self.due = self._ctx.now + c.timeout_s_min + span * self._ctx.rng()

    def tick(self, *, current: bool, stalled: bool) -> None:
        """Time passed. `stalled`: deltas are there and no entry comes (an aggregator that only beats)."""
        if not self.may_vote():
            return
        if self._log.committee.size == 1:
            # The only voter elects itself, once: `try_all` leads as soon as everything is applied.
            if self.leading is None and self._ballot.term not in self._votes:
                self.candidate(self._ballot.term + 1, current=current)
            return
        # A stall is seen at every event; asking once a heartbeat is enough.
        stalled = stalled and self._ctx.now - self._asked_at >= self._ctx.spec.committee.heartbeat_s
        if self._ctx.now >= self.due or stalled:
            if self.leading is not None and not stalled:
                self.arm()  # it hears itself
                return
            self._begin_pre_vote(current=current)

    def heard_aggregator(self, sender: PeerId, term: int) -> None:
        """The aggregator of `term` is alive: a heartbeat or a proposal came."""
        if not self.is_voter or self._log.committee.aggregator_of(term) != sender or self.jumps(term):
            return
        if term < self._ballot.term:
            self._ctx.send(sender, NewerTerm(self._ballot.term))
            return
        if not self._raised_by(sender, term):
            return
        self._heard_at = self._ctx.now
        self._pre_votes.clear()
        self.arm()

    def jumps(self, term: int) -> bool:
        """No one message may burn the terms; who lags so far is brought up by entries and answers."""
        return term > self._ballot.term + limits.term_jump_max

    def _raised_by(self, voter: PeerId, term: int) -> bool:
        """Follow `voter` into `term`; False if it may not raise the own term again so soon.

        A word that raises a term shows no election, so one liar could depose every aggregator: it may do so
        once in half a timeout, unless an entry was certified since.
        """
        if term <= self._ballot.term:
            return True
        now = self._ctx.now
        if now - self._raised.get(voter, float("-inf")) < self._ctx.spec.committee.timeout_s_min / 2:
            return False
        self._raised[voter] = now
        self._ballot.raise_term(term)
        self._step_down()
        return True

    # Pre-vote: a node that comes back must not depose an aggregator that works.

    def _begin_pre_vote(self, *, current: bool) -> None:
        self.arm()
        self._asked_at = self._ctx.now
        self._pre_term = self._ballot.term + 1
        self._pre_votes = {self._ctx.me}
        question = PreVote(self._log.committee_digest, self._pre_term, self._log.index)
        for member in self._log.committee.members:
            self._ctx.send(member, question)
        self._count_pre_votes(current=current)

    def on_pre_vote(self, sender: PeerId, m: PreVote, *, stalled: bool) -> None:
        if not self._same_committee(sender, m.committee, m.index) or not self.may_vote():
            return
        served = (
            self.leading is not None
            or self._ctx.now - self._heard_at < self._ctx.spec.committee.timeout_s_min
        )
        granted = m.term > self._ballot.term and (stalled or not served)
        answer = PreVoteAnswer(m.committee, m.term, granted, self._ballot.term, self._log.index)
        self._ctx.send(sender, answer)

    def on_pre_vote_answer(self, sender: PeerId, m: PreVoteAnswer, *, current: bool) -> None:
        if not self._same_committee(sender, m.committee, m.index) or not self.may_vote():
            return
        if m.own_term > self._ballot.term:
            self._follow(sender, m.own_term, current=current)
        elif m.granted and m.term == self._pre_term:
            self._pre_votes.add(sender)
            self._count_pre_votes(current=current)

    def _count_pre_votes(self, *, current: bool) -> None:
        if len(self._pre_votes) >= self._log.committee.quorum and self._pre_term > self._ballot.term:
            self._ctx.say("timeout", f"no word from the aggregator: on to term {self._pre_term}")
            self._move_to(self._pre_term, current=current)

    # Votes

    def _move_to(self, term: int, *, current: bool) -> None:
        """Take `term` as the own one and vote for its aggregator."""
        if self._ballot.raise_term(term):
            self._step_down()
        self._pre_votes.clear()
        self.arm()
        aggregator = self._log.committee.aggregator_of(term)
        if aggregator == self._ctx.me:
            self.candidate(term, current=current)
        else:
            self._ctx.send(aggregator, self._vote(term))

    def candidate(self, term: int, *, current: bool) -> None:
        if not self.may_vote():
            return
        if self._ballot.raise_term(term):
            self._step_down()
        self._cast(term, self._ctx.me, self._own_cast())
        for member in self._log.committee.members:
            self._ctx.send(member, RequestVotes(self._log.committee_digest, term, self._log.index))
        self.try_to_lead(term, current=current)

    def on_request_votes(self, sender: PeerId, m: RequestVotes) -> None:
        if not self._same_committee(sender, m.committee, m.index) or not self.may_vote():
            return
        if m.term < self._ballot.term:
            self._ctx.send(sender, NewerTerm(self._ballot.term))
            return
        if self._log.committee.aggregator_of(m.term) != sender or self.jumps(m.term):
            return
        if m.term > self._ballot.term:
            if not self._raised_by(sender, m.term):
                return
            self.arm()
        self._ctx.send(sender, self._vote(m.term))

    def on_vote(self, sender: PeerId, m: Vote, *, current: bool) -> None:
        if not self._same_committee(sender, m.committee, m.index) or not self.may_vote():
            return
        if m.term < self._ballot.term:
            self._ctx.send(sender, NewerTerm(self._ballot.term))
            return
        if self._log.committee.aggregator_of(m.term) != self._ctx.me or self.jumps(m.term):
            return
        if m.last_ack is not None and not self._could_ack(m.last_ack, m.term):
            raise PeerError("BAD_VOTE", "it shows an ack of a proposal that nobody could have made")
        rises = m.term > self._ballot.term
        if not self._raised_by(sender, m.term):
            return
        self._cast(m.term, sender, _cast_of(m.index, m.last_ack))
        if rises:
            self.candidate(m.term, current=current)
        else:
            self.try_to_lead(m.term, current=current)

    def _could_ack(self, ack: LastAck, term: int) -> bool:
        """False if this ack of the next body shows a proposal by somebody who could not lead its term.

        Its signature was checked when the vote was opened. Acks of entries that are certified by now, under
        whatever committee, are nothing to propose again.
        """
        body = open_body(ack.body)
        if ack.term > term:
            return False
        if body.index != self._log.index + 1:
            return True
        leader = self._log.committee.aggregator_of(ack.term)
        return self._log.follows(body) and peer_id_of(ack.proposer_key) == leader

    def on_newer_term(self, sender: PeerId, m: NewerTerm, *, current: bool) -> None:
        """A liar could burn terms: the jump is bounded, and only a member of the committee is believed."""
        if sender not in self._log.committee.members or not self.may_vote():
            return
        if m.term > self._ballot.term:
            self._follow(sender, m.term, current=current)

    def _follow(self, voter: PeerId, term: int, *, current: bool) -> None:
        term = min(term, self._ballot.term + limits.term_jump_max)
        if self._raised_by(voter, term):
            self._move_to(term, current=current)

    def on_last_ack(self, voter: PeerId, ack: Ack) -> None:
        """An ack of the last body of its term is its voter's vote for the next one."""
        term = ack.term + 1
        if self._log.committee.aggregator_of(term) != self._ctx.me or term < self._ballot.term:
            return
        if self.jumps(term):
            return
        cast = Cast(ack.index - 1, ack.term, ack.index, Digest(ack.body), None)
        self._votes.setdefault(term, {}).setdefault(voter, cast)

    def try_all(self, *, current: bool) -> None:
        """Something changed (an entry was applied, a vote came): lead if a majority is there."""
        for term in sorted(t for t in self._votes if t >= self._ballot.term):
            self.try_to_lead(term, current=current)

    def try_to_lead(self, term: int, *, current: bool) -> None:
        committee = self._log.committee
        if self.leading is not None and self.leading >= term:
            return
        if term < self._ballot.term or committee.aggregator_of(term) != self._ctx.me or not self.may_vote():
            return
        cast = {v: c for v, c in self._votes.get(term, {}).items() if v in committee.members}
        if len(cast) < committee.quorum:
            return
        for voter in [v for v, c in cast.items() if c.index > self._log.index]:
            self._ctx.send(voter, EntriesWanted(self._log.index + 1))
        # Whoever claims entries that are not here does not count until they are: a majority of the others
        # holds an ack of whatever was certified next, and one liar cannot keep everybody from leading.
        casts = {v: c for v, c in cast.items() if c.index <= self._log.index}
        if len(casts) < committee.quorum or not current:
            return
        # The own durable ack counts, voted or not.
        acked = [*casts.items(), (self._ctx.me, self._own_cast())]
        open_acks = [
            (v, c) for v, c in acked if c.ack_body is not None and c.ack_index == self._log.index + 1
        ]
        # All of them, the highest term first: one that turns out invalid was made up, and says nothing about
        # what the others acked (protocol.md 4).
        again: list[Digest] = []
        self._bodies.update({c.ack_body: c.body for _, c in open_acks if c.ack_body and c.body})
        for voter, cast_ in sorted(open_acks, key=lambda vc: (-vc[1].ack_term, vc[0])):
            assert cast_.ack_body is not None
            if cast_.ack_body not in self._bodies:
                self._ctx.send(voter, RequestVotes(self._log.committee_digest, term, self._log.index))
                return
            if cast_.ack_body not in again:
                again.append(cast_.ack_body)
        self._ballot.raise_term(term)
        self.leading = term
        self.again = again
        self._heard_at = self._ctx.now
        for old in [t for t in self._votes if t < term]:
            del self._votes[old]
        self._ctx.say("elected", f"this node aggregates in term {term}")

    def doubt(self, body: Digest, *, current: bool) -> None:
        """A body shown by a vote cannot be had: lead without the votes that show it, if a majority is left.

        A majority of the others holds an ack of whatever was certified, so this is as safe as any majority.
        """
        term = self.leading
        if term is None or body == self._own_cast().ack_body:
            return
        votes = self._votes.get(term, {})
        others = {v: c for v, c in votes.items() if c.ack_body != body}
        if len(others) < self._log.committee.quorum or len(others) == len(votes):
            return
        self._votes[term] = others
        self.leading = None
        self.again = []
        self.try_to_lead(term, current=current)

    def certified_in(self, term: int) -> None:
        """An entry of `term` is certified: never fall behind it."""
        self._raised.clear()
        if self.is_voter and self._ballot.raise_term(term):
            self._step_down()

    def epoch_began(self) -> None:
        """The owner put another committee in charge: whatever was won or promised was in the old epoch."""
        self.leading = None
        self.again = []
        self._votes.clear()
        self._pre_votes.clear()
        self._heard_at = float("-inf")
        self.arm()

    def installed(self, content: Content, term: int, *, last: bool, current: bool) -> None:
        """An entry certified in `term` became the state."""
        if changes_committee(content):
            self.leading = None
            self.again = []
            self._votes.clear()
            self._pre_votes.clear()
            if self.may_vote():
                # The old committee's right to lead ended with the entry; the new one's votes go out at once.
                self._move_to(max(self._ballot.term, term + 1), current=current)
        elif last:
            if self.leading is not None and self.leading <= term:
                self.leading = None
            if self.may_vote() and self._ballot.term <= term:
                self._move_to(term + 1, current=current)
        self.try_all(current=current)

    def resign(self) -> None:
        """Stop leading without a word; the others' timeouts do the rest."""
        if self.leading is not None:
            self._votes.pop(self.leading, None)
        self.leading = None
        self.again = []

    def _step_down(self) -> None:
        if self.leading is not None and self.leading < self._ballot.term:
            self.leading = None
            self.again = []

    def _vote(self, term: int) -> Vote:
        return Vote(self._log.committee_digest, term, self._log.index, self._ballot.last_ack)

    def _own_cast(self) -> Cast:
        return _cast_of(self._log.index, self._ballot.last_ack)

    def _cast(self, term: int, voter: PeerId, cast: Cast) -> None:
        of_term = self._votes.setdefault(term, {})
        held = of_term.get(voter)
        if held is None or held.index <= cast.index:
            of_term[voter] = cast
        for oldest in sorted(self._votes)[: -limits.terms_counted_max]:
            del self._votes[oldest]

    def _same_committee(self, sender: PeerId, committee: bytes, index: int) -> bool:
        """Votes count only under the committee that they name; whoever lags is brought up to date."""
        if committee == self._log.committee_digest:
            return sender in self._log.committee.members
        if index > self._log.index:
            self._ctx.send(sender, EntriesWanted(self._log.index + 1))
        return False


def _cast_of(index: int, ack: LastAck | None) -> Cast:
    if ack is None:
        return Cast(index, 0, 0, None, None)
    return Cast(index, ack.term, open_body(ack.body).index, body_digest(ack.body), ack.body)
