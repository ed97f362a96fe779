"""A node in a container has the container's memory, not the machine's."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from p2pdiloco_node.training import machine
from p2pdiloco_node.training.machine import this_machine
from p2pdiloco_node.training.ram import Ram, ram

MIB = 2**20


def group(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def v2(limit: str, used: int, cached: int = 0) -> dict[str, str]:
    stat = f"anon {used - cached}\nfile {cached}\ninactive_file {cached}\n"
    return {"memory.max": limit + "\n", "memory.current": f"{used}\n", "memory.stat": stat}


def own(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "own"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_without_a_limit_it_is_the_machine_s(tmp_path: Path) -> None:
    group(tmp_path / "groups", v2("max", 10 * MIB))
    found = ram(tmp_path / "groups", own(tmp_path, "0::/"))
    assert found.total == psutil.virtual_memory().total
    assert ram(tmp_path / "none", tmp_path / "none").total == found.total


def test_a_container_s_limit_counts_and_cached_files_are_free(tmp_path: Path) -> None:
    group(tmp_path / "groups", v2(str(40 * MIB), 30 * MIB, cached=10 * MIB))
    assert ram(tmp_path / "groups", own(tmp_path, "0::/")) == Ram(40 * MIB, 20 * MIB)
    # A path that is not to be seen from inside.
    assert ram(tmp_path / "groups", own(tmp_path, "0::/docker/abc")) == Ram(40 * MIB, 20 * MIB)


def test_the_least_of_all_groups_around_counts(tmp_path: Path) -> None:
    groups = tmp_path / "groups"
    group(groups / "user.slice", v2(str(30 * MIB), 25 * MIB))
    group(groups / "user.slice/mine.service", v2(str(50 * MIB), 5 * MIB))
    assert ram(groups, own(tmp_path, "0::/user.slice/mine.service")) == Ram(30 * MIB, 5 * MIB)
    group(groups / "user.slice", v2(str(30 * MIB), 31 * MIB))
    assert ram(groups, own(tmp_path, "0::/user.slice/mine.service")).free == 0


def test_version_1_says_it_in_other_files(tmp_path: Path) -> None:
    def v1(limit: int) -> dict[str, str]:
        return {
            "memory.limit_in_bytes": str(limit),
            "memory.usage_in_bytes": str(20 * MIB),
            "memory.stat": f"cache 1\ntotal_inactive_file {5 * MIB}\n",
        }

    group(tmp_path / "groups/memory/docker/abc", v1(25 * MIB))
    lines = ("3:cpu,cpuacct:/docker/abc", "2:memory:/docker/abc", "nonsense")
    assert ram(tmp_path / "groups", own(tmp_path, *lines)) == Ram(25 * MIB, 10 * MIB)
    group(tmp_path / "groups/memory/docker/abc", v1(2**63 - 4096))
    assert ram(tmp_path / "groups", own(tmp_path, *lines)).total == psutil.virtual_memory().total


def test_the_plan_s_machine_has_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "ram", lambda: Ram(40 * MIB, 20 * MIB))
    assert this_machine("cpu", tmp_path).ram_bytes == 20 * MIB
