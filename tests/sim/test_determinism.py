"""The same world twice, under different hash seeds, is the same to the last message."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import hashlib
from p2pdiloco.protocol.node import Node
from p2pdiloco.sim.swarm import run_seed
from p2pdiloco_node.lab.seeds import generator
for seed in (15, 16, 17, 18):
    report = run_seed(seed, generator(seed), Node, keep_trace=True, real_keys=seed == 15)
    print(seed, len(report.trace), hashlib.sha256("\\n".join(report.trace).encode()).hexdigest())
"""


def lives(hash_seed: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_a_world_does_not_depend_on_the_order_of_sets() -> None:
    first = lives("1")
    assert first == lives("2")
    assert len(first.splitlines()) == 4
    assert len({line.split()[2] for line in first.splitlines()}) == 4, "different seeds, different lives"
