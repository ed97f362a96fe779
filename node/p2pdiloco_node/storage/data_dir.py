"""The folder of one daemon: who may use it, and where things are."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from p2pdiloco.errors import OperatorError
from p2pdiloco.ids import RunId
from p2pdiloco_node.storage.files import Files, guarded, make_folder
from p2pdiloco_node.storage.run_folder import RUNS


class DataDir:
    """Entering takes the folder for this process; a second daemon on it is refused in one sentence.

    The lock belongs to the process: after kill -9 the next start has it at once.
    """

    def __init__(
        self,
        root: Path,
        files: Files | None = None,
        *,
        otherwise: str = "give this one a folder of its own with --data-dir",
    ) -> None:
        """`otherwise`: what else than stopping the other daemon a person may do."""
        self.root = root
        self._otherwise = otherwise
        self.files = files or Files()
        self._lock = -1

    @property
    def key_path(self) -> Path:
        return self.root / "identity.key"

    def run_folder(self, run: RunId) -> Path:
        """Everything of one run."""
        return self.root / RUNS / run.hex()[:16]

    def __enter__(self) -> Self:
        """Raises: OperatorError if another daemon uses it or it cannot be written."""
        make_folder(self.files, self.root)
        path = self.root / "lock"
        self._lock = guarded(lambda: os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600), path)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(self._lock, 20).decode("ascii", "replace").strip()
            os.close(self._lock)
            self._lock = -1
            raise OperatorError(
                f"Another p2pdiloco daemon (process {holder or 'unknown'}) already uses {self.root}: stop "
                f"it, or {self._otherwise}."
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
