"""A model leaves its run: exported by its link, evaluated by transformers alone, offered on the page."""

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

from .conftest import EndedRun
from .swarm_kit import get, swarm_in, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timed]
OFFLINE = os.environ | {"HF_HUB_OFFLINE": "1"}
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


def test_from_a_run_s_link_to_a_folder_that_talks(ended_run: EndedRun, tmp_path: Path) -> None:
    version = ended_run.page["progress"]["version"]
    with swarm_in(ended_run.folder, ended_run.run, ended_run.port) as swarm:
        swarm.start_tracker()
        wait_for(lambda: offered(swarm.page())[:1] == [version], 90, "the last version is offered")
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
        assert (facts["evaluation"]["version"], facts["evaluation"]["loss"]) == (version, loss)
        assert facts["contributors"][0]["name"] == "node-1"

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
    assert json.loads(said.stdout)["version"] == version


def offered(page: dict[str, Any]) -> list[int]:
    return [int(checkpoint["version"]) for checkpoint in page.get("checkpoints", [])]
