"""A node's data on its disk, put together; and how much of the disk is theirs: what is free, without what the
node's other files will need.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from p2pdiloco import limits
from p2pdiloco_node.data.opened_shards import OpenedShards
from p2pdiloco_node.data.shards import Disk, Shards
from p2pdiloco_node.taking_part.participant import Participant
from p2pdiloco_node.training.data import DataOrder
from p2pdiloco_node.training.machine import free_disk

MEASURED_EVERY_S = 30.0
DATA = ("tokens", "shard")  # folders of what the data take themselves: opened, and blobs


class DataRoom:
    """Called in a thread: bytes that the data may still grow by; negative where they should shrink."""

    def __init__(
        self,
        folder: Path,
        others: int,
        *,
        free: Callable[[Path], int] = free_disk,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`folder`: of the run; `others`: bytes that all its files but the data will take at most."""
        self._folder = folder
        self._others = others
        self._free = free
        self._clock = clock
        self._measured_at = float("-inf")
        self._taken = 0

    def __call__(self) -> int:
        now = self._clock()
        if now - self._measured_at >= MEASURED_EVERY_S:
            self._measured_at, self._taken = now, self._measure()
        to_come = max(0, self._others - self._taken)
        return self._free(self._folder) - to_come - limits.data_disk_reserve_bytes

    def _measure(self) -> int:
        """Bytes that the other files take by now; what vanishes meanwhile is not counted."""
        taken = 0
        for path in self._folder.rglob("*"):
            if not set(path.relative_to(self._folder).parts[:2]).intersection(DATA):
                try:
                    taken += path.stat().st_size if path.is_file() else 0
                except OSError:
                    continue
        return taken


def shards_of(participant: Participant, *, quota: int, others: int, cursor: int) -> Shards:
    """The data of a participant's run on its disk. `quota`, `others`: bytes for the data, and that all other
    files will take at most; `cursor`: where its trainer begins."""
    setting = participant.setting
    data = setting.spec.data
    order = DataOrder(
        setting.run, participant.me, [shard.tokens for shard in data.shards],
        seq_len=setting.spec.model.seq_len, window_shards=data.window_shards,
    )  # fmt: skip
    opened = OpenedShards(setting.folder / "tokens", participant.blobs.read, participant.files)
    return Shards(
        data, order, participant.blobs, opened, participant.run_blobs, participant.telemetry,
        Disk(quota, DataRoom(setting.folder, others)), cursor=cursor,
    )  # fmt: skip
