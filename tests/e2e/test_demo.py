"""The demo as a newcomer runs it, with faults; and Ctrl-C. Timed: needs the machine to itself."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from p2pdiloco.ids import PeerId
from p2pdiloco.run_spec import RunSpec, open_run_spec
from p2pdiloco.wire.signing import verify_ed25519
from p2pdiloco_node.verify import verify_run

from .swarm_kit import processes_of

pytestmark = [pytest.mark.e2e, pytest.mark.timed]

DEMO_S_MAX = 360.0
KEYS = {
    "seed", "nodes", "run_id", "version", "seconds", "tokens", "eval_loss_first", "eval_loss_last",
    "bits_per_byte_last", "state_digests", "terms", "aggregators", "voters", "deltas", "staleness",
    "bytes_per_node_per_token", "times_less_than_bf16_data_parallel", "tokens_per_s", "faults",
    "longest_inner_gap_s", "page",
}  # fmt: skip


def demo(*arguments: str, folder: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | {"XDG_STATE_HOME": str(folder / "state"), "TMPDIR": str(folder / "tmp")}
    (folder / "tmp").mkdir()
    with (folder / "demo.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "p2pdiloco_node.cli", "demo", "--headless", *arguments],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True,
        )  # fmt: skip


def said(folder: Path) -> str:
    return (folder / "demo.log").read_text("utf-8", "replace")


def finished(folder: Path, *arguments: str) -> tuple[dict[str, Any], RunSpec]:
    """Summary and spec of a demo that ran to its end, with what holds of each."""
    summary_path = folder / "out.json"
    process = demo("--json", str(summary_path), "--keep", str(folder / "kept"), *arguments, folder=folder)
    try:
        code = process.wait(DEMO_S_MAX)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(10)
    assert code == 0, said(folder)
    s = json.loads(summary_path.read_text())
    assert set(s) == KEYS
    assert len(set(s["state_digests"].values())) == 1
    assert len(s["state_digests"]) == s["nodes"] == 3
    assert set(s["deltas"]["refused"]) <= {"RUN_OVER"}, said(folder)

    run, spec = open_run_spec((folder / "kept" / "run" / "spec.bin").read_bytes(), verify_ed25519)
    assert s["run_id"] == run.hex()
    assert s["version"] == spec.target_version
    assert PeerId(spec.committee.genesis.witness).hex() not in s["aggregators"]

    verified = verify_run(folder / "kept")
    assert (verified.first_version, verified.version) == (0, s["version"])
    assert verified.state_root.hex() in s["state_digests"].values()
    assert verified.deltas == s["deltas"]["accepted"]
    assert processes_of(folder) == []
    return s, spec


def test_a_short_demo(tmp_path: Path) -> None:
    s, _ = finished(tmp_path, "--outer-steps", "6")
    assert s["eval_loss_last"] < s["eval_loss_first"] - 0.3
    assert s["faults"] == []


@pytest.mark.long
def test_the_demo_with_faults(tmp_path: Path) -> None:
    s, spec = finished(tmp_path, "--chaos")
    assert s["eval_loss_last"] <= 0.75 * s["eval_loss_first"]
    assert len(s["aggregators"]) >= 2
    assert 3.0 <= spec.inner.pass_s <= 6.0

    kinds = ["kill aggregator", "kill node", "pause node", "kill tracker"]
    assert [fault["kind"] for fault in s["faults"]] == kinds
    for fault in s["faults"]:
        assert fault["to_next_version_s"] is not None, said(tmp_path)
        assert fault["to_next_version_s"] <= 10 + spec.inner.pass_s, said(tmp_path)
        assert fault["to_contribution_s"] is not None, said(tmp_path)
    assert max(s["longest_inner_gap_s"].values()) <= 3.0, said(tmp_path)


@pytest.mark.parametrize(
    "moment",
    [
        r"Timing an inner step",
        pytest.param(r"version \d+ of \d+; node-1 training", marks=pytest.mark.long),
    ],
)
def test_ctrl_c_ends_everything_within_five_seconds(tmp_path: Path, moment: str) -> None:
    process = demo("--outer-steps", "200", "--inner-steps", "8", folder=tmp_path)
    try:
        until = time.monotonic() + 120
        while not re.search(moment, said(tmp_path)):
            assert process.poll() is None, said(tmp_path)
            assert time.monotonic() < until, said(tmp_path)
            time.sleep(0.1)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130, said(tmp_path)
        assert time.monotonic() - began < 5
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert processes_of(tmp_path) == []
    assert list((tmp_path / "tmp").glob("p2pdiloco-*")) == [], "temporary folders are left"
