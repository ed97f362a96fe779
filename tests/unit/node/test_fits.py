"""Scenario R5: a node says what it will need before it fetches anything, and chooses how it trains."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

from p2pdiloco.errors import OperatorError
from p2pdiloco.run_spec import RunSpec, TensorSpec
from p2pdiloco.sim.keys import FastSigner
from p2pdiloco.sim.tiny_run import tiny_run
from p2pdiloco_node import daemon as module
from p2pdiloco_node.config import NodeConfig
from p2pdiloco_node.daemon import Daemon
from p2pdiloco_node.process.lifetime import Leaving
from p2pdiloco_node.storage.data_dir import DataDir
from p2pdiloco_node.training.machine import Gpu, Machine
from p2pdiloco_node.training.presets import inner_spec, model_spec

GIB = 2**30


def spec_of(preset: str = "llama:110m", params: int = 113_000) -> RunSpec:
    owner = FastSigner("owner")
    return msgspec.structs.replace(
        tiny_run(owner, owner.peer_id).spec,
        model=model_spec(preset, (TensorSpec("w", (params, 1000)),)),
        inner=inner_spec(preset, 10**9),
    )


async def planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, gpu: float | None = None, ram: float = 64,
    disk: float = 500, spec: RunSpec | None = None, folder: Path | None = None, **settings: Any,
) -> Daemon:  # fmt: skip
    """A daemon on a machine with so many GiB that has been asked whether a run fits."""
    gpu_bytes = None if gpu is None else round(gpu * GIB)
    machine = Machine("", gpu_bytes, round(ram * GIB), round(disk * GIB), str(tmp_path))
    monkeypatch.setattr(module, "this_machine", lambda _device, _folder: machine)
    monkeypatch.setattr(module, "gpus", lambda: [Gpu(n, "a GPU", gpu_bytes or 0, 0) for n in range(2)])
    config = NodeConfig(join="http://127.0.0.1:1", data_dir=str(tmp_path / "node"), **settings)
    made = Daemon(config, Leaving())
    made._data = DataDir(tmp_path / "node")
    await made._fits(spec or spec_of(), folder or tmp_path / "run")
    return made


async def test_the_table_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="p2pdiloco.node"):
        await planned(tmp_path, monkeypatch, gpu=24)
    (said,) = [r.getMessage() for r in caplog.records if "needs on this machine" in r.getMessage()]
    assert "moments" in said
    assert "24.0 GiB" in said
    assert "sequences per forward pass" in said


async def test_too_little_is_refused_with_the_amount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OperatorError, match=r"of RAM.*more than is free") as refused:
        await planned(tmp_path, monkeypatch, ram=4)
    assert refused.value.exit_code == 6
    with pytest.raises(OperatorError, match="--data-dir"):
        await planned(tmp_path, monkeypatch, disk=1)


async def test_what_is_here_already_needs_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    spec = spec_of("llama:tiny", 2_000)
    needed = (await planned(tmp_path, monkeypatch, spec=spec))._plan.disk / GIB
    with pytest.raises(OperatorError):
        await planned(tmp_path, monkeypatch, spec=spec, disk=0.6 * needed)
    with (folder / "state").open("wb") as file:
        file.truncate(round(0.5 * needed * GIB))
    await planned(tmp_path, monkeypatch, spec=spec, folder=folder, disk=0.6 * needed)


async def test_a_strangers_config_is_looked_at_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of()
    for family, config in (("unknown", b"{}"), ("llama", b'{"auto_map": {}}')):
        model = msgspec.structs.replace(spec.model, family=family, config=config)
        with pytest.raises(OperatorError, match=r"not trained by this build|names code of its own"):
            await planned(tmp_path, monkeypatch, spec=msgspec.structs.replace(spec, model=model))


async def test_settings_reach_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU what was planned; on a GPU what was asked for: the trainer plans with what torch finds."""
    chosen = (await planned(tmp_path, monkeypatch, ram=12))._trainer_settings()
    assert (chosen.micro_batch, chosen.offload, chosen.compile) == (1, "auto", False)
    assert chosen.checkpointing in ("on", "off")
    asked = {"micro_batch": 3, "checkpointing": "on", "offload": "moments", "compile": True}
    for gpu in (None, 24):
        settings = (await planned(tmp_path, monkeypatch, gpu=gpu, **asked))._trainer_settings()
        assert (settings.micro_batch, settings.checkpointing) == (3, "on")
        assert (settings.offload, settings.compile) == ("moments", True)
    free = (await planned(tmp_path, monkeypatch, gpu=24))._trainer_settings()
    assert (free.micro_batch, free.checkpointing, free.offload) == (0, "auto", "auto")


async def test_ranks_are_in_the_plan_and_in_what_the_trainer_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await planned(tmp_path, monkeypatch, ranks=2)
    assert made._ranks.devices == ("cpu", "cpu")
    assert (made._plan.parallel, made._plan.ranks) == ("ddp", 2)
    assert made._trainer_settings().parallel == "ddp"
    assert made._trainer_settings().micro_batch * 2 <= spec_of().inner.sequences_per_step
    told = await planned(tmp_path, monkeypatch, gpu=24, gpus="0,1", parallel="fsdp")
    assert told._ranks.devices == ("cuda:0", "cuda:1")
    assert told._plan.parallel == "fsdp"
    assert told._trainer_settings().parallel == "fsdp"


async def test_more_ranks_than_sequences_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OperatorError, match="share the 64 sequences"):
        await planned(tmp_path, monkeypatch, ranks=65)


def test_contradictions_are_found_before_anything_is_touched(tmp_path: Path) -> None:
    config = NodeConfig(join="http://127.0.0.1:1", data_dir=str(tmp_path / "node"), ranks=2, gpus="all")
    with pytest.raises(OperatorError, match="give one of them"):
        Daemon(config, Leaving())
    assert not (tmp_path / "node").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"device": "cuda"}, "--device cuda: this machine has 0"),
        ({"device": "cuda:3"}, "--device cuda:3: this machine has 0"),
        ({"gpus": "all"}, "--gpus all: this machine has no NVIDIA GPU"),
        ({"parallel": "fsdp"}, "--parallel fsdp says how several ranks share a model"),
    ],
)
async def test_devices_and_ranks_are_checked_before_anybody_is_asked_for_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr(module, "gpus", list)
    root = tmp_path / "node"
    config = NodeConfig(join="http://127.0.0.1:1", data_dir=str(root), **settings)  # nobody answers there
    with pytest.raises(OperatorError, match=words):
        await Daemon(config, Leaving()).__aenter__()
    assert not root.exists()
