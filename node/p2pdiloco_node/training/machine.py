"""What this machine has, asked without torch: before anything is downloaded and before there is a trainer."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from p2pdiloco_node.training.ram import ram

NVIDIA_SMI_S_MAX = 10.0  # a driver that is waking up takes some seconds
QUERY = ("--query-gpu=index,name,memory.free,memory.total", "--format=csv,noheader,nounits")
MIB = 1 << 20


class Machine(NamedTuple):
    """Free memory in bytes. `gpu_bytes` None: there is no GPU to train on."""

    gpu_name: str
    gpu_bytes: int | None
    ram_bytes: int
    disk_bytes: int
    folder: str  # where the disk is measured


class Gpu(NamedTuple):
    number: int
    name: str
    free_bytes: int
    total_bytes: int


def this_machine(device: str, folder: Path) -> Machine:
    """Free memory for a trainer on `device` (auto, cpu, cuda, cuda:N) with its data in `folder`.

    Of several devices, separated by commas, the GPU with least free memory counts.

    A GPU that NVIDIA's driver does not tell of counts as none; the trainer, which asks torch, has the last
    word. Blocks for a moment: call it in a thread.
    """
    devices = [one for one in device.split(",") if one != "cpu"]
    found = gpus() if devices else []
    chosen = [gpu for one in devices if (gpu := _chosen(one, found)) is not None]
    return Machine(
        gpu_name=", ".join(dict.fromkeys(gpu.name for gpu in chosen)),
        gpu_bytes=min((gpu.free_bytes for gpu in chosen), default=None),
        ram_bytes=ram().free,
        disk_bytes=free_disk(folder),
        folder=str(folder),
    )


def free_disk(folder: Path) -> int:
    """Bytes that this user may still write to the disk that holds `folder`, whether it exists yet or not."""
    there = next(p for p in (folder, *folder.resolve().parents) if p.exists())
    disk = os.statvfs(there)
    return disk.f_bavail * disk.f_frsize


def gpus(run: Callable[[Sequence[str]], str] | None = None) -> list[Gpu]:
    """NVIDIA's GPUs as `nvidia-smi` tells, those that CUDA_VISIBLE_DEVICES leaves and in its order."""
    try:
        told = (run or _run)(("nvidia-smi", *QUERY))
    except (OSError, subprocess.SubprocessError):
        return []
    found = []
    for row in csv.reader(told.splitlines(), skipinitialspace=True):
        try:
            index, name, free, total = row
            found.append(Gpu(int(index), name, int(free) * MIB, int(total) * MIB))
        except ValueError:
            continue  # a GPU that does not say ("[N/A]"), or a line of warning
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found
    by_index = {str(gpu.number): gpu for gpu in found}
    return [by_index[word.strip()] for word in visible.split(",") if word.strip() in by_index]


def _chosen(device: str, found: list[Gpu]) -> Gpu | None:
    place = int(device.partition(":")[2] or 0)
    return found[place] if place < len(found) else None


def _run(command: Sequence[str]) -> str:
    program = shutil.which(command[0])
    if program is None:
        raise FileNotFoundError(command[0])
    done = subprocess.run(
        [program, *command[1:]], capture_output=True, text=True, timeout=NVIDIA_SMI_S_MAX, check=True
    )
    return done.stdout
