"""The run log's things: committee, bodies of three kinds, certificates, entries (protocol.md 3)."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated

from msgspec import Meta

from p2pdiloco import limits
from p2pdiloco.ids import NO_DIGEST, Digest, PeerId, RunId, tagged_digest
from p2pdiloco.wire.codec import Struct, decode, encode

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Bytes32 = Annotated[bytes, Meta(min_length=32, max_length=32)]
Signature = Annotated[bytes, Meta(min_length=64, max_length=64)]
Share = Annotated[float, Meta(ge=0)]


@lru_cache(maxsize=256)
def _members(witness: bytes, voters: tuple[bytes, ...]) -> tuple[PeerId, ...]:
    """Asked for at every event of every node: remembered."""
    seat = () if witness == NO_DIGEST else (PeerId(witness),)
    return seat + tuple(PeerId(v) for v in voters)


class Committee(Struct, frozen=True):
    """Who may certify the next entry. `voters`: training voters in order of admission.

    `witness` is NO_DIGEST while the witness has no seat.
    """

    witness: Bytes32
    voters: Annotated[tuple[Bytes32, ...], Meta(max_length=7)]

    @property
    def members(self) -> tuple[PeerId, ...]:
        return _members(self.witness, self.voters)

    @property
    def size(self) -> int:
        return len(self.voters) + (self.witness != NO_DIGEST)

    @property
    def quorum(self) -> int:
        """A majority of the members."""
        return self.size // 2 + 1

    def aggregator_of(self, term: int) -> PeerId:
        """The only one who can lead `term` (protocol.md 4): nothing to grind, nothing to tie."""
        if not self.voters:
            return PeerId(self.witness)
        return PeerId(self.voters[term % len(self.voters)])


@lru_cache(maxsize=256)
def committee_digest(committee: Committee) -> Digest:
    return tagged_digest("committee", encode(committee))


class Contribution(Struct, frozen=True):
    """One delta in an outer step. Floats are float32 values, declared by the aggregator."""

    delta: Bytes32
    peer: Bytes32
    base_version: Count
    sequence: Count
    steps: Count
    tokens: Count  # c_i: after the caps of protocol.md 8
    norm: Share  # L2 norm of the decoded delta
    staleness: Share  # rounds on the token clock
    weight: Share  # w_i = c_i * decay(staleness)
    clip: Share  # factor applied to the delta, <= 1
    key: Bytes32  # the peer's public key, and its signature over delta_statement: the log proves itself,
    signature: Signature  # so a voter or follower that never saw the header can still check it


class Refused(Struct, frozen=True):
    """A delta that the log turns away for good (TOO_LATE); signed facts as in Contribution."""

    delta: Bytes32
    peer: Bytes32
    base_version: Count
    sequence: Count
    steps: Count
    reason: Annotated[str, Meta(max_length=32)]
    key: Bytes32
    signature: Signature


class Left(Struct, frozen=True):
    peer: Bytes32
    goodbye: Bytes32  # digest of its signed goodbye


class Scalars(Struct, frozen=True):
    """The declared scalars of an outer step, each a float32 value (algorithm.md 4, 5)."""

    weight_sum: Share
    rho: Share
    mu_r: Share
    momentum_gain: Share  # (1 - mu_r) / (1 - mu)
    eta: Share


class OuterStep(Struct, frozen=True, tag="outer_step"):
    """Content of the entry that makes `version`; `clock` and `t_full` hold after it."""

    version: Count
    fragment: Count
    contributions: Annotated[
        tuple[Contribution, ...], Meta(min_length=1, max_length=limits.contributions_max)
    ]
    refused: Annotated[tuple[Refused, ...], Meta(max_length=limits.refused_max)]
    left: Annotated[tuple[Left, ...], Meta(max_length=limits.refused_max)]
    scalars: Scalars
    clock: Count
    t_full: Count
    state_root: Bytes32


class Membership(Struct, frozen=True, tag="membership"):
    """Content of the entry that changes the committee."""

    committee: Committee
    state_root: Bytes32


class OwnerWord(Struct, frozen=True):
    """What the owner signs: never the index at which it will stand, so that a word can wait for its turn.

    `finish` with sequence 0 and an empty signature is warranted by the RunSpec's targets instead. `recover`
    waits for nobody: its entry is certified by the owner alone (`is_recovery`), which signs all of it.
    """

    kind: Annotated[str, Meta(pattern="^(pause|resume|extend|finish|revoke|recover)$")]
    owner_sequence: Count
    value: Count  # extend: the new target in tokens; else 0
    peer: Annotated[bytes, Meta(max_length=32)]  # revoke: whom; else empty
    signature: Annotated[bytes, Meta(max_length=64)]  # recover: empty
    committee: Committee | None = None  # recover: who certifies what follows; else None

    def statement(self, run: RunId, epoch: int) -> bytes:
        words = [run, epoch, self.owner_sequence, self.kind, self.value, self.peer]
        return b"p2pdiloco/v1/owner\0" + encode(words)


FINISH = OwnerWord("finish", 0, 0, b"", b"")  # warranted by the RunSpec's targets


class OwnerEntry(Struct, frozen=True, tag="owner"):
    word: OwnerWord
    state_root: Bytes32


Content = OuterStep | Membership | OwnerEntry


class Body(Struct, frozen=True):
    """No term, no author: the same content proposed again after a failover is the same body."""

    run: Bytes32
    epoch: Count
    index: Count
    previous: Bytes32
    committee: Bytes32  # digest of the committee that governs this index
    content: OuterStep | Membership | OwnerEntry


class AckSignature(Struct, frozen=True):
    key: Bytes32
    signature: Signature


class Certificate(Struct, frozen=True):
    """Acks of one term from a majority of the committee that they name; of a recovery, the owner's ack."""

    committee: Bytes32
    term: Count
    last: bool
    acks: Annotated[tuple[AckSignature, ...], Meta(min_length=1, max_length=7)]


