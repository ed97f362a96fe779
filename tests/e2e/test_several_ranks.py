"""Two ranks on CPUs (gloo) against one with the same batch: losses, params, moments, texts, layouts."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from p2pdiloco.run_spec import ModelSpec, RunSpec, TensorSpec
from p2pdiloco.sim.keys import FastSigner
from p2pdiloco.sim.tiny_run import tiny_run
from p2pdiloco.wire.codec import encode
from p2pdiloco_node.training.families import FAMILIES
from p2pdiloco_node.training.presets import config_bytes, inner_spec
from tests.e2e import rank_job
from tests.unit.training.test_families import SEQ, VOCAB, tiny_config

pytestmark = pytest.mark.e2e


class Case(msgspec.Struct):
    name: str
    spec: str  # also the family, by which version 0 is found
    sharded: bool
    sequences: int = 4
    micro_batch: int = 2
    checkpointing: bool = False
    bf16: bool = False


CASES = (
    *(
        Case(f"{family}-{how}", family, how == "fsdp")
        for family in ("llama", "mixtral")
        for how in ("ddp", "fsdp")
    ),
    # Three rows on one rank and two on the other, one at a time: a row stands in for the missing one.
    *(Case(f"uneven-{how}", "mixtral", how == "fsdp", 5, 1) for how in ("ddp", "fsdp")),
    Case("checkpointing-fsdp", "gemma2", sharded=True, checkpointing=True),
    Case("bf16-fsdp", "llama", sharded=True, bf16=True),
)  # fmt: skip


def write_run(folder: Path, family: str) -> RunSpec:
    """A spec and its version 0 in `folder`."""
    import torch

    from p2pdiloco_node.training.models import (
        flatten_params,
        frozen_config,
        initialised,
        make_config,
        tensor_layout,
    )

    torch.manual_seed(5)
    config = make_config(family, tiny_config(family))
    model = initialised(family, config)
    made = ModelSpec(family, "tiny", config_bytes(frozen_config(config)), VOCAB, SEQ, tensor_layout(model))
    owner = FastSigner("owner")
    inner = msgspec.structs.replace(inner_spec("llama:tiny", 10**6), moments_warmup_steps=3)
    spec = msgspec.structs.replace(tiny_run(owner, owner.peer_id).spec, name=family, model=made, inner=inner)
    (folder / family).write_bytes(encode(spec))
    (folder / f"{family}.f32").write_bytes(flatten_params(model).numpy().tobytes())
    return spec


def start_ranks(folder: Path, ranks: int = 2) -> list[subprocess.Popen[bytes]]:
    """The job's processes, with what torchrun would tell them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    told = os.environ | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks),
        "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    return [
        subprocess.Popen([sys.executable, rank_job.__file__, str(folder)], env=told | {"RANK": str(rank)})
        for rank in range(ranks)
    ]


def made_by_two(folder: Path, cases: Sequence[Case]) -> Path:
    """The folder with what two ranks made of the cases."""
    for family in {case.spec for case in cases}:
        write_run(folder, family)
    (folder / "cases.json").write_bytes(msgspec.json.encode(cases))
    processes = start_ranks(folder)
    try:
        assert [process.wait(240) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return folder


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_by_two(tmp_path_factory.mktemp("ranks"), CASES)


def alone(case: Case, folder: Path, tmp_path: Path) -> dict[str, Any]:
    """The same life with one rank, and as many rows in a forward pass as a rank has."""
    from p2pdiloco.wire.codec import decode
    from p2pdiloco_node.training.inner_loop import InnerLoop, set_threads

    set_threads(1)
    spec = decode((folder / case.spec).read_bytes(), RunSpec)
    (tmp_path / f"{case.spec}.f32").write_bytes((folder / f"{case.spec}.f32").read_bytes())
    loop = InnerLoop(spec, micro_batch=case.micro_batch, checkpointing=case.checkpointing, bf16=case.bf16)
    return rank_job.live(loop, tmp_path, spec, case.sequences)


def saved(path: Path) -> dict[str, Any]:
    return {what: np.array(values) for what, values in json.loads(path.read_text()).items()}


def distance(found: Any, expected: Any) -> float:
    """Of two vectors, by the length of the second."""
    assert found.shape == expected.shape
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_two_ranks_are_one_with_the_same_batch(case: Case, ranks: Path, tmp_path: Path) -> None:
    compare(case, ranks, tmp_path)


@pytest.mark.long
def test_every_family_can_be_shared(tmp_path: Path) -> None:
    cases = [Case(f"{family}-fsdp", family, sharded=True) for family in FAMILIES]
    ranks = made_by_two(tmp_path, cases)
    for case in cases:
        folder = tmp_path / f"alone-{case.name}"
        folder.mkdir()
        compare(case, ranks, folder)


def compare(case: Case, ranks: Path, tmp_path: Path) -> None:
    one, two = alone(case, ranks, tmp_path), saved(ranks / f"{case.name}.json")
    # bf16 keeps eight bits; which rows are added first shows.
    near, apart = (2e-2, 0.2) if case.bf16 else (1e-5, 5e-3)
    assert two["losses"] == pytest.approx(one["losses"], rel=near)
    assert two["losses"][4] < two["losses"][0]
    assert two["evaluated"] == pytest.approx(one["evaluated"], rel=near)
    assert two["evenness"] == pytest.approx(one["evenness"], rel=1e-2)
    assert two["evenness"].size or case.spec != "mixtral"
    # In the RunSpec's flat order, every value in its place.
    for what in ("delta", "last"):
        assert distance(two[what], one[what]) < apart
    assert two["steps"] == one["steps"] == rank_job.STEPS
    for row in range(2):
        assert distance(two["moments"][row], one["moments"][row]) < apart
    if not case.bf16:
        assert list(two["text"]) == one["text"]
    # A state that is not finite is met by all ranks alike, and left again.
    assert np.isnan(two["broken"][0])
    assert np.isfinite(two["broken"][1])


def test_ranks_hold_rows_side_by_side() -> None:
    from p2pdiloco_node.training.sharded_params import shard_places

    matrix, vector, short = TensorSpec("m", (5, 3)), TensorSpec("v", (4,)), TensorSpec("s", (2, 7))
    assert shard_places(matrix, 100, 2) == [slice(100, 109), slice(109, 115)]
    assert shard_places(vector, 0, 4) == [slice(n, n + 1) for n in range(4)]
    # With more ranks than rows the last hold nothing of it.
    assert shard_places(short, 10, 4) == [slice(10, 17), slice(17, 24), slice(24, 24), slice(24, 24)]
    assert [s.stop - s.start for s in shard_places(matrix, 0, 3)] == [6, 6, 3]
