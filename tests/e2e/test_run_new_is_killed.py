"""`run new` ended in the middle, in every step: the same command goes on, and leaves what it makes alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from p2pdiloco.run_spec import RunSpec, open_run_spec
from p2pdiloco.wire.signing import verify_ed25519

pytestmark = pytest.mark.e2e

WAIT_S = 120.0


class Command:
    def __init__(self, folder: Path, *, model: str = "llama:tiny") -> None:
        self.out = folder / "out"
        command = (
            sys.executable, "-m", "p2pdiloco_node.cli", "run", "new", "--name", "x", "--model", model,
            "--data", str(folder / "in"), "--out", str(self.out), "--jobs", "2", "--tokens", "20M",
            "--admission", "local", "--pass-s", "600",
        )  # fmt: skip
        home = {"XDG_CONFIG_HOME": str(folder / "config")}
        self.popen = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | home
        )

    def end_when(self, reached: Callable[[], bool], how: signal.Signals) -> str:
        """What it said; its processes ended with it."""
        deadline = time.monotonic() + WAIT_S
        while not reached():
            assert self.popen.poll() is None, self.popen.communicate()[1].decode()
            assert time.monotonic() < deadline
            time.sleep(0.002)
        children = psutil.Process(self.popen.pid).children(recursive=True)
        self.popen.send_signal(how)
        out, _ = self.popen.communicate(timeout=20)
        _, alive = psutil.wait_procs(children, timeout=10)
        assert not alive, "its processes outlive it"
        return out.decode()

    def made(self) -> RunSpec:
        _, err = self.popen.communicate(timeout=WAIT_S)
        assert self.popen.returncode == 0, err.decode()
        return open_run_spec((self.out / "spec.bin").read_bytes(), verify_ed25519)[1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    for name in "abcdef":  # enough for several processes and several portions
        lines = (f"{name} {n}: the swarm trains one model together\n" for n in range(40_000))
        (tmp_path / "in" / f"{name}.txt").write_text("".join(lines))
    return tmp_path


def tokenising(out: Path) -> bool:
    return bool(list((out / "making/tokens").glob("*.held")))


def version_0(out: Path) -> bool:
    """Its file has begun to grow, or is whole and not yet in the blobs."""
    path = out / "making/version-0/params.f32"
    return path.exists() and path.stat().st_size > 0


@pytest.mark.parametrize(
    "hows",
    [
        pytest.param((signal.SIGTERM, signal.SIGKILL), id="SIGTERM, SIGKILL"),
        pytest.param((signal.SIGKILL, signal.SIGTERM), id="SIGKILL, SIGTERM", marks=pytest.mark.long),
    ],
)
def test_the_same_command_goes_on(folder: Path, hows: tuple[signal.Signals, ...]) -> None:
    for reached, how in zip((tokenising, version_0), hows, strict=True):
        command = Command(folder)
        said = command.end_when(lambda reached=reached, out=command.out: reached(out), how)
        # 130 as for Ctrl-C, with its sentence; a process that is killed says nothing.
        assert command.popen.returncode == (130 if how == signal.SIGTERM else -how)
        assert ("The same command goes on where it was." in said) == (how == signal.SIGTERM)
        assert not (command.out / "spec.bin").exists(), "it is no run yet"
        if how == signal.SIGTERM:
            assert not (command.out / "making/version-0").exists()
    # What a call with another model left among the blobs, and a file that was not whole.
    (command.out / "blobs" / ("ab" * 32)).write_bytes(b"of another model")
    (command.out / "blobs" / ("cd" * 32 + ".tmp")).write_bytes(b"half")
    spec = Command(folder).made()
    blobs = {ref.digest.hex() for ref in spec.data.blobs}
    blobs |= {digest.hex() for digest in (*spec.genesis.params, *spec.genesis.momentum)}
    assert {path.name for path in (command.out / "blobs").iterdir()} == blobs
    assert sorted(path.name for path in command.out.iterdir()) == ["blobs", "spec.bin", "witness.key"]
