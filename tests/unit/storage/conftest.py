"""A disk that fails, or a machine that dies, at any chosen call; with or without what was not synced."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from p2pdiloco.errors import OperatorError
from p2pdiloco_node.storage.files import Files


class Died(BaseException):
    """The process is gone: no handler of the code under test may run to any effect."""


class FaultyFiles(Files):
    """Counts calls; at call `at` it dies (`error` None) or raises OSError(`error`), after half a write.

    `power_cut()` undoes what was never synced: bytes behind the last fsync, and names behind the last
    fsync of their folder.
    """

    def __init__(self, at: int = -1, error: int | None = None, *, forever: bool = False) -> None:
        self.calls = 0
        self.at = at
        self.error = error
        self.forever = forever
        self.dead = False
        self.paths: dict[int, Path] = {}
        self.durable: dict[Path, int] = {}
        self.names: list[tuple[Path, Path, bytes | None, int | None]] = []

    def _step(self) -> bool:
        """True: this call fails."""
        if self.dead:
            raise Died
        self.calls += 1
        now = self.calls - 1
        return now == self.at or (self.forever and self.at <= now and self.at >= 0)

    def _fail(self) -> None:
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))
        self.dead = True
        raise Died

    def create(self, path: Path, mode: int = 0o600) -> int:
        if self._step():
            self._fail()
        fd = super().create(path, mode)
        self.paths[fd] = path
        self.durable[path] = 0
        return fd

    def open_append(self, path: Path) -> int:
        if self._step():
            self._fail()
        self.durable.setdefault(path, path.stat().st_size if path.exists() else 0)
        fd = super().open_append(path)
        self.paths[fd] = path
        return fd

    def write(self, fd: int, data: bytes | memoryview) -> None:
        if self._step():
            super().write(fd, memoryview(data).cast("B")[: len(data) // 2])
            self._fail()
        super().write(fd, data)

    def fsync(self, fd: int) -> None:
        if self._step():
            self._fail()
        super().fsync(fd)
        self.durable[self.paths[fd]] = self.paths[fd].stat().st_size

    def rename(self, source: Path, target: Path) -> None:
        if self._step():
            self._fail()
        old = target.read_bytes() if target.exists() else None
        super().rename(source, target)
        self.names.append((source, target, old, self.durable.get(target)))
        self.durable[target] = self.durable.pop(source, target.stat().st_size)

    def truncate(self, path: Path, size: int) -> None:
        if self._step():
            self._fail()
        super().truncate(path, size)

    def remove(self, path: Path) -> None:
        if self._step():
            self._fail()
        super().remove(path)

    def make_folder(self, path: Path) -> None:
        if self._step():
            self._fail()
        super().make_folder(path)

    def sync_folder(self, path: Path) -> None:
        if self._step():
            self._fail()
        super().sync_folder(path)
        self.names = [n for n in self.names if n[1].parent != path]

    def power_cut(self) -> None:
        self.dead = True
        for path, size in self.durable.items():
            if path.exists() and path.stat().st_size > size:
                os.truncate(path, size)
        for source, target, old, _ in reversed(self.names):
            if target.exists():
                target.replace(source)
            if old is not None:
                target.write_bytes(old)


def each_crash(work: Callable[[Files], None], check: Callable[[], None], reset: Callable[[], None]) -> int:
    """Die at each call of `work` in turn, with and without a power cut; `check` looks at what is left."""
    counting = FaultyFiles()
    reset()
    work(counting)
    check()
    for at in range(counting.calls):
        for power_cut in (False, True):
            reset()
            files = FaultyFiles(at)
            with pytest.raises(Died):
                work(files)
            if power_cut:
                files.power_cut()
            check()
    return counting.calls


def each_error(work: Callable[[Files], None], check: Callable[[], None], reset: Callable[[], None]) -> int:
    """The same with a full disk (ENOSPC) and a failing one (EIO): an error for people, and nothing lost."""
    counting = FaultyFiles()
    reset()
    work(counting)
    raised = 0
    for at in range(counting.calls):
        for code in (errno.ENOSPC, errno.EIO):
            reset()
            said: OperatorError | None = None
            try:
                work(FaultyFiles(at, code))
            except OperatorError as error:
                said = error
            if said is not None:
                raised += 1
                assert said.exit_code == 6
                assert "full" in str(said) or code != errno.ENOSPC
            check()
    return raised


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is durable is the model's to say (`power_cut`); the real disk's time would only be waited for."""
    monkeypatch.setattr(os, "fsync", lambda _fd: None)


@pytest.fixture
def faulty() -> type[FaultyFiles]:
    return FaultyFiles


@pytest.fixture
def crash_everywhere() -> Callable[..., int]:
    return each_crash


@pytest.fixture
def fail_everywhere() -> Callable[..., int]:
    return each_error
