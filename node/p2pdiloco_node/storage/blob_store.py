"""Blobs on disk by digest: `PURPOSE/ab/<hex>`, immutable once there; `PURPOSE/parts/<hex>.<size>` before.

A part is hashed while it is written. After a restart its hash is taken up again by reading it, so an
interrupted download goes on at its last byte (which may be lost in a crash: then the hash says so).
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError, TransportError
from p2pdiloco.exit_codes import RESOURCES
from p2pdiloco.ids import DIGEST_BYTES, Digest, digest_of, short
from p2pdiloco_node.ports import Origin, Purpose
from p2pdiloco_node.storage.files import TEMPORARY, Files, guarded, make_folder, remove_files, write_new

log = logging.getLogger(__name__)

BUDGETS: Mapping[Purpose, int] = {
    Purpose.DELTA: limits.delta_store_bytes_max,
    Purpose.SHARD: limits.shard_store_bytes_max,
    Purpose.SNAPSHOT: limits.snapshot_store_bytes_max,
}


class _Part:
    """An unfinished blob; its lock is held while bytes are written or hashed."""

    def __init__(
        self, path: Path, size: int, here: int, purpose: Purpose, origin: Origin | None, now: float
    ) -> None:
        self.path = path
        self.origin = origin  # None: fetched by this node, or left by an earlier life
        self.news_at = now  # of the last bytes
        self.size = size  # bytes of the whole blob
        self.here = here  # bytes written
        self.purpose = purpose
        self.lock = threading.Lock()
        self.fd = -1
        self.hash = hashlib.sha256() if here == 0 else None  # None: to be read again after a restart

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class DiskBlobStore:
    """Implements ports.BlobStore in `root`. Thread-safe: no lock is held while bytes are read or written,
    but for the lock of the one part that they belong to.

    `also`: folders of files named by their hex digest, served as shards and never changed (a run's DIR).
    """

    def __init__(
        self,
        root: Path,
        files: Files | None = None,
        *,
        budgets: Mapping[Purpose, int] = BUDGETS,
        also: Sequence[Path] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises: OperatorError if `root` cannot be written."""
        self._files = files or Files()
        self._root = root
        self._clock = clock
        self._budgets = budgets
        self._lock = threading.Lock()
        self._blobs: dict[Digest, tuple[Purpose, int, Path]] = {}
        self._parts: dict[Digest, _Part] = {}
        self._used = dict.fromkeys(Purpose, 0)
        self._puts = itertools.count()
        for purpose in Purpose:
            make_folder(self._files, root / purpose / "parts")
            guarded(partial(self._find, purpose), root)
        for folder in also:
            for path in sorted(folder.iterdir()) if folder.is_dir() else ():
                if (digest := _digest_in(path.name)) and digest not in self._blobs and path.is_file():
                    self._blobs[digest] = (Purpose.SHARD, path.stat().st_size, path)

    def has(self, digest: Digest) -> bool:
        return digest in self._blobs

    def size(self, digest: Digest) -> int | None:
        found = self._blobs.get(digest)
        return found[1] if found else None

    def purpose(self, digest: Digest) -> Purpose | None:
        found = self._blobs.get(digest)
        return found[0] if found else None

    def path(self, digest: Digest) -> Path | None:
        """Of an immutable file; it may be deleted meanwhile, but never changes."""
        found = self._blobs.get(digest)
        return found[2] if found else None

    def used(self, purpose: Purpose) -> int:
        """Bytes, unfinished blobs counted with their full size."""
        return self._used[purpose]

    def digests(self, purpose: Purpose) -> list[Digest]:
        with self._lock:
            return sorted(d for d, (p, _, _) in self._blobs.items() if p == purpose)

    def unfinished(self, purpose: Purpose) -> list[Digest]:
        """Blobs of which only a part is here."""
        with self._lock:
            return sorted(d for d, part in self._parts.items() if part.purpose == purpose)

    def read(self, digest: Digest) -> bytes:
        """The whole blob, checked: a damaged file is removed, as if it had never been here.

        Raises:
            TransportError: it is not here (any more).
        """
        path = self.path(digest)
        try:
            data = path.read_bytes() if path else None
        except FileNotFoundError:
            data = None
        except OSError as error:
            log.warning("blob %s cannot be read (%s)", short(digest), error)
            data = b""
        if data is None:
            raise TransportError(f"blob {short(digest)} is not here")
        if digest_of(data) != digest:
            log.warning("blob %s was damaged on this disk and is removed", short(digest))
            self.delete(digest)
            raise TransportError(f"blob {short(digest)} was damaged on this disk")
        return data

    def put(self, digest: Digest, data: bytes, purpose: Purpose = Purpose.DELTA) -> None:
        """Durable when it returns. Raises: OperatorError."""
        assert digest_of(data) == digest
        with self._lock:
            if digest in self._blobs:
                return
            self._reserve(purpose, len(data))
        path = self._place(purpose, digest)
        # A name of its own for each call: two threads may put the same bytes at once.
        temporary = self._root / purpose / "parts" / f"{digest.hex()}.{next(self._puts)}{TEMPORARY}"

        def publish() -> None:
            self._files.rename(temporary, path)
            self._files.sync_folder(path.parent)

        try:
            make_folder(self._files, path.parent)
            write_new(self._files, temporary, [data])
            guarded(publish, path)
        except OperatorError:
            with self._lock:
                self._used[purpose] -= len(data)
            raise
        with self._lock:
            if digest in self._blobs:  # two threads put the same bytes: both wrote the same file
                self._used[purpose] -= len(data)
            self._blobs[digest] = (purpose, len(data), path)

    def part_size(self, digest: Digest) -> int:
        part = self._parts.get(digest)
        return part.here if part else 0

    def append_part(
        self,
        digest: Digest,
        offset: int,
        data: bytes,
        size: int,
        purpose: Purpose = Purpose.DELTA,
        origin: Origin | None = None,
    ) -> None:
        """Raises: OperatorError; TransportError if another writer is ahead or says another size, and, with
        `retry_after_s`, if the share of `origin` for unfinished blobs is full."""
        part = self._part(digest, size, purpose, origin)
        with part.lock:
            if self._parts.get(digest) is not part or offset != part.here or part.size != size:
                raise TransportError(f"the part of {short(digest)} is at {part.here} of {part.size} bytes")
            assert offset + len(data) <= size, "more bytes than the blob has"

            def append() -> None:
                if part.fd < 0:
                    part.fd = self._files.open_append(part.path)
                self._files.write(part.fd, data)

            try:
                guarded(partial(self._resume_hash, part), part.path)
                guarded(append, part.path)
            except BaseException:
                self._drop_part(digest, part)  # how much of it was written is not known
                raise
            assert part.hash is not None
            part.hash.update(data)
            part.here += len(data)
            part.news_at = self._clock()

    def finish_part(self, digest: Digest) -> bool:
        """True: it is a blob now, durably. False: wrong bytes, and they are gone. Raises: OperatorError."""
        if digest in self._blobs:
            return True
        part = self._parts.get(digest)
        if part is None:
            return False
        with part.lock:
            if self._parts.get(digest) is not part:
                return digest in self._blobs
            path = self._place(part.purpose, digest)

            def finish() -> None:
                if part.fd < 0:
                    part.fd = self._files.open_append(part.path)
                self._files.fsync(part.fd)
                part.close()
                self._files.rename(part.path, path)
                self._files.sync_folder(path.parent)

            try:
                guarded(partial(self._resume_hash, part), part.path)
                assert part.hash is not None
                if part.here != part.size or part.hash.digest() != digest:
                    self._drop_part(digest, part)
                    return False
                make_folder(self._files, path.parent)
                guarded(finish, path)
            except BaseException:
                self._drop_part(digest, part)
                raise
            with self._lock:
                del self._parts[digest]
                self._blobs[digest] = (part.purpose, part.size, path)
            return True

    def delete(self, digest: Digest) -> None:
        """A blob or part, if it is here; files of `also` stay on disk."""
        with self._lock:
            found = self._blobs.pop(digest, None)
            part = self._parts.get(digest)
            if found and found[2].is_relative_to(self._root):
                self._used[found[0]] -= found[1]
                remove_files(self._files, found[2])
        if part is not None:
            with part.lock:
                if self._parts.get(digest) is part:
                    self._drop_part(digest, part)

    def close(self) -> None:
        for part in list(self._parts.values()):  # a thread of a fetch that was given up may still drop one
            with part.lock:
                part.close()

    def _part(self, digest: Digest, size: int, purpose: Purpose, origin: Origin | None) -> _Part:
        while True:
            with self._lock:
                if digest in self._blobs:
                    raise TransportError(f"blob {short(digest)} is whole")
                part = self._parts.get(digest)
                if part is not None:
                    return part
                gives_way = self._gives_way(purpose, origin)
                if gives_way is None:
                    self._reserve_part(purpose, size, origin)
                    path = self._root / purpose / "parts" / f"{digest.hex()}.{size}"
                    part = _Part(path, size, 0, purpose, origin, self._clock())
                    self._parts[digest] = part
                    return part
            victim, old = gives_way
            with old.lock:
                if self._parts.get(victim) is old:
                    self._drop_part(victim, old)

    def _gives_way(self, purpose: Purpose, origin: Origin | None) -> tuple[Digest, _Part] | None:
        """The part to drop before another one may begin, or None. With the lock held.

        Raises: TransportError if there is no room and every part that could give way has news.
        """
        now = self._clock()
        by_age = sorted(self._parts.items(), key=lambda item: item[1].news_at)
        if by_age and now - by_age[0][1].news_at > limits.blob_part_idle_s_max:
            return by_age[0]
        if origin is None:
            same = [one for one in by_age if one[1].purpose is purpose and one[1].origin is None]
            return same[0] if len(same) >= limits.blob_parts_fetched_max else None
        known, mine = origin.known, origin.peer
        same = [one for one in by_age if one[1].origin is not None and one[1].origin.known is known]
        own = [one for one in same if one[1].origin is not None and one[1].origin.peer == mine]
        if len(own) >= limits.blob_parts_per_peer_max:
            return own[0]
        if len(same) < limits.blob_parts_put_max:
            return None
        if now - same[0][1].news_at > limits.blob_part_spared_s:
            return same[0]
        raise TransportError(f"{len(same)} deltas are on their way here", limits.retry_after_s)

    def _reserve_part(self, purpose: Purpose, size: int, origin: Origin | None) -> None:
        """With the lock held. A store that is full is no news to a sender but a reason to wait."""
        try:
            self._reserve(purpose, size)
        except OperatorError as error:
            if origin is None:
                raise
            log.warning("%s", error)
            raise TransportError("the store of deltas is full", limits.full_store_retry_s) from None

    def _reserve(self, purpose: Purpose, size: int) -> None:
        """With the lock held."""
        if self._used[purpose] + size > self._budgets[purpose]:
            raise OperatorError(
                f"The {purpose}s in {self._root} are at their limit of {self._budgets[purpose]} bytes.",
                exit_code=RESOURCES,
            )
        self._used[purpose] += size

    def _resume_hash(self, part: _Part) -> None:
        if part.hash is None:
            part.hash = hashlib.sha256()
            with part.path.open("rb") as file:
                while data := file.read(limits.io_bytes):
                    part.hash.update(data)

    def _drop_part(self, digest: Digest, part: _Part) -> None:
        """With the part's lock held."""
        part.close()
        with self._lock:
            if self._parts.pop(digest, None) is not None:
                self._used[part.purpose] -= part.size
        remove_files(self._files, part.path)

    def _place(self, purpose: Purpose, digest: Digest) -> Path:
        name = digest.hex()
        return self._root / purpose / name[:2] / name

    def _find(self, purpose: Purpose) -> None:
        """What the last life left here; old parts and temporary files are removed."""
        for folder in sorted(p for p in (self._root / purpose).iterdir() if p.is_dir()):
            for path in sorted(folder.iterdir()):
                name, _, size_text = path.name.partition(".")
                digest = _digest_in(name)
                status = path.stat()
                if digest is None or path.name.endswith(TEMPORARY):
                    remove_files(self._files, path)
                elif folder.name != "parts":
                    self._blobs[digest] = (purpose, status.st_size, path)
                    self._used[purpose] += status.st_size
                elif self._keeps_part(purpose, status, size_text):
                    self._parts[digest] = _Part(
                        path, int(size_text), status.st_size, purpose, None, self._clock()
                    )
                    self._used[purpose] += int(size_text)
                else:
                    remove_files(self._files, path)

    def _keeps_part(self, purpose: Purpose, status: os.stat_result, size_text: str) -> bool:
        return (
            size_text.isdecimal()
            and status.st_size <= int(size_text) <= limits.blob_bytes_max
            and time.time() - status.st_mtime < limits.blob_part_age_s_max
            and sum(p.purpose is purpose for p in self._parts.values()) < limits.blob_parts_fetched_max
        )


def _digest_in(name: str) -> Digest | None:
    try:
        digest = bytes.fromhex(name)
    except ValueError:
        return None
    return Digest(digest) if len(digest) == DIGEST_BYTES and digest.hex() == name else None
