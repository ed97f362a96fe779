"""The demo's processes: one tracker and N nodes, started, hit, restarted and ended; and what they say.

Each daemon is a process in a session of its own, so that one signal reaches it and its trainer, and each
dies with the demo (PR_SET_PDEATHSIG), so that nothing is left whatever happens to the demo itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import aiohttp
import msgspec

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.exit_codes import NO
from p2pdiloco_node.config import without_settings
from p2pdiloco_node.storage.run_folder import ADDRESS
from p2pdiloco_node.telemetry import NodeStatus

POLL_S = 0.25
ANSWER_S = 2.0
START_S_MAX = 60.0  # a daemon that has not written its address by then has failed


@dataclass
class Daemon:
    """One daemon process and everything that it said, over all its lives."""

    name: str
    arguments: Sequence[str]
    folder: Path
    log: Path
    process: subprocess.Popen[bytes] | None = None
    status: NodeStatus | None = None  # of the current life
    bytes_before: int = 0  # sent and received for training in earlier lives
    refused_before: dict[str, int] = field(default_factory=dict)
    hit: list[tuple[float, float]] = field(default_factory=list)  # monotonic: from the fault until well again
    gap_s: float = 0.0  # longest pause between inner steps while not hit
    gaps_seen_s: float = 0.0  # monotonic time of the newest gap that was counted
    paused: bool = False

    def start(self) -> None:
        """Start a life. The address of the one before is forgotten."""
        self.address_file.unlink(missing_ok=True)
        command = [sys.executable, "-m", "p2pdiloco_node", *self.arguments, "--die-with-parent"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env=without_settings(os.environ),  # those of a real node on this machine are not the demo's
            )  # fmt: skip

    @property
    def address_file(self) -> Path:
        return self.folder / ADDRESS

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def url(self) -> str | None:
        try:
            return str(json.loads(self.address_file.read_bytes())["url"])
        except (OSError, ValueError, KeyError):
            return None

    def signal(self, number: signal.Signals) -> None:
        """To the daemon and its trainer."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """kill -9, and wait for it."""
        self.signal(signal.SIGKILL)
        if self.process is not None:
            self.process.wait()
        self.end_life()

    def end_life(self) -> None:
        """Keep what the sums need of a life that is over."""
        if self.status is not None:
            self.bytes_before += training_bytes(self.status)
            for reason, n in self.status.refused.items():
                self.refused_before[reason] = self.refused_before.get(reason, 0) + n
        self.status = None

    def learnt(self, status: NodeStatus) -> None:
        """A new answer: remember the longest pause that was not the fault's own."""
        self.status = status
        for gap in status.gaps:
            if gap.at_monotonic_s <= self.gaps_seen_s:
                continue
            self.gaps_seen_s = gap.at_monotonic_s
            begin = gap.at_monotonic_s - gap.seconds
            if not any(a <= gap.at_monotonic_s and begin <= b for a, b in self.hit):
                self.gap_s = max(self.gap_s, gap.seconds)

    def last_words(self, lines: int = 12) -> str:
        try:
            return "\n".join(self.log.read_text("utf-8", "replace").splitlines()[-lines:])
        except OSError:
            return "(nothing)"


def training_bytes(status: NodeStatus) -> int:
    """Sent and received for training: without the run's data and version 0, fetched once at the start."""
    return status.bytes_up + status.bytes_down - status.bytes_setup


class Swarm:
    """All daemons of a demo. Entering starts nothing; leaving ends everything within five seconds."""

    def __init__(self, tracker: Daemon, nodes: Sequence[Daemon]) -> None:
        self.tracker = tracker
        self.nodes = list(nodes)
        self.page: dict[str, object] | None = None  # newest /api/status of the tracker
        self.version_seen: dict[int, float] = {}  # version -> monotonic time when a node first showed it
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        self._session = aiohttp.ClientSession(timeout=timeout, trust_env=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.end()
        if self._session is not None:
            await self._session.close()

    async def started(self, daemon: Daemon) -> str:
        """Wait for its address. Raises: OperatorError with its last words if it ends instead."""
        until = time.monotonic() + START_S_MAX
        while time.monotonic() < until:
            if daemon.url is not None:
                return daemon.url
            if not daemon.alive:
                break
            await asyncio.sleep(POLL_S / 2)
        raise OperatorError(f"{daemon.name} did not start; its last words:\n{daemon.last_words()}", NO)

    async def poll(self) -> None:
        """Ask everybody once, at the same time."""
        asked = [self._ask_node(node) for node in self.nodes if node.alive and not node.paused]
        await asyncio.gather(*asked, self._ask_tracker())
        now = time.monotonic()
        for node in self.nodes:
            if node.status is not None:
                for version in range(max(self.version_seen, default=-1) + 1, node.status.version + 1):
                    self.version_seen[version] = now

    async def _ask_node(self, node: Daemon) -> None:
        if data := await self._get(node.url, "/v1/status"):
            try:
                node.learnt(msgspec.json.decode(data, type=NodeStatus))
            except msgspec.ValidationError as error:
                raise AssertionError(
                    f"{node.name} answered what this version does not know: {error}"
                ) from None

    async def _ask_tracker(self) -> None:
        if data := await self._get(self.tracker.url, "/api/status"):
            self.page = json.loads(data)

    async def _get(self, url: str | None, path: str) -> bytes | None:
        if url is None or self._session is None:
            return None
        try:
            async with self._session.get(url + path) as answer:
                return await answer.content.read(4 * limits.MIB) if answer.status == 200 else None
        except (aiohttp.ClientError, TimeoutError):
            return None

    @property
    def version(self) -> int:
        return max(self.version_seen, default=0)

    def node_of(self, peer: str) -> Daemon | None:
        return next((n for n in self.nodes if n.status is not None and n.status.peer == peer), None)

    def dead(self) -> Daemon | None:
        """A daemon that ended although nobody hit it, if there is one."""
        for daemon in (self.tracker, *self.nodes):
            if daemon.process is not None and not daemon.alive:
                return daemon
        return None

    async def end(self) -> None:
        """SIGTERM to all, SIGKILL to whoever is left after `shutdown_s_max`."""
        running = [d for d in (self.tracker, *self.nodes) if d.alive]
        for daemon in running:
            daemon.signal(signal.SIGCONT)
            if daemon.process is not None:
                daemon.process.terminate()
        until = time.monotonic() + limits.shutdown_s_max
        while any(d.alive for d in running) and time.monotonic() < until:  # noqa: ASYNC110 - processes, not tasks
            await asyncio.sleep(0.05)
        for daemon in (self.tracker, *self.nodes):
            if daemon.process is not None:
                daemon.signal(signal.SIGKILL)  # also whatever is left of its session
                daemon.process.wait()
