"""Real daemons on loopback for the end-to-end tests: a tiny run with the demo's timings."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from p2pdiloco.ids import RunId
from p2pdiloco_node.demo.command import TIMINGS
from p2pdiloco_node.run.new import Order, create_run
from p2pdiloco_node.telemetry import NodeStatus

WORDS = "the swarm trains one model together over the ordinary internet\n"
PASS_S = 1.5


def write_texts(folder: Path) -> Path:
    folder.mkdir()
    for number in range(24):
        (folder / f"{number}.txt").write_text("".join(f"{number + i} {WORDS}" for i in range(40)))
    return folder


def make_run(folder: Path, *, versions: int, pass_s: float = PASS_S, admission: str = "local") -> RunId:
    """A run of llama:tiny in `folder`/run; passes end by time, so that versions come at a steady pace."""
    texts = write_texts(folder / "texts")
    return asyncio.run(
        create_run(
            Order(
                "tiny", "llama:tiny", [f"{texts}/*.txt"], 2**40, admission=admission,
                target_version=versions, eval_every=4, seed=1,
                inner={"inner_steps": 2**20, "pass_s": pass_s}, committee=TIMINGS,
            ),
            folder / "run", owner_key=folder / "owner.key",
        )
    )  # fmt: skip


class Process:
    """One daemon. Its output is in `log`."""

    def __init__(self, arguments: list[str], folder: Path, log: Path) -> None:
        self.arguments = arguments
        self.folder = folder
        self.log = log
        self.popen: subprocess.Popen[bytes] | None = None

    def start(self) -> Process:
        (self.folder / "address.json").unlink(missing_ok=True)
        environment = os.environ | {"XDG_STATE_HOME": str(self.log.parent / "state")}
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "p2pdiloco_node.cli", *self.arguments, "--die-with-parent"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=environment,
            )  # fmt: skip
        return self

    @property
    def alive(self) -> bool:
        return self.popen is not None and self.popen.poll() is None

    def signal(self, number: signal.Signals) -> None:
        assert self.popen is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, number)

    def kill(self) -> None:
        """kill -9 of the daemon and its trainer."""
        self.signal(signal.SIGKILL)
        assert self.popen is not None
        self.popen.wait()

    def terminate(self) -> tuple[int, float]:
        """SIGTERM to the daemon alone; (exit status, seconds until it was gone)."""
        assert self.popen is not None
        began = time.monotonic()
        self.popen.terminate()
        return self.popen.wait(10), time.monotonic() - began

    def wait(self, seconds: float) -> int:
        assert self.popen is not None
        return self.popen.wait(seconds)

    @property
    def url(self) -> str | None:
        try:
            return str(json.loads((self.folder / "address.json").read_text())["url"])
        except (OSError, ValueError, KeyError):
            return None

    def status(self) -> NodeStatus | None:
        data = get(self.url, "/v1/status")
        return msgspec.json.decode(data, type=NodeStatus) if data else None

    def text(self) -> str:
        return self.log.read_text("utf-8", "replace")


def get(url: str | None, path: str) -> bytes | None:
    if url is None:
        return None
    try:
        with urllib.request.urlopen(url + path, timeout=2) as answer:
            return bytes(answer.read())
    except OSError:
        return None


class Swarm:
    """A tracker and nodes of one run; leaving kills what is left."""

    def __init__(self, folder: Path, run: RunId, port: int) -> None:
        self.folder = folder
        self.run = run
        self.address = f"127.0.0.1:{port}"
        self.tracker = Process(
            ["tracker", "--run", str(folder / "run"), "--listen", self.address],
            folder / "run" / "witness", folder / "tracker.log",
        )  # fmt: skip
        self.nodes: dict[str, Process] = {}

    @property
    def link(self) -> str:
        return f"http://{self.address}/#{self.run.hex()}"

    def node(self, name: str, *more: str) -> Process:
        """The node of this name, started."""
        if name not in self.nodes:
            arguments = [
                "node",
                "--join",
                self.link,
                "--data-dir",
                str(self.folder / name),
                "--name",
                name,
                *more,
            ]
            self.nodes[name] = Process(arguments, self.folder / name, self.folder / f"{name}.log")
        return self.nodes[name].start()

    def start_tracker(self) -> None:
        self.tracker.start()
        wait_for(lambda: self.tracker.url, 30, "the tracker serves")

    def page(self) -> dict[str, object]:
        return json.loads(get(self.tracker.url, "/api/status") or b"{}")

    def version(self) -> int:
        seen = [s.version for node in self.nodes.values() if node.alive and (s := node.status()) is not None]
        return max(seen, default=0)

    def listed(self, name: str) -> int:
        """The newest version that lists a delta of this node, as it says itself."""
        status = self.nodes[name].status()
        return status.listed.get(status.peer, 0) if status is not None else 0


@contextlib.contextmanager
def swarm_in(folder: Path, run: RunId, port: int) -> Iterator[Swarm]:
    swarm = Swarm(folder, run, port)
    try:
        yield swarm
    finally:
        for process in (swarm.tracker, *swarm.nodes.values()):
            if process.popen is not None:
                process.signal(signal.SIGKILL)
                process.popen.wait()


def wait_for(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Poll until `condition` is true; fail with what was waited for."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"after {seconds:.0f} s still not: {what}"
        time.sleep(0.1)


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def processes_of(folder: Path) -> list[str]:
    """Command lines of processes that name `folder`: what a daemon left behind."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
                environ = (entry / "cwd").readlink()
                if str(folder) in line or str(folder) in str(environ):
                    found.append(line)
    return found
