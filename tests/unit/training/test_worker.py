"""The trainer's loop, turn by turn, with a clock of the test's own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from p2pdiloco.errors import OperatorError
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


def test_a_report_says_how_long_its_pass_is(bench: Bench) -> None:
    """Adoption moves a pass's end, and with too much in flight it goes on: "inner step 25 of 24" was said."""

    def told() -> list[tuple[int, int]]:
        found = [(s.step, s.inner_steps) for s in bench.all(frames.Stepped)]
        bench.said.clear()
        return found

    bench.turn(3)
    bench.adopt(bench.tiny.params, version=1)
    bench.turn(4)
    assert told() == [(1, 4), (2, 4), (3, 4), (4, 7), (5, 7), (6, 7), (7, 7)]
    bench.worker.obey(frames.Allow(0, "waiting for the swarm"))
    bench.turn(9)
    assert told() == [(n, 16) for n in range(8, 17)]  # four times H is the most


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


def test_reports_say_where_on_the_runs_clock_they_are(bench: Bench) -> None:
    bench.adopt(bench.tiny.params, clock=5000)
    bench.turn(6)  # a pass of four steps, its end, and one more step
    step = bench.tiny.spec.tokens_per_inner_step
    assert [s.clock for s in bench.all(frames.Stepped)] == [5000 + n * step for n in (1, 2, 3, 4, 5)]


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


def test_when_the_owner_pauses_a_pass_ends_at_its_length_and_goes_out_at_once(bench: Bench) -> None:
    bench.turn(1)
    bench.worker.obey(frames.Allow(2, "the owner paused the run", prolong=False))
    bench.turn(9)
    assert len(bench.rates) == 4  # H, and no pass behind it
    assert [p.steps for p in bench.all(frames.PassDone)] == [4]
    assert bench.worker.idle
    assert bench.all(frames.Waiting)[-1].why == "the owner paused the run"
    bench.now += 1000
    bench.worker.obey(frames.Allow(2, ""))
    bench.turn(5)
    assert [p.steps for p in bench.all(frames.PassDone)] == [4, 4]


def test_in_a_pause_with_too_much_in_flight_a_pass_goes_out_when_there_is_room(bench: Bench) -> None:
    bench.turn(1)
    bench.worker.obey(frames.Allow(0, "the owner paused the run", prolong=False))
    bench.turn(9)
    assert len(bench.rates) == 4  # H, not four times H
    assert bench.worker.idle
    assert bench.all(frames.Waiting)[-1].why == "the owner paused the run"
    bench.now += 1000
    bench.worker.obey(frames.Allow(2, ""))
    bench.turn(1)
    assert [p.steps for p in bench.all(frames.PassDone)] == [4]


def test_what_a_pause_took_is_no_time_of_the_pass_that_begins_after_it(tiny: TinyModelRun) -> None:
    """Its first pass was one inner step, and its pace one of the pause."""
    inner = msgspec.structs.replace(tiny.spec.inner, pass_s=50.0)
    bench = Bench(tiny, spec=msgspec.structs.replace(tiny.spec, inner=inner))
    bench.adopt(tiny.params)
    bench.worker.obey(frames.Allow(0, "the owner paused the run", prolong=False))
    bench.turn(3)
    assert bench.rates == []  # no pass begins
    bench.now += 1000
    bench.worker.obey(frames.Allow(9, ""))
    bench.turn(5)
    assert [p.steps for p in bench.all(frames.PassDone)] == [4]
    assert bench.all(frames.Stepped)[0].tokens_per_s > 1
    assert max(s.longest_gap_s for s in bench.all(frames.Stepped)) < 100
