"""Orders. The driver performs them in the order given, and nothing after a `Save...` starts before it is
durable: written before said. Orders that start long work say which event ends it.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from p2pdiloco.ids import Digest, PeerId
from p2pdiloco.wire.codec import Struct
from p2pdiloco.wire.log import Bytes32, Count, Entry, OuterStep
from p2pdiloco.wire.messages import DeltaHeader, LastAck, Message, SnapshotOffer


class VoterRecord(Struct, frozen=True):
    """The one durable record of a voter (protocol.md 3)."""

    term: Count
    ack_index: Count  # 0: none yet
    ack_committee: Bytes32  # digest of the committee that the last ack named
    ack: LastAck | None
    epoch: Count = 0  # newest that the owner began, as far as this voter knows: none below is voted in


class Settled(StrEnum):
    """How the log settles a delta of our own (algorithm.md 6)."""

    LISTED = "LISTED"  # remove from in flight; error feedback stays subtracted
    PASSED_OVER = "PASSED_OVER"  # remove; content back into the error feedback, once
    REFUSED = "REFUSED"  # remove; content dropped
    NOT_FINITE = "NOT_FINITE"  # remove; theta <- anchor <- G; error feedback and pending cleared
    TOO_LATE = "TOO_LATE"  # remove, progress kept; content dropped


class SaveRecord(msgspec.Struct, frozen=True):
    """Make the voter's record durable before anything that follows."""

    record: VoterRecord


class SaveEntries(msgspec.Struct, frozen=True):
    """Append certified entries to the log file, durable before anything that follows."""

    entries: tuple[Entry, ...]


class CutLog(msgspec.Struct, frozen=True):
    """The owner's recovery left these entries behind: drop those after `index`, states and snapshots first.

    Durable before anything that follows. Where the state here is beyond `index`, a FetchSnapshot follows.
    """

    index: int


class EnterEpoch(msgspec.Struct, frozen=True):
    """Envelopes say this epoch from here on; what still waits was said in another and is dropped."""

    epoch: int


class Send(msgspec.Struct, frozen=True):
    """Seal and send. Loss is nobody's fault; the rules say everything again that matters."""

    peer: PeerId
    message: Message


class RememberPeer(msgspec.Struct, frozen=True):
    """A verified peer record (its envelope): keep it in the address book."""

    peer: PeerId
    sealed: bytes


class UploadDelta(msgspec.Struct, frozen=True):
    """Put the blob of an own delta to a voter. Ends in DeltaUploaded or DeltaNotUploaded."""

    peer: PeerId
    delta: Digest
    size: int


class FetchDelta(msgspec.Struct, frozen=True):
    """Get a listed or announced delta from one of `donors` (tried in order, resumable), check it.

    Ends in DeltaArrived or DeltaNotFetched.
    """

    header: DeltaHeader | None  # None: only its digest is known, from the log
    delta: Digest
    size_max: int
    donors: tuple[PeerId, ...]


class AllowDelta(msgspec.Struct, frozen=True):
    """The header is noted: `sender` may put this blob here. Ends in DeltaArrived when it did.

    Kept on disk with the blob, so that a restart finds what it HAS (`Restored.held`).
    """

    header: DeltaHeader
    sender: PeerId
    key: bytes  # the sender's public key


class RevealDelta(msgspec.Struct, frozen=True):
    """A majority of voters has the header: the blob may be served to anyone (commit before reveal)."""

    delta: Digest


class DropDelta(msgspec.Struct, frozen=True):
    """No longer needed by the rules (the archive may keep it)."""

    delta: Digest


class PrepareOuterStep(msgspec.Struct, frozen=True):
    """Compute this step on the certified state at `base_index`; keep the arrays under `ticket`.

    Ends in OuterStepPrepared or OuterStepNotPrepared. Only the declared scalars, weights and clips of
    `step` are used; its state_root is ignored.
    """

    ticket: Digest
    base_index: int
    step: OuterStep


class InstallEntry(msgspec.Struct, frozen=True):
    """The entry at `index` is certified: make it the state.

    `ticket` names the prepared arrays for an outer step and is None for the other kinds, which leave the
    arrays alone. `rules` is the encoded rules state after it.
    """

    index: int
    version: int
    ticket: Digest | None
    rules: bytes
    step: OuterStep | None


class TakeSnapshot(msgspec.Struct, frozen=True):
    """Write the state at `index` as a snapshot, in the background. Ends in SnapshotTaken."""

    index: int
    version: int


class FetchSnapshot(msgspec.Struct, frozen=True):
    """Fetch the chunks from `donors`, verify, install as state. Ends in SnapshotFetched or -NotFetched."""

    offer: SnapshotOffer
    version: int
    donors: tuple[PeerId, ...]


class SettleDelta(msgspec.Struct, frozen=True):
    """An own delta is settled: adjust in flight and error feedback. Comes before its AdoptState."""

    delta: Digest
    how: Settled


class AdoptState(msgspec.Struct, frozen=True):
    """Give the trainer the certified state: anchor <- G - sum(in_flight) (algorithm.md 3).

    `reset`: theta <- anchor <- G, progress and in flight discarded, moments warmed up (long absence).
    """

    version: int
    clock: int  # tokens, for the learning rate
    target_tokens: int  # where the learning rate ends; the owner may have extended the run
    last_sequence: int  # of the last own delta that the log knows: the next one is above it
    reset: bool


class AllowPasses(msgspec.Struct, frozen=True):
    """Deltas the trainer may finish before it prolongs its pass; why no more (algorithm.md 3)."""

    allowed: int
    why: str
    prolong: bool = True  # False: a pass ends at its length as always, and no other begins


class EvaluateState(msgspec.Struct, frozen=True):
    """This node is chosen to evaluate the certified state just installed; reports to the tracker."""

    version: int
    index: int
    state_root: Digest


class Say(msgspec.Struct, frozen=True):
    """Something a person may want to know: for log and page. `kind` is a word, `text` one sentence."""

    kind: str
    text: str


class RunEnded(msgspec.Struct, frozen=True):
    """The certified `finish` entry is installed: stop training, keep the model."""

    version: int


class LeaveDone(msgspec.Struct, frozen=True):
    """The goodbye is said and the seat handed over as far as possible: the process may end."""


Action = (
    SaveRecord
    | SaveEntries
    | CutLog
    | EnterEpoch
    | Send
    | RememberPeer
    | UploadDelta
    | FetchDelta
    | AllowDelta
    | RevealDelta
    | DropDelta
    | PrepareOuterStep
    | InstallEntry
    | TakeSnapshot
    | FetchSnapshot
    | SettleDelta
    | AdoptState
    | AllowPasses
    | EvaluateState
    | Say
    | RunEnded
    | LeaveDone
)
