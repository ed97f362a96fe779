"""A virtual disk: what a crash leaves, what it forgets, and how it fails.

Every write has two stages, as on a real disk: *written* (the process sees it) and *synced* (a crash
leaves it). Writes that the rules call durable are synced at once, unless the world plants a driver
that forgets to (`forgets`); the state files lag behind the journal by design.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from p2pdiloco import limits
from p2pdiloco.ids import Digest
from p2pdiloco.protocol.actions import VoterRecord
from p2pdiloco.protocol.context import HeldDelta
from p2pdiloco.sim.tiny_run import Array
from p2pdiloco.wire.log import Entry, open_body
from p2pdiloco.wire.messages import DeltaHeader, SnapshotOffer


class DiskFull(Exception):
    """Nothing more can be written until there is room again."""


class StateFiles(msgspec.Struct, frozen=True):
    """The certified state at `index`, arrays shared and never written to."""

    index: int
    version: int
    params: Array
    momentum: Array
    rules: bytes


class OwnWork(NamedTuple):
    """The contributor's one record (protocol.md 7), replaced as a whole."""

    sequence: int
    cursor: int
    adopted_version: int  # what the own work stands on
    in_flight: tuple[DeltaHeader, ...]
    feedback: dict[str, Array] | None  # the error feedback's arrays


class Image(NamedTuple):
    """All that is on the disk at one moment; every part is immutable, so keeping one costs nothing."""

    boot: int
    record: VoterRecord | None
    entries: tuple[Entry, ...]
    state: StateFiles
    own: OwnWork
    blobs: dict[Digest, bytes]
    held: dict[Digest, HeldDelta]
    snapshots: tuple[tuple[SnapshotOffer, StateFiles], ...]


NO_WORK = OwnWork(0, 0, 0, (), None)


class Disk:
    """One machine's disk. Attributes are what the running process sees."""

    def __init__(self, genesis: StateFiles, forgets: frozenset[str] = frozenset()) -> None:
        self.genesis = genesis
        self.forgets = forgets  # of "record", "entries": written but never synced before what follows
        self.full = False
        self.boot = 0
        self.record: VoterRecord | None = None
        self.entries: list[Entry] = []
        self.state = genesis
        self.own = NO_WORK
        self.blobs: dict[Digest, bytes] = {}
        self.held: dict[Digest, HeldDelta] = {}
        self.snapshots: tuple[tuple[SnapshotOffer, StateFiles], ...] = ()
        self._record_synced: VoterRecord | None = None
        self._entries_synced = 0
        self._state_synced = genesis

    def _room(self) -> None:
        if self.full:
            raise DiskFull

    def count_boot(self) -> int:
        self._room()
        self.boot += 1
        return self.boot

    def save_record(self, record: VoterRecord) -> None:
        self._room()
        self.record = record
        if "record" not in self.forgets:
            self._record_synced = record

    def save_entries(self, entries: tuple[Entry, ...]) -> None:
        """Append in a row. Raises: AssertionError if they do not follow what is here."""
        self._room()
        for entry in entries:
            assert open_body(entry.body).index == len(self.entries) + 1, "a gap in the journal"
            self.entries.append(entry)
        if "entries" not in self.forgets:
            self._entries_synced = len(self.entries)

    def cut(self, index: int) -> None:
        """Drop the entries after `index`, and first the states and snapshots of what they made."""
        self._room()
        self.snapshots = tuple(kept for kept in self.snapshots if kept[0].index <= index)
        older = self.snapshots[-1][1] if self.snapshots else self.genesis
        if self._state_synced.index > index:
            self._state_synced = older
        if self.state.index > index:
            self.state = self._state_synced
        del self.entries[index:]
        if "entries" not in self.forgets:
            self._entries_synced = min(self._entries_synced, index)

    def put_blob(self, delta: Digest, data: bytes) -> None:
        self._room()
        self.blobs[delta] = data

    def write_state(self, state: StateFiles) -> None:
        """Written; durable after `sync`."""
        if not self.full:
            self.state = state

    def sync_state(self) -> None:
        """The state files reach the platter; they never overtake the journal, which is synced first."""
        if not self.full and self.state.index <= self.durable_index:
            self._state_synced = self.state

    @property
    def durable_record(self) -> VoterRecord | None:
        return self._record_synced

    @property
    def durable_index(self) -> int:
        """The certified index that a crash would leave."""
        return self._entries_synced

    def keep_snapshot(self, offer: SnapshotOffer, state: StateFiles) -> None:
        """A snapshot is whole or not there; the newest ones stay."""
        kept = [kept for kept in self.snapshots if kept[0].index != offer.index] + [(offer, state)]
        self.snapshots = tuple(sorted(kept, key=lambda k: k[0].index)[-limits.snapshots_kept :])

    def install_snapshot(self, offer: SnapshotOffer, state: StateFiles) -> None:
        """A fetched snapshot is the state, durably, and may be served."""
        self.state = self._state_synced = state
        self.keep_snapshot(offer, state)

    def crash(self) -> None:
        """Forget what was not synced."""
        self.record = self._record_synced
        del self.entries[self._entries_synced :]
        self.state = self._state_synced

    def newest_state(self) -> StateFiles:
        """What a start finds: the newest state that is not after the log's last entry."""
        index = len(self.entries)
        if self.state.index <= index:
            return self.state
        older = [state for offer, state in self.snapshots if offer.index <= index]
        return older[-1] if older else self.genesis

    def image(self) -> Image:
        return Image(
            self.boot, self._record_synced, tuple(self.entries[: self._entries_synced]), self._state_synced,
            self.own, dict(self.blobs), dict(self.held), self.snapshots,
        )  # fmt: skip

    def restore(self, image: Image) -> None:
        """An old image of the whole disk is put back (protocol.md 3, what is promised)."""
        self.boot, self.record, self.state, self.own = image.boot, image.record, image.state, image.own
        self.entries = list(image.entries)
        self.blobs, self.held, self.snapshots = dict(image.blobs), dict(image.held), image.snapshots
        self._record_synced, self._entries_synced = self.record, len(self.entries)
        self._state_synced = self.state
