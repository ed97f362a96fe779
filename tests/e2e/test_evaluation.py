"""Evaluations end to end: wide tokens, two sources, samples through a tokenizer, page and TensorBoard."""

from __future__ import annotations

import pytest

from .conftest import EndedRun

pytestmark = [pytest.mark.e2e, pytest.mark.timed]


def test_losses_of_each_source_and_samples_are_on_the_page(ended_run: EndedRun) -> None:
    learning, metrics = ended_run.page["learning"], ended_run.metrics
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


def test_tensorboard_has_the_curves_of_both(ended_run: EndedRun) -> None:
    folder, page = ended_run.folder, ended_run.page
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
