"""The voter's record, the boot counter and the certified log on disk (protocol.md 3).

The log is append-only: a tag, then frames of length (4 bytes), the first 8 bytes of the payload's SHA-256,
payload (an encoded `Entry`). A frame that a crash tore off is cut away at the next start. Damage before
the end is something else: the file is kept aside, what stands before it is used, the rest is fetched again.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from p2pdiloco.errors import PeerError
from p2pdiloco.limits import log_frame_bytes_max
from p2pdiloco.protocol.actions import VoterRecord
from p2pdiloco.wire.codec import decode, encode
from p2pdiloco.wire.log import Entry
from p2pdiloco_node.storage.files import Files, guarded, make_folder, replace_file, write_new
from p2pdiloco_node.storage.twin_file import TwinFile

log = logging.getLogger(__name__)
TAG = b"p2pdiloco log 1\n"
FRAME_HEAD_BYTES = 12
COPY_BYTES = 1 << 20


class DiskJournal:
    """Implements ports.Journal in `folder`. One caller at a time; each save is durable when it returns."""

    def __init__(self, folder: Path, files: Files | None = None) -> None:
        self._files = files or Files()
        self._folder = folder
        self._path = folder / "log"
        make_folder(self._files, folder)
        self._record = TwinFile(self._files, folder / "record")
        self._boot = TwinFile(self._files, folder / "boot")
        self._fd = -1
        self._good_bytes = 0  # durable and whole
        self._suspect = False  # after a failed write or fsync nothing behind `_good_bytes` counts
        self._loaded = False
        self.rewrites = 0  # of this life: goes up after each, so who reads bytes knows whether they go on

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def save_record(self, record: VoterRecord) -> None:
        """Raises: OperatorError; then nothing may be said that depends on it."""
        self._record.save(encode(record))

    def load_record(self) -> VoterRecord | None:
        """Raises: OperatorError if both copies are damaged: falling back to an older one could vote twice."""
        data = self._record.load()
        return None if data is None else decode(data, VoterRecord)

    def next_boot(self) -> int:
        """Count a start, durably: the boot counter of this life, from 1. Raises: OperatorError."""
        data = self._boot.load()
        boot = 1 + (0 if data is None else int.from_bytes(data, "big"))
        self._boot.save(boot.to_bytes(8, "big"))
        return boot

    def append_entries(self, entries: Sequence[Entry]) -> None:
        """Raises: OperatorError; the log holds what it held before."""
        assert self._loaded, "the log is read (and mended) before it is written"
        if not entries:
            return
        frames = b"".join(_frame(encode(entry)) for entry in entries)
        if self._suspect:
            self._rewrite()
        self._suspect = True

        def append() -> None:
            if self._fd < 0:
                self._fd = self._files.open_append(self._path)
            self._files.write(self._fd, frames)
            self._files.fsync(self._fd)

        guarded(append, self._path)
        self._suspect = False
        self._good_bytes += len(frames)

    def cut(self, index: int) -> None:
        """Drop the entries after `index`, durably. Raises: OperatorError; the log holds what it held."""
        assert self._loaded, "the log is read (and mended) before it is written"
        good = len(TAG)
        with guarded(lambda: self._path.open("rb"), self._path) as file:
            file.seek(good)
            for payload, _ in zip(frames_of(file.read), range(index), strict=False):
                good += FRAME_HEAD_BYTES + len(payload)
        before, self._good_bytes = self._good_bytes, good
        try:
            self._rewrite()
        except BaseException:
            self._good_bytes = before
            raise

    def load_entries(self) -> list[Entry]:
        """All entries in the order in which they were appended. Raises: OperatorError."""
        self.close()
        self._loaded = True
        if not self._path.exists():
            replace_file(self._files, self._path, TAG)
            self._good_bytes = len(TAG)
            return []
        entries = []
        with guarded(lambda: self._path.open("rb"), self._path) as file:
            size = os.fstat(file.fileno()).st_size
            good = len(TAG) if file.read(len(TAG)) == TAG else 0
            if good:
                for payload in frames_of(file.read):
                    try:
                        entries.append(decode(payload, Entry, bytes_max=log_frame_bytes_max))
                    except PeerError:
                        break
                    good += FRAME_HEAD_BYTES + len(payload)
        self._good_bytes = good
        if good < size:
            self._mend(size)
        return entries

    def _mend(self, size: int) -> None:
        """Keep the file aside, because its end may not be a torn frame, and go on with what is whole."""
        aside = self._path.with_name("log.damaged")
        log.warning(
            "the log %s is whole up to byte %d of %d (an unfinished write, or damage); the rest is cut off "
            "and fetched again from peers; the file as found is kept as %s",
            self._path,
            self._good_bytes,
            size,
            aside.name,
        )
        with suppress(OSError):
            aside.unlink(missing_ok=True)
            os.link(self._path, aside)
        self._rewrite()

    def _rewrite(self) -> None:
        """A new file with what is whole and durable: nothing behind a failed write can be trusted."""
        self.close()
        temporary = self._path.with_name("log.new")

        def copied() -> Iterator[bytes]:
            left = self._good_bytes
            with self._path.open("rb") as file:
                while left and (data := file.read(min(left, COPY_BYTES))):
                    left -= len(data)
                    yield data

        parts = copied() if self._good_bytes else iter([TAG])
        write_new(self._files, temporary, parts)

        def rename() -> None:
            self._files.rename(temporary, self._path)
            self._files.sync_folder(self._folder)

        guarded(rename, self._path)
        self.rewrites += 1
        self._good_bytes = max(self._good_bytes, len(TAG))
        self._suspect = False


def _frame(payload: bytes) -> bytes:
    assert 0 < len(payload) <= log_frame_bytes_max
    return len(payload).to_bytes(4, "big") + hashlib.sha256(payload).digest()[:8] + payload


def next_frame(data: bytes | bytearray, start: int) -> bytes | None:
    """The frame, head and payload, that begins at `start`; None where it has not come whole.

    Raises: PeerError MALFORMED: no frame begins there.
    """
    head = data[start : start + FRAME_HEAD_BYTES]
    if len(head) < FRAME_HEAD_BYTES:
        return None
    length = int.from_bytes(head[:4], "big")
    if not 0 < length <= log_frame_bytes_max:
        raise PeerError("MALFORMED", f"a frame of {length} bytes")
    end = start + FRAME_HEAD_BYTES + length
    if len(data) < end:
        return None
    if hashlib.sha256(data[end - length : end]).digest()[:8] != head[4:]:
        raise PeerError("MALFORMED", "a damaged frame")
    return bytes(data[start:end])


def frames_of(read: Callable[[int], bytes]) -> Generator[bytes, None, bool]:
    """Payloads up to the first frame that is not whole.

    Returns: whether that one is damaged; if not it is torn off, as by a crash or while it is written.
    """
    while len(head := read(FRAME_HEAD_BYTES)) == FRAME_HEAD_BYTES:
        length = int.from_bytes(head[:4], "big")
        if not 0 < length <= log_frame_bytes_max:
            return True
        payload = read(length)
        if len(payload) < length:
            return False
        if hashlib.sha256(payload).digest()[:8] != head[4:]:
            return True
        yield payload
    return False
