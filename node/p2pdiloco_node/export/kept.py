"""A run as it lies on this disk: a run's DIR, what `demo --keep` kept, or a node's data folder. Read only.

The daemon that it belongs to may be running: files that are replaced meanwhile are whole before and after.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError, PeerError, TransportError
from p2pdiloco.ids import Digest, RunId, digest_of, short
from p2pdiloco.run_spec import RunSpec, open_run_spec
from p2pdiloco.status.read_model import Credit, EvalPoint
from p2pdiloco.wire.codec import decode
from p2pdiloco.wire.messages import SnapshotOffer
from p2pdiloco.wire.signing import verify_ed25519
from p2pdiloco_node.config import parse_join
from p2pdiloco_node.export.certified import KeptArrays
from p2pdiloco_node.export.chain import Entries, entries_in
from p2pdiloco_node.export.facts import Evaluation, Heard
from p2pdiloco_node.ports import Purpose
from p2pdiloco_node.storage.files import guarded, read_at_most
from p2pdiloco_node.storage.run_folder import (
    BLOBS,
    HISTORY,
    JOURNAL,
    LINK,
    LOG,
    RUN,
    RUNS,
    SNAPSHOTS,
    SPEC,
    STATE,
    WITNESS,
)
from p2pdiloco_node.storage.state_files import MANIFEST, MANIFEST_BYTES_MAX, KeptSnapshot, Manifest


class Kept(NamedTuple):
    """Where the parts of a kept run lie."""

    base: Path  # with the RunSpec
    own: Path  # with journal, blobs, snapshots and state of whoever kept it
    blobs: tuple[Path, ...]  # folders of blobs, in the store's layout or flat

    @property
    def spec(self) -> Path:
        return self.base / SPEC

    @property
    def log(self) -> Path:
        return self.own / JOURNAL / LOG

    @property
    def history(self) -> Path:
        return self.base / HISTORY

    @property
    def is_served(self) -> bool:
        """Whether it is a run's own folder, with a tracker's witness in it."""
        return self.own != self.base


def locate(folder: Path) -> Kept:
    """Raises: OperatorError: no run is kept there, or more than one."""
    if not folder.exists():
        raise OperatorError(f"There is no folder {folder}.")
    base = _chosen(folder, lambda place: _kept(place) is not None)
    found = _kept(base) if base is not None else None
    if found is None:
        raise OperatorError(
            f"There is no kept run in {folder}: name the folder that `p2pdiloco run new` made and a tracker "
            "served, what `p2pdiloco demo --keep` kept, or a node's data folder."
        )
    return found


def spec_in(path: Path) -> tuple[RunId, RunSpec] | None:
    """The RunSpec in a file, or in a folder that holds one; None where there is none. Nobody need have served
    the run yet.

    Raises: OperatorError: it is damaged, or of another version; or there is more than one.
    """
    if path.is_file():
        return open_spec(path)
    base = _chosen(path, lambda place: (place / SPEC).is_file())
    return open_spec(base / SPEC) if base is not None else None


def _chosen(folder: Path, is_one: Callable[[Path], bool]) -> Path | None:
    """The place in `folder` where the run is: there, in a kept demo, or in a node's data folder."""
    for base in (folder, folder / RUN):
        if is_one(base):
            return base
    runs = {base.name: base for base in sorted(folder.glob(f"{RUNS}/*")) if is_one(base)}
    if len(runs) > 1 and (pinned := _pinned(folder)) in runs:
        return runs[pinned]
    if len(runs) > 1:
        raise OperatorError(
            f"{folder} keeps {len(runs)} runs: name one of them, such as {folder / RUNS / min(runs)}."
        )
    return next(iter(runs.values()), None)


def _kept(base: Path) -> Kept | None:
    own = base / WITNESS if (base / WITNESS / JOURNAL).is_dir() else base
    stores = tuple(own / BLOBS / purpose for purpose in Purpose)
    found = Kept(base, own, (*stores, base / BLOBS))
    return found if found.spec.is_file() and found.log.is_file() else None


def _pinned(folder: Path) -> str:
    try:
        run = parse_join((folder / LINK).read_text()).run
    except (OSError, UnicodeDecodeError, OperatorError):
        return ""
    return run.hex()[:16] if run is not None else ""


