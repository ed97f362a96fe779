"""Facts, in the past tense: the only things that a node's brain ever learns.

Whatever carries a message has opened and verified it (wire/envelope.py); whatever carries numbers has
measured them on this machine. Each piece of long work that an action starts ends in exactly one event.
"""

from __future__ import annotations

import msgspec

from p2pdiloco.ids import Digest, PeerId
from p2pdiloco.wire.messages import DeltaHeader, Message, Outcome, SnapshotOffer


class Started(msgspec.Struct, frozen=True):
    """The driver runs; everything durable was given to the constructor."""


class Ticked(msgspec.Struct, frozen=True):
    """The time that `deadline()` named has come."""


class MessageReceived(msgspec.Struct, frozen=True):
    sender: PeerId
    key: bytes  # the sender's public key
    boot: int  # the sender's boot counter
    message: Message
    sealed: bytes = b""  # the envelope as it came, where it may be passed on (PeerRecord)
    epoch: int = 0  # the sender's, as its envelope says


class PeerMet(msgspec.Struct, frozen=True):
    """An address of `peer` is known: from a tracker, from another peer, or from the life before."""

    peer: PeerId


class MessageNotSent(msgspec.Struct, frozen=True):
    """A message could not be delivered to `peer` (refused, timed out)."""

    peer: PeerId


class DeltaArrived(msgspec.Struct, frozen=True):
    """A delta's blob is stored here and was decoded: the outcome of checking it, and its L2 norm.

    `outcome` is HELD, or BAD_SHAPE, NOT_FINITE, TOO_BIG.
    """

    delta: Digest
    outcome: Outcome
    norm: float


class DeltaNotFetched(msgspec.Struct, frozen=True):
    """No donor gave this blob; it is asked for again by the rules' own timing."""

    delta: Digest
    why: str


class DeltaUploaded(msgspec.Struct, frozen=True):
    """The blob of an own delta reached `peer` (or it had it already)."""

    delta: Digest
    peer: PeerId


class DeltaNotUploaded(msgspec.Struct, frozen=True):
    delta: Digest
    peer: PeerId
    retry_after_s: float
    why: str


class OuterStepPrepared(msgspec.Struct, frozen=True):
    """The arrays of a candidate outer step are computed and waiting under `ticket`."""

    ticket: Digest
    params_root: Digest
    momentum_root: Digest


class OuterStepNotPrepared(msgspec.Struct, frozen=True):
    """It could not be computed here (a blob is gone, the disk failed)."""

    ticket: Digest
    why: str


class SnapshotTaken(msgspec.Struct, frozen=True):
    """The snapshot of the state at `index` is complete on disk and served."""

    offer: SnapshotOffer


class SnapshotFetched(msgspec.Struct, frozen=True):
    """Every chunk of the offer is here, verified, and installed as the state at its index."""

    index: int


class SnapshotNotFetched(msgspec.Struct, frozen=True):
    index: int
    why: str


class PassFinished(msgspec.Struct, frozen=True):
    """An own delta is encoded and durable together with its sequence, cursor and error feedback."""

    header: DeltaHeader


class TrainerNotFinite(msgspec.Struct, frozen=True):
    """A non-finite loss or gradient: the trainer went back to the last adopted state; no delta."""


class GoodbyeWanted(msgspec.Struct, frozen=True):
    """The person or the system asked this node to leave."""

    reason: str


Event = (
    Started
    | Ticked
    | MessageReceived
    | PeerMet
    | MessageNotSent
    | DeltaArrived
    | DeltaNotFetched
    | DeltaUploaded
    | DeltaNotUploaded
    | OuterStepPrepared
    | OuterStepNotPrepared
    | SnapshotTaken
    | SnapshotFetched
    | SnapshotNotFetched
    | PassFinished
    | TrainerNotFinite
    | GoodbyeWanted
)
