"""Scenario R5: a node says what it will need before it fetches anything, and chooses how it trains."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.run_spec import RunSpec, TensorSpec
from p2pdiloco.sim.keys import FastSigner
from p2pdiloco.sim.tiny_run import tiny_run
from p2pdiloco_node.config import NodeConfig
from p2pdiloco_node.taking_part import fitting as module
from p2pdiloco_node.training.frames import TrainerSettings
from p2pdiloco_node.training.machine import Gpu, Machine
from p2pdiloco_node.training.memory_plan import MemoryPlan
from p2pdiloco_node.training.presets import inner_spec, model_spec
from p2pdiloco_node.training.ranks import Ranks

GIB = 2**30


def spec_of(preset: str = "llama:110m", params: int = 113_000) -> RunSpec:
    owner = FastSigner("owner")
    return msgspec.structs.replace(
        tiny_run(owner, owner.peer_id).spec,
        model=model_spec(preset, (TensorSpec("w", (params, 1000)),)),
        inner=inner_spec(preset, 10**9),
    )


class Planned(NamedTuple):
    ranks: Ranks
    plan: MemoryPlan
    told: TrainerSettings


async def planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, gpu: float | None = None, ram: float = 64,
    disk: float = 500, spec: RunSpec | None = None, folder: Path | None = None, **settings: Any,
) -> Planned:  # fmt: skip
    """What a node does, and tells its trainer, on a machine with so many GiB."""
    gpu_bytes = None if gpu is None else round(gpu * GIB)
    machine = Machine("", gpu_bytes, round(ram * GIB), round(disk * GIB), str(tmp_path))
    monkeypatch.setattr(module, "this_machine", lambda _device, _folder: machine)
    monkeypatch.setattr(module, "gpus", lambda: [Gpu(n, "a GPU", gpu_bytes or 0, 0) for n in range(2)])
    config = NodeConfig(join="http://127.0.0.1:1", **settings)
    ranks, plan = await module.fit(
        config, spec or spec_of(), limits.shard_store_bytes_max, tmp_path, folder or tmp_path / "run"
    )
    return Planned(ranks, plan, module.trainer_settings(config, plan))


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
    needed = (await planned(tmp_path, monkeypatch, spec=spec)).plan.disk / GIB
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
    chosen = (await planned(tmp_path, monkeypatch, ram=12)).told
    assert (chosen.micro_batch, chosen.offload, chosen.compile) == (1, "auto", False)
    assert chosen.checkpointing in ("on", "off")
    asked = {"micro_batch": 3, "checkpointing": "on", "offload": "moments", "compile": True}
    for gpu in (None, 24):
        settings = (await planned(tmp_path, monkeypatch, gpu=gpu, **asked)).told
        assert (settings.micro_batch, settings.checkpointing) == (3, "on")
        assert (settings.offload, settings.compile) == ("moments", True)
    free = (await planned(tmp_path, monkeypatch, gpu=24)).told
    assert (free.micro_batch, free.checkpointing, free.offload) == (0, "auto", "auto")


async def test_ranks_are_in_the_plan_and_in_what_the_trainer_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await planned(tmp_path, monkeypatch, ranks=2)
    assert made.ranks.devices == ("cpu", "cpu")
    assert (made.plan.parallel, made.plan.ranks) == ("ddp", 2)
    assert made.told.parallel == "ddp"
    assert made.told.micro_batch * 2 <= spec_of().inner.sequences_per_step
    told = await planned(tmp_path, monkeypatch, gpu=24, gpus="0,1", parallel="fsdp")
    assert told.ranks.devices == ("cuda:0", "cuda:1")
    assert told.plan.parallel == "fsdp"
    assert told.told.parallel == "fsdp"


async def test_more_ranks_than_sequences_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OperatorError, match="share the 64 sequences"):
        await planned(tmp_path, monkeypatch, ranks=65)