def open_spec(path: Path) -> tuple[RunId, RunSpec]:
    """Raises: OperatorError."""
    data = read_at_most(path, limits.run_spec_bytes_max + 1025)
    try:
        return open_run_spec(data, verify_ed25519)
    except PeerError as error:
        raise OperatorError(f"The RunSpec {path} is damaged ({error}): use another copy.") from None


def entries(kept: Kept) -> Entries:
    """The log, up to an entry that is just being written. Raises: OperatorError."""
    with guarded(lambda: kept.log.open("rb"), kept.log) as file:
        return entries_in(file.read, where=str(kept.log))


def offers(kept: Kept) -> list[SnapshotOffer]:
    """Those that are listed as whole; damaged lists are passed over."""
    folder = kept.own / SNAPSHOTS
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        try:
            data = path.read_bytes()
            if digest_of(data[32:]) == data[:32]:
                found.append(decode(data[32:], KeptSnapshot, bytes_max=MANIFEST_BYTES_MAX).offer)
        except (OSError, PeerError):
            continue
    return found


def state_indices(kept: Kept) -> list[int]:
    """Of the state files here, newest first."""
    folder = kept.own / STATE
    names = (path.name for path in folder.iterdir()) if folder.is_dir() else iter(())
    return sorted((int(name) for name in names if name.isdecimal()), reverse=True)


def read_state(kept: Kept, index: int, params: int) -> KeptArrays | None:
    """The state file at `index`, for a model of `params`; None where it is gone, unfinished or damaged.

    What it holds is not believed: the roots are computed anew and compared with the log.
    """
    folder = kept.own / STATE / f"{index:020d}"
    try:
        listed = (folder / MANIFEST).read_bytes()
        manifest = decode(listed[32:], Manifest)
        rules = (folder / "rules").read_bytes()
        if manifest.index != index or manifest.array_bytes != 4 * params:
            return None
        arrays = [np.fromfile(folder / name, "<f4", params + 1) for name in ("params", "momentum")]
    except (OSError, PeerError):
        return None
    if len(rules) > limits.message_bytes_max or any(array.size != params for array in arrays):
        return None
    return KeptArrays(index, arrays[0], arrays[1], rules)


def read_blob(kept: Kept, digest: Digest) -> bytes:
    """Raises: TransportError: no whole copy of it is here."""
    damaged = False
    for path in blob_paths(kept, digest):
        try:
            data = path.read_bytes()
        except OSError:
            continue
        if digest_of(data) == digest:
            return data
        damaged = True
    raise TransportError(f"blob {short(digest)} is {'damaged' if damaged else 'not'} here")


def has_blob(kept: Kept, digest: Digest) -> bool:
    return next(blob_paths(kept, digest), None) is not None


def blob_paths(kept: Kept, digest: Digest) -> Iterator[Path]:
    """Of every copy."""
    name = digest.hex()
    places = (place for base in kept.blobs for place in (base / name[:2] / name, base / name))
    return (place for place in places if place.is_file())


def heard(kept: Kept, version: int) -> Heard:
    """What the tracker's history says of `version`, or of the nearest evaluated one before it."""
    if not kept.history.is_file():
        return Heard()
    try:
        with closing(sqlite3.connect(f"{kept.history.absolute().as_uri()}?mode=ro", uri=True)) as db:
            found = db.execute(
                "SELECT point FROM evaluations WHERE version <= ? ORDER BY version DESC LIMIT 1", (version,)
            ).fetchone()
            rows = db.execute("SELECT point FROM contributions WHERE version <= ?", (version,)).fetchall()
        evaluation = None
        if found is not None:
            point = msgspec.msgpack.decode(found[0], type=EvalPoint)
            evaluation = Evaluation(point.version, point.loss, point.tokens, point.losses)
        earned = [msgspec.msgpack.decode(data, type=Credit) for (data,) in rows]
        names = {credit.peer[:8]: credit.name for credit in earned}
    except (sqlite3.Error, msgspec.MsgspecError, ValueError, TypeError):
        return Heard()  # a card without these is still a card
    return Heard(evaluation, names)
