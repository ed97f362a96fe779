"""The nouns that peers exchange. Each travels in an envelope that names its kind.

Field order is the wire order; a change of any field is a new protocol version (docs/spec/wire.md).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from p2pdiloco import limits
from p2pdiloco.wire.codec import Struct
from p2pdiloco.wire.log import Bytes32, Count, Entry, OwnerWord, Share, Signature

Text = Annotated[str, Meta(max_length=256)]
Name = Annotated[str, Meta(max_length=limits.name_chars_max)]


class Outcome(StrEnum):
    """What became of a delta (protocol.md 5). Receipts inform; only the log settles (algorithm.md 6)."""

    NOTED = "NOTED"  # the header is kept; send the blob
    HELD = "HELD"  # the blob is checked and held
    ACCEPTED = "ACCEPTED"
    STALE = "STALE"
    TOO_LATE = "TOO_LATE"
    TOO_EARLY = "TOO_EARLY"
    DUPLICATE = "DUPLICATE"
    BAD_SIGNATURE = "BAD_SIGNATURE"
    BAD_SHAPE = "BAD_SHAPE"
    NOT_FINITE = "NOT_FINITE"
    TOO_BIG = "TOO_BIG"
    OUTLIER = "OUTLIER"
    RATE_LIMITED = "RATE_LIMITED"
    NOT_ADMITTED = "NOT_ADMITTED"
    WRONG_RUN = "WRONG_RUN"
    RUN_OVER = "RUN_OVER"


class DeltaHeader(Struct, frozen=True):
    """Announces a delta; signed by its sender through the envelope. Reaches a majority before the blob."""

    delta: Bytes32
    size: Annotated[int, Meta(ge=1, le=limits.blob_bytes_max)]  # bytes of the blob
    codec: Annotated[str, Meta(max_length=16)]
    fragment: Count
    base_version: Count  # the anchor's version when the pass began
    sequence: Annotated[int, Meta(ge=1, le=2**53)]  # this peer's deltas, from 1
    steps: Annotated[int, Meta(ge=1, le=2**40)]  # inner steps
    data_first: Count  # the node's data cursor at the start of the pass, in sequences
    data_count: Count  # sequences used
    loss: Share  # mean training loss of the pass, nats per token; informs, never enters a weight
    signature: Signature  # over delta_statement: what the log repeats


class DeltaReceipt(Struct, frozen=True):
    delta: Bytes32
    outcome: Outcome
    detail: Text
    weight: Share


class Have(Struct, frozen=True):
    """This voter holds these deltas, checked."""

    deltas: Annotated[tuple[Bytes32, ...], Meta(max_length=limits.heartbeat_have_max)]


class Heartbeat(Struct, frozen=True):
    """Sent to the committee by everybody, and by voters to those they heard from."""

    index: Count  # certified and applied
    head: Bytes32  # body digest at that index
    term: Count  # own term; 0 for those who do not vote
    leads: bool  # the sender leads `term`
    boot_seen: Count  # highest boot counter seen from the receiver
    term_seen: Count  # highest own term that the receiver has shown, and
    ack_seen: Count  # highest index that it has acked: a restored disk forgets them
    have: Annotated[tuple[Bytes32, ...], Meta(max_length=limits.heartbeat_have_max)]
    willing: bool  # may be given a seat


class Head(Struct, frozen=True):
    """The newest entry that the sender has applied, for anybody who asks; no message of the protocol: the
    rules ignore it, so whoever passes it on makes nobody look alive, and takes no seat from anybody.
    """

    index: Count  # certified and applied
    head: Bytes32  # body digest at that index
    term: Count  # own term; 0 for those who do not vote


class Proposal(Struct, frozen=True):
    term: Count
    body: Annotated[bytes, Meta(max_length=limits.body_bytes_max)]
    last: bool
    signature: Signature  # over proposal_statement, by the envelope's sender


class Ack(Struct, frozen=True):
    committee: Bytes32
    term: Count
    index: Count
    body: Bytes32
    last: bool
    signature: Signature  # over ack_statement, by the envelope's sender


class PreVote(Struct, frozen=True):
    """Would you move to `term`? (protocol.md 4)"""

    committee: Bytes32
    term: Count
    index: Count


class PreVoteAnswer(Struct, frozen=True):
    committee: Bytes32
    term: Count
    granted: bool
    own_term: Count
    index: Count


class RequestVotes(Struct, frozen=True):
    """The aggregator of `term` asks for the votes of those who have not sent them."""

    committee: Bytes32
    term: Count
    index: Count


class LastAck(Struct, frozen=True):
    """A voter's last ack, with the proposal it answered, so that it can be proposed again."""

    term: Count
    body: Annotated[bytes, Meta(max_length=limits.body_bytes_max)]
    last: bool
    proposer_key: Bytes32
    proposal_signature: Signature


class Vote(Struct, frozen=True):
    committee: Bytes32
    term: Count
    index: Count  # certified
    last_ack: LastAck | None


class NewerTerm(Struct, frozen=True):
    term: Count


class EntriesWanted(Struct, frozen=True):
    first: Count


