"""Arithmetic of the inner loop with a real, tiny model on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from p2pdiloco import limits
from p2pdiloco_node.training.moments_file import write_moments

if TYPE_CHECKING:
    from p2pdiloco_node.training.inner_loop import InnerLoop
    from tests.unit.training.conftest import TinyModelRun

Floats = npt.NDArray[np.float32]


def make(tiny: TinyModelRun, *, micro_batch: int = 0, offload: Any = "none", **inner: object) -> InnerLoop:
    from p2pdiloco_node.training.inner_loop import InnerLoop

    spec = msgspec.structs.replace(tiny.spec, inner=msgspec.structs.replace(tiny.spec.inner, **inner))
    loop = InnerLoop(spec, micro_batch=micro_batch, offload=offload)
    loop.start_from(tiny.params)
    return loop


def batches(tiny: TinyModelRun, n: int) -> list[npt.NDArray[np.int64]]:
    text = np.frombuffer(tiny.shards[0].read_bytes(), np.uint8).astype(np.int64)
    seq, rng = tiny.spec.model.seq_len, np.random.default_rng(11)
    starts = rng.integers(0, len(text) - seq - 1, (n, tiny.spec.inner.sequences_per_step))
    return [np.stack([text[s : s + seq + 1] for s in row]) for row in starts]


def delta_of(loop: InnerLoop) -> Floats:
    return np.concatenate(list(loop.cut_delta()))


def theta(loop: InnerLoop) -> Floats:
    return np.array(loop.theta.numpy(), np.float32)


def test_tied_embeddings_are_one_tensor(tiny: TinyModelRun) -> None:
    names = [t.name for t in tiny.spec.model.tensors]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert len(names) == len(set(names))
    assert tiny.spec.model.params == len(tiny.params)
    assert 15_000 < len(tiny.params) < 25_000


def test_loss_begins_at_a_guess_and_falls(tiny: TinyModelRun) -> None:
    loop = make(tiny)
    losses = [loop.step(batch, 5e-3) for batch in batches(tiny, 40)]
    assert losses[0] == pytest.approx(np.log(256), abs=0.15)
    assert losses[-1] is not None
    assert losses[-1] < 4.0


def test_micro_batches_give_the_same_step(tiny: TinyModelRun) -> None:
    """How a node splits a batch is its own affair (algorithm.md 2): equal within rounding."""
    whole, split, uneven = make(tiny), make(tiny, micro_batch=1), make(tiny, micro_batch=3)
    for batch in batches(tiny, 5):
        losses = [loop.step(batch, 1e-3) for loop in (whole, split, uneven)]
        assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
    moved = np.abs(theta(whole) - tiny.params).max()
    for other in (split, uneven):
        assert np.abs(theta(whole) - theta(other)).max() < 0.05 * moved


def test_a_step_is_adamw_with_clipping(tiny: TinyModelRun) -> None:
    """The first step against AdamW written out: m/(1-b1) = g, v/(1-b2) = g^2, decay on matrices only."""
    lr, decay = 1e-3, 0.1
    loop = make(tiny, clip_norm=1e9, weight_decay=decay)
    (batch,) = batches(tiny, 1)
    loop.step(batch, lr)
    gradient = loop._held.gradient.numpy().copy()
    at = 0
    for tensor in tiny.spec.model.tensors:
        here = slice(at, at + tensor.size)
        before, g = tiny.params[here].astype(np.float64), gradient[here].astype(np.float64)
        kept = before * (1 - lr * decay) if len(tensor.shape) > 1 else before
        expected = kept - lr * g / (np.abs(g) + 1e-8)
        np.testing.assert_allclose(theta(loop)[here], expected, atol=2e-6)
        at += tensor.size
    clipped = make(tiny, clip_norm=0.01)
    clipped.step(batch, lr)
    assert np.linalg.norm(clipped._held.gradient.numpy()) == pytest.approx(0.01, rel=1e-4)


def test_adopting_carries_unfinished_work(tiny: TinyModelRun) -> None:
    """algorithm.md 3: progress = theta - anchor; anchor <- A; theta <- anchor + progress."""
    loop = make(tiny)
    for batch in batches(tiny, 3):
        loop.step(batch, 1e-3)
    progress = theta(loop) - tiny.params
    new = (tiny.params + np.random.default_rng(0).standard_normal(len(tiny.params)) * 0.01).astype(np.float32)
    loop.adopt(new.copy(), reset=False)
    np.testing.assert_array_equal(loop.anchor.numpy(), new)
    np.testing.assert_allclose(theta(loop), new + progress, atol=1e-6)
    # Work done before and after is one pseudo-gradient: others' progress is not in it.
    np.testing.assert_allclose(delta_of(loop), -progress, atol=1e-6)
    np.testing.assert_array_equal(loop.anchor.numpy(), theta(loop))


def test_adopting_after_own_deltas_were_merged_moves_nothing(tiny: TinyModelRun) -> None:
    """Alone, with a delta in flight: the new state plus what is in flight is where the node already is."""
    loop = make(tiny)
    g = tiny.params.copy()
    for batch in batches(tiny, 3):
        loop.step(batch, 1e-3)
    first = delta_of(loop)
    for batch in batches(tiny, 2):
        loop.step(batch, 1e-3)
    second = delta_of(loop)
    before = theta(loop)
    loop.adopt(g - first - second, reset=False)  # nothing merged yet
    np.testing.assert_allclose(theta(loop), before, atol=1e-6)
    g = g - first  # the swarm merged the first as it was
    loop.adopt(g - second, reset=False)
    np.testing.assert_allclose(theta(loop), before, atol=1e-6)


def test_a_reset_gives_up_progress_and_moments(tiny: TinyModelRun) -> None:
    loop = make(tiny, moments_warmup_steps=10)
    for batch in batches(tiny, 3):
        loop.step(batch, 1e-3)
    loop.adopt(tiny.params.copy(), reset=True)
    np.testing.assert_array_equal(theta(loop), tiny.params)
    assert loop.moments()[0] == 0
    assert not loop.moments()[1].any()
    # Warmed up: the first step after it is a tenth of a full one.
    (batch,) = batches(tiny, 1)
    loop.step(batch, 1e-3)
    small = np.abs(theta(loop) - tiny.params).max()
    full = make(tiny, moments_warmup_steps=0)
    full.step(batch, 1e-3)
    assert small == pytest.approx(0.1 * np.abs(theta(full) - tiny.params).max(), rel=0.02)


@pytest.mark.parametrize("where", ["params", "gradient"])
def test_a_step_that_is_not_finite_changes_nothing(tiny: TinyModelRun, where: str) -> None:
    loop = make(tiny)
    first, second = batches(tiny, 2)
    loop.step(first, 1e-3)
    if where == "params":
        loop.theta[5] = float("nan")
    else:
        # Finite loss, infinite gradient: as from an overflow in the backward pass.
        next(iter(loop._model.parameters())).register_hook(lambda g: g * float("inf"))
    before, moments = theta(loop), loop.moments()[1]
    assert loop.step(second, 1e-3) is None
    np.testing.assert_array_equal(theta(loop), before)
    np.testing.assert_array_equal(loop.moments()[1], moments)
    loop.roll_back()
    np.testing.assert_array_equal(theta(loop), tiny.params)


def test_moments_come_back_exactly(tiny: TinyModelRun, tmp_path: Path) -> None:
    loop = make(tiny, moments_warmup_steps=10)
    *first, last = batches(tiny, 5)
    for batch in first:
        loop.step(batch, 1e-3)
    other = make(tiny, moments_warmup_steps=10)
    steps, both = loop.moments()
    assert steps == 4
    other.start_from(theta(loop))
    write_moments(tmp_path / "moments", steps, both)
    other.load_moments(tmp_path / "moments")
    assert loop.step(last, 1e-3) == other.step(last, 1e-3)
    np.testing.assert_array_equal(theta(loop), theta(other))


def test_evaluating_other_params_leaves_training_alone(tiny: TinyModelRun) -> None:
    loop, quiet = make(tiny), make(tiny)
    first, second, third = batches(tiny, 3)
    for each in (loop, quiet):
        each.step(first, 1e-3)
    loop.load_evaluation(tiny.params.copy())
    tokens = first.shape[0] * (first.shape[1] - 1)
    assert loop.evaluate(first) / tokens == pytest.approx(make(tiny).step(first, 1e-3), rel=1e-5)
    for each in (loop, quiet):
        each.step(second, 1e-3)
    assert loop.evaluate(third) / tokens == pytest.approx(make(tiny).step(third, 1e-3), rel=1e-5)
    loop.drop_evaluation()
    np.testing.assert_array_equal(theta(loop), theta(quiet))


@pytest.mark.parametrize("offload", ["anchor", "moments"])
def test_what_lies_in_host_memory_computes_the_same(tiny: TinyModelRun, offload: str) -> None:
    """On a CPU both memories are one: what is tested is that nothing is lost on the way."""
    plain, saving = make(tiny), make(tiny, offload=offload)
    first, second, third = batches(tiny, 3)
    for loop in (plain, saving):
        loop.step(first, 1e-3)
        loop.load_evaluation(tiny.params.copy())
        loop.adopt(tiny.params * np.float32(1.01), reset=False)
    assert plain.evaluate(second) == saving.evaluate(second)
    assert plain.step(third, 1e-3) == saving.step(third, 1e-3)
    np.testing.assert_array_equal(delta_of(plain), delta_of(saving))
    np.testing.assert_array_equal(theta(plain), theta(saving))
    np.testing.assert_array_equal(plain.moments()[1], saving.moments()[1])


def test_pieces_are_the_whole(tiny: TinyModelRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Params move in pieces that do not divide the model: adoption, pseudo-gradient, evaluation."""
    whole, cut = make(tiny), make(tiny)
    first, second = batches(tiny, 2)
    deltas, losses = [], []
    for loop, size in ((whole, len(tiny.params)), (cut, 1000)):
        monkeypatch.setattr(limits, "handed_over_values", size)
        loop.step(first, 1e-3)
        loop.adopt(tiny.params * np.float32(1.01), reset=False)
        loop.load_evaluation(tiny.params.copy())
        losses.append(loop.evaluate(second))
        deltas.append(delta_of(loop))
    assert losses[0] == losses[1]
    np.testing.assert_array_equal(*deltas)
    assert deltas[0].any()
    np.testing.assert_array_equal(theta(whole), theta(cut))


