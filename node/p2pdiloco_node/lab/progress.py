"""How far a study is, on standard error: bars in a terminal, now and then a line elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from p2pdiloco.words import count_of

LINE_EVERY_S = 20.0  # without a terminal


class StudyProgress:
    """Counts runs and their shares. `cached` runs count as done and not in the rate."""

    def __init__(self, names: list[str], cached: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._names = names
        self._cached = cached
        self._clock = clock
        self._began = clock()
        self._said = clock()
        self._shares = [0.0] * len(names)
        self._ended: set[int] = set()
        self._bars: Progress | None = None
        self._rows: dict[int, TaskID] = {}
        self._whole = TaskID(0)

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
            self._bars = Progress(*columns, TextColumn("{task.fields[text]}"), console=Console(stderr=True),
                                  transient=True)  # fmt: skip
            self._whole = self._bars.add_task("all runs", total=max(1, len(self._names)), text="")
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def told(self, run: int, share: float, text: str) -> None:
        """Run number `run` of those that are not cached is at `share` in [0, 1]."""
        self._shares[run] = min(1.0, max(0.0, share))
        if self._bars is None:
            self._line()
            return
        if run not in self._rows:
            self._rows[run] = self._bars.add_task(self._names[run], total=1.0, text="")
        self._bars.update(self._rows[run], completed=self._shares[run], text=text)
        self._bars.update(self._whole, completed=sum(self._shares), text=self.words())

    def ended(self, run: int) -> None:
        self._shares[run] = 1.0
        self._ended.add(run)
        if self._bars is None:
            self._line()
            return
        if run in self._rows:
            self._bars.remove_task(self._rows.pop(run))
        self._bars.update(self._whole, completed=sum(self._shares), text=self.words())

    def words(self) -> str:
        """`3 of 12 runs done (2 from the cache), 1.4 an hour, 2.1 h to go`."""
        total = self._cached + len(self._names)
        text = f"{self._cached + len(self._ended)} of {count_of(total, 'run')} done"
        if self._cached:
            text += f" ({self._cached} from the cache)"
        spent, done = self._clock() - self._began, sum(self._shares)
        if done <= 0 or spent <= 0:
            return text
        left = (len(self._names) - done) * spent / done
        return f"{text}, {3600 * done / spent:.1f} an hour, {in_short(left)} to go"

    def _line(self) -> None:
        if self._clock() - self._said < LINE_EVERY_S:
            return
        self._said = self._clock()
        running = [
            f"{name} {100 * share:.0f} %"
            for number, (name, share) in enumerate(zip(self._names, self._shares, strict=True))
            if share > 0 and number not in self._ended
        ]
        print("; ".join([self.words(), ", ".join(running)]).rstrip("; "), file=sys.stderr, flush=True)


def in_short(seconds: float) -> str:
    """`45 s`, `12 min`, `2.1 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
