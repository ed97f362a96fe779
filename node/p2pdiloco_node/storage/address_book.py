"""Peer records on disk, as the envelopes that their owners signed, so that a swarm finds itself again
without its tracker (scenario B1). Verified again when loaded."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from p2pdiloco import limits
from p2pdiloco.errors import PeerError
from p2pdiloco.ids import PeerId, RunId
from p2pdiloco.wire.codec import Struct, decode, encode
from p2pdiloco.wire.envelope import ANYBODY, open_envelope
from p2pdiloco.wire.messages import PeerRecord
from p2pdiloco.wire.signing import Verify
from p2pdiloco_node.storage.files import Files, make_folder, read_at_most, replace_file

log = logging.getLogger(__name__)
RECORD_BYTES_MAX = 1024
FILE_BYTES_MAX = limits.peers_max * (RECORD_BYTES_MAX + 8) + 16


class KeptPeers(Struct, frozen=True):
    records: Annotated[
        tuple[Annotated[bytes, Meta(max_length=RECORD_BYTES_MAX)], ...], Meta(max_length=limits.peers_max)
    ]


class DiskAddressBook:
    """Implements ports.AddressBook. Thread-safe; at most `limits.peers_max` peers, the one that was heard
    of longest ago is forgotten first."""

    def __init__(self, path: Path, run: RunId, verify: Verify, files: Files | None = None) -> None:
        """Reads `path`; a damaged file or record is skipped with a log line. Raises: OperatorError."""
        self._path = path
        self._run = run
        self._verify = verify
        self._files = files or Files()
        self._lock = threading.Lock()
        self._peers: dict[PeerId, tuple[PeerRecord, bytes]] = {}
        self._changed = False
        make_folder(self._files, path.parent)
        self._load()

    def get(self, peer: PeerId) -> PeerRecord | None:
        found = self._peers.get(peer)
        return found[0] if found else None

    def records(self) -> dict[PeerId, bytes]:
        """Every peer's sealed record, to give to others and to restore the rules' view of peers."""
        with self._lock:
            return {peer: sealed for peer, (_, sealed) in self._peers.items()}

    def remember(self, sealed: bytes) -> PeerRecord | None:
        """The record if it is news, else None. About 0.1 ms.

        Raises:
            PeerError: it is not a record that its sender signed.
        """
        if len(sealed) > RECORD_BYTES_MAX:
            raise PeerError("TOO_BIG", f"a peer record of {len(sealed)} bytes")
        opened = open_envelope(sealed, self._verify, run=self._run, me=ANYBODY)
        record = opened.message
        if not isinstance(record, PeerRecord):
            raise PeerError("MALFORMED", "not a peer record")
        with self._lock:
            known = self._peers.pop(opened.sender, None)
            newer = known is None or record.issued > known[0].issued
            if newer or known is None:
                self._changed = True
                self._peers[opened.sender] = (record, sealed)
            else:
                self._peers[opened.sender] = known  # at the end: heard of just now
            if len(self._peers) > limits.peers_max:
                del self._peers[next(iter(self._peers))]
        return record if newer else None

    def flush(self) -> None:
        """Durable when it returns. Raises: OperatorError."""
        with self._lock:
            if not self._changed:
                return
            self._changed = False
            kept = KeptPeers(tuple(sealed for _, sealed in self._peers.values()))
        try:
            replace_file(self._files, self._path, encode(kept))
        except BaseException:
            self._changed = True
            raise

    def _load(self) -> None:
        if not self._path.exists():
            return
        data = read_at_most(self._path, FILE_BYTES_MAX + 1)
        try:
            kept = decode(data, KeptPeers, bytes_max=FILE_BYTES_MAX)
        except PeerError as error:
            log.warning("the list of peers %s is damaged (%s); peers are asked for again", self._path, error)
            return
        skipped = 0
        for sealed in kept.records:
            try:
                self.remember(sealed)
            except PeerError:
                skipped += 1
        if skipped:
            log.warning("%d records of peers in %s are not valid and were skipped", skipped, self._path)
        self._changed = False
