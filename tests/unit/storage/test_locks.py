"""A folder of one process: while it has it, and after it removed it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from p2pdiloco_node.storage import files
from p2pdiloco_node.storage.files import lock_folder


def test_a_folder_is_one_process_s_until_it_is_closed(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    held = lock_folder(folder)
    assert held is not None
    assert lock_folder(folder) is None
    os.close(held)
    again = lock_folder(folder)
    assert again is not None
    os.close(again)


def test_the_lock_of_a_folder_that_was_removed_meanwhile_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is done removes it between the next one's look and its lock: two would be at work."""
    folder = tmp_path / "work"
    flock = files.fcntl.flock
    removed: list[Path] = []

    def late(fd: int, how: int) -> None:
        if not removed:
            removed.append(folder)
            folder.rmdir()
        flock(fd, how)

    monkeypatch.setattr(files.fcntl, "flock", late)
    held = lock_folder(folder)
    assert held is not None
    assert os.path.samestat(os.fstat(held), folder.stat())
    assert lock_folder(folder) is None
    os.close(held)
