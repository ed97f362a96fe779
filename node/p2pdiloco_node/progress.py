"""How far a long work is: a bar on a terminal, now and then a line elsewhere; with rate and time to go."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

LINE_EVERY_S = 10.0  # without a terminal
TICK_S = 1.0  # between two looks at a step that is not counted
RATE_AFTER_S = 1.0  # a rate of less is chance
BYTES = "bytes"


class Told(Protocol):
    """Who is told, from any thread."""

    def say(self, text: str) -> None:
        """One sentence."""
        ...

    def progress(self, what: str, done: float, total: float = 1.0, unit: str = "", doing: str = "") -> None:
        """`done` of `total` in `unit` ("bytes", "shards", or none); a total of 0 is one that nobody knows.

        `doing`: what a step without a unit is at. Such a step ends with all of `total` done: what comes
        behind it may be silent, and is not its time.
        """
        ...


Watch = Callable[[str, float, float, str], None]  # `Told.progress`


class Quiet:
    """Nobody listens."""

    def say(self, text: str) -> None: ...
    def progress(
        self, what: str, done: float, total: float = 1.0, unit: str = "", doing: str = ""
    ) -> None: ...


class Step(NamedTuple):
    """What `Told.progress` was told."""

    what: str
    done: float
    total: float
    unit: str
    doing: str = ""


class Pace:
    """Rate and time to go of the step that is under way."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._what = ""
        self._began = 0.0
        self._first = 0.0

    def words(self, what: str, done: float, total: float, unit: str, doing: str = "") -> str:
        """`38 %, 12.3 MB/s, 4 min to go`; of what is not counted `backward pass, 34 s so far`."""
        now = self._clock()
        if what != self._what:
            # What an earlier call did is not this one's pace.
            self._what, self._began, self._first = what, now, done
        spent, new = now - self._began, done - self._first
        if not unit:
            words = [doing] if doing else []
            return ", ".join([*words, f"{in_short(spent)} so far"] if spent >= RATE_AFTER_S else words)
        known = total > 0
        words = [f"{100 * min(1.0, done / total):.0f} %" if known else f"{amount(done)} so far"]
        if spent >= RATE_AFTER_S and new > 0:
            rate = new / spent
            words.append(f"{amount(rate)}/s" if unit == BYTES else f"{rate:.1f} {unit}/s")
            if known:
                words.append(f"{in_short(max(0.0, total - done) / rate)} to go")
        return ", ".join(words)


class Shown:
    """The step that is under way, for one of the two below."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pace = Pace(clock)
        self._lock = threading.Lock()
        self._step: Step | None = None

    def progress(self, what: str, done: float, total: float = 1.0, unit: str = "", doing: str = "") -> None:
        with self._lock:
            if not unit and done >= total > 0:
                self._step, self._pace = None, Pace(self._clock)
                self._end()
                return
            self._step = Step(what, done, total, unit, doing)
            self._draw(self._step, self._pace.words(*self._step))

    def tick(self) -> None:
        """Who makes a step that is not counted is silent until its end: the time goes on by itself."""
        with self._lock:
            if self._step is not None and not self._step.unit:
                self._draw(self._step, self._pace.words(*self._step))

    def _draw(self, step: Step, words: str) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        """No step is under way; one of the same name is another."""
        raise NotImplementedError


class Lines(Shown):
    """Plain lines: each step when it begins, then its pace every ten seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, on_stderr: bool = False) -> None:
        super().__init__(clock)
        self._on_stderr = on_stderr
        self._what = ""
        self._said_at = 0.0
        self._left = False  # the last line said less than all

    def say(self, text: str) -> None:
        print(text, file=sys.stderr if self._on_stderr else sys.stdout, flush=True)

    def _draw(self, step: Step, words: str) -> None:
        now = self._clock()
        if step.what != self._what:
            self._what, self._said_at, self._left = step.what, now, False
            self.say(f"{step.what} ...")
        elif words and (now - self._said_at >= LINE_EVERY_S or (self._left and step.done >= step.total > 0)):
            self._said_at, self._left = now, bool(step.unit) and step.done < step.total
            self.say(f"{step.what}: {words}")

    def _end(self) -> None:
        self._what = ""


class Bar(Shown):
    """One bar for the step that is under way."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._console = console
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[words]}"))
        self.bars = Progress(*columns, console=console, transient=True)
        self._row: TaskID | None = None
        self._what = ""

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)

    def _draw(self, step: Step, words: str) -> None:
        if step.what != self._what or self._row is None:
            if self._row is not None:
                self.bars.remove_task(self._row)
            self._what, self._row = step.what, self.bars.add_task(step.what, words=words)
        # Without a count the bar only moves.
        total = step.total if step.unit and step.total else None
        self.bars.update(self._row, completed=step.done, total=total, words=words)

    def _end(self) -> None:
        if self._row is not None:
            self.bars.remove_task(self._row)
        self._row = None


@contextmanager
def shown(*, on_stderr: bool = False) -> Iterator[Told]:
    """A bar on a terminal, lines elsewhere. `on_stderr`: where standard output is for what was asked for."""
    if not (sys.stderr if on_stderr else sys.stdout).isatty():
        lines = Lines(on_stderr=on_stderr)
        with _ticking(lines):
            yield lines
        return
    bar = Bar(Console(stderr=on_stderr))
    with bar.bars, _ticking(bar):
        yield bar


@contextmanager
def _ticking(told: Shown) -> Iterator[None]:
    over = threading.Event()

    def tick() -> None:
        with suppress(OSError):  # nobody reads any more: whoever speaks next finds out
            while not over.wait(TICK_S):
                told.tick()

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


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
