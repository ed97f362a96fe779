"""A voter's durable record: own term and last ack. Saved before anything that it allows is said.

Rules of protocol.md 3: only a term that is not below the own one, and one (body, last) for each index and
term. Acking raises the own term to the proposal's, and beyond it when the proposal is the last of its term.
An epoch that the owner ended is never voted in again, and what was acked in it binds nobody in the next one;
terms go on rising.
"""

from __future__ import annotations

import msgspec

from p2pdiloco.ids import NO_DIGEST, Digest, PeerId
from p2pdiloco.protocol.actions import SaveRecord, VoterRecord
from p2pdiloco.protocol.context import Context
from p2pdiloco.wire.log import Committee, body_digest
from p2pdiloco.wire.messages import LastAck


class Ballot:
    """What this voter has promised, and whether its disk may be believed (targets.md R1b)."""

    def __init__(self, ctx: Context, record: VoterRecord | None, epoch: int = 0) -> None:
        """`epoch`: the log's. A crash may have come between the entry that began it and the record."""
        self._ctx = ctx
        self._record = record or VoterRecord(0, 0, NO_DIGEST, None)
        if self._record.epoch < epoch:
            self._record = VoterRecord(self._record.term, 0, NO_DIGEST, None, epoch)
        self._told: set[PeerId] = set()
        self.rolled_back = False

    @property
    def term(self) -> int:
        return self._record.term

    @property
    def epoch(self) -> int:
        """The newest epoch that the owner began, as far as is known here; the log may still be on its way."""
        return self._record.epoch

    @property
    def last_ack(self) -> LastAck | None:
        return self._record.ack

    @property
    def ack_index(self) -> int:
        return self._record.ack_index

    def raise_term(self, term: int) -> bool:
        """Move the own term up, durably. Raising is always safe; True if it moved."""
        if term <= self.term:
            return False
        self._save(msgspec.structs.replace(self._record, term=term))
        return True

    def begin_epoch(self, epoch: int) -> None:
        """The owner began `epoch`: durable before the log changes, so that no crash votes in an older one."""
        if epoch > self.epoch:
            self._save(VoterRecord(self.term, 0, NO_DIGEST, None, epoch))

    def is_repeat(self, term: int, index: int, body: Digest, *, last: bool) -> bool:
        """True if exactly this was acked last: saying it again is allowed."""
        ack = self._record.ack
        return (
            ack is not None
            and self._record.ack_index == index
            and ack.term == term
            and ack.last == last
            and body_digest(ack.body) == body
        )

    def refuses(self, term: int, index: int) -> str | None:
        """Why a new ack for `index` in `term` would break a promise; None if it would not."""
        if term < self.term:
            return f"own term is {self.term}"
        ack = self._record.ack
        if ack is not None and ack.term == term and self._record.ack_index >= index:
            return f"already acked index {self._record.ack_index} in term {term}"
        return None

    def promise(self, ack: LastAck, index: int, committee: Digest) -> None:
        """Record an ack, durably. An ack of the last body of a term is also the vote for the next term."""
        assert self.refuses(ack.term, index) is None, "an ack that breaks a promise"
        term = max(self.term, ack.term + 1 if ack.last else ack.term)
        self._save(VoterRecord(term, index, committee, ack, self.epoch))

    def _save(self, record: VoterRecord) -> None:
        self._record = record
        self._ctx.emit(SaveRecord(record))

    # A restored disk image forgets promises. What others saw, mirrored in heartbeats, gives it away.

    def told_seen(self, voter: PeerId, *, boot: int, term: int, ack_index: int) -> None:
        """`voter` says what it has seen from this node: starts, terms, acks. More than the disk knows?"""
        self._told.add(voter)
        behind = [
            f"{what} {seen} (the disk says {here})"
            for what, seen, here in (
                ("start", boot, self._ctx.identity.boot),
                ("term", term, self.term),
                ("an ack of index", ack_index, self.ack_index),
            )
            if seen > here
        ]
        if behind and not self.rolled_back:
            self.rolled_back = True
            self._ctx.say(
                "rolled_back",
                f"a voter has seen {' and '.join(behind)} of this node: its disk was restored from a copy, "
                "so this node no longer votes",
            )

    def may_vote(self, committee: Committee) -> bool:
        """False until a majority of the committee (this node included) has told what it saw of this node."""
        if self.rolled_back:
            return False
        told = sum(1 for m in committee.members if m in self._told or m == self._ctx.me)
        return told >= committee.quorum
