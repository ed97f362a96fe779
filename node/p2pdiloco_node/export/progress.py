"""How far long work is: a bar with rate and time to go on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

LINE_S = 10.0  # between two lines of one piece of work without a terminal


class Progressing:
    """`with Progressing() as told: told(what, done, total)`, from any thread. It speaks on stderr."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = Console(stderr=True, quiet=quiet)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=quiet or not self._console.is_terminal,
        )
        self._quiet = quiet
        self._lock = threading.Lock()
        self._task: TaskID | None = None
        self._what = ""
        self._began = 0.0
        self._said_at = 0.0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        """`done` of `total` (0: not known) of `what`."""
        now = time.monotonic()
        with self._lock:
            if what != self._what:
                self._what, self._began, self._said_at = what, now, float("-inf")
                if self._task is not None:
                    self._bar.remove_task(self._task)
                self._task = self._bar.add_task(what, total=total or None, rate="")
            rate = done / (now - self._began) if now > self._began else 0.0
            assert self._task is not None, "just added"
            self._bar.update(self._task, completed=done, total=total or None, rate=f"{_short(rate)}/s")
            if self._quiet or self._console.is_terminal or now - self._said_at < LINE_S:
                return
            self._said_at = now
            share = f" {done / total:.0%} of {_short(total)}" if total else f" {_short(done)}"
            left = f", {(total - done) / rate:,.0f} s to go" if total and rate and done < total else ""
            print(f"{what}:{share}{left}", file=sys.stderr, flush=True)


def _short(n: float) -> str:
    for step, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if n >= step:
            return f"{n / step:.1f} {unit}"
    return f"{n:.0f}"
