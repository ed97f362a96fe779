"""How many processes one trainer is, on which devices and machines: from the settings to a command. No torch.

One rank is the worker itself. Several are started by the launcher (launch.py), which is torchrun's elastic
agent; whatever ends one of them ends all of them, and the daemon sees a trainer that ended.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.exit_codes import RESOURCES, USAGE
from p2pdiloco_node.config import NodeConfig, parse_host_port
from p2pdiloco_node.training.device import DeviceMissing
from p2pdiloco_node.training.machine import Gpu

PYTHON = (sys.executable, "-P", "-m")
WORKER = (*PYTHON, "p2pdiloco_node.training.trainer_process")
LAUNCHER = (*PYTHON, "p2pdiloco_node.training.launch")
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class Launch(msgspec.Struct, frozen=True):
    """What the launcher is started with, as JSON."""

    devices: tuple[str, ...]  # of this machine's ranks: cpu, cuda:N; one rank may be auto
    folder: str  # of its own, made anew: what the ranks leave of their last words
    nnodes: int = 1  # machines, each with as many ranks
    node_rank: int = 0  # which of them this is; rank 0 is on the first
    rdzv: str = ""  # HOST:PORT on the first machine; empty: all ranks are here, on loopback
    collective_s: float = limits.collective_s_max  # longest wait of a rank for another
    stop_s: float = limits.ranks_stop_s  # ranks that are left get so long to end


class Ranks(NamedTuple):
    """The ranks of this machine, and how many machines there are."""

    devices: tuple[str, ...]
    nnodes: int = 1
    rdzv: str = ""

    @property
    def here(self) -> int:
        return len(self.devices)

    @property
    def all(self) -> int:
        return self.nnodes * self.here

    @property
    def device(self) -> str:
        """As `this_machine` and the worker take it: names separated by commas."""
        return ",".join(self.devices)

    def command(self, folder: Path, node_rank: int = 0) -> Sequence[str]:
        """What is started on a machine; niceness and device follow. `folder`: as in Launch."""
        if self.all == 1:
            return WORKER
        launch = Launch(self.devices, str(folder), self.nnodes, node_rank, self.rdzv)
        return (*LAUNCHER, msgspec.json.encode(launch).decode())


def check_ranks(settings: NodeConfig) -> None:
    """What can be seen without looking at the machine. Raises: OperatorError (usage)."""
    if settings.gpus and settings.ranks > 1:
        raise OperatorError("--gpus and --ranks both say how many processes train: give one of them.", USAGE)
    if settings.gpus and settings.device not in ("auto", "cuda"):
        raise OperatorError(f"--gpus and --device {settings.device} contradict: leave --device out.", USAGE)
    if settings.ranks > 1 and settings.device not in ("auto", "cpu"):
        raise OperatorError(
            f"--ranks are processes on the CPU, and --device is {settings.device}: for several GPUs give "
            "--gpus all, or their numbers.", USAGE,
        )  # fmt: skip
    if settings.gpus not in ("", "all"):
        numbers = settings.gpus.split(",")
        if not all(n.strip().isdecimal() for n in numbers) or len({int(n) for n in numbers}) < len(numbers):
            raise OperatorError(f"--gpus {settings.gpus!r}: give all, or numbers such as 0,1,3.", USAGE)
    if (settings.nnodes > 1) != bool(settings.rdzv):
        raise OperatorError(
            "--nnodes and --rdzv go together: how many machines, and HOST:PORT where their ranks meet.", USAGE
        )
    if settings.rdzv:
        parse_host_port(settings.rdzv, "--rdzv")


def find_ranks(settings: NodeConfig, gpus: Callable[[], list[Gpu]]) -> Ranks:
    """`gpus`: those of this machine, asked only where the settings name some.

    Raises: OperatorError: the settings contradict each other, or there are no such GPUs.
    """
    check_ranks(settings)
    return Ranks(_devices(settings, gpus), settings.nnodes, settings.rdzv)


def _devices(settings: NodeConfig, gpus: Callable[[], list[Gpu]]) -> tuple[str, ...]:
    if settings.ranks > 1:
        return ("cpu",) * settings.ranks
    if not settings.gpus:
        if settings.device.startswith("cuda"):
            place, told = int(settings.device.partition(":")[2] or 0), len(gpus())
            if place >= told:
                raise DeviceMissing(
                    f"--device {settings.device}",
                    f"this machine has {told} NVIDIA GPU(s) that its driver tells of, counted from 0",
                )
        return (settings.device,)
    there = len(gpus())
    if not there:
        raise DeviceMissing(
            f"--gpus {settings.gpus}", "this machine has no NVIDIA GPU that its driver tells of",
            "install its driver, or leave --gpus out and train on the CPU",
        )  # fmt: skip
    numbers = range(there) if settings.gpus == "all" else [int(n) for n in settings.gpus.split(",")]
    for number in numbers:
        if number >= there:
            raise DeviceMissing(
                f"--gpus {settings.gpus}", f"this machine has {there} NVIDIA GPU(s), counted from 0",
                "name those, or give all",
            )  # fmt: skip
    return tuple(f"cuda:{number}" for number in numbers)


def check_parallel(ranks: Ranks, parallel: str) -> None:
    """Raises: OperatorError (usage): there is nothing over which a model could be spread."""
    if parallel != "auto" and ranks.all == 1:
        raise OperatorError(
            f"--parallel {parallel} says how several ranks share a model, and this node has one: give "
            "--gpus, --ranks or --nnodes as well, or leave --parallel out.", USAGE,
        )  # fmt: skip


def check_batch(ranks: Ranks, sequences_per_step: int) -> None:
    """Raises: OperatorError RESOURCES: there are more ranks than sequences in a batch."""
    if ranks.all > sequences_per_step:
        raise OperatorError(
            f"{ranks.all} ranks share the {sequences_per_step} sequences of an inner step of this run: some "
            f"would have nothing to do. Give {sequences_per_step} or fewer (--gpus, --ranks, --nnodes).",
            RESOURCES,
        )
