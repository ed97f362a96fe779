"""The chain of certified entries since genesis, and the committee that governs the next one.

Everybody learns the committee from this chain: index i + 1 is governed by the committee that the entries
up to i define (protocol.md 3). Certificates' signatures are verified when a message is opened; here is
checked that their signers are a majority of the right committee, and that the owner said what a majority
certified as the owner's word: nobody else can speak for it.

Within an epoch the chain only grows. A recovery, which the owner signs, stands on any certified entry that
this chain holds: it begins the next epoch there, and what followed that entry before is cut off.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from p2pdiloco.errors import PeerError
from p2pdiloco.ids import Digest, RunId, peer_id_of
from p2pdiloco.run_spec import RunSpec
from p2pdiloco.wire.log import (
    FINISH,
    Body,
    Committee,
    Content,
    Entry,
    Membership,
    OuterStep,
    OwnerEntry,
    OwnerWord,
    body_digest,
    committee_digest,
    genesis_digest,
    is_recovery,
    open_body,
)
from p2pdiloco.wire.signing import Verify, verify_ed25519


class _Point(NamedTuple):
    """What holds after an entry."""

    head: Digest
    epoch: int
    committee: Committee
    version: int
    clock: int  # tokens merged
    target_tokens: int
    owner_sequence: int


class RunLog:
    """`index` is the certified index; 0 means genesis alone."""

    def __init__(
        self, run: RunId, spec: RunSpec, entries: Iterable[Entry] = (), *, verify: Verify = verify_ed25519
    ) -> None:
        self.run = run
        self.spec = spec
        self._verify = verify
        self._entries: list[Entry] = []
        self._points = [_Point(genesis_digest(run), 0, spec.committee.genesis, 0, 0, spec.target_tokens, 0)]
        for entry in entries:
            self.append(entry)

    @property
    def index(self) -> int:
        return len(self._entries)

    @property
    def head(self) -> Digest:
        """Body digest of the newest certified entry."""
        return self._points[-1].head

    @property
    def epoch(self) -> int:
        return self._points[-1].epoch

    @property
    def committee(self) -> Committee:
        """It governs the next index."""
        return self._points[-1].committee

    @property
    def committee_digest(self) -> Digest:
        return committee_digest(self.committee)

    def head_at(self, index: int) -> Digest:
        return self._points[index].head

    def epoch_at(self, index: int) -> int:
        return self._points[index].epoch

    def committee_at(self, index: int) -> Committee:
        """The one that governs `index` + 1 where no recovery stands there."""
        return self._points[index].committee

    def version_at(self, index: int) -> int:
        """Outer steps among the entries up to `index`."""
        return self._points[index].version

    def entry(self, index: int) -> Entry:
        return self._entries[index - 1]

    def content(self, index: int) -> Content:
        return open_body(self._entries[index - 1].body).content

    def term_of(self, index: int) -> int:
        """The term in which the entry was certified; 0 for genesis."""
        return self._entries[index - 1].certificate.term if index else 0

    def entries_from(self, first: int, count: int) -> tuple[Entry, ...]:
        return tuple(self._entries[first - 1 : first - 1 + count])

    def recovery_after(self, epoch: int) -> int | None:
        """The index of the first recovery of an epoch above `epoch`; None where there is none."""
        if self.epoch <= epoch:
            return None
        return next(i for i, point in enumerate(self._points) if point.epoch > epoch)

    def branch_below(self, index: int) -> int:
        """The last index below `index` where this chain may have left another one: a recovery, or 1."""
        places = (i for i in range(min(index, self.index + 1) - 1, 1, -1) if self._begins_epoch(i))
        return next(places, 1)

    def _begins_epoch(self, index: int) -> bool:
        return self._points[index].epoch > self._points[index - 1].epoch

    def follows(self, body: Body) -> bool:
        """True if `body` is a next body of this chain under the governing committee."""
        return self._follows(body, self._points[-1], self.index)

    def _follows(self, body: Body, point: _Point, index: int) -> bool:
        return (
            body.run == self.run
            and body.epoch == point.epoch
            and body.index == index + 1
            and body.previous == point.head
            and body.committee == committee_digest(point.committee)
        )

    def append(self, entry: Entry) -> Body:
        """Add the next certified entry, or a recovery that stands on the newest one.

        Raises: PeerError BAD_CHAIN or BAD_CERTIFICATE.
        """
        body = open_body(entry.body)
        if self.recovers(entry):
            if body.index != self.index + 1:
                raise PeerError("BAD_CHAIN", f"entries after {body.index - 1} must be cut off first")
        elif not self.follows(body):
            raise PeerError("BAD_CHAIN", f"index {body.index} does not follow {self.index}")
        else:
            self._check_certificate(entry, body, self._points[-1])
            if isinstance(body.content, OwnerEntry):
                why = self.refuses_word(body.content.word)
                if why is not None:
                    raise PeerError("BAD_CHAIN", f"index {body.index}: {why}")
        self._entries.append(entry)
        self._points.append(_after(self._points[-1], entry, body))
        return body

    @staticmethod
    def _check_certificate(entry: Entry, body: Body, point: _Point) -> None:
        """Raises: PeerError."""
        content, certificate = body.content, entry.certificate
        if isinstance(content, OwnerEntry) and content.word.kind == "recover":
            raise PeerError("BAD_CERTIFICATE", "a recovery is certified by the owner alone")
        if certificate.committee != body.committee:
            raise PeerError("BAD_CERTIFICATE", "acks name another committee")
        signers = {peer_id_of(ack.key) for ack in certificate.acks}
        if len(signers & set(point.committee.members)) < point.committee.quorum:
            raise PeerError("BAD_CERTIFICATE", f"no majority at index {body.index}")

    def refuses_word(self, word: OwnerWord) -> str | None:
        """Why `word` cannot stand next; None if the owner signed it or the RunSpec warrants it."""
        return self._refuses_word(word, self._points[-1])

    def _refuses_word(self, word: OwnerWord, point: _Point) -> str | None:
        if word.kind == "recover" or word.committee is not None:
            return "a recovery is the owner's own entry and no proposal"
        if word.owner_sequence == 0:
            reached = point.clock >= point.target_tokens or 0 < self.spec.target_version <= point.version
            return None if word == FINISH and reached else "no target of the RunSpec is reached"
        if word.owner_sequence <= point.owner_sequence:
            return "an owner's word that was followed already"
        if not self._verify(self.spec.owner_key, word.signature, word.statement(self.run, point.epoch)):
            return "not signed by the owner"
        return None

    # Recoveries

    def begins(self, entry: Entry) -> int | None:
        """The epoch above this chain's that the owner begins with `entry`, wherever it stands; else None."""
        body = open_body(entry.body)
        newer = body.run == self.run and body.epoch > self.epoch
        return body.epoch if newer and is_recovery(entry, self.spec.owner_key) else None

    def recovers(self, entry: Entry) -> bool:
        """Whether `entry` is a recovery of a newer epoch that stands on an entry of this chain."""
        body = open_body(entry.body)
        stands = 0 < body.index <= self.index + 1 and self.head_at(body.index - 1) == body.previous
        return stands and self.begins(entry) is not None

    def replaces(self, entry: Entry) -> bool:
        """Whether `entry` is certified on this chain in the place of one that is there now.

        Two entries of one epoch never are. One of the two lies in an epoch that the owner ended; which one,
        a recovery says that stands further on (`begins`).
        """
        body = open_body(entry.body)
        if not 0 < body.index <= self.index or self.head_at(body.index) == body_digest(entry.body):
            return False
        point = self._points[body.index - 1]
        if is_recovery(entry, self.spec.owner_key):
            return body.run == self.run and body.epoch > point.epoch and body.previous == point.head
        if not self._follows(body, point, body.index - 1):
            return False
        try:
            self._check_certificate(entry, body, point)
        except PeerError:
            return False
        content = body.content
        return not isinstance(content, OwnerEntry) or self._refuses_word(content.word, point) is None

    def cut(self, index: int) -> None:
        """Drop the entries after `index`."""
        assert 0 <= index < self.index, f"nothing to cut off after {index}"
        del self._entries[index:]
        del self._points[index + 1 :]


def _after(point: _Point, entry: Entry, body: Body) -> _Point:
    content = body.content
    after = point._replace(head=body_digest(entry.body), epoch=body.epoch)
    if isinstance(content, Membership):
        return after._replace(committee=content.committee)
    if isinstance(content, OuterStep):
        return after._replace(version=content.version, clock=content.clock)
    word = content.word
    after = after._replace(owner_sequence=max(point.owner_sequence, word.owner_sequence))
    if word.kind == "extend":
        return after._replace(target_tokens=max(point.target_tokens, word.value))
    if word.kind == "recover" and word.committee is not None:
        return after._replace(committee=word.committee)
    return after
