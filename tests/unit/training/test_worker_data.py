"""The trainer and its data: shards that come and go, and a place that survives (scenarios F4, S12)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from p2pdiloco import limits
from p2pdiloco_node.training import frames
from p2pdiloco_node.training.arrays import write_array
from tests.unit.training.test_worker import Bench

if TYPE_CHECKING:
    from tests.unit.training.conftest import TinyModelRun
ROOT = bytes(range(32))


@pytest.fixture
def bench(tiny: TinyModelRun) -> Bench:
    """Adopted version 0 and may finish two passes."""
    made = Bench(tiny)
    made.adopt(tiny.params)
    made.worker.obey(frames.Allow(2, "waiting"))
    return made


def test_it_resumes_at_its_cursor_and_number(bench: Bench) -> None:
    """F4: killed in mid-pass it repeats at most the lost pass and skips nothing."""
    bench.turn(5 + 2)
    first = bench.all(frames.PassDone)[0]
    again = Bench(bench.tiny, cursor=first.data_first + first.data_count, next_sequence=2)
    again.adopt(bench.anchor, sequence=1)
    again.worker.obey(frames.Allow(2, ""))
    again.turn(5)
    bench.turn(3)
    ours, theirs = bench.all(frames.PassDone)[1], again.all(frames.PassDone)[0]
    assert (ours.sequence, ours.data_first, ours.data_count) == (2, 16, 16)
    assert (theirs.sequence, theirs.data_first, theirs.data_count) == (2, 16, 16)


def test_without_any_shard_it_waits_and_goes_on_when_one_is_there(tiny: TinyModelRun) -> None:
    """The pass's seconds do not run meanwhile, and the data of what was never read is not passed over."""
    texts = [shard.read_bytes() for shard in tiny.shards]
    for shard in tiny.shards:
        shard.unlink()
    inner = msgspec.structs.replace(tiny.spec.inner, pass_s=100.0)
    bench = Bench(tiny, spec=msgspec.structs.replace(tiny.spec, inner=inner))
    bench.adopt(tiny.params)
    bench.worker.obey(frames.Allow(1, ""))
    bench.turn(4)
    assert bench.worker.idle
    assert [w.why for w in bench.all(frames.Waiting)] == ["no data shard is here"]
    assert [m.shards for m in bench.all(frames.ShardsMissing)] == [(0, 1)]
    bench.now += 1000
    tiny.shards[1].write_bytes(texts[1])
    bench.worker.obey(frames.ShardsChanged(()))
    bench.turn(2)
    tiny.shards[0].write_bytes(texts[0])
    bench.worker.obey(frames.ShardsChanged(()))
    bench.turn(3)
    (done,) = bench.all(frames.PassDone)
    assert (done.steps, done.data_first) == (4, 0)
    assert [m.shards for m in bench.all(frames.ShardsMissing)] == [(0, 1), (0,), ()]


def test_a_missing_shard_is_passed_over_and_used_again_when_it_is_there(tiny: TinyModelRun) -> None:
    """S12: the next shard is used meanwhile, and the headers' ranges hold all that was trained on."""
    text = tiny.shards[0].read_bytes()
    tiny.shards[0].unlink()
    bench = Bench(tiny)
    bench.adopt(tiny.params)
    bench.worker.obey(frames.Allow(9, ""))
    bench.turn(10)
    (missing,) = bench.all(frames.ShardsMissing)
    assert (missing.shards, "shard 0 cannot be read" in missing.why) == ((0,), True)
    one, two = bench.all(frames.PassDone)
    assert (one.steps, two.steps) == (4, 4)
    assert one.data_count > 16
    assert two.data_first == one.data_first + one.data_count
    tiny.shards[0].write_bytes(text)
    bench.now += limits.shard_retry_s
    bench.turn(5)
    assert [m.shards for m in bench.all(frames.ShardsMissing)] == [(0,), ()]
    assert bench.all(frames.PassDone)[2].data_count == 16


def test_a_shard_that_is_taken_away_is_not_read_any_more(bench: Bench) -> None:
    """Its file may be another when it comes back, and takes no room meanwhile."""
    bench.turn(2)
    bench.tiny.shards[0].unlink()
    bench.worker.obey(frames.ShardsChanged((0,)))
    bench.turn()
    assert [m.shards for m in bench.all(frames.ShardsMissing)] == [(0,)]
    assert str(bench.tiny.shards[0]) not in Path("/proc/self/maps").read_text()


def test_a_report_says_how_far_the_data_is_read(bench: Bench) -> None:
    bench.turn(4)
    steps = bench.all(frames.Stepped)
    assert [s.cursor for s in steps] == [4 * s.step for s in steps]
    assert steps[-1].step > 1


def test_a_missing_held_out_shard_costs_the_evaluation_alone(bench: Bench) -> None:
    bench.tiny.evaluation.unlink()
    path = bench.tiny.folder / "evaluation.f32"
    write_array(path, bench.tiny.params)
    bench.worker.obey(frames.Evaluate(9, ROOT, str(path)))
    bench.turn(5)
    (told,) = bench.all(frames.NotEvaluated)
    assert (told.version, told.state_root, "cannot be read" in told.why) == (9, ROOT, True)
    assert len(bench.all(frames.PassDone)) == 1
