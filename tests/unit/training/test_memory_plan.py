"""Scenario R5: what a node will need, said and judged before any download."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.run_spec import InnerSpec, ModelSpec, RunSpec, TensorSpec
from p2pdiloco.sim.keys import FastSigner
from p2pdiloco.sim.tiny_run import tiny_run
from p2pdiloco_node.training.families import ModelRefused
from p2pdiloco_node.training.machine import Machine
from p2pdiloco_node.training.memory_plan import (
    GIB,
    RESOURCES,
    MemoryPlan,
    Wishes,
    amount,
    check,
    in_words,
    part_sizes,
    plan_memory,
    plan_trainer,
)
from p2pdiloco_node.training.presets import inner_spec, model_spec
from p2pdiloco_node.training.shapes import shape_of

TIB = 1024 * GIB


def run_of(preset: str, params: int, **inner: Any) -> RunSpec:
    """A run of that preset's dimensions; its tensors stand for all `params`."""
    owner = FastSigner("owner")
    model = model_spec(preset, (TensorSpec("w", (params // 1000, 1000)),))
    loop: InnerSpec = msgspec.structs.replace(inner_spec(preset, 10**9), **inner)
    spec = tiny_run(owner, owner.peer_id).spec
    outer = msgspec.structs.replace(spec.outer, codec="int4")
    return msgspec.structs.replace(spec, model=model, inner=loop, outer=outer)


M110, B1, B7 = (
    run_of("llama:110m", 113_000_000),
    run_of("llama:1b", 993_000_000),
    run_of("llama:7b", 6_478_000_000),
)


def gpu(gib: float, *, ram: float = 1024, disk: float = 1024) -> Machine:
    return Machine("a GPU", round(gib * GIB), round(ram * GIB), round(disk * GIB), "/data")


def cpu(gib: float) -> Machine:
    return Machine("", None, round(gib * GIB), TIB, "/data")


def ways(plan: MemoryPlan) -> tuple[int, bool, str]:
    return plan.micro_batch, plan.checkpointing, plan.offload


def test_a_large_gpu_needs_no_saving() -> None:
    plan = plan_memory(M110, gpu(80))
    assert not plan.missing
    assert ways(plan)[1:] == (False, "none")
    assert plan.micro_batch * 1024 <= 32768
    assert M110.inner.sequences_per_step % plan.micro_batch == 0
    assert plan.gpu > 20 * 113_000_000  # params, gradients, moments, anchor, evaluation: 24 bytes each


def test_the_smaller_the_gpu_the_more_is_saved() -> None:
    """In order: the micro-batch down to a good size, the anchor to the host, checkpointing, the moments."""
    seen = [plan_memory(B1, gpu(gib)) for gib in (80, 32, 24, 20, 12)]
    assert not any(plan.missing for plan in seen)
    needs = [plan.gpu for plan in seen]
    assert needs == sorted(needs, reverse=True)
    assert [plan.offload for plan in seen] == ["none", "anchor", "anchor", "anchor", "moments"]
    assert [plan.checkpointing for plan in seen] == [False, False, True, True, True]
    moved = seen[-1].ram - seen[0].ram
    assert moved >= 16 * 993_000_000  # moments, anchor and evaluated params are on the host


def test_what_does_not_fit_is_refused_with_the_missing_amount() -> None:
    plan = plan_memory(B7, gpu(24, ram=64, disk=10))
    assert set(plan.missing) == {"on the GPU", "of RAM", "on the disk"}
    with pytest.raises(OperatorError) as refused:
        check(plan, "big")
    assert refused.value.exit_code == RESOURCES
    said = str(refused.value)
    assert f"{amount(plan.missing['on the GPU'])} more than is free" in said
    assert "--data-dir" in said
    assert "Run big does not fit" in said
    # With so much more it fits.
    more = plan.missing
    machine = Machine(
        "a GPU",
        24 * GIB + more["on the GPU"],
        64 * GIB + more["of RAM"],
        10 * GIB + more["on the disk"],
        "/data",
    )
    assert not plan_memory(B7, machine).missing
    check(plan_memory(B7, machine), "big")


def test_wishes_are_kept() -> None:
    wishes = Wishes(micro_batch=3, checkpointing="on", offload="anchor")
    assert ways(plan_memory(M110, gpu(80), wishes)) == (3, True, "anchor")
    assert ways(plan_memory(M110, gpu(80), Wishes(offload="moments")))[2] == "moments"
    never = plan_memory(B1, gpu(12), Wishes(checkpointing="off", offload="none"))
    assert ways(never)[1:] == (False, "none")
    assert never.missing
    # More than a batch has is the batch.
    assert plan_memory(M110, gpu(80), Wishes(micro_batch=9999)).micro_batch == 64


def test_on_a_cpu_everything_is_ram() -> None:
    plan = plan_memory(M110, cpu(64))
    assert plan.gpu == 0
    assert plan.offload == "none"
    assert plan.micro_batch * 1024 <= 8192
    small = plan_memory(M110, cpu(10))
    assert small.missing == {} or "of RAM" in small.missing
    assert small.ram < plan.ram
    assert "of RAM" in plan_memory(M110, cpu(4)).missing
    # The demo's model: its whole batch at once, on anything.
    assert ways(plan_memory(run_of("llama:1m", 970_000), cpu(2))) == (8, False, "none")


def test_a_trainer_refuses_a_gpu_alone() -> None:
    """RAM and disk hold by then what it is about to read."""
    assert plan_trainer(M110, gpu(80, ram=0.1, disk=0.1), Wishes()).missing
    with pytest.raises(OperatorError, match="does not fit on this machine"):
        plan_trainer(B7, gpu(8), Wishes())


def test_a_sparse_codec_keeps_more() -> None:
    sparse = msgspec.structs.replace(M110, outer=msgspec.structs.replace(M110.outer, codec="topk64"))
    assert plan_memory(sparse, gpu(80)).ram - plan_memory(M110, gpu(80)).ram > 7 * 113_000_000


def test_experts_and_long_sequences_cost_activations() -> None:
    def gpu_bytes(preset: str, **inner: Any) -> int:
        return plan_memory(run_of(preset, 10**6, **inner), gpu(500), Wishes(micro_batch=4)).gpu

    assert gpu_bytes("mixtral:8x20m") > gpu_bytes("llama:20m")
    model = M110.model
    long = msgspec.structs.replace(M110, model=msgspec.structs.replace(model, seq_len=4 * model.seq_len))
    assert plan_memory(long, gpu(500), Wishes(4)).gpu > plan_memory(M110, gpu(500), Wishes(4)).gpu


def test_the_table_adds_up() -> None:
    plan = plan_memory(B1, gpu(18))
    lines = in_words(plan)
    assert lines[0].split() == ["GPU", "RAM", "disk"]
    assert lines[-3].split()[:2] == ["in", "all"]
    assert amount(plan.gpu) in lines[-3]
    assert amount(18 * GIB) in lines[-2]
    assert "checkpointing" in lines[-1]
    assert len({len(line) for line in lines[:-3]} | {len(lines[-3])}) == 1
    assert "GPU" not in "".join(in_words(plan_memory(M110, cpu(64))))


def test_a_config_that_says_nothing_is_planned_all_the_same() -> None:
    """The trainer will refuse it; the plan must not fall over it."""
    empty = ModelSpec("llama", "x", json.dumps({}).encode(), 256, 128, (TensorSpec("w", (10, 10)),))
    assert plan_memory(msgspec.structs.replace(M110, model=empty), cpu(8)).ram > 0


def real(preset: str) -> RunSpec:
    """A run whose tensors are those of a Llama of that preset, by layer."""
    spec = run_of(preset, 1_000_000)
    shape = shape_of(spec.model)
    each = 4 * shape.hidden * shape.hidden + 3 * shape.hidden * shape.dense
    layers = tuple(
        TensorSpec(f"model.layers.{n}.w", (each // shape.hidden, shape.hidden)) for n in range(shape.layers)
    )
    ends = tuple(TensorSpec(name, (32000, shape.hidden)) for name in ("model.embed_tokens.w", "lm_head.w"))
    return msgspec.structs.replace(spec, model=msgspec.structs.replace(spec.model, tensors=(*layers, *ends)))


def test_several_gpus_hold_the_model_each_or_share_it() -> None:
    small, large = real("llama:110m"), real("llama:7b")
    plan = plan_memory(small, gpu(80), Wishes(ranks=4, here=4))
    assert (plan.parallel, plan.missing) == ("ddp", {})
    assert not plan_memory(large, gpu(80)).missing.get("of RAM")
    assert "on the GPU" in plan_memory(large, gpu(24, ram=4096, disk=4096), Wishes(offload="anchor")).missing
    shared = plan_memory(large, gpu(40, ram=4096, disk=4096), Wishes(ranks=8, here=8))
    assert (shared.parallel, shared.missing, shared.offload) == ("fsdp", {}, "none")
    # What does not grow or shrink with the ranks is the swarm's state.
    alone = plan_memory(large, gpu(400, ram=4096, disk=4096))
    state = "global state: params, momentum"
    assert [r for r in shared.rows if r.what == state] == [r for r in alone.rows if r.what == state]
    moments = {
        plan.parallel: row.gpu for plan in (shared, alone) for row in plan.rows if row.what == "moments"
    }
    assert moments["fsdp"] * 8 == pytest.approx(moments["none"], abs=64)
    # Less is whole at a time than a rank would hold alone, and more than nothing.
    (gathered,) = (row.gpu for row in shared.rows if row.what.startswith("layers gathered"))
    assert 0 < gathered < 4 * large.model.params // 4


def test_flags_choose_how_ranks_share() -> None:
    small = real("llama:110m")
    for parallel in ("ddp", "fsdp"):
        plan = plan_memory(small, gpu(80), Wishes(ranks=2, here=2, parallel=parallel))  # type: ignore[arg-type]
        assert plan.parallel == parallel
        said = "\n".join(in_words(plan))
        assert "each GPU" in said
        assert f"({parallel})" in said
    # One rank knows nothing of it.
    assert plan_memory(small, gpu(80), Wishes(parallel="fsdp")).parallel == "none"


def test_a_batch_is_divided_among_ranks() -> None:
    assert plan_memory(M110, gpu(80), Wishes(ranks=4, here=4)).micro_batch == 16
    assert plan_memory(M110, gpu(80), Wishes(ranks=3, here=3, micro_batch=999)).micro_batch == 22


def test_ranks_on_a_cpu_repeat_what_they_do_not_share() -> None:
    def ram(ranks: int, parallel: Any) -> dict[str, int]:
        plan = plan_memory(M110, cpu(640), Wishes(ranks=ranks, here=ranks, parallel=parallel))
        return {row.what: row.ram for row in plan.rows}

    one, ddp, fsdp = ram(1, "auto"), ram(2, "ddp"), ram(2, "fsdp")
    assert ddp["moments"] == 2 * one["moments"]
    assert fsdp["moments"] == one["moments"]
    assert ddp["programs"] > one["programs"] + 500 * 2**20


def test_the_trainer_plans_for_its_ranks() -> None:
    with pytest.raises(OperatorError, match="on the GPU"):
        plan_trainer(real("llama:7b"), gpu(80), Wishes(offload="none", checkpointing="off"))
    plan = plan_trainer(real("llama:7b"), gpu(80), Wishes(offload="none", checkpointing="off"), ranks=8)
    assert plan.parallel == "fsdp"


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 12, 60, 97, 1000])
def test_every_size_of_equal_parts_is_tried_once(batch: int) -> None:
    assert list(part_sizes(batch)) == sorted({-(-batch // n) for n in range(1, batch + 1)}, reverse=True)


def test_a_strangers_huge_batch_is_planned_at_once() -> None:
    """Its parts are counted by their sizes: going through every number of parts would take a day."""
    assert sum(1 for _ in part_sizes(2**40)) <= 2**21
    assert sum(1 for _ in part_sizes(limits.sequences_per_step_max)) <= 2**9


@pytest.mark.parametrize("config", [b"[]", b"7", b"[" * 16_000, b"\xff", b'{"num_hidden_layers": 1e300}'])
def test_a_config_that_no_trainer_takes_is_refused_in_words(config: bytes) -> None:
    spec = msgspec.structs.replace(M110, model=msgspec.structs.replace(M110.model, config=config))
    with pytest.raises(ModelRefused, match="the model's config"):
        plan_memory(spec, gpu(80))
