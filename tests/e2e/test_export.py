"""A model leaves a live swarm: exported by its link, evaluated by transformers alone, offered on the page."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from p2pdiloco.ids import digest_of

from .swarm_kit import free_port, get, make_run, swarm_in, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timed]
OFFLINE = os.environ | {"HF_HUB_OFFLINE": "1"}
VERSIONS = 4
START_S = 240.0  # imports of torch on a busy machine
COMMAND_S = 300.0  # export and generate import transformers


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "p2pdiloco_node.cli", *words],
        capture_output=True, text=True, timeout=COMMAND_S, check=False, env=OFFLINE,
    )  # fmt: skip


def script() -> str:
    page = (Path(__file__).resolve().parents[2] / "docs/export.md").read_text()
    found = re.search(r"^```python\n(# evaluate\.py.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def test_from_a_live_swarm_to_a_folder_that_talks(tmp_path: Path) -> None:
    run = make_run(tmp_path, versions=VERSIONS)
    with swarm_in(tmp_path, run, free_port()) as swarm:
        swarm.tracker.start()
        wait_for(lambda: swarm.tracker.url, START_S, "the tracker serves")
        swarm.node("one", "--stay")
        wait_for(lambda: swarm.version() >= 2, START_S, "two versions")
        live = command("export", "--join", swarm.link, "--format", "hf", str(tmp_path / "live"))
        assert live.returncode == 0, live.stderr
        facts = json.loads((tmp_path / "live/p2pdiloco.json").read_bytes())
        assert facts["run"]["id"] == run.hex()
        assert 2 <= facts["version"] <= VERSIONS
        assert [c["deltas"] for c in facts["contributors"]] == [facts["version"]]

        wait_for(lambda: evaluated(swarm.page()) == VERSIONS, START_S, "the last version is evaluated")
        wait_for(lambda: offered(swarm.page()) == [VERSIONS], 90, "the last version is offered")
        page = swarm.page()
        loss = float(page["learning"]["evaluation"]["loss"])
        shown: Any = page["checkpoints"]
        weights = shown[0]["files"][0]
        data = get(swarm.tracker.url, "/" + weights["path"])
        assert data is not None
        assert (len(data), digest_of(data).hex()) == (weights["bytes"], weights["sha256"])
        listed = json.loads(get(swarm.tracker.url, "/v1/checkpoints") or b"{}")
        assert listed["checkpoints"] == shown
        html = (get(swarm.tracker.url, "/") or b"").decode()
        assert weights["path"] in html
        assert weights["sha256"] in html
        assert f"p2pdiloco export --join {swarm.link}" in html

        done = command("export", "--join", swarm.link, "--held-out", str(tmp_path / "out"))
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "out/model.safetensors").read_bytes() == data, "the same version, the same bytes"
        facts = json.loads((tmp_path / "out/p2pdiloco.json").read_bytes())
        assert (facts["evaluation"]["version"], facts["evaluation"]["loss"]) == (VERSIONS, loss)
        assert facts["contributors"][0]["name"] == "one"

    (tmp_path / "evaluate.py").write_text(script())
    alone = subprocess.run(
        [sys.executable, str(tmp_path / "evaluate.py"), str(tmp_path / "out")],
        capture_output=True, text=True, timeout=COMMAND_S, check=True, env=OFFLINE,
    )  # fmt: skip
    found = re.search(r"loss (\d+\.\d+)", alone.stdout)
    assert found is not None
    assert float(found[1]) == pytest.approx(loss, rel=0.005)

    said = command(
        "generate", "--from", str(tmp_path / "out"), "--prompt", "the swarm", "--tokens", "8", "--json"
    )
    assert said.returncode == 0, said.stderr
    assert json.loads(said.stdout)["version"] == VERSIONS


def evaluated(page: dict[str, Any]) -> int:
    point = page.get("learning", {}).get("evaluation")
    return int(point["version"]) if point else -1


def offered(page: dict[str, Any]) -> list[int]:
    return [int(checkpoint["version"]) for checkpoint in page.get("checkpoints", [])]
