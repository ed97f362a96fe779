"""kill -9 at every step of a making, and the same command again: the same shards, and nothing made twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.e2e

MAKE = """
import sys
from pathlib import Path
import msgspec
from p2pdiloco_node.corpus import making
from p2pdiloco_node.progress import Lines

making.INLINE_BYTES = 0
if __name__ == "__main__":
    request = making.Request(sys.argv[2:], tokenizer="bpe:300", seed=7, jobs=2, eval_per_source=True)
    data = making.make_data(request, Path(sys.argv[1]), Lines())
    print(msgspec.json.encode(data).decode())
"""
WAIT_S = 120.0


class Making:
    """A process that makes data, and the processes that it started."""

    def __init__(self, script: Path, out: Path, data: list[str]) -> None:
        self.out = out
        self._command = [sys.executable, str(script), str(out), *data]
        self._popen = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def kill_when(self, reached: Callable[[], bool]) -> bool:
        """kill -9 when `reached`; whether it came so far before it ended. Its processes end with it."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            there = reached()
            if there or self._popen.poll() is not None:
                break
            time.sleep(0.005)
        children = (
            psutil.Process(self._popen.pid).children(recursive=True) if self._popen.poll() is None else []
        )
        self._popen.send_signal(signal.SIGKILL)
        self._popen.communicate()
        _, alive = psutil.wait_procs(children, timeout=10)
        assert not alive, "its processes outlive it"
        return there

    def result(self) -> tuple[object, str]:
        out, err = self._popen.communicate(timeout=WAIT_S)
        assert self._popen.returncode == 0, err.decode()
        *said, data = out.decode().splitlines()
        return msgspec.json.decode(data), "\n".join(said)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 7 MB, so that there are some portions and buckets."""
    root = tmp_path_factory.mktemp("in")
    rng = np.random.default_rng(1)
    words = np.array([f"word{n}" for n in range(500)])

    def text() -> str:
        return " ".join(rng.choice(words, int(rng.integers(50, 600))).tolist())

    for part in range(3):
        with (root / f"{part}.jsonl").open("w") as file:
            file.writelines(json.dumps({"text": text()}) + "\n" for _ in range(500))
    pq.write_table(pa.table({"text": [text() for _ in range(1000)]}), root / "x.parquet", row_group_size=200)
    return root


def files(place: Path, pattern: str) -> dict[Path, int]:
    return {path: path.stat().st_ino for path in place.glob(pattern)} if place.exists() else {}


def test_killed_at_every_step(folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "make.py"
    script.write_text(MAKE)
    data = [f"{folder}/*.jsonl", f"{folder}/x.parquet"]
    whole, _ = Making(script, tmp_path / "whole", data).result()

    out = tmp_path / "out"
    work, blobs = out / "making", out / "blobs"

    def lines() -> int:
        path = work / "shards.txt"
        return path.read_text().count("\n") if path.exists() else 0

    points: list[Callable[[], bool]] = [
        lambda: len(files(work, "read/*.seg")) >= 2,
        lambda: len(files(work, "read/*.seg")) >= 5,
        lambda: (work / "split.bin").exists(),
        lambda: (work / "tokenizer.json").exists(),
        lambda: len(files(work, "tokens/*.held")) >= 3,
        lambda: len(files(work, "tokens/*.held")) >= 6,
        lambda: (work / "tokens.bin").exists(),
        lambda: lines() >= 1,
    ]
    reached = 0
    kept: dict[Path, int] = {}
    for point in points:
        reached += Making(script, out, data).kill_when(point)
        # What had its name before is what it was, or is gone because it was used.
        now = (
            files(work, "read/*.seg")
            | files(work, "tokens/[0-9]*[0-9]")
            | files(work, "*.bin")
            | files(blobs, "*")
        )
        temporary = {path for path in now if path.suffix == ".tmp"}
        assert {path for path in kept.keys() & now.keys() if kept[path] != now[path]} == set()
        kept |= {path: inode for path, inode in now.items() if path not in temporary}
    assert reached >= len(points) - 1, "the last shards may be written before one looks"
    again, said = Making(script, out, data).result()
    assert again == whole
    assert "Tokenising: " not in said
    assert {path for path, inode in files(blobs, "*").items() if kept.get(path, inode) != inode} == set()
    assert sorted(p.name for p in blobs.iterdir() if p.suffix != ".tmp") == sorted(
        p.name for p in (tmp_path / "whole/blobs").iterdir()
    )


def test_ctrl_c_stops_soon_and_says_how_to_go_on(folder: Path, tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "p2pdiloco_node.cli", "run", "new", "--name", "x", "--model", "llama:tiny",
        "--data", f"{folder}/*.jsonl", "--data", f"{folder}/*.parquet", "--tokenizer", "bpe:300",
        "--out", str(tmp_path / "out"), "--jobs", "2",
    ]  # fmt: skip
    popen = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        env=os.environ | {"XDG_CONFIG_HOME": str(tmp_path / "config")},
    )  # fmt: skip
    deadline = time.monotonic() + WAIT_S
    while not files(tmp_path / "out/making", "read/*.seg") and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(popen.pid, signal.SIGINT)
    out, err = popen.communicate(timeout=20)
    assert popen.returncode == 130, err.decode()
    assert "Stopped. The same command goes on where it was." in out.decode()
    assert (tmp_path / "out/making/plan.bin").exists()
    assert not (tmp_path / "config").exists()
