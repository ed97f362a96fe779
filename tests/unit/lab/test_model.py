"""The lab's real model: the product's inner loop, bit for bit, on each node's own text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from p2pdiloco.sim.lab.experiment import Data, Experiment, Inner, Model, Swarm
from p2pdiloco.sim.lab.experts import expert_slices

if TYPE_CHECKING:
    from p2pdiloco_node.lab.model import TextModel

LLAMA = Model(hidden_size=16, intermediate_size=32, layers=2, heads=2, seq_len=16)
MIXTRAL = msgspec.structs.replace(LLAMA, kind="mixtral", experts=4, experts_per_token=2)


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A glob of text with something to learn."""
    folder = tmp_path_factory.mktemp("words")
    rng = np.random.default_rng(3)
    vocabulary = [
        "anchor",
        "delta",
        "outer",
        "inner",
        "momentum",
        "staleness",
        "swarm",
        "node",
        "round",
        "of",
    ]
    for number in range(12):
        chosen = rng.integers(0, len(vocabulary), 8_000)
        (folder / f"{number}.txt").write_text(" ".join(vocabulary[i] for i in chosen))
    return f"{folder}/*.txt"


def experiment(words: str, model: Model = LLAMA, **changes: Any) -> Experiment:
    return Experiment(
        swarm=Swarm(nodes=3),
        model=model,
        data=Data(files=(words,), evaluation_tokens=4096),
        inner=Inner(**({"sequences_per_step": 3} | changes)),
    )


def make(words: str, model: Model = LLAMA, *, seed: int = 1, **inner: Any) -> TextModel:
    from p2pdiloco_node.lab.model import make_model

    return make_model(experiment(words, model, **inner), seed, compiled=False)


def plain_loop(made: TextModel, words: str) -> Any:
    """The product's inner loop at version 0."""
    from p2pdiloco_node.lab.model import loop_spec
    from p2pdiloco_node.training.inner_loop import InnerLoop

    loop = InnerLoop(loop_spec(experiment(words), made.tensors))
    loop.start_from(made.initial.copy())
    return loop


def test_theta_is_the_model(words: str) -> None:
    """What the engine writes into theta is what the next step starts from."""
    made = make(words)
    one, other = made.trainer(0), made.trainer(0)
    one.step(1e-3)
    assert not np.array_equal(one.theta, made.initial)
    one.theta[:] = made.initial
    one.zero_moments()
    one_batch_on = other.step(0.0)
    assert one_batch_on == pytest.approx(np.log(256), abs=0.3)
    # The same params on the same (second) batch give the same loss.
    assert one.step(0.0) == other.step(0.0)


def test_a_step_is_the_products_step(words: str) -> None:
    from p2pdiloco_node.lab.text import load_text

    made = make(words)
    trainer, loop = made.trainer(1), plain_loop(made, words)
    feed = load_text(experiment(words)).feed(experiment(words), 1, 1)
    for _ in range(4):
        assert trainer.step(3e-3) == loop.step(feed.next_batch(3), 3e-3)
    assert np.array_equal(trainer.theta, loop.theta.numpy())


def test_data_parallel_sees_the_union_of_the_nodes_batches(words: str) -> None:
    from p2pdiloco_node.lab.text import load_text

    made = make(words)
    loop, trainer = plain_loop(made, words), made.trainer(0, batch_factor=3)
    feeds = [load_text(experiment(words)).feed(experiment(words), 1, node) for node in range(3)]
    for _ in range(3):
        union = np.concatenate([feed.next_batch(3) for feed in feeds])
        assert trainer.step(3e-3) == loop.step(union, 3e-3)
    assert np.array_equal(trainer.theta, loop.theta.numpy())


def test_a_seed_decides_every_bit_and_a_node_its_data(words: str) -> None:
    def losses(made: TextModel, node: int) -> list[float]:
        trainer = made.trainer(node)
        return [trainer.step(3e-3) for _ in range(3)]

    first, again, other = make(words), make(words), make(words, seed=2)
    assert np.array_equal(first.initial, again.initial)
    assert not np.array_equal(first.initial, other.initial)
    assert losses(first, 0) == losses(again, 0)
    assert losses(first, 0) != losses(first, 1)
    assert first.data_digest == other.data_digest
    assert first.evaluate(first.initial) == again.evaluate(again.initial)


@pytest.mark.parametrize("shape", [LLAMA, MIXTRAL], ids=["llama", "mixtral"])
def test_training_lowers_the_held_out_loss(words: str, shape: Model) -> None:
    made = make(words, shape)
    trainer = made.trainer(0)
    for _ in range(80):
        trainer.step(1e-2)
    before, after = (made.evaluate(p) for p in (made.initial, trainer.theta))
    assert before == pytest.approx(np.log(256), abs=0.3)
    assert after < 3.2


def test_the_moments_warm_up_again(words: str) -> None:
    made = make(words, moments_warmup_steps=4)
    trainer = made.trainer(0)

    def moved() -> float:
        before = trainer.theta.copy()
        trainer.step(1e-3)
        return float(np.abs(trainer.theta - before).max())

    first = moved()
    for _ in range(8):
        settled = moved()
    trainer.zero_moments()
    assert first == pytest.approx(0.25e-3, rel=0.02)  # AdamW's first step is the learning rate
    assert settled > 2 * first
    assert moved() == pytest.approx(0.25e-3, rel=0.02)


