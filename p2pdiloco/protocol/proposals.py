"""Proposal, ack, certificate (protocol.md 3): how one body becomes the next entry.

A voter acks only what it has checked itself: it holds the deltas, recomputes scalars and arrays and finds
the same root. The aggregator goes the same way and acks durably before it proposes.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import msgspec

from p2pdiloco import limits
from p2pdiloco.ids import NO_DIGEST, Digest, PeerId
from p2pdiloco.protocol.applied import Applied
from p2pdiloco.protocol.ballot import Ballot
from p2pdiloco.protocol.context import Context
from p2pdiloco.protocol.delta_pool import DeltaPool
from p2pdiloco.protocol.election import Election
from p2pdiloco.protocol.run_log import RunLog
from p2pdiloco.rules.outer_step import check_outer_step
from p2pdiloco.wire.codec import encode
from p2pdiloco.wire.log import (
    AckSignature,
    Body,
    Certificate,
    Content,
    Entry,
    OuterStep,
    body_digest,
    changes_committee,
    open_body,
)
from p2pdiloco.wire.messages import Ack, EntriesWanted, LastAck, NewerTerm, Proposal
from p2pdiloco.wire.signing import ack_statement, proposal_statement

TOLERANCE = 1e-4  # relative, of declared scalars (algorithm.md 5)
TOLERANCE_AGAIN = 1e-3  # of a body proposed again, so that a borderline figure cannot split the voters


class _Wait(Enum):
    """The check goes on when a blob or an array has come."""

    WAIT = 0


WAIT = _Wait.WAIT


class Proposals:
    """What is proposed to this voter, what it proposes itself, and the acks it has seen."""

    def __init__(
        self,
        ctx: Context,
        log: RunLog,
        ballot: Ballot,
        election: Election,
        applied: Applied,
        pool: DeltaPool,
        bodies: dict[Digest, bytes],
        check_other: Callable[[Content], str | None],
    ) -> None:
        """`bodies` is shared with the election. `check_other` judges membership and owner content: None, or
        the reason to refuse it.
        """
        self._ctx = ctx
        self._log = log
        self._ballot = ballot
        self._election = election
        self._applied = applied
        self._pool = pool
        self._check_other = check_other
        self._parked: tuple[PeerId, bytes, Proposal] | None = None
        # Content, the body if it is proposed again, whether it wants to be the last of the term.
        self._draft: tuple[Content, bytes | None, bool] | None = None
        self._draft_since = 0.0
        self._mine: Proposal | None = None  # proposed in the term led, until certified
        self._bodies = bodies
        self._acks: dict[tuple[int, int, Digest, bool], dict[PeerId, AckSignature]] = {}

    @property
    def busy(self) -> bool:
        """True while a content of this aggregator is on its way to a certificate."""
        self._forget_overtaken()
        return self._draft is not None or self._mine is not None

    def _forget_overtaken(self) -> None:
        """A proposal whose ack is no longer the last one given (a newer term came) is not said again."""
        if self._mine is not None:
            body = open_body(self._mine.body)
            digest = body_digest(self._mine.body)
            repeat = self._ballot.is_repeat(self._mine.term, body.index, digest, last=self._mine.last)
            if not repeat or self._mine.term != self._election.leading:
                self._mine = None

    # The aggregator's side

    def start(self, content: Content, *, wants_last: bool) -> None:
        """Propose this content (its root is still to be found) in the term led."""
        assert self._election.leading is not None
        self._draft = (content, None, wants_last)
        self.resume()

    def start_again(self, digest: Digest) -> None:
        """Propose a body that a voter acked in an earlier term, once it is checked here.

        The very bytes: another encoding of the same content would be another body.
        """
        body = self._bodies.get(digest)
        if body is None:  # pushed out by newer ones: it will be shown again
            self._election.resign()
            return
        self._draft = (open_body(body).content, body, False)
        self._draft_since = self._ctx.now
        self._remember(body)
        self.resume()

    def resume(self) -> None:
        """A blob or an array came, or an entry was applied: go on with the draft and what is parked."""
        self._resume_draft()
        self._resume_parked()

    def _resume_draft(self) -> None:
        if self._draft is None:
            return
        term = self._election.leading
        if term is None or not self._applied.current:
            self._draft = None
            return
        content, again, wants_last = self._draft
        if again is not None:
            verdict = self._check(content, TOLERANCE_AGAIN)
            if verdict is WAIT:
                if self._ctx.now - self._draft_since > self._ctx.spec.committee.timeout_s_min:
                    self._draft_since = self._ctx.now
                    self._election.doubt(body_digest(again), current=self._applied.current)
                return
            if verdict is not None:
                self._ctx.say("bad_body", f"an acked body is invalid and is not proposed again: {verdict}")
                self._draft = None
                return
        else:
            root = self._applied.root_after(content)
            if root is None:
                return
            content = msgspec.structs.replace(content, state_root=root)
        self._draft = None
        log = self._log
        fresh = Body(log.run, log.epoch, log.index + 1, log.head, log.committee_digest, content)
        self._propose(content, again or encode(fresh), term, wants_last=wants_last)

    def _propose(self, content: Content, body: bytes, term: int, *, wants_last: bool) -> None:
        log, me = self._log, self._ctx.identity
        committee = log.committee_digest
        digest = body_digest(body)
        self._remember(body)
        last = wants_last
        acked = self._ballot.last_ack
        if acked is not None and acked.term == term and body_digest(acked.body) == digest:
            last = acked.last  # never changes afterwards
        statement = proposal_statement(me.run, log.epoch, committee, term, log.index + 1, digest, last=last)
        proposal = Proposal(term, body, last, me.signer.sign(statement))
        # A disk that turned out to be rolled back makes no more promises (targets.md R1b).
        if not self._election.may_vote() or not self._ack(proposal, me.signer.public_key):
            self._election.resign()
            return
        self._mine = proposal
        if isinstance(content, OuterStep):
            self._pool.reveal(content)
        for member in log.committee.members:
            self._ctx.send(member, proposal)
        self._count_own_ack(proposal)

    def say_again(self) -> None:
        """Whatever was proposed or acked for the next index, to those who may have missed it."""
        self._forget_overtaken()
        if self._mine is not None:
            for member in self._log.committee.members:
                self._ctx.send(member, self._mine)
        ack = self._ballot.last_ack
        if ack is not None and self._ballot.ack_index == self._log.index + 1:
            self._broadcast_ack(ack)

    def drop_mine(self) -> None:
        """Leadership is over."""
        self._draft = None
        self._mine = None

    # The voter's side

    def on_proposal(self, sender: PeerId, key: bytes, m: Proposal) -> None:
        body = open_body(m.body)
        log = self._log
        if not self._election.is_voter:
            return
        if body.index > log.index + 1:
            self._ctx.send(sender, EntriesWanted(log.index + 1))
            return
        if not log.follows(body) or log.committee.aggregator_of(m.term) != sender:
            return
        if self._election.jumps(m.term):
            return
        repeat = self._ballot.is_repeat(m.term, body.index, body_digest(m.body), last=m.last)
        if m.term < self._ballot.term and not repeat:
            self._ctx.send(sender, NewerTerm(self._ballot.term))
            return
        if not repeat:
            self._election.heard_aggregator(sender, m.term)
        self._remember(m.body)
        if isinstance(body.content, OuterStep):
            self._pool.reveal(body.content)
        if repeat and self._ballot.last_ack is not None:
            self._broadcast_ack(self._ballot.last_ack)
            return
        if self._parked is None or self._parked[2].term <= m.term:
            self._parked = (sender, key, m)
        self._resume_parked()

    def _resume_parked(self) -> None:
        if self._parked is None:
            return
        sender, key, m = self._parked
        body = open_body(m.body)
        if body.index <= self._log.index or not self._log.follows(body):
            self._parked = None
            return
        if not self._applied.current or not self._election.may_vote():
            return
        # A body proposed again can only be the first of its aggregator's term.
        first = self._log.term_of(self._log.index) != m.term
        verdict = self._check(body.content, TOLERANCE_AGAIN if first else TOLERANCE, sender)
        if verdict is WAIT:
            return
        self._parked = None
        if verdict is not None:
            self._ctx.say("refused_body", f"no ack for index {body.index} in term {m.term}: {verdict}")
            return
        acked = self._ack(m, key)
        if acked and self._ballot.last_ack is not None:
            self._broadcast_ack(self._ballot.last_ack)

    def _check(
        self, content: Content, tolerance: float, proposer: PeerId | None = None
    ) -> str | _Wait | None:
        """None: ack. A string: why not. WAIT: something is on its way."""
        if isinstance(content, OuterStep):
            missing = self._pool.missing(content)
            if missing:
                owners = {Digest(c.delta): PeerId(c.peer) for c in content.contributions}
                for delta in missing:
                    self._pool.fetch(delta, [p for p in (proposer, owners[delta]) if p is not None])
                return WAIT
            plain = msgspec.structs.replace(content, state_root=NO_DIGEST)
            reason = check_outer_step(
                self._applied.rules, self._ctx.spec, plain, self._pool.norms(), relative=tolerance
            )
        else:
            reason = self._check_other(content)
        if reason is not None:
            return reason
        root = self._applied.root_after(content)
        if root is None:
            return WAIT
        return None if root == content.state_root else "the state root differs from the one computed here"

    def _ack(self, m: Proposal, proposer_key: bytes) -> bool:
        body = open_body(m.body)
        digest = body_digest(m.body)
        if self._ballot.is_repeat(m.term, body.index, digest, last=m.last):
            return True
        if self._ballot.refuses(m.term, body.index) is not None:
            return False
        ack = LastAck(m.term, m.body, m.last, proposer_key, m.signature)
        self._ballot.promise(ack, body.index, self._log.committee_digest)
        return True

    def _broadcast_ack(self, ack: LastAck) -> None:
        message = self._signed_ack(ack)
        if message is None:
            return
        for member in self._log.committee.members:
            self._ctx.send(member, message)
        self.on_ack(self._ctx.me, self._ctx.identity.signer.public_key, message)

    def _signed_ack(self, ack: LastAck) -> Ack | None:
        body = open_body(ack.body)
        if not self._log.follows(body):
            return None
        digest = body_digest(ack.body)
        signature = self._ctx.identity.signer.sign(
            ack_statement(
                self._log.run, body.epoch, Digest(body.committee), ack.term, body.index, digest, last=ack.last
            )
        )
        return Ack(body.committee, ack.term, body.index, digest, ack.last, signature)

    def _count_own_ack(self, proposal: Proposal) -> None:
        ack = self._ballot.last_ack
        assert ack is not None
        assert ack.body == proposal.body
        self._broadcast_ack(ack)

    # Acks and certificates

    def on_ack(self, voter: PeerId, key: bytes, m: Ack) -> None:
        """Count an ack; a majority makes the entry, which `certified` picks up."""
        log = self._log
        if m.committee != log.committee_digest or voter not in log.committee.members:
            return
        digest = Digest(m.body)
        if m.index != log.index + 1:
            if m.index > log.index + 1:
                self._ctx.send(voter, EntriesWanted(log.index + 1))
            return
        if self._election.jumps(m.term):
            return
        self._forget_oldest_ack(voter)
        self._acks.setdefault((m.term, m.index, digest, m.last), {})[voter] = AckSignature(key, m.signature)
        if m.last:
            self._election.on_last_ack(voter, m)

    def _forget_oldest_ack(self, voter: PeerId) -> None:
        """A voter acks one body in a term; whoever acks many only pushes out its own."""
        given = [k for k, acks in self._acks.items() if voter in acks]
        if len(given) >= limits.terms_counted_max:
            oldest = min(given)
            del self._acks[oldest][voter]
            if not self._acks[oldest]:
                del self._acks[oldest]

    def certified(self) -> Entry | None:
        """The next entry, if a majority has acked one body in one term and the body is known here."""
        for (term, index, digest, last), acks in self._acks.items():
            if index != self._log.index + 1 or len(acks) < self._log.committee.quorum:
                continue
            body = self._bodies.get(digest)
            if body is None or not self._log.follows(open_body(body)):
                continue
            signatures = tuple(sorted(acks.values(), key=lambda a: a.key))
            return Entry(body, Certificate(self._log.committee_digest, term, last, signatures))
        return None

    def appended(self, content: Content) -> None:
        """The log grew: what was for that index is settled."""
        index = self._log.index
        if self._mine is not None and open_body(self._mine.body).index <= index:
            self._mine = None
        self._draft = None
        if changes_committee(content):
            self._acks.clear()
        for key in [k for k in self._acks if k[1] <= index]:
            del self._acks[key]

    def epoch_began(self) -> None:
        """What was on its way was so under a committee that the owner dismissed."""
        self._acks.clear()
        self._parked = self._draft = self._mine = None

    def _remember(self, body: bytes) -> None:
        self._bodies[body_digest(body)] = body
        while len(self._bodies) > limits.bodies_remembered_max:
            del self._bodies[next(iter(self._bodies))]
