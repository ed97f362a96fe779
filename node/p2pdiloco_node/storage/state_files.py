"""The global state on disk: params, momentum and rules state at a log index; and lists of snapshots.

A state is a folder `<index>` with three files and a manifest that is written last and holds their sizes
and digests. The state before stays until the new one was read back. A damaged one is skipped with a log
line (scenarios F1, F2, S11). Arrays are little-endian float32.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError, PeerError
from p2pdiloco.exit_codes import RESOURCES
from p2pdiloco.ids import Digest, digest_of
from p2pdiloco.wire.codec import Struct, decode, encode
from p2pdiloco.wire.log import Bytes32, Count
from p2pdiloco.wire.messages import SnapshotOffer
from p2pdiloco_node.ports import Array
from p2pdiloco_node.storage.files import Files, guarded, make_folder, remove_files, replace_file, write_new

log = logging.getLogger(__name__)
MANIFEST = "manifest"
MANIFEST_BYTES_MAX = limits.message_bytes_max * 2
READ_BYTES = 1 << 22


class Manifest(Struct, frozen=True):
    index: Count
    version: Count
    params: Bytes32  # SHA-256 of each file
    momentum: Bytes32
    rules: Bytes32
    array_bytes: Count


class KeptSnapshot(Struct, frozen=True):
    version: Count
    offer: SnapshotOffer


@dataclass(frozen=True, slots=True)
class KeptState:
    index: int
    version: int
    params: Array  # float32 [params], writable
    momentum: Array
    rules: bytes  # encoded rules state


class StateFiles:
    """One caller at a time."""

    def __init__(self, folder: Path, files: Files | None = None) -> None:
        self._folder = folder
        self._files = files or Files()
        make_folder(self._files, folder)

    def save(self, state: KeptState) -> None:
        """Durable when it returns. Raises: OperatorError; then the states before are all there."""
        folder = self._folder / f"{state.index:020d}"
        params, momentum = _little(state.params), _little(state.momentum)
        manifest = Manifest(
            index=state.index,
            version=state.version,
            params=digest_of(params),
            momentum=digest_of(momentum),
            rules=digest_of(state.rules),
            array_bytes=state.params.nbytes,
        )
        if self._manifest(folder) == manifest and _reads_back(folder, manifest):
            return
        self._remove(folder)
        make_folder(self._files, folder)
        for name, data in (("params", params), ("momentum", momentum), ("rules", state.rules)):
            write_new(self._files, folder / name, [data])
        guarded(lambda: self._files.sync_folder(folder), folder)
        listed = encode(manifest)
        replace_file(self._files, folder / MANIFEST, digest_of(listed), listed)
        if not _reads_back(folder, manifest):
            self._remove(folder)
            raise OperatorError(
                f"{folder} reads back otherwise than it was written: check that disk; the state before is "
                "kept.",
                exit_code=RESOURCES,
            )
        for old in self._folders()[2:]:
            self._remove(old)

    def load(self, params: int, *, index_max: int | None = None) -> KeptState | None:
        """The newest whole state of `params` parameters, not after `index_max`; damaged and unfinished
        ones are skipped."""
        for folder in self._folders():
            if index_max is not None and int(folder.name) > index_max:
                continue
            manifest = self._manifest(folder)
            state = self._read(folder, manifest, params) if manifest else None
            if state is not None:
                return state
            log.warning("the state in %s is unfinished or damaged and is skipped", folder)
        return None

    def cut(self, index: int) -> None:
        """Remove the states after `index`. Raises: OperatorError."""
        for folder in self._folders():
            if int(folder.name) > index:
                self._remove(folder)

    def _folders(self) -> list[Path]:
        """Newest first."""
        found = [p for p in self._folder.iterdir() if p.name.isdecimal() and p.is_dir()]
        return sorted(found, key=lambda p: p.name, reverse=True)

    def _manifest(self, folder: Path) -> Manifest | None:
        try:
            with (folder / MANIFEST).open("rb") as file:
                data = file.read(MANIFEST_BYTES_MAX)
            return decode(data[32:], Manifest) if digest_of(data[32:]) == data[:32] else None
        except (OSError, PeerError):
            return None

    def _read(self, folder: Path, manifest: Manifest, params: int) -> KeptState | None:
        if manifest.array_bytes != 4 * params or folder.name != f"{manifest.index:020d}":
            return None
        arrays: list[Array] = []
        for name, digest in (("params", manifest.params), ("momentum", manifest.momentum)):
            try:
                whole = (folder / name).stat().st_size == manifest.array_bytes
                array = np.fromfile(folder / name, dtype="<f4", count=params)
            except OSError:
                return None
            if not whole or array.size != params or digest_of(array.data) != digest:
                return None
            arrays.append(array)
        try:
            with (folder / "rules").open("rb") as file:
                rules = file.read(limits.message_bytes_max + 1)
        except OSError:
            return None
        if digest_of(rules) != manifest.rules:
            return None
        return KeptState(manifest.index, manifest.version, arrays[0], arrays[1], rules)

    def _remove(self, folder: Path) -> None:
        """The manifest first, and durably: what is left without one is nothing."""
        manifest = folder / MANIFEST
        if manifest.exists():
            guarded(lambda: self._files.remove(manifest), manifest)
            guarded(lambda: self._files.sync_folder(folder), folder)
        shutil.rmtree(folder, ignore_errors=True)


class SnapshotList:
    """Which snapshots are complete here; their chunks are blobs."""

    def __init__(self, folder: Path, files: Files | None = None) -> None:
        self._folder = folder
        self._files = files or Files()
        make_folder(self._files, folder)

    def save(self, snapshot: KeptSnapshot) -> None:
        """Written after its chunks. Raises: OperatorError."""
        data = encode(snapshot)
        replace_file(self._files, self._folder / f"{snapshot.offer.index:020d}", digest_of(data), data)

    def remove(self, index: int) -> None:
        remove_files(self._files, self._folder / f"{index:020d}")

    def load(self) -> list[KeptSnapshot]:
        """Oldest first; damaged ones are skipped with a log line."""
        found = []
        for path in sorted(p for p in self._folder.iterdir() if p.name.isdecimal()):
            try:
                with path.open("rb") as file:
                    data = file.read(MANIFEST_BYTES_MAX)
                if digest_of(data[32:]) != data[:32]:
                    raise PeerError("MALFORMED", "wrong digest")
                found.append(decode(data[32:], KeptSnapshot, bytes_max=MANIFEST_BYTES_MAX))
            except (OSError, PeerError) as error:
                log.warning("the snapshot list %s is damaged (%s) and is skipped", path, error)
        return found


def snapshot_chunks(offer: SnapshotOffer) -> list[Digest]:
    return [Digest(c) for c in (*offer.params, *offer.momentum)]


def _little(array: Array) -> memoryview:
    return np.ascontiguousarray(array, dtype="<f4").data.cast("B")


def _reads_back(folder: Path, manifest: Manifest) -> bool:
    return all(_same(folder / name, getattr(manifest, name)) for name in ("params", "momentum", "rules"))


def _same(path: Path, digest: bytes) -> bool:
    h = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while data := file.read(READ_BYTES):
                h.update(data)
    except OSError:
        return False
    return h.digest() == digest