def test_a_step_that_is_not_finite_changes_nothing(words: str) -> None:
    trainer = make(words).trainer(0)
    trainer.theta[0] = np.inf
    before = trainer.theta.copy()
    assert np.isnan(trainer.step(1e-3))
    assert np.array_equal(trainer.theta, before)


def test_evaluation_is_the_mean_over_all_held_out_tokens(words: str) -> None:
    """Large batches, and a last one that is smaller, give what the product's evaluation gives."""
    from p2pdiloco_node.lab.text import load_text

    made = make(words)
    tokens = load_text(experiment(words)).held_out(seq_len=16, tokens=4096)
    assert len(tokens) == 256
    loop = plain_loop(made, words)
    loop.load_evaluation(made.initial.copy())
    total = sum(loop.evaluate(tokens[i : i + 10]) for i in range(0, len(tokens), 10))
    assert made.evaluate(made.initial) == pytest.approx(total / 4096, rel=1e-5)


def test_the_balance_loss_is_for_training_alone(words: str) -> None:
    plain = make(words, msgspec.structs.replace(MIXTRAL, balance=0.0))
    strict = make(words, msgspec.structs.replace(MIXTRAL, balance=10.0))
    trainers = [made.trainer(0) for made in (plain, strict)]
    losses = [trainer.step(1e-3) for trainer in trainers]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert not np.array_equal(trainers[0].theta, trainers[1].theta)
    assert plain.evaluate(plain.initial) == strict.evaluate(plain.initial)


def test_balance_keeps_experts_busy(words: str) -> None:
    """A new router sends nearly everything to two experts; the balance loss brings the others back sooner."""

    def least(balance: float) -> float:
        made = make(words, msgspec.structs.replace(MIXTRAL, balance=balance))
        trainer = made.trainer(0)
        for _ in range(300):
            trainer.step(1e-2)
        return min(min(layer) for layer in made.expert_load(trainer.theta))

    assert least(1.0) > least(0.0)


def test_routes_are_counted(words: str) -> None:
    made = make(words, MIXTRAL)
    trainer = made.trainer(0)
    for _ in range(2):
        trainer.step(1e-3)
    counts = np.reshape(trainer.expert_tokens(), (2, 4))
    assert counts.sum(axis=1).tolist() == [2 * 3 * 16 * 2] * 2  # steps, sequences, tokens, experts of a token
    assert sum(trainer.expert_tokens()) == 0
    load = made.expert_load(made.initial)
    assert np.sum(load, axis=1) == pytest.approx([1, 1])
    assert make(words).trainer(0).expert_tokens() == []
    assert make(words).expert_load(made.initial) == []


def test_an_experts_slices_are_what_its_gradient_moves(words: str) -> None:
    """An expert that no token chose has no gradient: without decay, its slices alone stay as they were."""
    one_token = msgspec.structs.replace(MIXTRAL, seq_len=1, balance=0.0, layers=1)
    made = make(words, one_token, weight_decay=0.0, sequences_per_step=1)
    trainer = made.trainer(0)
    trainer.step(1e-2)
    counts = trainer.expert_tokens()
    assert sorted(counts) == [0, 0, 1, 1]
    moved = trainer.theta != made.initial
    for part in expert_slices(made.tensors):
        assert moved[part.part].any() == (counts[part.expert] > 0)


@pytest.mark.parametrize("value", ["0", "1", "auto"])
def test_compiling_is_for_long_runs_unless_told(
    words: str, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    from p2pdiloco_node.lab import compiling

    monkeypatch.setattr(compiling, "_compile", lambda model, sequences: compiling.Compiled(None, "asked"))
    monkeypatch.setenv("P2PDILOCO_LAB_COMPILE", value)
    short = experiment(words)
    long = msgspec.structs.replace(short, run=msgspec.structs.replace(short.run, rounds=10_000))
    brief = msgspec.structs.replace(short, run=msgspec.structs.replace(short.run, rounds=10))
    asked = [compiling.compiled_for(e).how == "asked" for e in (brief, long)]
    assert asked == {"0": [False, False], "1": [True, True], "auto": [False, True]}[value]


def test_without_a_compiler_it_trains_all_the_same(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from p2pdiloco_node.lab import compiling

    def broken(*_args: Any, **_kwargs: Any) -> Any:
        def call(*_: Any) -> Any:
            raise RuntimeError("No working C++ compiler found\nmore")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    compiling._compile.cache_clear()
    made = compiling.compiled_for(experiment(words), wanted=True)
    compiling._compile.cache_clear()
    assert made.loss_sum is None
    assert made.how == "eager, as compiling failed: No working C++ compiler found"


def test_compiled_is_the_same_within_rounding_and_compiles_once(words: str) -> None:
    import torch

    from p2pdiloco_node.lab.model import make_model

    small = experiment(words, msgspec.structs.replace(LLAMA, layers=1))
    compiled, eager = (make_model(small, 1, compiled=c) for c in (True, False))
    if compiled.how != "compiled":
        pytest.skip(compiled.how)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for node, factor in ((0, 1), (1, 1), (0, 2)):
        one, other = (made.trainer(node, batch_factor=factor) for made in (compiled, eager))
        losses = [[t.step(1e-3) for _ in range(3)] for t in (one, other)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        assert np.abs(one.theta - other.theta).max() < 1e-4
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
