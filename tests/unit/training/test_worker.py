"""The trainer's loop, turn by turn, with a clock of the test's own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.run_spec import BlobRef, EvaluationSet, RunSpec, SampleSpec, TokenizerSpec
from p2pdiloco_node.training import frames
from p2pdiloco_node.training.arrays import read_array, write_array
from p2pdiloco_node.training.moments_file import read_moments
from p2pdiloco_node.training.worker import Worker

if TYPE_CHECKING:
    from tests.unit.training.conftest import TinyModelRun

Floats = npt.NDArray[np.float32]
E = TypeVar("E", bound=frames.Event)


class Bench:
    """A worker, what it said, and a clock that a step moves by one second."""

    def __init__(self, tiny: TinyModelRun, **changes: Any) -> None:
        self.tiny = tiny
        self.now = 100.0
        self.said: list[frames.Event] = []
        self.rates: list[float] = []
        self.worker = Worker(tiny.configure(**changes), self.said.append, lambda: self.now)
        self._files = 0
        step = self.worker.loop.step

        def timed(tokens: Any, lr: float) -> float | None:
            self.now += 1.0
            self.rates.append(lr)
            return step(tokens, lr)

        self.worker.loop.step = timed  # type: ignore[method-assign]

    def adopt(
        self,
        anchor: Floats,
        *,
        version: int = 0,
        clock: int = 0,
        sequence: int = 0,
        reset: bool = False,
        target_tokens: int = 10**6,
    ) -> Path:
        self._files += 1
        path = self.tiny.folder / f"anchor-{self._files}.f32"
        write_array(path, anchor)
        self.worker.obey(frames.Adopt(version, clock, target_tokens, str(path), sequence, reset))
        return path

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.worker.turn()

    def all(self, kind: type[E]) -> list[E]:
        return [e for e in self.said if isinstance(e, kind)]

    @property
    def theta(self) -> Floats:
        return np.array(self.worker.loop.theta.numpy(), np.float32)

    @property
    def anchor(self) -> Floats:
        return np.array(self.worker.loop.anchor.numpy(), np.float32)


@pytest.fixture
def bench(tiny: TinyModelRun) -> Bench:
    """Adopted version 0 and may finish two passes."""
    made = Bench(tiny)
    made.adopt(tiny.params)
    made.worker.obey(frames.Allow(2, "waiting for the swarm (no quorum, 2/5)"))
    return made


def test_it_waits_for_its_first_state(tiny: TinyModelRun) -> None:
    bench = Bench(tiny)
    assert bench.worker.idle
    path = bench.adopt(tiny.params)
    assert not bench.worker.idle
    bench.turn()
    assert not path.exists()
    assert bench.all(frames.Configured)[0].params == len(tiny.params)


def test_a_pass_is_h_steps_and_the_next_begins_at_once(bench: Bench) -> None:
    bench.turn(4)
    before = bench.theta
    bench.turn()
    (done,) = bench.all(frames.PassDone)
    assert (done.sequence, done.base_version, done.steps) == (1, 0, 4)
    assert (done.data_first, done.data_count) == (0, 16)
    assert 4.5 < done.loss < 6
    delta = read_array(Path(done.delta), len(before))
    np.testing.assert_array_equal(delta, bench.tiny.params - before)
    np.testing.assert_array_equal(bench.anchor, before)
    bench.turn(5)
    second = bench.all(frames.PassDone)[1]
    assert (second.sequence, second.data_first) == (2, 16)


def test_a_slow_node_takes_fewer_steps(tiny: TinyModelRun) -> None:
    inner = msgspec.structs.replace(tiny.spec.inner, pass_s=2.5)
    bench = Bench(tiny, spec=msgspec.structs.replace(tiny.spec, inner=inner))
    bench.adopt(tiny.params)
    bench.worker.obey(frames.Allow(9, ""))
    bench.turn(8)
    assert [p.steps for p in bench.all(frames.PassDone)] == [3, 3]


def test_the_base_is_the_version_at_which_the_pass_began(bench: Bench) -> None:
    bench.turn(2)
    bench.adopt(bench.tiny.params, version=7)
    bench.turn(5)  # H is 4, counted from the adoption
    assert bench.all(frames.PassDone)[0].base_version == 0
    bench.turn(5)
    assert bench.all(frames.PassDone)[1].base_version == 7


def test_adopting_in_mid_pass_keeps_the_work(bench: Bench) -> None:
    bench.turn(2)
    progress = bench.theta - bench.anchor
    assert np.abs(progress).max() > 0
    new = bench.tiny.params + np.float32(0.01)
    bench.adopt(new, version=1)
    bench.worker._paused = True  # adopt without another step
    bench.turn()
    np.testing.assert_array_equal(bench.anchor, new)
    np.testing.assert_allclose(bench.theta, new + progress, atol=1e-6)


def test_an_anchor_made_before_a_pass_was_known_lacks_its_delta_no_longer(bench: Bench) -> None:
    """The daemon computed G - sum(in_flight) while a finished pass was on its way: nothing is lost."""
    bench.turn(5)
    (done,) = bench.all(frames.PassDone)
    delta = read_array(Path(done.delta), len(bench.tiny.params))
    bench.worker._paused = True
    new = bench.tiny.params + np.float32(0.01)
    bench.adopt(new, version=1, sequence=0)
    bench.turn()
    np.testing.assert_allclose(bench.anchor, new - delta, atol=1e-7)
    assert Path(done.delta).exists()
    # The next one takes it into account, and its file is of no more use.
    bench.adopt(new - delta, version=1, sequence=1)
    bench.turn()
    np.testing.assert_array_equal(bench.anchor, new - delta)
    assert not Path(done.delta).exists()


def test_of_two_adoptions_the_later_holds_and_a_reset_is_not_lost(bench: Bench) -> None:
    bench.turn(2)
    first = bench.adopt(bench.tiny.params + np.float32(1), version=1, reset=True)
    second = bench.adopt(bench.tiny.params, version=2)
    bench.worker._paused = True
    bench.turn()
    assert not first.exists()
    assert not second.exists()
    np.testing.assert_array_equal(bench.theta, bench.tiny.params)  # progress given up
    bench.worker.obey(frames.Resume())
    bench.turn(5)
    assert bench.all(frames.PassDone)[0].base_version == 2  # the pass began anew


def test_with_two_in_flight_the_pass_is_prolonged_then_waits(bench: Bench) -> None:
    bench.turn(10)
    assert len(bench.all(frames.PassDone)) == 2
    bench.turn(16)
    assert not bench.worker.idle
    bench.turn()
    assert bench.worker.idle
    (waiting,) = bench.all(frames.Waiting)
    assert waiting.why == "waiting for the swarm (no quorum, 2/5)"
    waited = bench.theta
    bench.now += 50.0
    bench.worker.obey(frames.Allow(3, ""))
    bench.turn()
    third = bench.all(frames.PassDone)[2]
    assert (third.sequence, third.steps) == (3, 16)
    np.testing.assert_array_equal(bench.theta, waited)
    # The wait is no part of the next pass, but it is a gap that must not be hidden.
    bench.turn(4)
    assert max(s.longest_gap_s for s in bench.all(frames.Stepped)) > 50
    bench.turn(1)
    assert not bench.all(frames.PassDone)[3:]


def test_allowed_in_a_prolonged_pass_it_ends_at_the_next_boundary(bench: Bench) -> None:
    bench.turn(10)
    bench.turn(6)
    bench.worker.obey(frames.Allow(3, ""))
    bench.turn()
    assert bench.all(frames.PassDone)[2].steps == 6


def test_the_rate_follows_the_token_clock_and_own_unmerged_work(tiny: TinyModelRun) -> None:
    inner = msgspec.structs.replace(tiny.spec.inner, warmup_tokens=100_000, lr=1.0)
    bench = Bench(tiny, spec=msgspec.structs.replace(tiny.spec, inner=inner))
    bench.worker.obey(frames.Allow(9, ""))
    step = tiny.spec.tokens_per_inner_step
    bench.adopt(tiny.params, clock=10_000)
    bench.turn(5)  # a pass of four steps and its end
    bench.turn()
    seen = [round(rate * 100_000) for rate in bench.rates]
    assert seen == [10_000 + n * step for n in (1, 2, 3, 4, 5)]
    # Others' work arrives: the clock jumps, the pass that the anchor lacks still counts.
    bench.adopt(tiny.params, version=1, clock=50_000, sequence=0)
    bench.turn()
    assert round(bench.rates[-1] * 100_000) == 50_000 + 6 * step
    bench.adopt(tiny.params, version=1, clock=50_000 + 4 * step, sequence=1)
    bench.turn()
    assert round(bench.rates[-1] * 100_000) == 50_000 + 7 * step


def test_after_an_extension_the_rate_leaves_its_floor(tiny: TinyModelRun) -> None:
    inner = msgspec.structs.replace(tiny.spec.inner, lr=1.0, lr_min_share=0.1)
    bench = Bench(tiny, spec=msgspec.structs.replace(tiny.spec, inner=inner))
    bench.worker.obey(frames.Allow(9, ""))
    bench.adopt(tiny.params, clock=2 * 10**6)
    bench.turn()
    assert bench.rates == [pytest.approx(0.1)]
    bench.adopt(tiny.params, version=1, clock=2 * 10**6, target_tokens=4 * 10**6)
    bench.turn()
    assert bench.rates[-1] == pytest.approx(0.55, abs=0.01)  # half-way


def test_numbers_that_the_log_knows_are_not_used_again(bench: Bench) -> None:
    bench.turn(2)
    bench.adopt(bench.tiny.params, version=9, sequence=40)
    bench.worker.obey(frames.Allow(42, ""))
    bench.turn(5)
    assert [p.sequence for p in bench.all(frames.PassDone)] == [41]


def test_not_finite_rolls_back_and_goes_on_behind_the_data(bench: Bench) -> None:
    bench.turn(5)
    anchor = bench.anchor
    bench.turn(2)
    bench.worker.loop.theta[3] = float("inf")
    bench.turn()
    (bad,) = bench.all(frames.NotFinite)
    assert (bad.step, bad.data_first) == (3, 16)
    np.testing.assert_array_equal(bench.theta, anchor)
    bench.turn(5)
    second = bench.all(frames.PassDone)[1]
    assert (second.steps, second.data_first, second.data_count) == (4, 28, 16)
    assert np.isfinite(read_array(Path(second.delta), len(anchor))).all()


def test_pausing_stops_steps_and_is_no_gap(bench: Bench) -> None:
    bench.turn(2)
    bench.worker.obey(frames.Pause())
    assert bench.worker.idle
    before = bench.theta
    bench.turn(3)
    np.testing.assert_array_equal(bench.theta, before)
    bench.now += 1000.0
    bench.worker.obey(frames.Resume())
    bench.turn(3)
    assert max(s.longest_gap_s for s in bench.all(frames.Stepped)) < 5
    assert bench.all(frames.PassDone)[0].steps == 4  # pass_s does not run while paused


def test_reports_come_at_most_every_half_second(bench: Bench) -> None:
    bench.turn(4)
    reports = bench.all(frames.Stepped)
    assert [r.step for r in reports] == [1, 2, 3, 4]  # a step takes a second here
    assert reports[-1].tokens_per_s == pytest.approx(bench.tiny.spec.tokens_per_inner_step)
    assert reports[-1].inner_steps == 4
    step = bench.worker.loop.step
    bench.worker.loop.step = lambda tokens, lr: _hurry(bench, step(tokens, lr))  # type: ignore[method-assign]
    bench.said.clear()
    bench.turn(10)
    assert 1 <= len(bench.all(frames.Stepped)) <= 3


def _hurry(bench: Bench, loss: float | None) -> float | None:
    bench.now -= 0.9  # of the second that the bench counts
    return loss


def evaluate(bench: Bench, params: Floats) -> frames.Evaluated:
    """Ask for version 9 and train until it is evaluated."""
    path = bench.tiny.folder / "evaluation.f32"
    write_array(path, params)
    bench.worker.obey(frames.Evaluate(9, str(path)))
    bench.said.clear()
    for _ in range(100):
        if bench.all(frames.Evaluated):
            break
        bench.turn()
    assert not path.exists()
    assert not bench.all(frames.NotEvaluated)
    (told,) = bench.all(frames.Evaluated)
    assert told.version == 9
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
    bench.worker.obey(frames.Evaluate(9, str(path)))
    bench.turn(2)
    (told,) = bench.all(frames.NotEvaluated)
    assert "'short' is shorter than a sequence" in told.why
    assert len(bench.rates) == 2


def test_params_that_are_not_finite_are_not_evaluated(bench: Bench) -> None:
    path = bench.tiny.folder / "evaluation.f32"
    write_array(path, np.full_like(bench.tiny.params, np.nan))
    bench.worker.obey(frames.Evaluate(9, str(path)))
    bench.turn(40)
    (told,) = bench.all(frames.NotEvaluated)
    assert "not finite" in told.why
    assert np.isfinite(bench.theta).all()


def test_reports_say_where_on_the_runs_clock_they_are(bench: Bench) -> None:
    bench.adopt(bench.tiny.params, clock=5000)
    bench.turn(6)  # a pass of four steps, its end, and one more step
    step = bench.tiny.spec.tokens_per_inner_step
    assert [s.clock for s in bench.all(frames.Stepped)] == [5000 + n * step for n in (1, 2, 3, 4, 5)]


def test_evaluation_is_done_while_paused_or_waiting_and_the_oldest_gives_way(bench: Bench) -> None:
    bench.turn()
    bench.worker.obey(frames.Pause())
    paths = []
    for version in range(limits.evaluations_waiting_max + 2):
        paths.append(bench.tiny.folder / f"evaluation-{version}.f32")
        write_array(paths[-1], bench.tiny.params)
        bench.worker.obey(frames.Evaluate(version, str(paths[-1])))
    while not bench.worker.idle:
        bench.turn()
    assert [e.version for e in bench.all(frames.Evaluated)] == [2, 3, 4, 5]
    assert [e.version for e in bench.all(frames.NotEvaluated)] == [0, 1], "whoever waits for them is told"
    assert not any(p.exists() for p in paths)
    assert len(bench.rates) == 1


def test_a_checkpoint_is_written_beside_the_loop(bench: Bench) -> None:
    bench.turn(3)
    path = bench.tiny.folder / "moments.1"
    steps, both = bench.worker.loop.moments()
    bench.worker.obey(frames.SaveCheckpoint(str(path)))
    bench.worker.join_saves()
    (saved,) = bench.all(frames.Saved)
    assert (saved.path, saved.size) == (str(path), path.stat().st_size)
    read_steps, read = read_moments(path, len(bench.tiny.params))
    assert read_steps == steps == 3
    np.testing.assert_array_equal(read, both)
    again = Bench(bench.tiny, moments=str(path))
    assert again.worker.loop.moments()[0] == 3


def test_a_bad_device_is_said_in_a_sentence(tiny: TinyModelRun) -> None:
    import torch

    if not torch.cuda.is_available():
        with pytest.raises(OperatorError, match="use auto or cpu"):
            Bench(tiny, device="cuda")


def test_a_run_of_another_model_is_not_trained(tiny: TinyModelRun) -> None:
    tensors = tiny.spec.model.tensors
    model = msgspec.structs.replace(tiny.spec.model, tensors=(tensors[1], tensors[0], *tensors[2:]))
    with pytest.raises(OperatorError, match="names the tensor"):
        Bench(tiny, spec=msgspec.structs.replace(tiny.spec, model=model))
