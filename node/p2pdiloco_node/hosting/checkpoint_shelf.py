"""The checkpoints that a tracker offers: whole folders as `export` makes them, the newest few, on its disk.

A folder is made under another name and takes its own when it is whole and its list is written; what a crash
left half made is removed at the next start. So whatever has a name here can be downloaded.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.exit_codes import RESOURCES
from p2pdiloco.ids import Digest
from p2pdiloco.status.read_model import Checkpoint, CheckpointFile
from p2pdiloco_node.export.hf_folder import FACTS, Content, write_folder
from p2pdiloco_node.export.sources import room_needed
from p2pdiloco_node.export.weights import Chunk, Written, write_file
from p2pdiloco_node.storage.files import Files, guarded, make_folder
from p2pdiloco_node.transport.downloads import Offered

log = logging.getLogger("p2pdiloco.tracker")
LISTED = "checkpoint.json"  # the list of a folder's files: not one of them
MAKING = "making"
PATH = "checkpoints"  # of the addresses
DTYPE, VALUE_BYTES = "float32", 4  # what the swarm agreed on, bit for bit


@dataclass(frozen=True, slots=True)
class Job:
    """A version to put on the shelf."""

    content: Content
    chunks: Callable[[], Iterator[Chunk]]
    when_unix: float


class _Made(msgspec.Struct):
    """Which entry of the log made it."""

    index: int
    head: str  # hex


class _Facts(msgspec.Struct):
    """What is read of p2pdiloco.json."""

    log: _Made


class _Stopped(OperatorError):
    """The tracker ends: a checkpoint that is half made is given up."""


class CheckpointShelf:
    """`load`, `make` and what they raise belong into a thread, one at a time; the rest answers at once."""

    def __init__(self, folder: Path, kept: int, files: Files | None = None) -> None:
        """`kept`: checkpoints at most; `folder`: of this shelf alone."""
        self._folder = folder
        self._kept = kept
        self._files = files or Files()
        self._stop = threading.Event()
        self._offered: tuple[Checkpoint, ...] = ()
        self._by_name: dict[str, Offered] = {}

    @property
    def offered(self) -> tuple[Checkpoint, ...]:
        """Oldest first."""
        return self._offered

    def find(self, name: str) -> Offered | None:
        """`vN/FILE`."""
        return self._by_name.get(name)

    def stop(self) -> None:
        """Give up what is being made."""
        self._stop.set()

    def load(self, of_log: Callable[[int, Digest], bool]) -> None:
        """What earlier lives left here. Raises: OperatorError.

        `of_log(index, head)`: whether that entry is in the log. What a recovery dropped is not: a life that
        ended in the middle of one has left it here.
        """
        make_folder(self._files, self._folder)
        found = []
        for folder in sorted(guarded(lambda: list(self._folder.iterdir()), self._folder)):
            checkpoint = _listed(folder, of_log)
            if checkpoint is None:
                shutil.rmtree(folder, ignore_errors=True)
            else:
                found.append(checkpoint)
        self._offer(sorted(found, key=lambda c: c.version))

    def make(self, job: Job) -> Checkpoint:
        """Make it and offer it; then the oldest go. Raises: OperatorError; what was offered before still is,
        unless the disk had no room for one more beside it."""
        origin = job.content.origin
        needed = room_needed(origin.spec, VALUE_BYTES, fetched=False)
        if needed > limits.checkpoint_store_bytes_max:
            raise OperatorError(
                f"a checkpoint of {needed / 1e9:,.0f} GB is more than a tracker may offer "
                f"({limits.checkpoint_store_bytes_max / 1e9:,.0f} GB): leave them out with --checkpoints 0."
            )
        making = self._folder / MAKING
        shutil.rmtree(making, ignore_errors=True)
        make_folder(self._files, making)
        # Somebody may have tidied up here while the tracker runs.
        self._offer([c for c in self._offered if (self._folder / f"v{c.version}" / LISTED).is_file()])
        try:
            self._make_room(needed)
            written = write_folder(self._files, making, job.content, job.chunks, self._told).files
            checkpoint = _as_shown(origin.version, job.when_unix, written)
            write_file(self._files, making / LISTED, msgspec.json.encode(checkpoint))
            place = self._folder / f"v{origin.version}"
            shutil.rmtree(place, ignore_errors=True)
            guarded(lambda: self._files.rename(making, place), place)
            guarded(lambda: self._files.sync_folder(self._folder), self._folder)
        except BaseException:
            shutil.rmtree(making, ignore_errors=True)
            raise
        others = [c for c in self._offered if c.version != checkpoint.version]
        self._offer(sorted([*others, checkpoint], key=lambda c: c.version))
        return checkpoint

    def forget_after(self, version: int) -> None:
        """The owner's recovery dropped these versions: others will have their numbers."""
        for checkpoint in [c for c in self._offered if c.version > version]:
            self._drop(checkpoint)

    def _told(self, _values: int) -> None:
        if self._stop.is_set():
            raise _Stopped("the tracker ends")

    def _make_room(self, needed: int) -> None:
        """The oldest go before the new one is there only where both have no room beside each other.

        Raises: OperatorError: the disk is too full, whatever goes.
        """
        free = self._free()
        if needed > free + self._here:
            raise OperatorError(
                f"it needs {needed / 1e6:,.0f} MB in {self._folder}, and {free / 1e6:,.0f} MB are free: make "
                "room there, or leave checkpoints out with --checkpoints 0.",
                RESOURCES,
            )
        while self._offered and not self._fits(needed):
            self._drop(self._offered[0])

    @property
    def _here(self) -> int:
        """Bytes of all that are offered."""
        return sum(checkpoint.bytes for checkpoint in self._offered)

    def _fits(self, needed: int) -> bool:
        return self._here + needed <= limits.checkpoint_store_bytes_max and needed <= self._free()

    def _free(self) -> int:
        return guarded(lambda: shutil.disk_usage(self._folder).free, self._folder)

    def _drop(self, checkpoint: Checkpoint) -> None:
        """No longer offered, then gone; a download that has begun keeps its file."""
        self._offer([c for c in self._offered if c.version != checkpoint.version])
        shutil.rmtree(self._folder / f"v{checkpoint.version}", ignore_errors=True)

    def _offer(self, checkpoints: list[Checkpoint]) -> None:
        """Replaced as a whole: the event loop reads it meanwhile."""
        for old in checkpoints[: -self._kept]:
            shutil.rmtree(self._folder / f"v{old.version}", ignore_errors=True)
        checkpoints = checkpoints[-self._kept :]
        self._by_name = {
            f"v{c.version}/{file.name}": Offered(
                self._folder / f"v{c.version}" / file.name, file.bytes, file.sha256
            )
            for c in checkpoints
            for file in c.files
        }
        self._offered = tuple(checkpoints)


