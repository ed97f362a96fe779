"""Simulated swarms carry topk as well: sparse blobs, raw pseudo-gradients on disk, averages over senders."""

from __future__ import annotations

from p2pdiloco.protocol.node import Node
from p2pdiloco.sim.swarm import run_seed
from p2pdiloco.sim.world import World
from p2pdiloco_node.lab.seeds import generator


def test_swarms_of_each_codec_are_among_the_everyday_seeds() -> None:
    worlds: list[World] = []
    seen: dict[str, int] = {}
    for seed in range(1, 40):
        report = run_seed(seed, generator(seed), Node, prepare=worlds.append)
        assert not report.violation, f"seed {seed}: {report.violation}"
        codec = worlds.pop().run.spec.outer.codec
        seen[codec] = seen.get(codec, 0) + report.entries
        if len(seen) == 3 and min(seen.values()) > 20:
            break
    assert set(seen) == {"fp16", "int4", "topk64"}
    assert min(seen.values()) > 20, seen
