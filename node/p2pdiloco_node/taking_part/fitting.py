"""Whether a run fits this machine: what a node will need, said before anything is fetched (scenario R5)."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from p2pdiloco.run_spec import RunSpec
from p2pdiloco_node.config import NodeConfig
from p2pdiloco_node.training.families import open_config
from p2pdiloco_node.training.frames import TrainerSettings
from p2pdiloco_node.training.machine import gpus, this_machine
from p2pdiloco_node.training.memory_plan import MemoryPlan, check, in_words, plan_memory, wishes_of
from p2pdiloco_node.training.ranks import Ranks, check_batch, find_ranks
from p2pdiloco_node.training.shard_plan import check_quota

log = logging.getLogger("p2pdiloco.node")


async def fit(
    config: NodeConfig, spec: RunSpec, quota: int, root: Path, folder: Path
) -> tuple[Ranks, MemoryPlan]:
    """Its ranks and its plan. `quota`: bytes of data; `root`: the node's folder; `folder`: the run's in it.

    Raises: OperatorError.
    """
    open_config(spec.model.family, spec.model.config)
    check_quota(spec.data, quota)

    def plan() -> tuple[Ranks, MemoryPlan]:
        ranks = find_ranks(config, gpus)
        check_batch(ranks, spec.inner.sequences_per_step)
        machine = this_machine(ranks.device, root)
        # What of this run lies here already needs no room any more.
        kept = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
        machine = machine._replace(disk_bytes=machine.disk_bytes + kept)
        wishes = wishes_of(config)._replace(ranks=ranks.all, here=ranks.here, data_disk=quota)
        return ranks, plan_memory(spec, machine, wishes)

    ranks, made = await asyncio.to_thread(plan)
    log.info("Run %s needs on this machine, at most:\n%s", spec.name, "\n".join(in_words(made)))
    check(made, spec.name)
    return ranks, made


def trainer_settings(config: NodeConfig, plan: MemoryPlan) -> TrainerSettings:
    """On a CPU as planned, before this daemon took its part of the RAM; a GPU is the trainer's to ask."""
    asked = TrainerSettings(
        config.device, config.micro_batch, config.checkpointing, config.offload, config.compile,
        config.parallel,
    )  # fmt: skip
    if plan.machine.gpu_bytes is not None:
        return asked
    on_or_off = "on" if plan.checkpointing else "off"
    parallel = config.parallel if plan.parallel == "none" else plan.parallel
    return asked._replace(micro_batch=plan.micro_batch, checkpointing=on_or_off, parallel=parallel)
