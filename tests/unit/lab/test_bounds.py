"""What an experiment may ask for at most: work that ends, arrays that fit, times that a clock can hold."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from p2pdiloco.errors import OperatorError
from p2pdiloco.rules.delta_layout import CODECS
from p2pdiloco.sim.lab.experiment import Experiment, Model, Outer, Swarm, check_experiment, params_of
from p2pdiloco_node.lab.study import make_study, read_study


def refusal(text: str) -> str:
    with pytest.raises(OperatorError) as refused:
        make_study(tomllib.loads(text), where="x.toml")
    return str(refused.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("swarm.step_s = 1e-300", "expected a number >= 0.001"),
        ("swarm.speeds = [1e-300]", "expected a number >= 0.001"),
        ("swarm.up_mbit = inf", "expected a number <= 1000000.0"),
        ("swarm.joins = [[0, 1099511627776]]", "expected a whole number <= 1024"),
        ("run.round_steps = inf", "expected a number <="),
        ("run.evaluations = 1000000", "expected a whole number <= 10000"),
        ("model.layers = 100000", "expected a whole number <= 256"),
        ("inner.clip_norm = inf", "expected a number <= 1000000.0"),
    ],
)
def test_single_keys(text: str, sentence: str) -> None:
    assert sentence in refusal(text)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("swarm.mtbf_s = 1e-9", "failures; 5e+06 are the most: set a longer swarm.mtbf_s"),
        ("inner.pass_s = 1e-9", "fastest node's inner step takes 1 s"),
        ("swarm.step_s = 0.001\nswarm.speeds = [1000.0]", "inner step 1e-06 s long; 0.0001 is the least"),
        ("swarm.up_mbit = 1e-9", "swarm.up_mbit is 1e-09: give 0.001 or more"),
        ("run.rounds = 1000000\nmodel.kind = 'none'", "4e+06 passes of all nodes; 2e+06 are the most"),
        ("run.rounds = 100000\nouter.fragments = 20", "8e+06 passes of all nodes"),
        ("run.round_steps = 1e12", "2.05e+17 tokens"),
        ("run.rounds = 1\nrun.round_steps = 1e8\ninner.inner_steps = 1000000", "4e+08 steps with a model"),
        ("inner.inner_steps = 100000000\nmodel.kind = 'none'\nrun.rounds = 1", "more than a year"),
        ("swarm.nodes = 1000\nswarm.joins = [[0.1, 20], [0.2, 5]]", "make 1025 nodes; 1024 are the most"),
        ("swarm.leaves = [[0.1, 4]]", "takes everybody away"),
        ("model.hidden_size = 15\nmodel.heads = 3", "model.heads is 5, and rotary positions turn pairs"),
        ("model.hidden_size = 1000000000", "parameters, and 2e+08 are the most"),
        ("model.kind = 'mixtral'\nmodel.experts = 10000", "parameters, and 2e+08 are the most"),
        ("inner.sequences_per_step = 100000000", "is 6400000000 tokens; 1048576"),
        ("outer.fragments = 64", "has 20 tensors"),
        ("outer.fragments = 3\nmodel.kind = 'none'", "has 2 tensors"),
        ("outer.direction_correction = true\nouter.mu = 1.0", "above 0 and below 1"),
        ("outer.direction_correction = true\nouter.mu = 0.0", "above 0 and below 1"),
    ],
)
def test_keys_together(text: str, sentence: str) -> None:
    assert sentence in refusal(text)


def test_an_end_by_the_clock_bounds_the_work() -> None:
    text = "run.rounds = 1000000\nmodel.kind = 'none'\n"
    assert "passes" in refusal(text)
    make_study(tomllib.loads(f"{text}run.hours = 24"), where="x.toml")


def test_the_largest_swarm_and_odd_heads_without_arrays_are_taken() -> None:
    check_experiment(Experiment(swarm=Swarm(nodes=1000, joins=((0.1, 24),))))
    check_experiment(Experiment(model=Model(kind="none", hidden_size=15, heads=3, params=110_000_000)))


def test_codecs_are_those_of_the_product() -> None:
    assert set(get_args(get_type_hints(Outer)["codec"])) == set(CODECS)


def test_what_was_measured_stays_valid() -> None:
    docs = Path(__file__).parents[3] / "docs"
    files = [*(docs / "experiments").glob("*.toml"), *(docs / "results/learning").glob("*.toml")]
    assert len(files) > 20
    for file in files:
        assert all(math.isfinite(arm.target_tokens) for arm in read_study(file).arms), file


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_parameters_are_counted_as_they_are_built(kind: str) -> None:
    pytest.importorskip("transformers")
    from p2pdiloco_node.lab import networks

    shape = Model(kind=kind, hidden_size=12, intermediate_size=20, layers=3, heads=2, seq_len=8, experts=3)
    module = networks.build(shape)
    assert params_of(shape) == sum(p.numel() for p in module.parameters())
    if kind == "llama":
        assert len(list(module.parameters())) == 9 * shape.layers + 2
