"""What tests with real processes share."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from p2pdiloco.ids import RunId
from p2pdiloco_node.demo.command import TIMINGS
from p2pdiloco_node.run.new import Order, create_run

from .swarm_kit import free_port, get, processes_of, swarm_in, wait_for

END_S = 150.0  # imports of a trainer on a busy machine, six versions, two evaluations and samples
SOURCES = {
    "code": "def main(number):\n    return number + {}\n\n",
    "prose": "The swarm trains model {} together.\n",
}


class EndedRun(NamedTuple):
    """A run of six versions, with a tokenizer of its own, that one node finished by itself (scenario A2)."""

    folder: Path
    run: RunId
    port: int
    page: dict[str, Any]  # of its tracker at the end
    metrics: str


@pytest.fixture(autouse=True, scope="session")
def _ctrl_c_can_be_sent() -> None:
    """Tests that run in the background ignore SIGINT, and so would the programs that they start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def ended_run(tmp_path_factory: pytest.TempPathFactory) -> EndedRun:
    """Kept with every delta by the node and by its tracker's witness; nothing of it runs any more."""
    folder = tmp_path_factory.mktemp("ended")
    for name, text in SOURCES.items():
        (folder / name).mkdir()
        for number in range(30):
            (folder / name / f"{number}.txt").write_text(
                "".join(text.format(1000 * number + i) for i in range(60))
            )
    run = asyncio.run(
        create_run(
            Order(
                "ended", "llama:tiny", [f"{folder}/code/*.txt", f"{folder}/prose/*.txt"], 2**40,
                admission="local", target_version=6, eval_every=3, seed=1, tokenizer="bpe:400",
                eval_per_source=True, jobs=1, inner={"inner_steps": 2**20, "pass_s": 1.0}, committee=TIMINGS,
                samples={"prompts": ("def main(", "The swarm"), "tokens": 12},
            ),
            folder / "run", owner_key=folder / "owner.key",
        )
    )  # fmt: skip
    port = free_port()
    with swarm_in(folder, run, port) as swarm:
        swarm.tracker.arguments += ["--tensorboard", str(folder / "curves" / "tracker")]
        swarm.start_tracker()
        node = swarm.node("node-1", "--keep-deltas", "--tensorboard", str(folder / "curves" / "node"))
        assert node.wait(END_S) == 0, node.text()
        assert "The run is over at version 6" in node.text()

        def evaluated() -> list[int]:
            learning: Any = swarm.page()["learning"]
            return [e["version"] for e in learning["evaluations"]]

        wait_for(lambda: evaluated()[-1:] == [6], 20, "the last version's evaluation is on the page")
        page: dict[str, Any] = swarm.page()
        metrics = (get(swarm.tracker.url, "/metrics") or b"").decode()
        status, seconds = swarm.tracker.terminate()
        assert (status, seconds < 5) == (0, True), swarm.tracker.text()
    assert processes_of(folder) == []
    return EndedRun(folder, run, port, page, metrics)