def _as_shown(version: int, when_unix: float, written: tuple[Written, ...]) -> Checkpoint:
    """Weights first: they are what people look for."""
    in_order = sorted(written, key=lambda file: (not file.name.endswith(".safetensors"), file.name))
    files = tuple(
        CheckpointFile(
            name=file.name, path=f"{PATH}/v{version}/{file.name}", bytes=file.size, sha256=file.sha256
        )
        for file in in_order
    )
    return Checkpoint(
        version=version, when_unix=when_unix, loss=None, dtype=DTYPE,
        bytes=sum(file.bytes for file in files), files=files,
    )  # fmt: skip


def _listed(folder: Path, of_log: Callable[[int, Digest], bool]) -> Checkpoint | None:
    """What a folder's list says, if it and every file are there and it is of this log; None else."""
    why = "is unfinished or damaged"
    try:
        checkpoint = msgspec.json.decode((folder / LISTED).read_bytes(), type=Checkpoint)
        whole = folder.name == f"v{checkpoint.version}" and all(
            "/" not in file.name and (folder / file.name).stat().st_size == file.bytes
            for file in checkpoint.files
        )
        made = msgspec.json.decode((folder / FACTS).read_bytes(), type=_Facts).log
        if whole and not of_log(made.index, Digest(bytes.fromhex(made.head))):
            whole, why = False, "is of a version that the log has not, or not any more"
    except (OSError, msgspec.MsgspecError, ValueError):
        whole = False
    if not whole:
        log.warning("the checkpoint in %s %s; it is removed", folder, why)
        return None
    return checkpoint
