"""A folder of one process: while it has it, and after it removed it."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path

import pytest

from p2pdiloco_node.storage import files
from p2pdiloco_node.storage.files import lock_folder, lock_left
from p2pdiloco_node.storage.scratch import remove_temporary_folders, temporary_folder


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


def test_who_removes_what_is_left_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An export was told that another one makes its folder, while one beside it only cleaned up."""
    folder = tmp_path / "work"
    folder.mkdir()
    left, too = lock_left(folder), lock_left(folder)
    assert left is not None
    assert too is not None
    has_it = [left, too]
    monkeypatch.setattr(files, "sleep", lambda _: os.close(has_it.pop()))
    held = lock_folder(folder)
    assert held is not None
    assert has_it == []
    assert lock_left(folder) is None
    os.close(held)


@pytest.fixture
def nfs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that locks for one alone only what is opened for writing."""
    flock = files.fcntl.flock

    def locks(fd: int, how: int) -> None:
        if how & files.fcntl.LOCK_EX and stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(fd, how)

    monkeypatch.setattr(files.fcntl, "flock", locks)


@pytest.mark.usefixtures("nfs")
def test_where_folders_cannot_be_locked_a_file_in_them_is(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    held = lock_folder(folder)
    assert held is not None
    assert lock_folder(folder) is None
    assert lock_left(folder) is None
    os.close(held)
    assert lock_left(folder) is None, "nobody knows whether it is left"
    again = lock_folder(folder)
    assert again is not None
    os.close(again)


@pytest.mark.usefixtures("nfs")
def test_there_temporary_folders_are_had_as_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`generate` and `demo` ended with a sentence about the disk."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with temporary_folder("generate") as folder:
        remove_temporary_folders()
        assert list(tmp_path.iterdir()) == [folder]
    assert list(tmp_path.iterdir()) == []
