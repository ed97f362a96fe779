"""One small value kept in two files, both durable before a save returns.

For what must never be forgotten: a voter that falls back to its last record but one could vote twice
(protocol.md 3). So a single damaged file costs nothing, and a crash between the two leaves a newer first
copy, which is only ever a value that nobody was told yet. Each copy: tag, SHA-256 of the rest, generation
(8 bytes), payload.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from p2pdiloco.errors import OperatorError
from p2pdiloco.limits import message_bytes_max
from p2pdiloco_node.storage.files import Files, read_at_most, replace_file

log = logging.getLogger(__name__)
TAG = b"p2pdiloco record 1\n"
HEAD_BYTES = len(TAG) + 32 + 8


class TwinFile:
    """`path` and `path` + ".copy". One writer at a time."""

    def __init__(self, files: Files, path: Path) -> None:
        self._files = files
        self._paths = (path, path.with_name(path.name + ".copy"))
        self._generation = -1  # of the last save; unknown before the first load

    def save(self, payload: bytes) -> None:
        """Durable in both copies when it returns. Raises: OperatorError."""
        assert len(payload) <= message_bytes_max
        if self._generation < 0:
            self.load()
        self._generation += 1
        rest = self._generation.to_bytes(8, "big") + payload
        for path in self._paths:
            replace_file(self._files, path, TAG, hashlib.sha256(rest).digest(), rest)

    def load(self) -> bytes | None:
        """The newest undamaged copy; None if there never was one. A lost or damaged twin is written again.

        Raises: OperatorError if there are copies and all are damaged.
        """
        found = [self._read(path) for path in self._paths]
        good = [value for value in found if value is not None]
        if not good:
            present = [path for path in self._paths if path.exists()]
            if not present:
                self._generation = 0
                return None
            raise OperatorError(
                f"{' and '.join(str(p) for p in present)} are damaged. Without them this node could "
                "contradict what it has signed: put them back from a backup no older than its last run, or "
                "give the identity up by starting with a new --data-dir."
            )
        self._generation, payload = max(good)
        if len(good) < len(found) or good[0] != good[1]:
            log.warning("one copy of %s was missing, older or damaged; it is written again", self._paths[0])
            self.save(payload)
        return payload

    def _read(self, path: Path) -> tuple[int, bytes] | None:
        if not path.exists():
            return None
        data = read_at_most(path, HEAD_BYTES + message_bytes_max + 1)
        rest = data[len(TAG) + 32 :]
        if not data.startswith(TAG) or len(rest) < 8 or len(data) > HEAD_BYTES + message_bytes_max:
            return None
        if hashlib.sha256(rest).digest() != data[len(TAG) : len(TAG) + 32]:
            return None
        return int.from_bytes(rest[:8], "big"), rest[8:]
