"""Evaluations on the page, in its JSON twin and in /metrics: losses by source, samples, who agrees."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from p2pdiloco.ids import digest_of
from p2pdiloco.run_spec import BYTES, BlobRef, DataSpec, EvaluationSet, SampleSpec
from p2pdiloco.status.read_model import to_json
from p2pdiloco_node.status_page.metrics import metrics_text
from p2pdiloco_node.status_page.render import render_sections

ALL = [(i, 10_000, 3.0) for i in (1, 2, 3)]
SETS = tuple(
    EvaluationSet(name, BlobRef(digest_of(name.encode()), 4096, 4096), text_bytes)
    for name, text_bytes in (("all", 4096), ("<script>code", 8192))
)
HOSTILE = "\u202e</blockquote><script>alert(1)</script>\x00{{ 7*7 }}\nsecond   line"


@pytest.fixture
def run(fake_run: Any) -> Any:
    """Three voters train; two evaluation sets and two prompts; at version 4."""
    shard = BlobRef(digest_of(b"s"), 4096, 4096)
    made = fake_run(data=DataSpec(BYTES, 1, (shard,), SETS), samples=SampleSpec(("def main(", "<b>Once"), 8))
    for i in (1, 2, 3):
        made.node(i)
    made.listed()
    made.step(ALL)
    made.seats(1, 2, 3, witness=False)
    for _ in range(3):
        made.step(ALL)
    return made


def html_of(run: Any) -> str:
    sections = render_sections(run.builder.build(run.now)).sections
    return sections["figures"] + sections["evaluation"]


def words_of(run: Any) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", html_of(run)).split())


def metrics_of(run: Any) -> dict[str, dict[str, float]]:
    """Samples by family and label."""
    text = metrics_text(run.builder.build(run.now), 0).decode()
    return {
        family.name: {s.labels.get("set", ""): s.value for s in family.samples}
        for family in text_string_to_metric_families(text)
    }


def test_three_that_agree_and_then_one_liar(run: Any) -> None:
    run.evaluated(2.90, by=1, losses=[2.0])
    assert "as one evaluator says (3 were asked)" in words_of(run)
    run.evaluated(2.91, by=2, losses=[2.1])
    assert "mean of two evaluators that agree (3 were asked)" in words_of(run)
    assert "2.905" in words_of(run)
    run.evaluated(0.01, by=3, losses=[9.0])
    assert "median of 3 evaluators, of which 2 agree" in words_of(run)
    assert "were asked" not in words_of(run)
    assert "2.900" in words_of(run)


def test_each_source_has_its_row(run: Any) -> None:
    run.evaluated(math.log(4), by=1, losses=[math.log(8)])
    page = html_of(run)
    assert "&lt;script&gt;code" in page
    assert "code 2.079 8.00 1.500" in words_of(run).replace("&gt;", " ")
    assert re.search(r"all 1\.386 4\.00 2\.000", words_of(run))


def test_a_single_set_needs_no_table(fake_run: Any) -> None:
    run = fake_run()
    run.lifelike(8)
    assert "<table" not in html_of(run)
    assert "What it writes" not in html_of(run)


def test_samples_are_text_whatever_a_model_or_a_liar_writes(run: Any) -> None:
    for i in (1, 2, 3):
        run.evaluated(2.9, by=i, losses=[2.0], samples=["argv):", HOSTILE if i < 3 else "upon a time"])
    page = html_of(run)
    assert "<script" not in page
    assert "</blockquote>&lt;" not in page
    assert "&lt;/blockquote&gt;&lt;script&gt;alert(1)&lt;/script&gt;{{ 7*7 }}\nsecond   line" in page
    assert "<b><bdi>&lt;b&gt;Once</bdi></b>" in page
    assert not re.search("[\u202e\x00]", page)
    assert "3 of 3 evaluators wrote just this" in page
    assert "2 of 3 evaluators wrote just this" in page
    assert page.count("<blockquote") == 2


def test_the_json_twin_has_it_all(run: Any) -> None:
    for i in (1, 2, 3):
        run.evaluated(2.9, by=i, losses=[2.0], samples=["argv):", "upon"])
    learning = json.loads(to_json(run.builder.build(run.now)))["learning"]
    assert [(s["name"], s["loss"]) for s in learning["sets"]] == [("all", 2.9), ("<script>code", 2.0)]
    assert learning["evaluation"]["losses"] == [2.9, 2.0]
    assert (learning["evaluation"]["asked"], learning["evaluation"]["agreeing"]) == (3, 3)
    assert len(learning["evaluation"]["reports"]) == 3
    (samples,) = learning["samples"]
    assert (samples["version"], samples["evaluators"]) == (4, 3)
    assert samples["samples"][0] == {"prompt": "def main(", "text": "argv):", "agreeing": 3}


def test_metrics_by_set_and_how_many_agree(run: Any) -> None:
    assert metrics_of(run)["p2pdiloco_evaluation_set_loss"] == {}
    assert "p2pdiloco_evaluation_version" not in metrics_of(run)
    for i, loss in ((1, math.log(4)), (2, math.log(4)), (3, 50.0)):
        run.evaluated(loss, by=i, losses=[math.log(8)])
    metrics = metrics_of(run)
    code = "<script>code"
    assert metrics["p2pdiloco_evaluation_set_loss"] == pytest.approx({"all": math.log(4), code: math.log(8)})
    assert metrics["p2pdiloco_evaluation_set_perplexity"] == pytest.approx({"all": 4, code: 8})
    assert metrics["p2pdiloco_evaluation_set_bits_per_byte"] == pytest.approx({"all": 2, code: 1.5})
    assert metrics["p2pdiloco_evaluation_loss"] == pytest.approx({"": math.log(4)})
    counts = {"version": 4, "evaluators": 3, "evaluators_agreeing": 2, "evaluators_asked": 3}
    for name, value in counts.items():
        assert metrics[f"p2pdiloco_evaluation_{name}"] == {"": value}
