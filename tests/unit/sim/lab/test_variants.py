"""Each variant once through the engine: every rule goes downhill on a quadratic, each on a way of its own."""

from __future__ import annotations

import numpy as np
import pytest

from p2pdiloco.sim.lab.engine import run_experiment
from p2pdiloco.sim.lab.experiment import Experiment, Inner, Outer, Run, Swarm

from .toy import ToyModel

VARIANTS = {
    "product": Outer(codec="fp16"),
    "sgd": Outer(codec="fp16", mu=0.0),
    "delayed nesterov": Outer(codec="fp16", optimizer="delayed_nesterov"),
    "adamw": Outer(codec="fp16", optimizer="adamw"),
    "lion": Outer(codec="fp16", optimizer="lion"),
    "immediate": Outer(codec="fp16", policy="immediate"),
    "textbook": Outer(codec="fp16", policy="immediate", optimizer="textbook", eta=0.07),
    "barrier": Outer(codec="fp16", policy="barrier"),
    "rda": Outer(codec="fp16", merge="rda"),
    "direction correction": Outer(codec="fp16", direction_correction=True),
    "polynomial": Outer(codec="fp16", decay="polynomial"),
    "constant": Outer(codec="fp16", decay="constant"),
    "half for a quorum": Outer(codec="fp16", closing_share=0.5),
    "no grace": Outer(codec="fp16", grace=0.0),
    "two fragments": Outer(codec="fp16", fragments=2),
}


@pytest.fixture(scope="module")
def curves() -> dict[str, list[float]]:
    """Losses on the way, of each variant."""
    found = {}
    for name, outer in VARIANTS.items():
        e = Experiment(
            swarm=Swarm(nodes=4, speeds=(1.0, 0.8, 0.6, 0.3)),
            inner=Inner(inner_steps=10, lr=0.02),
            outer=outer,
            run=Run(rounds=12, evaluations=3),
        )
        rng = np.random.Generator(np.random.PCG64(1))
        found[name] = [p.loss for p in run_experiment(e, 1, rng, ToyModel(), lambda share, words: None).curve]
    return found


@pytest.mark.parametrize("name", VARIANTS)
def test_it_goes_downhill(curves: dict[str, list[float]], name: str) -> None:
    assert curves[name][-1] < curves[name][0] / 4


def test_no_two_variants_are_the_same(curves: dict[str, list[float]]) -> None:
    assert len({tuple(curve) for curve in curves.values()}) == len(VARIANTS)
