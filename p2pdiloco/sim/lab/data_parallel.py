"""The reference: data parallel training, one optimizer step per global batch, no outer loop at all."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from p2pdiloco.rules.schedule import learning_rate
from p2pdiloco.sim.lab.experiment import Experiment
from p2pdiloco.sim.lab.result import Point, Result, entropy_of
from p2pdiloco.sim.lab.terms import terms_of
from p2pdiloco.sim.lab.trainer import LabModel


def ring_bytes(nodes: int, params: int) -> float:
    """Bytes that a node sends for one bf16 ring all-reduce: 2 (N - 1) / N times two bytes a parameter."""
    return 2 * (nodes - 1) / nodes * 2 * params


def run_data_parallel(
    e: Experiment, seed: int, rng: np.random.Generator, model: LabModel, told: Callable[[float, str], None]
) -> Result:
    """The same tokens in steps of all nodes' batches together, as fast as the slowest node and its links.

    Every step waits for everybody; a failure of anybody stops all for `repair_s`. `rng` draws the failures.
    """
    terms, swarm = terms_of(e, model.tensors), e.swarm
    batch = e.swarm.nodes * e.tokens_per_step
    trainer = model.trainer(0, batch_factor=swarm.nodes)
    trainer.theta[:] = model.initial
    steps = -(-e.target_tokens // batch)
    traffic = ring_bytes(swarm.nodes, terms.model.params)
    rates = [mbit * 1e6 / 8 for mbit in (swarm.up_mbit, swarm.down_mbit) if mbit]
    slowest = max(swarm.step_s / e.speed(i) for i in range(swarm.nodes))
    step_s = slowest + (traffic / min(rates) if rates else 0.0)
    step_s += 2 * (swarm.nodes - 1) * swarm.latency_s
    every = max(1.0, steps / (e.run.evaluations + 1))
    now_s, lost_s = 0.0, 0.0
    losses: list[float] = []
    curve = [Point(0, 0.0, 0, model.evaluate(trainer.theta))]
    for done in range(1, steps + 1):
        clock = (done - 1) * batch
        rate = learning_rate(terms.inner, clock, target_tokens=e.target_tokens, step_tokens=batch)
        losses.append(trainer.step(rate))
        now_s += step_s
        if swarm.mtbf_s and rng.random() < 1 - np.exp(-step_s * swarm.nodes / swarm.mtbf_s):
            now_s += swarm.repair_s
            lost_s += swarm.repair_s
        if int((done - 1) / every) < int(done / every) and done < steps:
            curve.append(Point(done * batch, now_s / 3600, done, model.evaluate(trainer.theta)))
        told(done / steps, f"step {done}")
    curve.append(Point(steps * batch, now_s / 3600, steps, model.evaluate(trainer.theta)))
    last = losses[-max(1, len(losses) // 20) :]
    possible = sum(e.speed(i) for i in range(swarm.nodes)) * now_s / swarm.step_s * e.tokens_per_step
    return Result(
        arm=e.name, seed=seed, curve=tuple(curve), final_loss=curve[-1].loss,
        train_loss=sum(last) / len(last), tokens=steps * batch,
        trained_tokens=steps * batch, versions=steps, hours=now_s / 3600,
        goodput=steps * batch / possible, staleness_mean=0.0, staleness_max=0.0, rho_mean=1.0,
        bytes_up=traffic * steps, bytes_down=traffic * steps, data_parallel_bytes=traffic * steps, nodes=(),
        expert_entropy=entropy_of(model.expert_load(trainer.theta)), wall_s=0.0,
    )  # fmt: skip
