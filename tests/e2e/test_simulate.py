"""`p2pdiloco simulate FILE` with real processes and the real engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.e2e
NO_MODEL = '[model]\nkind = "none"\n[swarm]\nnodes = 8\nmtbf_s = 2000.0\n'


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}
    return subprocess.Popen(
        [sys.executable, "-m", "p2pdiloco_node.cli", "simulate", *arguments],
        cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_the_same_seed_gives_the_same_figures(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(NO_MODEL + "[run]\nrounds = 20\n")
    told = []
    for _ in range(2):
        process = start(tmp_path, "a.toml", "--seeds", "4,5", "--fresh", "--json", "-")
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        told.append([r | {"wall_s": 0} for r in json.loads(out)["results"]])
    assert told[0] == told[1]
    assert told[0][0] != told[0][1] | {"seed": 4}


def test_ctrl_c_ends_all_processes_and_keeps_what_is_finished(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(
        NO_MODEL + "[arms.short.run]\nrounds = 5\n[arms.long.run]\nrounds = 200000\n"
    )
    process = start(tmp_path, "a.toml", "--jobs", "2")
    cache = tmp_path / "cache" / "p2pdiloco" / "lab"
    until = time.monotonic() + 60
    while not (cache.is_dir() and list(cache.glob("*.json"))):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    _, err = process.communicate(timeout=20)
    assert time.monotonic() - began < 5
    assert process.returncode == 130
    assert "Finished and kept: 1 of 2 runs" in err
    assert "Traceback" not in err
    _, alive = psutil.wait_procs(children, timeout=3)
    assert alive == []
