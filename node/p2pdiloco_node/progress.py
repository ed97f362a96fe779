"""How far a long work is: a bar on a terminal, now and then a line elsewhere; with rate and time to go."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

LINE_EVERY_S = 10.0  # without a terminal
RATE_AFTER_S = 1.0  # a rate of less is chance
BYTES = "bytes"


class Told(Protocol):
    """Who is told, from any thread."""

    def say(self, text: str) -> None:
        """One sentence."""
        ...

    def progress(self, what: str, done: float, total: float = 1.0, unit: str = "") -> None:
        """`done` of `total` in `unit` ("bytes", "shards", or none); a total of 0 is one that nobody knows."""
        ...


Watch = Callable[[str, float, float, str], None]  # `Told.progress`


class Quiet:
    """Nobody listens."""

    def say(self, text: str) -> None: ...
    def progress(self, what: str, done: float, total: float = 1.0, unit: str = "") -> None: ...


class Pace:
    """Rate and time to go of the step that is under way."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._what = ""
        self._began = 0.0
        self._first = 0.0

    def words(self, what: str, done: float, total: float, unit: str) -> str:
        """`38 %, 12.3 MB/s, 4 min to go`; empty for what is not counted."""
        now = self._clock()
        if what != self._what:
            # What an earlier call did is not this one's pace.
            self._what, self._began, self._first = what, now, done
        if not unit:
            return ""
        known = total > 0
        words = [f"{100 * min(1.0, done / total):.0f} %" if known else f"{amount(done)} so far"]
        spent, new = now - self._began, done - self._first
        if spent >= RATE_AFTER_S and new > 0:
            rate = new / spent
            words.append(f"{amount(rate)}/s" if unit == BYTES else f"{rate:.1f} {unit}/s")
            if known:
                words.append(f"{in_short(max(0.0, total - done) / rate)} to go")
        return ", ".join(words)


class Lines:
    """Plain lines: each step when it begins, then its pace every ten seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, on_stderr: bool = False) -> None:
        self._clock = clock
        self._on_stderr = on_stderr
        self._lock = threading.Lock()
        self._pace = Pace(clock)
        self._what = ""
        self._said_at = 0.0
        self._left = False  # the last line said less than all

    def say(self, text: str) -> None:
        print(text, file=sys.stderr if self._on_stderr else sys.stdout, flush=True)

    def progress(self, what: str, done: float, total: float = 1.0, unit: str = "") -> None:
        with self._lock:
            words = self._pace.words(what, done, total, unit)
            now = self._clock()
            if what != self._what:
                self._what, self._said_at, self._left = what, now, False
                self.say(f"{what} ...")
            elif words and (now - self._said_at >= LINE_EVERY_S or (self._left and done >= total > 0)):
                self._said_at, self._left = now, done < total
                self.say(f"{what}: {words}")


class Bar:
    """One bar for the step that is under way."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._pace = Pace()
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[words]}"))
        self.bars = Progress(*columns, console=console, transient=True)
        self._row: TaskID | None = None
        self._what = ""
        self._lock = threading.Lock()

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)

    def progress(self, what: str, done: float, total: float = 1.0, unit: str = "") -> None:
        with self._lock:
            words = self._pace.words(what, done, total, unit)
            if what != self._what or self._row is None:
                if self._row is not None:
                    self.bars.remove_task(self._row)
                self._what, self._row = what, self.bars.add_task(what, words=words)
            # Without a count the bar only moves.
            self.bars.update(self._row, completed=done, total=total if unit and total else None, words=words)


@contextmanager
def shown(*, on_stderr: bool = False) -> Iterator[Told]:
    """A bar on a terminal, lines elsewhere. `on_stderr`: where standard output is for what was asked for."""
    if not (sys.stderr if on_stderr else sys.stdout).isatty():
        yield Lines(on_stderr=on_stderr)
        return
    bar = Bar(Console(stderr=on_stderr))
    with bar.bars:
        yield bar


def amount(size: float) -> str:
    """`1.2 GB`."""
    for unit in ("bytes", "KB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def in_short(seconds: float) -> str:
    """`45 s`, `12 min`, `2.1 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
