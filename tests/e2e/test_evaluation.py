"""Evaluations end to end: wide tokens, two sources, samples through a tokenizer, page and TensorBoard."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from p2pdiloco_node.demo import TIMINGS
from p2pdiloco_node.run_new import Order, create_run

from .swarm_kit import free_port, get, swarm_in, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timed]

END_S = 150.0  # imports of a trainer on a busy machine, six versions, two evaluations and samples
SOURCES = {
    "code": "def main(number):\n    return number + {}\n\n",
    "prose": "The swarm trains model {} together.\n",
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """A run of six versions that one node finished: its folder, its page's JSON and its metrics."""
    folder = tmp_path_factory.mktemp("evaluated")
    for name, text in SOURCES.items():
        (folder / name).mkdir()
        for number in range(30):
            (folder / name / f"{number}.txt").write_text(
                "".join(text.format(1000 * number + i) for i in range(60))
            )
    run = asyncio.run(
        create_run(
            Order(
                "evaluated", "llama:tiny", [f"{folder}/code/*.txt", f"{folder}/prose/*.txt"], 2**40,
                admission="local", target_version=6, eval_every=3, seed=1, tokenizer="bpe:400",
                eval_per_source=True, jobs=1, inner={"inner_steps": 2**20, "pass_s": 1.0}, committee=TIMINGS,
                samples={"prompts": ("def main(", "The swarm"), "tokens": 12},
            ),
            folder / "run", owner_key=folder / "owner.key",
        )
    )  # fmt: skip
    with swarm_in(folder, run, free_port()) as swarm:
        swarm.tracker.arguments += ["--tensorboard", str(folder / "curves" / "tracker")]
        swarm.start_tracker()
        node = swarm.node("node-1", "--tensorboard", str(folder / "curves" / "node"))
        assert node.wait(END_S) == 0, node.text()

        def evaluated() -> list[int]:
            learning: Any = swarm.page()["learning"]
            return [e["version"] for e in learning["evaluations"]]

        wait_for(lambda: evaluated()[-1:] == [6], 20, "the last version's evaluation is on the page")
        page, metrics = swarm.page(), (get(swarm.tracker.url, "/metrics") or b"").decode()
        assert swarm.tracker.terminate()[0] == 0, swarm.tracker.text()
        # Back after a restart, without any node.
        swarm.start_tracker()
        again = swarm.page()
        assert again["learning"] == page["learning"]
        assert swarm.tracker.terminate()[0] == 0, swarm.tracker.text()
    return folder, page, metrics


def test_losses_of_each_source_and_samples_are_on_the_page(ended: tuple[Path, dict[str, Any], str]) -> None:
    _, page, metrics = ended
    learning = page["learning"]
    assert [e["version"] for e in learning["evaluations"]] == [0, 3, 6]
    assert learning["evaluations"][-1]["loss"] < learning["evaluations"][0]["loss"]
    names = [s["name"] for s in learning["sets"]]
    assert len(names) == 3
    assert len({s["loss"] for s in learning["sets"]}) == 3
    # A token of this vocabulary stands for several bytes.
    for held_out in learning["sets"]:
        assert 0 < held_out["bits_per_byte"] < held_out["loss"] / 0.7
        assert f'p2pdiloco_evaluation_set_loss{{set="{held_out["name"]}"}} {held_out["loss"]}' in metrics
    newest = learning["samples"][0]
    assert newest["version"] == 6
    assert [s["prompt"] for s in newest["samples"]] == ["def main(", "The swarm"]
    assert any(s["text"] for s in newest["samples"])
    assert learning["evaluators"] == "as one evaluator says"


def test_tensorboard_has_the_curves_of_both(ended: tuple[Path, dict[str, Any], str]) -> None:
    folder, page, _ = ended
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = {}
    for who in ("tracker", "node"):
        found[who] = reader.EventAccumulator(str(folder / "curves" / who))
        found[who].Reload()
    whole = f"evaluation/{page['learning']['sets'][0]['name']}/loss"
    shown = [e["loss"] for e in page["learning"]["evaluations"]]
    for events in found.values():
        assert [e.value for e in events.Scalars(whole)] == pytest.approx(shown, rel=1e-6)
        assert len(events.Tensors("samples/1")) == 3
    versions = found["tracker"].Scalars("version")
    assert [e.value for e in versions] == [1, 2, 3, 4, 5, 6]
    assert versions[-1].step == page["progress"]["tokens"]
    assert {"loss", "tokens_per_s", "staleness_max"} <= set(found["tracker"].Tags()["scalars"])
    own = found["node"].Tags()["scalars"]
    assert {"loss", "lr", "tokens_per_s", "version", "staleness", "goodput"} <= set(own)
    assert found["node"].Scalars("loss")[-1].value < found["node"].Scalars("loss")[0].value
    assert 0 < found["node"].Scalars("goodput")[-1].value <= 1
