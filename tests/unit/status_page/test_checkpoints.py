"""Checkpoints on the page and in its JSON twin: which versions, how large, by which digest, from where."""

from __future__ import annotations

import json
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from p2pdiloco.status.read_model import Checkpoint, CheckpointFile, to_json
from p2pdiloco_node.status_page.metrics import metrics_text
from p2pdiloco_node.status_page.render import render_page, render_sections


def checkpoint(version: int, *names: str) -> Checkpoint:
    files = tuple(
        CheckpointFile(name=name, path=f"checkpoints/v{version}/{name}", bytes=1_500_000, sha256=f"{n:064x}")
        for n, name in enumerate(names or ("model.safetensors", "config.json"), start=10 * version)
    )
    return Checkpoint(
        version=version, when_unix=1_790_000_000.0, loss=None, dtype="float32", bytes=3_000_000, files=files
    )


def test_the_newest_is_first_with_its_own_loss(fake_run: Any) -> None:
    run = fake_run()
    run.lifelike(8)
    run.builder.checkpoints = (checkpoint(4), checkpoint(7))
    status = run.builder.build(run.now)
    assert [(c.version, c.loss is not None) for c in status.checkpoints] == [(7, False), (4, True)]
    html = render_sections(status).sections["checkpoints"]
    assert html.index("checkpoints/v7/model.safetensors") < html.index("checkpoints/v4/model.safetensors")
    assert f"{70:064x}" in html
    assert "3.00\u00a0MB" in html
    assert 'href="checkpoints/v7/config.json" download' in html
    page = render_page(render_sections(status), {}, inline_css="")
    assert "p2pdiloco export --join http://203.0.113.7:8470/#" in page
    twin = json.loads(to_json(status))
    assert twin["checkpoints"][1]["files"][0]["sha256"] == f"{40:064x}"
    assert twin["export_line"].endswith(" out/")
    metrics = {m.name: m for m in text_string_to_metric_families(metrics_text(status, 0).decode())}
    assert metrics["p2pdiloco_checkpoint_version"].samples[0].value == 7


def test_without_one_it_says_when_the_first_comes(fake_run: Any) -> None:
    run = fake_run(join="http://0.0.0.0:8470")
    run.listed()
    status = run.builder.build(run.now)
    rendering = render_sections(status)
    assert "No version is offered yet" in rendering.sections["checkpoints"]
    assert "p2pdiloco export" not in render_page(rendering, {}, inline_css=""), "no address works elsewhere"
    assert "checkpoint_version" not in metrics_text(status, 0).decode()


def test_a_model_in_several_files_has_each_digest(fake_run: Any) -> None:
    run = fake_run()
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "config.json")
    run.builder.checkpoints = (checkpoint(1, *names),)
    html = render_sections(run.builder.build(run.now)).sections["checkpoints"]
    assert all(f"checkpoints/v1/{name}" in html for name in names)
    assert html.count("<code>") == 2
