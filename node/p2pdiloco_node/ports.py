"""What the driver needs from the world. Adapters implement these; tests and tools bring their own.

Methods that are not `async` do disk or heavy CPU work: the driver calls them in a thread, never on the
event loop. They may raise OperatorError (disk full, damaged file) or TransportError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from p2pdiloco.ids import Digest, PeerId
from p2pdiloco.protocol.actions import Settled, VoterRecord
from p2pdiloco.wire.log import Entry, OuterStep
from p2pdiloco.wire.messages import DeltaHeader, Message, Outcome, PeerRecord, SnapshotOffer

Array = npt.NDArray[np.float32]
Tell = Callable[[str], None]


def unheard(_: str) -> None:
    """Nobody listens."""


class Purpose(StrEnum):
    """What a blob is for: its budget on disk, and whether it may be served before it is revealed."""

    DELTA = "delta"  # served once revealed (commit before reveal)
    SHARD = "shard"
    SNAPSHOT = "snapshot"


class Origin(NamedTuple):
    """Who puts a blob here."""

    peer: PeerId
    known: bool  # the log knows it: it has a share that strangers cannot take


class BlobStore(Protocol):
    """Bytes on disk by digest. A blob is either whole and verified, or a resumable part, never between.

    Raises OperatorError (disk full, store at its limit) and TransportError (not here, or another writer
    is ahead with this part; with `retry_after_s`: the share for unfinished blobs is full). Safe to use from
    several threads.
    """

    def has(self, digest: Digest) -> bool: ...
    def size(self, digest: Digest) -> int | None: ...
    def read(self, digest: Digest) -> bytes: ...
    def path(self, digest: Digest) -> Path | None: ...
    def purpose(self, digest: Digest) -> Purpose | None: ...
    def put(self, digest: Digest, data: bytes, purpose: Purpose = Purpose.DELTA) -> None: ...
    def part_size(self, digest: Digest) -> int:
        """Bytes of an unfinished blob that are already here."""
        ...

    def append_part(
        self,
        digest: Digest,
        offset: int,
        data: bytes,
        size: int,
        purpose: Purpose = Purpose.DELTA,
        origin: Origin | None = None,
    ) -> None:
        """`size`: of the whole blob. `offset` is the part's size, or the call fails. `origin`: who puts it
        here; None where this node fetches it."""
        ...

    def finish_part(self, digest: Digest) -> bool:
        """Hash the part; True and it is a blob, or False and it is gone."""
        ...

    def delete(self, digest: Digest) -> None: ...


class Journal(Protocol):
    """The voter's record and the log, durable when the call returns."""

    def save_record(self, record: VoterRecord) -> None: ...
    def load_record(self) -> VoterRecord | None: ...
    def append_entries(self, entries: Sequence[Entry]) -> None: ...
    def load_entries(self) -> list[Entry]: ...
    def cut(self, index: int) -> None:
        """Drop the entries after `index`."""
        ...

    def next_boot(self) -> int:
        """Count a start, durably: the boot counter of this life."""
        ...


class CheckedDelta(NamedTuple):
    outcome: Outcome  # HELD or why not
    norm: float


class Roots(NamedTuple):
    params: Digest
    momentum: Digest


class StateKeeper(Protocol):
    """The global state G, M in numpy float32, its prepared successors, and its files."""

    def params(self) -> Array:
        """The certified params now, float32[params]; later installs never write into this array."""
        ...

    def check_delta(
        self, header: DeltaHeader | None, delta: Digest, sender: PeerId | None = None
    ) -> CheckedDelta:
        """`header` and `sender` where they are known: the blob must name them as its origin."""
        ...

    def prepare(self, ticket: Digest, step: OuterStep) -> Roots: ...
    def install(self, index: int, version: int, ticket: Digest | None, rules: bytes) -> None: ...
    def take_snapshot(self, index: int, version: int) -> SnapshotOffer: ...
    def install_snapshot(self, offer: SnapshotOffer, version: int) -> None: ...
    def cut(self, index: int) -> None:
        """Drop state files and snapshots of entries after `index`; a start must never find them."""
        ...


class PassOutcome(NamedTuple):
    """One finished pass, encoded and durable."""

    header: DeltaHeader


class Contributor(Protocol):
    """Own deltas: sequence, cursor, error feedback and in flight, in one durable record (protocol.md 7)."""

    def settle(self, delta: Digest, how: Settled) -> None: ...
    def anchor(self, params: Array) -> Array:
        """G - sum(in_flight)."""
        ...

    def reset(self) -> None:
        """Long absence: in flight, error feedback and pending cleared."""
        ...

    def in_flight(self) -> list[DeltaHeader]: ...


class AddressBook(Protocol):
    """Verified peer records. `get` is a look-up in memory."""

    def get(self, peer: PeerId) -> PeerRecord | None: ...
    def remember(self, sealed: bytes) -> PeerRecord | None:
        """Open, verify and keep; None where a newer one is known. Raises PeerError."""
        ...

    def flush(self) -> None:
        """Make what changed durable."""
        ...


class Transport(Protocol):
    """Messages and blobs to and from peers."""

    async def send(self, peer: PeerId, message: Message) -> None: ...
    def enter_epoch(self, epoch: int) -> None:
        """Seal in this epoch from now on; what waits was said in another and is dropped."""
        ...

    async def upload(self, peer: PeerId, delta: Digest, size: int) -> None: ...
    async def fetch(
        self,
        digest: Digest,
        size_max: int,
        donors: Sequence[PeerId],
        purpose: Purpose = Purpose.DELTA,
        *,
        of_spec: bool = False,
        tell: Tell = unheard,
    ) -> None:
        """Into the blob store, resumable over several donors. `of_spec`: the RunSpec names it.

        `tell` hears in words why a donor did not give it.

        Raises: TransportError: none gave it; OperatorError: the disk; RUN: larger than the RunSpec says.
        """
        ...

    def remember(self, peer: PeerId, sealed: bytes) -> None: ...
