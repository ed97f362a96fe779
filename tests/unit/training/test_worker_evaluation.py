"""Evaluations in the trainer: slices between steps, every set and prompt, most of it computing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from p2pdiloco import limits
from p2pdiloco.run_spec import BlobRef, EvaluationSet, RunSpec, SampleSpec, TokenizerSpec
from p2pdiloco_node.training import frames
from p2pdiloco_node.training.arrays import write_array
from tests.unit.training.test_worker import Bench

if TYPE_CHECKING:
    from tests.unit.training.conftest import TinyModelRun

Floats = npt.NDArray[np.float32]
ROOT = bytes(range(32))


@pytest.fixture
def bench(tiny: TinyModelRun) -> Bench:
    """Adopted version 0 and may finish two passes."""
    made = Bench(tiny)
    made.adopt(tiny.params)
    made.worker.obey(frames.Allow(2, "waiting for the swarm (no quorum, 2/5)"))
    return made


def evaluate(bench: Bench, params: Floats) -> frames.Evaluated:
    """Ask for version 9 and train until it is evaluated."""
    path = bench.tiny.folder / "evaluation.f32"
    write_array(path, params)
    bench.worker.obey(frames.Evaluate(9, ROOT, str(path)))
    bench.said.clear()
    for _ in range(100):
        if bench.all(frames.Evaluated):
            break
        bench.turn()
    assert not path.exists()
    assert not bench.all(frames.NotEvaluated)
    (told,) = bench.all(frames.Evaluated)
    assert (told.version, told.state_root) == (9, ROOT)
    return told


def with_sets(tiny: TinyModelRun, **changes: Any) -> RunSpec:
    """A second evaluation set, of one source, and two prompts."""
    data = tiny.spec.data
    source = EvaluationSet("source", data.shards[1], data.shards[1].tokens)
    return msgspec.structs.replace(
        tiny.spec,
        data=msgspec.structs.replace(data, evaluations=(*data.evaluations, source)),
        samples=SampleSpec(("ab", "c"), 5, (tuple(b"ab"), tuple(b"c"))),
        **changes,
    )


def test_evaluation_goes_on_in_slices_between_steps(bench: Bench) -> None:
    bench.worker.obey(frames.Allow(999, ""))
    bench.turn(1)
    steps = len(bench.rates)
    turns = bench.worker.turn
    taken = 0
    evaluate_one = bench.worker.loop.evaluate

    def timed(tokens: Any) -> float:
        bench.now += limits.evaluation_slice_s * 0.6
        return evaluate_one(tokens)

    bench.worker.loop.evaluate = timed  # type: ignore[method-assign]

    def counted() -> None:
        nonlocal taken
        taken += 1
        turns()

    bench.worker.turn = counted  # type: ignore[method-assign]
    told = evaluate(bench, bench.tiny.params)
    sequences = (bench.tiny.spec.data.evaluation.tokens - 1) // bench.tiny.spec.model.seq_len
    assert told.tokens == (sequences * bench.tiny.spec.model.seq_len,)
    assert list(told.losses) == pytest.approx([np.log(256)], abs=0.2)
    assert (told.samples, told.why) == ((), "")
    assert taken == sequences > 3  # two would take longer than a slice
    assert len(bench.rates) - steps >= taken // 2  # one step a turn but for the ends of passes


def test_slices_take_about_as_long_as_they_may(bench: Bench) -> None:
    """On a slow machine a slice as large as an inner step would hold training up for seconds."""
    sizes: list[int] = []
    evaluate_one = bench.worker.loop.evaluate

    def timed(tokens: Any) -> float:
        sizes.append(len(tokens))
        bench.now += 0.12 * len(tokens)
        return evaluate_one(tokens)

    bench.worker.loop.evaluate = timed  # type: ignore[method-assign]
    evaluate(bench, bench.tiny.params)
    assert set(sizes) == {1}  # two would take longer than they may
    sizes.clear()

    def busy_for_a_moment(tokens: Any) -> float:
        bench.now += limits.evaluation_slice_s * (1.5 if len(sizes) == 3 else 0.1)
        sizes.append(len(tokens))
        return evaluate_one(tokens)

    bench.worker.loop.evaluate = busy_for_a_moment  # type: ignore[method-assign]
    evaluate(bench, bench.tiny.params)
    assert sizes[:6] == [1, 2, 4, 4, 2, 4]


@pytest.mark.parametrize("move_s", [0.0, 0.3, 1.3])
def test_most_of_an_evaluation_is_computing_however_long_moving_params_takes(
    tiny: TinyModelRun, move_s: float
) -> None:
    """On a small machine a gigabyte takes a second to move: never once for each sequence."""
    bench = Bench(tiny, spec=with_sets(tiny), evaluations=(str(tiny.evaluation), str(tiny.shards[1])))
    bench.adopt(tiny.params)
    loop = bench.worker.loop
    exchange, evaluate_one, next_token = loop._exchange, loop.evaluate, loop.next_token
    moved = computed = slices = 0.0

    def moving() -> None:
        nonlocal moved, slices
        moved, slices = moved + move_s, slices + 0.5
        bench.now += move_s
        exchange()

    def evaluating(tokens: Any) -> float:
        nonlocal computed
        computed += 0.05 * len(tokens)
        bench.now += 0.05 * len(tokens)
        return evaluate_one(tokens)

    def writing(*args: Any, **kwargs: Any) -> int:
        nonlocal computed
        computed += 0.05
        bench.now += 0.05
        return next_token(*args, **kwargs)

    loop._exchange, loop.evaluate, loop.next_token = moving, evaluating, writing  # type: ignore[method-assign]
    told = evaluate(bench, tiny.params)
    assert len(told.samples) == 2
    most = computed / limits.evaluation_slice_moves + 2 * move_s  # the last slice may end early
    assert moved <= most
    assert slices >= computed / (
        2 * limits.evaluation_slice_s + 8 * 2 * move_s
    )  # training goes on in between


def test_every_evaluation_set_has_its_loss_and_every_prompt_its_continuation(tiny: TinyModelRun) -> None:
    sets = (str(tiny.evaluation), str(tiny.shards[1]))
    bench = Bench(tiny, spec=with_sets(tiny), evaluations=sets)
    bench.adopt(tiny.params)
    bench.worker.obey(frames.Allow(99, ""))
    told = evaluate(bench, tiny.params)
    swapped = Bench(tiny, spec=tiny.spec, evaluations=sets[:1])
    swapped.adopt(tiny.params)
    alone = evaluate(swapped, tiny.params)
    assert told.losses[0] == pytest.approx(alone.losses[0], rel=1e-6)
    assert told.losses[1] != told.losses[0]
    seq_len = tiny.spec.model.seq_len
    assert told.tokens == (alone.tokens[0], 3499 // seq_len * seq_len)
    assert len(told.samples) == 2
    assert all(told.samples)
    assert evaluate(bench, tiny.params).samples == told.samples  # greedy: nothing is drawn
    bench.turn(8)
    assert evaluate(bench, bench.theta).losses[0] < told.losses[0]


def test_single_sources_together_cost_as_much_as_the_whole(tiny: TinyModelRun, monkeypatch: Any) -> None:
    seq_len = tiny.spec.model.seq_len
    monkeypatch.setattr(limits, "evaluation_tokens_max", 2 * seq_len)
    spec = with_sets(tiny)
    sources = spec.data.evaluations[1:] * 2
    data = msgspec.structs.replace(spec.data, evaluations=(spec.data.evaluations[0], *sources))
    spec = msgspec.structs.replace(spec, data=data)
    bench = Bench(tiny, spec=spec, evaluations=(str(tiny.evaluation), *[str(tiny.shards[1])] * 2))
    bench.adopt(tiny.params)
    assert evaluate(bench, tiny.params).tokens == (2 * seq_len, seq_len, seq_len)


def test_without_a_tokenizer_there_are_losses_and_the_reason(tiny: TinyModelRun) -> None:
    tokenizer = TokenizerSpec("json", 256, 0, (BlobRef(tiny.spec.data.shards[0].digest, 5, 5),))
    (tiny.folder / "tokenizer").write_bytes(b"no json")
    spec = msgspec.structs.replace(
        tiny.spec,
        data=msgspec.structs.replace(tiny.spec.data, tokenizer=tokenizer),
        samples=SampleSpec(("ab",), 5, (tuple(b"ab"),)),
    )
    for files, why in ((("tokenizer",), "cannot be used"), (("gone",), "cannot be read")):
        bench = Bench(tiny, spec=spec, tokenizer=tuple(str(tiny.folder / f) for f in files))
        bench.adopt(tiny.params)
        told = evaluate(bench, tiny.params)
        assert told.losses[0] > 0
        assert (told.samples, why in told.why) == ((), True)


def test_a_set_shorter_than_a_sequence_is_said_and_training_goes_on(tiny: TinyModelRun) -> None:
    (held_out,) = tiny.spec.data.evaluations
    short = EvaluationSet("short", msgspec.structs.replace(held_out.shard, size=5, tokens=5), 5)
    data = msgspec.structs.replace(tiny.spec.data, evaluations=(short,))
    bench = Bench(tiny, spec=msgspec.structs.replace(tiny.spec, data=data))
    bench.adopt(tiny.params)
    path = tiny.folder / "evaluation.f32"
    write_array(path, tiny.params)
    bench.worker.obey(frames.Evaluate(9, ROOT, str(path)))
    bench.turn(2)
    (told,) = bench.all(frames.NotEvaluated)
    assert "'short' is shorter than a sequence" in told.why
    assert len(bench.rates) == 2


def test_params_that_are_not_finite_are_not_evaluated(bench: Bench) -> None:
    path = bench.tiny.folder / "evaluation.f32"
    write_array(path, np.full_like(bench.tiny.params, np.nan))
    bench.worker.obey(frames.Evaluate(9, ROOT, str(path)))
    bench.turn(40)
    (told,) = bench.all(frames.NotEvaluated)
    assert "not finite" in told.why
    assert np.isfinite(bench.theta).all()


def test_evaluation_is_done_while_paused_or_waiting_and_the_oldest_gives_way(bench: Bench) -> None:
    bench.turn()
    bench.worker.obey(frames.Pause())
    paths = []
    for version in range(limits.evaluations_waiting_max + 2):
        paths.append(bench.tiny.folder / f"evaluation-{version}.f32")
        write_array(paths[-1], bench.tiny.params)
        bench.worker.obey(frames.Evaluate(version, ROOT, str(paths[-1])))
    while not bench.worker.idle:
        bench.turn()
    assert [e.version for e in bench.all(frames.Evaluated)] == [2, 3, 4, 5]
    assert [e.version for e in bench.all(frames.NotEvaluated)] == [0, 1], "whoever waits for them is told"
    assert not any(p.exists() for p in paths)
    assert len(bench.rates) == 1


def test_sets_that_are_done_are_told_before_one_that_cannot_be_read(tiny: TinyModelRun) -> None:
    gone = tiny.folder / "gone"
    bench = Bench(tiny, spec=with_sets(tiny), evaluations=(str(tiny.evaluation), str(gone)))
    bench.adopt(tiny.params)
    path = tiny.folder / "evaluation.f32"
    write_array(path, tiny.params)
    bench.worker.obey(frames.Allow(99, ""))
    bench.worker.obey(frames.Evaluate(9, ROOT, str(path)))
    for _ in range(100):
        if bench.all(frames.NotEvaluated):
            break
        bench.turn()
    known = bench.all(frames.Evaluating)[-1]
    assert (known.version, len(known.losses), len(known.tokens)) == (9, 1, 1)
    assert known.losses[0] == pytest.approx(np.log(256), abs=0.2)
    assert 0 < known.share < 1
    assert bench.said.index(known) < bench.said.index(bench.all(frames.NotEvaluated)[0])
