"""Folders that a command needs for as long as it runs; the next command removes what a killed one left.

A model may be gigabytes, and nobody looks for them in the system's temporary folder. Whoever has a folder
has it locked, and kill -9 gives the lock back: a folder that nobody has locked is nobody's.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from p2pdiloco_node.storage.files import guarded, lock_folder, lock_left

OURS = re.compile(r"p2pdiloco-[a-z]+-[0-9a-f]{32}")


@contextmanager
def temporary_folder(kind: str) -> Iterator[Path]:
    """An empty folder of this call alone below the system's temporary one; gone at the end, however it comes.

    `kind`: a word for people who find it. Raises: OperatorError.
    """
    folder = Path(tempfile.gettempdir()) / f"p2pdiloco-{kind}-{secrets.token_hex(16)}"
    fd = guarded(lambda: lock_folder(folder), folder)
    assert fd is not None, "nobody else knows its name"
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(fd)


def remove_temporary_folders() -> None:
    """Those of commands that were killed. What cannot be removed stays."""
    with suppress(OSError):
        place = Path(tempfile.gettempdir())
        remove_unlocked(path for path in place.iterdir() if OURS.fullmatch(path.name))


def remove_unlocked(folders: Iterable[Path]) -> None:
    """The folders of this user that no living process has locked. What cannot be removed stays."""
    for folder in folders:
        with suppress(OSError):
            if folder.lstat().st_uid != os.getuid():
                continue  # everybody may make such a name in a temporary folder
            fd = lock_left(folder)
            if fd is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(fd)