class Entry(Struct, frozen=True):
    """A certified body, as bytes so that its digest is of what came."""

    body: Annotated[bytes, Meta(max_length=limits.body_bytes_max)]
    certificate: Certificate


@lru_cache(maxsize=512)
def open_body(data: bytes) -> Body:
    """Raises: PeerError MALFORMED or TOO_BIG."""
    return decode(data, Body, bytes_max=limits.body_bytes_max)


@lru_cache(maxsize=512)
def body_digest(data: bytes) -> Digest:
    return tagged_digest("body", data)


def changes_committee(content: Content) -> bool:
    """Whether another committee governs the index behind this content."""
    recovers = isinstance(content, OwnerEntry) and content.word.kind == "recover"
    return recovers or isinstance(content, Membership)


def is_recovery(entry: Entry, owner_key: bytes) -> bool:
    """Whether the owner began an epoch with this entry: its ack, over the whole body, is the certificate.

    Signatures were checked when the entry was opened (`wire.envelope.verify_entry`).
    """
    body, certificate = open_body(entry.body), entry.certificate
    content = body.content
    if not isinstance(content, OwnerEntry) or content.word.kind != "recover":
        return False
    committee = content.word.committee
    return (
        committee is not None
        and body.epoch > 0
        and body.committee == certificate.committee == committee_digest(committee)
        and [ack.key for ack in certificate.acks] == [owner_key]
    )


def genesis_digest(run: RunId) -> Digest:
    """`previous` of the first entry: the RunSpec stands at index 0."""
    return tagged_digest("genesis", run)


def state_root(params_root: bytes, momentum_root: bytes, rules_digest: bytes) -> Digest:
    """What an entry commits to: everything that a snapshot holds (protocol.md 3)."""
    return tagged_digest("state", params_root, momentum_root, rules_digest)
