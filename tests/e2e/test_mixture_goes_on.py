"""A mixture of experts with a BPE of its own: trained by a swarm, exported, trained on by another swarm."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from p2pdiloco.run_spec import RunSpec, open_run_spec
from p2pdiloco.wire.signing import verify_ed25519
from p2pdiloco_node.demo.command import TIMINGS

from .swarm_kit import Swarm, free_port, swarm_in, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.long]
OFFLINE = os.environ | {"HF_HUB_OFFLINE": "1"}
START_S = 300.0  # imports of torch and transformers in five processes on a busy machine
VERSIONS = 6
SUBJECTS = ("node", "swarm", "tracker", "witness", "delta", "model", "aggregator", "shard")
VERBS = ("sends", "keeps", "fetches", "merges", "certifies", "forgets", "weighs", "opens")


def texts(folder: Path) -> Path:
    """Sentences in which one word says much about the next."""
    folder.mkdir()
    for number in range(60):
        with (folder / f"{number}.txt").open("w") as file:
            for i in range(120):
                n = number * 7919 + i * 104729
                subject, verb = SUBJECTS[n % 8], VERBS[(n // 8 + n % 8) % 8]
                file.write(f"The {subject} {verb} what the {SUBJECTS[(n // 64) % 8]} {VERBS[n % 8]}.\n")
    return folder


def command(home: Path, *words: str) -> str:
    """Output of a command that has to succeed."""
    done = subprocess.run(
        [sys.executable, "-m", "p2pdiloco_node.cli", *words], capture_output=True, text=True, timeout=START_S,
        check=False, env=OFFLINE | {"XDG_CONFIG_HOME": str(home)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_new(folder: Path, home: Path, *flags: str) -> RunSpec:
    timings = [word for key, value in TIMINGS.items() for word in ("--set", f"committee.{key}={value}")]
    command(
        home, "run", "new", "--name", "goes-on", "--admission", "local", "--outer-steps", str(VERSIONS),
        "--tokens", "1G", "--eval-every", "2", "--pass-s", "4", "--inner-steps", "1000", "--seq-len", "32",
        "--batch", "4", "--out", str(folder / "run"), *timings, *flags,
    )  # fmt: skip
    return open_run_spec((folder / "run/spec.bin").read_bytes(), verify_ed25519)[1]


@contextlib.contextmanager
def finished(folder: Path) -> Iterator[Swarm]:
    """Two nodes have trained the run to its end, and its last version is evaluated."""
    run, _ = open_run_spec((folder / "run/spec.bin").read_bytes(), verify_ed25519)
    with swarm_in(folder, run, free_port()) as swarm:
        swarm.tracker.start()
        wait_for(lambda: swarm.tracker.url, START_S, "the tracker serves")
        swarm.node("one", "--stay")
        swarm.node("two", "--stay")
        wait_for(lambda: losses(swarm).get(VERSIONS), START_S, "the last version is evaluated")
        yield swarm


def losses(swarm: Swarm) -> dict[int, float]:
    page: Any = swarm.page()
    points = page.get("learning", {}).get("evaluations", [])
    return {int(point["version"]): float(point["loss"]) for point in points}


def by_transformers(folder: Path, script: Path) -> float:
    page = (Path(__file__).resolve().parents[2] / "docs/export.md").read_text()
    found = re.search(r"^```python\n(# evaluate\.py.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    assert found is not None
    script.write_text(found[1])
    said = subprocess.run(
        [sys.executable, str(script), str(folder)], capture_output=True, text=True, timeout=START_S,
        check=True, env=OFFLINE,
    )  # fmt: skip
    loss = re.search(r"loss (\d+\.\d+)", said.stdout)
    assert loss is not None
    return float(loss[1])


def test_a_mixture_is_trained_exported_and_trained_on(tmp_path: Path) -> None:
    first, second, home = tmp_path / "first", tmp_path / "second", tmp_path / "home"
    first.mkdir()
    second.mkdir()
    words = texts(tmp_path / "texts")
    spec = run_new(first, home, "--model", "mixtral:tiny", "--data", str(words), "--tokenizer", "bpe:400")
    assert spec.model.family == "mixtral"
    assert 300 <= spec.model.vocab_size <= 400
    with finished(first) as swarm:
        before = losses(swarm)
        command(home, "export", "--join", swarm.link, "--held-out", str(tmp_path / "model"))
    assert before[VERSIONS] < before[0] - 0.5, "the mixture learns"
    command(home, "verify", str(first / "run"))
    model = tmp_path / "model"
    assert json.loads((model / "config.json").read_bytes())["architectures"] == ["MixtralForCausalLM"]
    assert by_transformers(model, tmp_path / "evaluate.py") == pytest.approx(before[VERSIONS], rel=0.005)

    spec = run_new(second, home, "--model", str(model), "--data", str(words), "--lr", "1e-3")
    of_run = json.loads((model / "p2pdiloco.json").read_bytes())["run"]["id"]
    assert spec.origin == f"version {VERSIONS} of run {of_run}"
    with finished(second) as swarm:
        after = losses(swarm)
    assert after[0] == pytest.approx(before[VERSIONS], rel=0.005), "version 0 is the exported model"
    assert after[VERSIONS] < after[0], "and it is trained on"
    command(home, "verify", str(second / "run"))
