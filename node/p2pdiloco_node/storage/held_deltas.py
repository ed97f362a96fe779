"""The headers of deltas held here, on disk beside their blobs: a voter that said HAVE has it after a restart.

One small file per delta, written before the rules hear of the delta and so before anybody hears HAVE. The
blob alone would not do: who sent it and what was signed about it is in the header (protocol.md 3).
"""

from __future__ import annotations

import logging
from pathlib import Path

from p2pdiloco import limits
from p2pdiloco.errors import PeerError
from p2pdiloco.ids import Digest, PeerId, digest_of
from p2pdiloco.protocol.context import HeldDelta
from p2pdiloco.wire.codec import Struct, decode, encode
from p2pdiloco.wire.log import Bytes32
from p2pdiloco.wire.messages import DeltaHeader
from p2pdiloco_node.ports import BlobStore
from p2pdiloco_node.storage.files import Files, make_folder, read_at_most, remove_files, replace_file

log = logging.getLogger(__name__)
FILE_BYTES_MAX = 4 * limits.KIB


class _Kept(Struct, frozen=True):
    header: DeltaHeader
    sender: Bytes32
    key: Bytes32
    norm: float


class HeldDeltas:
    """Implements driver.Shelf. Used from one thread at a time."""

    def __init__(self, folder: Path, files: Files | None = None) -> None:
        """Raises: OperatorError."""
        self._folder = folder
        self._files = files or Files()
        make_folder(self._files, folder)

    def keep(self, held: HeldDelta) -> None:
        """Durable when it returns. Raises: OperatorError."""
        data = encode(_Kept(held.header, held.sender, held.key, held.norm))
        replace_file(self._files, self._folder / held.header.delta.hex(), digest_of(data), data)

    def drop(self, delta: Digest) -> None:
        remove_files(self._files, self._folder / delta.hex())

    def load(self, blobs: BlobStore) -> tuple[HeldDelta, ...]:
        """Those whose blobs are here too; what is damaged or has lost its blob is removed."""
        found = []
        for path in sorted(self._folder.iterdir()):
            held = self._read(path)
            if held is not None and blobs.has(Digest(held.header.delta)):
                found.append(held)
            else:
                remove_files(self._files, path)
        return tuple(found)

    def _read(self, path: Path) -> HeldDelta | None:
        data = read_at_most(path, FILE_BYTES_MAX)
        try:
            if digest_of(data[32:]) != data[:32]:
                raise PeerError("MALFORMED", "wrong digest")
            kept = decode(data[32:], _Kept)
        except PeerError as error:
            log.warning(
                "what is known of the delta %s is damaged (%s); it is offered again", path.name[:8], error
            )
            return None
        return HeldDelta(kept.header, PeerId(kept.sender), kept.key, kept.norm)
