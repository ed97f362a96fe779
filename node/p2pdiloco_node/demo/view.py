"""How the demo shows itself: a live table on a terminal, plain lines at sensible intervals without one."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from p2pdiloco.run_spec import RunSpec
from p2pdiloco_node.demo.swarm import Daemon, Swarm

LINE_EVERY_S = 10.0
SAID_KEPT = 6


class View(Protocol):
    def say(self, text: str) -> None:
        """One sentence."""
        ...

    def progress(self, what: str, done: float, total: float = 1.0, unit: str = "", doing: str = "") -> None:
        """While the run is made: what is going on, and how much of it is done, in a unit."""
        ...

    def page(self, url: str) -> None: ...
    def show(self, swarm: Swarm, spec: RunSpec) -> None: ...


@contextmanager
def make_view(*, headless: bool) -> Iterator[View]:
    if headless or not sys.stdout.isatty():
        yield PlainView()
        return
    view = LiveView(Console())
    with view.live:
        yield view


class PlainView:
    """Lines on stdout, each with the seconds since the start."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._shown_at = float("-inf")
        self._version = -1
        self._what = ""

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began:5.1f} s] {text}", flush=True)

    def progress(self, what: str, *_: object, **__: object) -> None:
        # Lines do not show shares or parts: the demo's corpus and model are small.
        if what != self._what:
            self._what = what
            self.say(f"{what} ...")

    def page(self, url: str) -> None:
        self.say(f"The run's page: {url}/")

    def show(self, swarm: Swarm, spec: RunSpec) -> None:
        now = time.monotonic()
        if now - self._shown_at < LINE_EVERY_S and swarm.version == self._version:
            return
        if swarm.version != self._version or now - self._shown_at >= LINE_EVERY_S:
            self._shown_at, self._version = now, swarm.version
            self.say(
                f"version {swarm.version} of {spec.target_version}; " + "; ".join(map(_words, swarm.nodes))
            )


class LiveView:
    """A table that is drawn again in place, with the last sentences below it."""

    def __init__(self, console: Console) -> None:
        self._said: list[str] = []
        self._page = ""
        self._doing = ""
        self._table: Table | None = None
        self._bar: ProgressBar | None = None
        self.live = Live(console=console, get_renderable=self._render, refresh_per_second=4)

    def say(self, text: str) -> None:
        self._said = [*self._said, text][-SAID_KEPT:]

    def progress(self, what: str, done: float, total: float = 1.0, unit: str = "", doing: str = "") -> None:
        self._doing = f"{what} {done / total:.0%}" if unit and 0 < done < total else what
        if doing:
            self._doing = f"{what}: {doing}"

    def page(self, url: str) -> None:
        self._page = f"{url}/"

    def show(self, swarm: Swarm, spec: RunSpec) -> None:
        self._doing = ""
        table = Table(box=None, pad_edge=False)
        for column in (
            "node",
            "state",
            "version",
            "inner step",
            "loss",
            "tokens/s",
            "last delta",
            "up / down",
        ):
            table.add_column(column)
        for node in swarm.nodes:
            table.add_row(*_cells(node))
        self._table = table
        self._bar = ProgressBar(total=spec.target_version, completed=min(swarm.version, spec.target_version))

    def _render(self) -> Group:
        parts: list[Text | Table | ProgressBar] = []
        if self._page:
            parts.append(Text.assemble("Page: ", (self._page, "bold")))
        if self._table is not None and self._bar is not None:
            parts += [self._table, self._bar]
        if self._doing:
            parts.append(Text(self._doing))
        parts += [Text(line, style="dim") for line in self._said]
        return Group(*parts)


def _words(node: Daemon) -> str:
    s = node.status
    if s is None or node.paused:
        return f"{node.name} {_without_answer(node)}"
    loss = "–" if s.loss is None else f"{s.loss:.2f}"
    return f"{node.name} {s.state.word}{' (leads)' if s.leads else ''}, loss {loss}"


def _without_answer(node: Daemon) -> str:
    return "stopped" if node.paused else "starting" if node.alive else "down"


def _cells(node: Daemon) -> list[str]:
    s = node.status
    if s is None or node.paused:
        return [node.name, _without_answer(node), *["–"] * 6]
    return [
        node.name,
        s.state.word + (" (leads)" if s.leads else ""),
        str(s.version),
        f"{s.inner_step} of {s.inner_steps}",
        "–" if s.loss is None else f"{s.loss:.3f}",
        "–" if s.tokens_per_s is None else f"{s.tokens_per_s:,.0f}",
        s.last_outcome or "–",
        f"{s.bytes_up / 2**20:.1f} / {s.bytes_down / 2**20:.1f} MiB",
    ]
