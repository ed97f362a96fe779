"""GPUs as the driver tells of them, without torch."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from p2pdiloco_node.training import machine
from p2pdiloco_node.training.machine import Gpu, free_disk, gpus, this_machine

MIB = 2**20
TOLD = "0, NVIDIA GeForce RTX 3060, 11000, 12288\n1, NVIDIA A100, 40000, 40960\n2, odd, [N/A], [N/A]\n"


def told(_command: Sequence[str]) -> str:
    return TOLD


def test_what_the_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    first, second = gpus(told)
    assert first == Gpu(0, "NVIDIA GeForce RTX 3060", 11000 * MIB, 12288 * MIB)
    assert second.name == "NVIDIA A100"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert gpus(told) == [second, first]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus(told) == []


@pytest.mark.parametrize(
    "error", [FileNotFoundError("nvidia-smi"), subprocess.TimeoutExpired("nvidia-smi", 10)]
)
def test_without_a_driver_there_is_no_gpu(error: Exception) -> None:
    def fails(_command: Sequence[str]) -> str:
        raise error

    assert gpus(fails) == []


def test_the_device_chooses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machine, "_run", told)
    assert this_machine("auto", tmp_path).gpu_bytes == 11000 * MIB
    assert this_machine("cuda:1", tmp_path).gpu_name == "NVIDIA A100"
    assert this_machine("cuda:7", tmp_path).gpu_bytes is None
    here = this_machine("cpu", tmp_path / "not" / "there")
    assert here.gpu_bytes is None
    assert here.ram_bytes > 0
    assert here.disk_bytes == pytest.approx(free_disk(tmp_path), rel=0.1)
