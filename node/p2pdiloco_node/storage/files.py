"""Files that survive a crash: old or new, never mixed.

The order is the whole art: temporary file in the same folder, write, fsync, rename, fsync of the folder.
After a failed fsync the kernel may have dropped the pages and call the next fsync fine, so that file is
lost: it is removed, and a caller that tries again writes a new one. Every call that durability depends on
goes through `Files`, so that tests can fail or end the process at each of them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from time import sleep
from typing import TypeVar

from p2pdiloco.errors import OperatorError
from p2pdiloco.exit_codes import FILES, RESOURCES

T = TypeVar("T")
Bytes = bytes | memoryview
TEMPORARY = ".tmp"
LOCK = ".lock"  # in a folder on NFS and the like, which lock only what is opened for writing
LOOK_AGAIN_S = 0.01  # what is left is mostly removed within this time
OF_A_FOLDER = os.O_RDONLY | os.O_DIRECTORY


class Files:
    """The operating system's calls, each able to fail."""

    def create(self, path: Path, mode: int = 0o600) -> int:
        """A new, empty file; an old one of that name is a left-over and is emptied."""
        return os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, mode)

    def open_append(self, path: Path) -> int:
        return os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC, 0o600)

    def write(self, fd: int, data: Bytes) -> None:
        """All of `data`."""
        view = memoryview(data).cast("B")
        while view:
            view = view[os.write(fd, view) :]

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def rename(self, source: Path, target: Path) -> None:
        source.replace(target)

    def truncate(self, path: Path, size: int) -> None:
        os.truncate(path, size)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def make_folder(self, path: Path) -> None:
        path.mkdir(mode=0o700, exist_ok=True)

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def write_new(files: Files, path: Path, parts: Iterable[Bytes]) -> None:
    """Write a file whose name nobody reads yet, durable but for its name.

    Raises: OperatorError; the file is gone then.
    """

    def write() -> None:
        fd = files.create(path)
        try:
            for part in parts:
                files.write(fd, part)
            files.fsync(fd)
        finally:
            os.close(fd)

    try:
        guarded(write, path)
    except OperatorError:
        with suppress(OSError):
            files.remove(path)
        raise


def replace_file(files: Files, path: Path, *parts: Bytes) -> None:
    """Replace or create `path` atomically; durable when the call returns.

    Raises: OperatorError; `path` holds what it held before.
    """
    replace_file_by(files, path, parts)


def replace_file_by(files: Files, path: Path, parts: Iterable[Bytes]) -> None:
    """The same with parts that are made while the file is written."""
    temporary = path.with_name(path.name + TEMPORARY)
    write_new(files, temporary, parts)

    def rename() -> None:
        files.rename(temporary, path)
        files.sync_folder(path.parent)

    guarded(rename, path)


def make_folder(files: Files, path: Path) -> None:
    """Create a folder and its parents, durably. Raises: OperatorError."""
    if path.is_dir():
        return
    if not path.parent.is_dir():
        make_folder(files, path.parent)

    def make() -> None:
        files.make_folder(path)
        files.sync_folder(path.parent)

    guarded(make, path)


def read_at_most(path: Path, bytes_max: int) -> bytes:
    """The file, or its first `bytes_max` bytes. Raises: OperatorError."""

    def read() -> bytes:
        with path.open("rb") as file:
            return file.read(bytes_max)

    return guarded(read, path)


def remove_files(files: Files, *paths: Path) -> None:
    """Remove what is there; what cannot be removed stays. Never durable: it may be back after a crash."""
    for path in paths:
        with suppress(OSError):
            files.remove(path)


def guarded(work: Callable[[], T], path: Path) -> T:
    """Run file work; an OSError becomes the sentence that says what to do. Raises: OperatorError."""
    try:
        return work()
    except OSError as error:
        raise operator_error(error, path) from error


def operator_error(error: OSError, path: Path) -> OperatorError:
    """What a failed file call means to the person at this machine."""
    folder = path if path.is_dir() else path.parent
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return OperatorError(
                f"The disk with {folder} is full ({_free(folder)} free): make room there and start again; "
                "nothing that was said to be saved is lost.",
                exit_code=RESOURCES,
            )
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return OperatorError(
                f"{path} cannot be written or read ({error.strerror}): give this user the right to, or name "
                "another folder with --data-dir.",
                exit_code=FILES,
            )
        case errno.ENOTDIR | errno.EEXIST:
            return OperatorError(
                f"{path} cannot be a folder, because a file has that name or is on the way to it: name a "
                "folder, or move the file away.",
                exit_code=FILES,
            )
        case errno.EMFILE | errno.ENFILE:
            return OperatorError(
                f"No more files may be open ({error.strerror}): raise the limit with ulimit -n 4096.",
                exit_code=RESOURCES,
            )
        case _:
            return OperatorError(
                f"{path} failed ({error.strerror or error}): check that disk; what was saved before is kept.",
                exit_code=RESOURCES,
            )


def _free(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free / 2**20:.0f} MiB"
    except OSError:
        return "unknown"


def lock_folder(folder: Path) -> int | None:
    """`folder`, made if it is not there, locked and open until it is closed; None: another process has it.

    Whoever has it may remove it: then the next one gets a new folder, not the lock of one that is gone. Who
    only removes what is left there (`lock_left`) is waited for.

    Raises: OSError.
    """
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        path, flags = folder, OF_A_FOLDER
        try:
            try:
                fd = _locked(path, flags, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno != errno.EBADF:
                    raise
                path, flags = folder / LOCK, os.O_RDWR | os.O_CREAT
                fd = _locked(path, flags, fcntl.LOCK_EX)
            if fd is None:
                shared = _locked(path, flags, fcntl.LOCK_SH)
                if shared is None:
                    return None
                os.close(shared)
                sleep(LOOK_AGAIN_S)
                continue
        except FileNotFoundError:
            continue  # whoever had it was just done with it
        if _is_still(fd, path):
            return fd
        os.close(fd)


def lock_left(folder: Path) -> int | None:
    """A folder that no living process has, for whoever removes it; open until it is closed. None: leave it.

    Several may have it at once. Where folders themselves cannot be locked, what is left is nobody's to judge.

    Raises: OSError.
    """
    if (folder / LOCK).exists():
        return None
    fd = _locked(folder, OF_A_FOLDER, fcntl.LOCK_SH)
    if fd is None or _is_still(fd, folder):
        return fd
    os.close(fd)
    return None


def _locked(path: Path, flags: int, how: int) -> int | None:
    """None: another process has it. Raises: OSError."""
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return fd


def _is_still(fd: int, path: Path) -> bool:
    """Whether what is open is what has this name now."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False
