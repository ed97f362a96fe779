"""A stand-in for the engine: a loss that falls with tokens, in a module that a process can import."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

FAKE = """
import math, os, signal, time

from p2pdiloco.errors import OperatorError
from p2pdiloco.sim.lab.result import NodeFigures, Point, Result


def result(experiment, seed):
    quick = 0.5 if experiment.outer.policy == "quorum" else 1.0
    total = experiment.target_tokens
    hours = quick * experiment.run.rounds * experiment.pass_s / 3600
    points = [
        Point(round(total * s / 10), hours * s / 10, s, 2 + 3 * math.exp(-s / 3) + 0.01 * seed + 0.02 * quick)
        for s in range(11)
    ]
    if experiment.model.kind == "none":
        points = []
    nodes = tuple(
        NodeFigures(experiment.speed(n), 100, 95, 10**6, 2 * 10**6, 3.0, 1.0, 10, 9, 1, 0, 0, 0)
        for n in range(experiment.swarm.nodes)
    )
    loss = points[-1].loss if points else None
    return Result(experiment.name, seed, tuple(points), loss, loss, total, total, 200, hours, 0.95, 0.4, 2.5,
                  0.7, 1e6, 2e6, 9e8, nodes, None, 0.1)


def work(experiment, seed, told):
    told(0.5, "half")
    if experiment.name == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if experiment.name == "breaks":
        raise ZeroDivisionError("an engine's slip")
    if experiment.name == "unwell":
        raise OperatorError("no data there")
    if experiment.name == "hangs":
        while True:
            told(0.5, "still")
            time.sleep(0.05)
    return result(experiment, seed)


def pid(experiment, seed, told):
    made = result(experiment, seed)
    import msgspec
    return msgspec.structs.replace(made, versions=os.getpid())
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The stand-in's module; fresh processes inherit the path to it."""
    (tmp_path / "fake_engine.py").write_text(FAKE)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield importlib.import_module("fake_engine")
    import sys

    sys.modules.pop("fake_engine", None)


@pytest.fixture
def two_arms(tmp_path: Path) -> Path:
    """Barrier, the reference, and quorum."""
    file = tmp_path / "pair.toml"
    file.write_text(
        'question = "Does it wait?"\nseeds = "1..3"\n[swarm]\nnodes = 2\nspeeds = [1.0, 0.5]\n'
        '[arms.barrier.outer]\npolicy = "barrier"\n[arms.quorum.outer]\npolicy = "quorum"\n'
    )
    return file
