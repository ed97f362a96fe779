"""RAM that this process may use: the machine's, or less where a control group of Linux has a limit.

A container's limit, or a service's, stands in files of its control group (version 2: `memory.max`; version 1:
`memory.limit_in_bytes`) and in those of the groups around it; whoever goes beyond the least is killed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import psutil

GROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
V1_UNLIMITED = 2**60  # bytes; version 1 writes about 2**63 for no limit


class Ram(NamedTuple):
    """Bytes."""

    total: int
    free: int


def ram(groups: Path = GROUPS, own: Path = OWN) -> Ram:
    """What this process may use in all, and what of it is free. `own`: the file that names its groups."""
    memory = psutil.virtual_memory()
    found = [Ram(memory.total, memory.available), *_limits(groups, own)]
    return Ram(min(one.total for one in found), max(0, min(one.free for one in found)))


def _limits(groups: Path, own: Path) -> Iterator[Ram]:
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return  # no Linux
    for line in lines:
        number, kinds, path = [*line.split(":", 2), "", ""][:3]
        if number == "0":
            names = ("memory.max", "memory.current", "inactive_file")
            root = groups
        elif "memory" in kinds.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            root = groups / "memory"
        else:
            continue
        inside = PurePosixPath(path.lstrip("/"))
        # In a container without a view of its own the path may not be there; the root then is its group.
        for group in (inside, *inside.parents):
            limit = _limit(root / group, *names)
            if limit is not None:
                yield limit


def _limit(group: Path, most: str, used: str, given_back: str) -> Ram | None:
    """None: there is none. Cached files are given back when memory is wanted, so they count as free."""
    try:
        total, in_use = int((group / most).read_text()), int((group / used).read_text())
        stat = dict(line.split(" ", 1) for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None  # "max" is no number
    if total >= V1_UNLIMITED:
        return None
    return Ram(total, total - max(0, in_use - int(stat.get(given_back, "0"))))
