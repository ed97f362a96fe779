"""Ranks of one trainer as a torch.distributed process group: gloo for CPUs and for orders, NCCL for GPUs.

Nothing of it pickles. Every wait for another rank has an end (`collective_s_max`): a rank that hangs makes
the others raise, the launcher ends them all, and the daemon sees a trainer that crashed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from p2pdiloco import limits

Floats = npt.NDArray[np.float32]


class ProcessGroup:
    """This process among the ranks that the launcher started. `Group` (rank_group.py), and orders beside."""

    def __init__(self, device: str, *, seconds: float) -> None:
        """Returns when all ranks have come. `seconds`: the longest wait for another rank, here and later.

        Raises: RuntimeError: one did not come.
        """
        self.device = torch.device(device)
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(self.device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            timeout=timedelta(seconds=seconds),
            device_id=self.device if on_gpu else None,
        )
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        # So much is free on the fullest GPU; None: the ranks are on CPUs.
        self.gpu_bytes = self.least(torch.cuda.mem_get_info(self.device)[0]) if on_gpu else None
        self.beat_s = min(
            seconds / 4, limits.ranks_beat_s_max
        )  # rank 0 says something at least so often: the others wait no longer
        if self.rank:
            # Dropout, where a config asks for it, drops other values on each rank.
            torch.manual_seed(torch.initial_seed() + self.rank)

    def add_up(self, values: Any) -> None:
        dist.all_reduce(values)

    def spread(self, values: Any) -> None:
        dist.broadcast(values, 0)

    def give(self, values: Floats) -> None:
        dist.send(torch.from_numpy(values), 0)

    def take(self, count: int, rank: int) -> Floats:
        values = np.empty(count, np.float32)
        dist.recv(torch.from_numpy(values), rank)
        return values

    def least(self, value: int) -> int:
        """The smallest of all ranks' values; also a barrier."""
        held = torch.tensor(value, dtype=torch.int64)
        dist.all_reduce(held, dist.ReduceOp.MIN)
        return int(held)

    def tell(self, order: bytes) -> None:
        """Rank 0 to all others, each of which is in `hear`."""
        dist.broadcast(torch.tensor(len(order), dtype=torch.int64), 0)
        dist.broadcast(torch.frombuffer(bytearray(order), dtype=torch.uint8), 0)

    def hear(self) -> bytes:
        size = torch.zeros((), dtype=torch.int64)
        dist.broadcast(size, 0)
        order = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(order, 0)
        return bytes(order.numpy())

    def close(self) -> None:
        """In order, when all ranks do."""
        dist.destroy_process_group()


@contextmanager
def reasons_recorded() -> Iterator[None]:
    """What ends this rank is kept for the launcher, which says it to the daemon."""
    try:
        yield
    except Exception as error:
        get_error_handler().record_exception(error)
        raise