class Entries(Struct, frozen=True):
    """Certified entries in a row, the first at the index that its body names; `head` is the sender's."""

    entries: Annotated[tuple[Entry, ...], Meta(max_length=limits.entries_per_message_max)]
    head: Count


class SnapshotWanted(Struct, frozen=True):
    pass


class SnapshotOffer(Struct, frozen=True):
    """A snapshot that the sender serves: it hashes to the state root of the certified entry at `index`."""

    index: Count
    params: Annotated[tuple[Bytes32, ...], Meta(max_length=limits.array_items_max)]  # chunk digests
    momentum: Annotated[tuple[Bytes32, ...], Meta(max_length=limits.array_items_max)]
    rules: Annotated[bytes, Meta(max_length=limits.message_bytes_max)]  # encoded rules state


class Goodbye(Struct, frozen=True):
    reason: Text


class PeerRecord(Struct, frozen=True):
    """How to reach a peer, signed by itself through the envelope: IP literals only."""

    hosts: Annotated[tuple[Annotated[str, Meta(max_length=45)], ...], Meta(max_length=4)]
    port: Annotated[int, Meta(ge=0, le=65535)]  # 0: outbound only
    name: Name
    role: Annotated[str, Meta(pattern="^(node|witness)$")]
    issued: Count  # a counter of the sender; the higher one holds


class Peers(Struct, frozen=True):
    """Peer records passed on as the envelopes that their owners signed."""

    records: Annotated[tuple[Annotated[bytes, Meta(max_length=1024)], ...], Meta(max_length=256)]


class NodeReport(Struct, frozen=True):
    """What a node says of itself, for the page. Never enters a weight."""

    state: Annotated[str, Meta(max_length=16)]  # joining, syncing, training, waiting, paused, leaving
    why: Text
    version: Count
    inner_step: Count  # within the pass
    inner_steps: Count  # of the pass in all, as far as it is known
    loss: Share  # of the last pass; 0 while there is none
    tokens_per_s: Share
    device: Annotated[str, Meta(max_length=64)]
    last_outcome: Annotated[str, Meta(max_length=32)]
    bytes_up: Count
    bytes_down: Count
    longest_inner_gap_s: Share
    build: Annotated[str, Meta(max_length=32)]


class SetLoss(Struct, frozen=True):
    """Of one evaluation set."""

    loss: Share  # mean, nats per token
    tokens: Count  # over which


class EvalReport(Struct, frozen=True):
    """Held-out losses of a certified state, and what it writes, by a node chosen for that version."""

    version: Count
    state_root: Bytes32
    sets: Annotated[tuple[SetLoss, ...], Meta(min_length=1, max_length=16)]  # the RunSpec's first ones
    samples: Annotated[
        tuple[Annotated[str, Meta(max_length=limits.sample_chars_max)], ...], Meta(max_length=4)
    ] = ()  # continuations of the RunSpec's prompts, in their order; none where they cannot be written


class Announce(Struct, frozen=True):
    """A node tells the tracker that it is there (BitTorrent's word)."""

    record: Annotated[bytes, Meta(max_length=1024)]  # envelope of a PeerRecord
    state: Annotated[str, Meta(max_length=16)]
    clock_unix_s: Share  # only to tell the owner of a wrong clock


class StateShown(Struct, frozen=True):
    """How far its sender is, for whoever asks; like `Head` no message of the protocol.

    Sealed by whoever shows it and with the asker's own number in it, so that nobody speaks for one that is
    gone. That it is so, the log proves.
    """

    nonce: Bytes32  # the asker's
    epoch: Count
    index: Count  # applied
    head: Bytes32  # body digest at that index
    params: Bytes32  # root
    momentum: Bytes32
    term: Count
    votes: bool  # False: its disk was restored from a copy, and it may have a seat only to lose it


class OwnerWordMessage(Struct, frozen=True):
    """The owner's signed word, carried to the committee by anybody."""

    word: OwnerWord


Message = (
    DeltaHeader
    | DeltaReceipt
    | Have
    | Heartbeat
    | Head
    | Proposal
    | Ack
    | PreVote
    | PreVoteAnswer
    | RequestVotes
    | Vote
    | NewerTerm
    | EntriesWanted
    | Entries
    | SnapshotWanted
    | SnapshotOffer
    | Goodbye
    | PeerRecord
    | Peers
    | NodeReport
    | EvalReport
    | Announce
    | StateShown
    | OwnerWordMessage
)

KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in Message.__args__}
# Said to anybody, and meant to be passed on; every other kind names its receiver (wire/envelope.py).
PASSED_ON: frozenset[type[Message]] = frozenset({PeerRecord, Head, StateShown})
# What is said within one epoch of the log and means nothing in another. All other kinds prove themselves, or
# have nothing to do with the log; by them a node of an older epoch, or one that has just joined, catches up.
OF_AN_EPOCH: frozenset[type[Message]] = frozenset(
    {
        DeltaHeader,
        DeltaReceipt,
        Have,
        Heartbeat,
        Proposal,
        Ack,
        PreVote,
        PreVoteAnswer,
        RequestVotes,
        Vote,
        NewerTerm,
    }
)
