"""Which saved moments are whole: the data first, then a manifest with their digest, then the older ones go.

Only AdamW's moments are kept here. Params need no copy: after a restart theta <- anchor <- G - sum(in_flight)
(protocol.md 7), and both come from the certified state and the contributor's record.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from p2pdiloco.errors import PeerError
from p2pdiloco.ids import digest_of
from p2pdiloco.wire.codec import Struct, decode, encode
from p2pdiloco.wire.log import Bytes32, Count
from p2pdiloco_node.training.contributor import WriteDurably
from p2pdiloco_node.training.frames import Saved

log = logging.getLogger(__name__)

KEPT = 2  # the newest and the one before
READ_BYTES = 1 << 20
MANIFEST_BYTES_MAX = 1024


class Manifest(Struct, frozen=True):
    file: Annotated[str, Meta(pattern=r"^moments\.\d+$")]
    size: Count  # bytes
    digest: Bytes32


class MomentsCheckpoints:
    """`moments.N` and `manifest.N` in one folder, which exists and is this run's alone."""

    def __init__(self, folder: Path, write_durably: WriteDurably) -> None:
        self._folder = folder
        self._write = write_durably
        self._last = max((self._number(p) for p in folder.iterdir()), default=0)

    def next_path(self) -> Path:
        """Where the trainer writes the next one."""
        self._last += 1
        return self._folder / f"moments.{self._last}"

    def commit(self, saved: Saved) -> None:
        """The trainer has written and synced it: from here on it counts. Raises: OperatorError."""
        path = Path(saved.path)
        listed = encode(Manifest(path.name, saved.size, saved.digest))
        self._write(self._folder / f"manifest.{self._number(path)}", digest_of(listed) + listed)
        kept = sorted((self._number(p) for p in self._folder.glob("manifest.*")), reverse=True)[:KEPT]
        for old in self._folder.iterdir():
            # Above the oldest kept there may be one that the trainer is just writing.
            if self._number(old) < min(kept):
                old.unlink(missing_ok=True)

    def newest(self) -> Path | None:
        """The newest whole one; damaged ones are skipped with a log line. Reads it: not on the event loop."""
        for manifest in sorted(self._folder.glob("manifest.*"), key=self._number, reverse=True):
            path = self._checked(manifest)
            if path is not None:
                return path
            log.warning("the checkpoint %s is damaged and is skipped for the one before.", manifest)
        return None

    def forget(self) -> None:
        """After a long absence moments are worth nothing."""
        for path in sorted(self._folder.iterdir()):
            if self._number(path):
                path.unlink(missing_ok=True)

    def _checked(self, path: Path) -> Path | None:
        try:
            with path.open("rb") as file:
                data = file.read(MANIFEST_BYTES_MAX)
            manifest = decode(data[32:], Manifest)
            if digest_of(data[32:]) != data[:32]:
                return None
            moments = self._folder / manifest.file
            digest = hashlib.sha256()
            with moments.open("rb") as file:
                while part := file.read(READ_BYTES):
                    digest.update(part)
        except (OSError, PeerError):
            return None
        return moments if digest.digest() == manifest.digest else None

    @staticmethod
    def _number(path: Path) -> int:
        kind, _, number = path.name.partition(".")
        return int(number) if kind in {"moments", "manifest"} and number.isdecimal() else 0
