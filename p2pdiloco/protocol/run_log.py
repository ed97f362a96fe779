"""The chain of certified entries since genesis, and the committee that governs the next one.

Everybody learns the committee from this chain: index i + 1 is governed by the committee that the entries
up to i define (protocol.md 3). Certificates' signatures are verified when a message is opened; here is
checked that their signers are a majority of the right committee.
"""

from __future__ import annotations

from collections.abc import Iterable

from p2pdiloco.errors import PeerError
from p2pdiloco.ids import Digest, RunId, peer_id_of
from p2pdiloco.run_spec import RunSpec
from p2pdiloco.wire.log import (
    Body,
    Committee,
    Content,
    Entry,
    Membership,
    body_digest,
    committee_digest,
    genesis_digest,
    open_body,
)


class RunLog:
    """Append-only. `index` is the certified index; 0 means genesis alone."""

    def __init__(self, run: RunId, spec: RunSpec, entries: Iterable[Entry] = ()) -> None:
        self.run = run
        self.epoch = 0
        self.committee: Committee = spec.committee.genesis
        self._entries: list[Entry] = []
        self._heads: list[Digest] = [genesis_digest(run)]
        for entry in entries:
            self.append(entry)

    @property
    def index(self) -> int:
        return len(self._entries)

    @property
    def head(self) -> Digest:
        """Body digest of the newest certified entry."""
        return self._heads[-1]

    @property
    def committee_digest(self) -> Digest:
        return committee_digest(self.committee)

    def head_at(self, index: int) -> Digest:
        return self._heads[index]

    def entry(self, index: int) -> Entry:
        return self._entries[index - 1]

    def content(self, index: int) -> Content:
        return open_body(self._entries[index - 1].body).content

    def term_of(self, index: int) -> int:
        """The term in which the entry was certified; 0 for genesis."""
        return self._entries[index - 1].certificate.term if index else 0

    def entries_from(self, first: int, count: int) -> tuple[Entry, ...]:
        return tuple(self._entries[first - 1 : first - 1 + count])

    def follows(self, body: Body) -> bool:
        """True if `body` is a next body of this chain under the governing committee."""
        return (
            body.run == self.run
            and body.epoch == self.epoch
            and body.index == self.index + 1
            and body.previous == self.head
            and body.committee == self.committee_digest
        )

    def append(self, entry: Entry) -> Body:
        """Add the next certified entry.

        Raises: PeerError BAD_CHAIN or BAD_CERTIFICATE.
        """
        body = open_body(entry.body)
        if not self.follows(body):
            raise PeerError("BAD_CHAIN", f"index {body.index} does not follow {self.index}")
        certificate = entry.certificate
        if certificate.committee != body.committee:
            raise PeerError("BAD_CERTIFICATE", "acks name another committee")
        signers = {peer_id_of(ack.key) for ack in certificate.acks}
        if len(signers & set(self.committee.members)) < self.committee.quorum:
            raise PeerError("BAD_CERTIFICATE", f"no majority at index {body.index}")
        self._entries.append(entry)
        self._heads.append(body_digest(entry.body))
        if isinstance(body.content, Membership):
            self.committee = body.content.committee
        return body