def test_where_compiling_fails_training_goes_on(tiny: TinyModelRun, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from p2pdiloco_node.training.inner_loop import InnerLoop

    called = []

    def broken(module: Any, **_: Any) -> Any:
        def call(tokens: Any) -> Any:
            called.append(tuple(tokens.shape))
            raise RuntimeError("no C++ compiler\nmore")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    loop = InnerLoop(tiny.spec, micro_batch=2, compiled=True)
    assert called == [(2, tiny.spec.model.seq_len + 1)]
    assert loop.compile_failure == "torch.compile failed here, training goes on without it: no C++ compiler"
    loop.start_from(tiny.params)
    (batch,) = batches(tiny, 1)
    assert loop.step(batch, 1e-3) == make(tiny, micro_batch=2).step(batch, 1e-3)
    assert len(called) == 1


def test_what_is_compiled_is_used(tiny: TinyModelRun, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from p2pdiloco_node.training.inner_loop import InnerLoop

    called = []

    def compiled(module: Any, **_: Any) -> Any:
        def call(tokens: Any) -> Any:
            called.append(len(tokens))
            return module(tokens)

        return call

    monkeypatch.setattr(torch, "compile", compiled)
    loop = InnerLoop(tiny.spec, compiled=True)
    assert loop.compile_failure == ""
    loop.start_from(tiny.params)
    (batch,) = batches(tiny, 1)
    # Trying it out leaves no gradient behind.
    assert loop.step(batch, 1e-3) == make(tiny).step(batch, 1e-3)
    assert called == [tiny.spec.inner.sequences_per_step] * 2


def test_a_device_that_is_not_there() -> None:
    import torch

    from p2pdiloco_node.training.device import DeviceMissing
    from p2pdiloco_node.training.inner_loop import choose_device

    assert choose_device("cpu") == "cpu"
    if not torch.cuda.is_available():
        assert choose_device("auto") == "cpu"
        with pytest.raises(DeviceMissing, match=r"--device cuda: .* NVIDIA GPU"):
            choose_device("cuda")
