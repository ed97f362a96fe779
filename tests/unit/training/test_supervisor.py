"""The daemon's side of a trainer process, with a small stand-in process that speaks real frames."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

import numpy as np
import psutil
import pytest

from p2pdiloco.errors import OperatorError
from p2pdiloco.ids import digest_of
from p2pdiloco_node.training import frames
from p2pdiloco_node.training.arrays import read_array
from p2pdiloco_node.training.checkpoints import MomentsCheckpoints
from p2pdiloco_node.training.contributor import AnchorView
from p2pdiloco_node.training.supervisor import Beginning, Supervisor, Told, TrainerDown

T = TypeVar("T", bound=Told)

# Echoes each command's type and fields on its events; `Allow.why` orders what else it does.
STAND_IN = """
import os, sys, time
from p2pdiloco_node.training import frames as f
say = lambda event: f.write_event(sys.stdout.buffer, event)
if "no device" in sys.argv:
    say(f.Failed("--device cuda: no GPU", 6))
    os._exit(6)
say(f.Ready(0.5))
while (command := f.read_command(sys.stdin.buffer)) is not None:
    say(f.Waiting(repr(command)))
    if isinstance(command, f.Configure):
        say(f.Configured("cpu", 3))
        number, cursor, exchange = command.next_sequence, command.cursor, command.exchange
    if isinstance(command, f.Adopt):
        os.unlink(command.anchor)
    if isinstance(command, f.SaveCheckpoint):
        from p2pdiloco_node.training.moments_file import write_moments
        import numpy as np, pathlib
        moments = np.zeros((2, 3), np.float32)
        say(f.Saved(command.path, *write_moments(pathlib.Path(command.path), 5, moments)))
    if isinstance(command, f.Stop) and "hang" not in sys.argv:
        break
    if isinstance(command, f.Allow):
        if command.why == "pass":
            say(f.PassDone(number, "", 0, 4, cursor, 16, 2.0))
            number, cursor = number + 1, cursor + 16
        if command.why == "bad":
            say(f.NotFinite(1, cursor, "loss"))
        if command.why == "crash":
            print("a warning", file=sys.stderr)
            print("RuntimeError: out of memory", file=sys.stderr, flush=True)
            os._exit(9)
        if command.why == "fail":
            say(f.Failed("torch is not installed"))
            os._exit(3)
        if command.why == "device gone":
            say(f.Failed("--device cuda: no GPU", 6))
            os._exit(6)
        if command.why == "half a frame":
            sys.stdout.buffer.write(b"\\0\\0\\1\\0half")
            sys.stdout.buffer.flush()
            os._exit(1)
while "hang" in sys.argv:
    time.sleep(60)
"""


class Desk:
    """What a daemon does with a supervisor; time passes only when the test says so."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.told: list[Told] = []
        self.news = asyncio.Condition()
        self.pauses: list[float] = []
        self.go_on = asyncio.Semaphore(0)
        self.state = asyncio.Event()
        self.view = AnchorView(np.arange(3, dtype=np.float32), 0, 0)
        self.version = 0
        self.folder = folder
        moments = folder / "moments"
        moments.mkdir()
        self.checkpoints = MomentsCheckpoints(moments, lambda path, data: path.write_bytes(data) and None)
        (folder / "exchange").mkdir()
        self.now = 0.0
        self.supervisor = Supervisor(
            folder / "exchange",
            self.checkpoints,
            begin=self._begin,
            on_event=self._hear,
            command=(sys.executable, "-c", STAND_IN, *flags),
            clock=lambda: self.now,
            sleep=self._sleep,
        )

    async def _begin(self) -> Beginning:
        version, view = self.version, self.view  # as it was when the answer was begun
        await self.state.wait()
        configure = frames.Configure(b"", b"", (), (), "", cursor=0, next_sequence=0)
        return Beginning(configure, version, 1000, 7000, view)

    async def _hear(self, event: Told) -> None:
        async with self.news:
            self.told.append(event)
            self.news.notify_all()

    async def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        await self.go_on.acquire()

    async def until(self, found: Callable[[], bool]) -> None:
        async with asyncio.timeout(20), self.news:
            await self.news.wait_for(found)

    def all(self, kind: type[T]) -> list[T]:
        return [e for e in self.told if isinstance(e, kind)]

    def heard(self, *words: str) -> list[str]:
        """Commands that the stand-in got, by the name of their type."""
        got = [e.why for e in self.all(frames.Waiting)]
        return [w for w in got if not words or w.startswith(words)]


@asynccontextmanager
async def running(folder: Path, *flags: str) -> AsyncIterator[Desk]:
    desk = Desk(folder, *flags)
    task = asyncio.create_task(desk.supervisor.run())
    try:
        yield desk
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    assert desk.supervisor.pid is None


async def test_it_configures_and_adopts_once_there_is_a_state(tmp_path: Path) -> None:
    async with running(tmp_path) as desk:
        desk.view = desk.view._replace(sequence=5, unmerged_tokens=30)
        await desk.until(lambda: bool(desk.all(frames.Ready)))
        assert desk.heard() == []  # imports run beside the sync
        desk.supervisor.allow(2, 5, "free")
        for version in (0, 4):
            await desk.supervisor.evaluate(version, bytes(32), np.zeros(3, np.float32))
        assert [desk.supervisor.withdraw(0) for _ in range(2)] == [True, False]
        desk.state.set()
        await desk.until(lambda: len(desk.heard()) == 4)
        configure, adopt, allow, evaluate = desk.heard()
        assert configure.startswith("Configure")
        assert "next_sequence=6" in configure
        assert adopt.startswith("Adopt(version=0, clock=1030, target_tokens=7000,")
        assert "sequence=5, reset=False" in adopt
        assert allow.startswith("Allow(until_sequence=7")
        assert evaluate.startswith("Evaluate(version=4")


async def test_a_state_that_comes_while_it_begins_is_not_lost(tmp_path: Path) -> None:
    async with running(tmp_path) as desk:
        await desk.until(lambda: bool(desk.all(frames.Ready)))
        desk.version = 8
        await desk.supervisor.adopt(
            8, 2000, 7000, desk.view
        )  # not configured: the beginning is asked for again
        desk.state.set()
        await desk.until(lambda: len(desk.heard("Adopt")) == 1)
        assert "version=8" in desk.heard("Adopt")[0]
        await desk.supervisor.adopt(9, 3000, 8000, desk.view, reset=True)
        await desk.until(lambda: len(desk.heard("Adopt")) == 2)
        assert desk.heard("Adopt")[1].startswith("Adopt(version=9, clock=3000, target_tokens=8000")
        assert "reset=True" in desk.heard("Adopt")[1]
    assert list((tmp_path / "exchange").iterdir()) == []


async def test_after_a_crash_it_starts_again_where_the_last_pass_ended(tmp_path: Path) -> None:
    async with running(tmp_path) as desk:
        desk.state.set()
        await desk.until(lambda: bool(desk.heard("Adopt")))
        desk.supervisor.allow(1, 0, "pass")
        await desk.until(lambda: bool(desk.all(frames.PassDone)))
        desk.supervisor.allow(1, 0, "crash")
        await desk.until(lambda: bool(desk.all(TrainerDown)))
        down = desk.all(TrainerDown)[0]
        assert down == TrainerDown("exit status 9: RuntimeError: out of memory", 1.0, False)
        desk.supervisor.allow(2, 1, "free")
        desk.go_on.release()
        await desk.until(lambda: len(desk.heard("Adopt")) == 2)
        again = desk.heard("Configure")[1]
        # The contributor may not have seen that pass yet; number and data are used all the same.
        assert "cursor=16, next_sequence=2" in again
        await desk.until(lambda: desk.heard()[-1].startswith("Allow(until_sequence=3"))


async def test_numbers_that_the_log_knows_are_not_used_again_in_the_next_life(tmp_path: Path) -> None:
    async with running(tmp_path) as desk:
        desk.state.set()
        await desk.until(lambda: bool(desk.heard("Adopt")))
        await desk.supervisor.adopt(1, 0, 7000, desk.view._replace(sequence=40))
        desk.supervisor.allow(1, 0, "pass")  # on its way with the number 1 when the trainer was told
        await desk.until(lambda: bool(desk.all(frames.PassDone)))
        desk.supervisor.allow(1, 0, "crash")
        await desk.until(lambda: bool(desk.all(TrainerDown)))
        desk.supervisor.allow(0, 0, "free")
        desk.go_on.release()
        await desk.until(lambda: len(desk.heard("Configure")) == 2)
        assert "next_sequence=41" in desk.heard("Configure")[1]


async def test_a_pass_that_became_no_delta_costs_no_permission(tmp_path: Path) -> None:
    async with running(tmp_path) as desk:
        desk.state.set()
        desk.supervisor.pass_lost()  # before anything was allowed: nothing to give back
        desk.supervisor.allow(2, 7, "pass")
        desk.supervisor.pass_lost()
        await desk.until(lambda: bool(desk.heard("Adopt")))
        await desk.until(lambda: "until_sequence=10" in repr(desk.heard("Allow")))
        desk.supervisor.pass_lost()
        await desk.until(lambda: "until_sequence=11" in repr(desk.heard("Allow")))


async def test_three_crashes_and_the_brake_holds(tmp_path: Path) -> None:
    async with running(tmp_path) as desk:
        desk.state.set()
        for life in range(1, 4):
            await desk.until(lambda life=life: len(desk.heard("Adopt")) == life)  # type: ignore[misc]
            desk.supervisor.allow(1, 0, "fail")
            await desk.until(lambda life=life: len(desk.all(TrainerDown)) == life)  # type: ignore[misc]
            desk.supervisor.allow(1, 0, "free")
            if life < 3:
                desk.go_on.release()
        assert [(d.retry_s, d.braked) for d in desk.all(TrainerDown)] == [(1, False), (2, False), (600, True)]
        assert {d.why for d in desk.all(TrainerDown)} == {"torch is not installed"}
        assert desk.pauses == [1, 2, 600]
        assert desk.supervisor.pid is None
        # Nothing that is said meanwhile blocks or fails.
        await desk.supervisor.adopt(3, 10, 7000, desk.view)
        desk.supervisor.pause()
        desk.supervisor.save_checkpoint()


async def test_a_setting_that_was_wrong_from_the_start_ends_the_daemon_at_once(tmp_path: Path) -> None:
    """It was started again for ever; nothing waits for the data either."""
    desk = Desk(tmp_path, "no device")
    with pytest.raises(OperatorError, match="--device cuda: no GPU") as caught:
        await asyncio.wait_for(desk.supervisor.run(), 20)
    assert caught.value.exit_code == 6
    assert desk.supervisor.pid is None
    assert not desk.pauses


async def test_a_device_that_is_lost_later_is_tried_again(tmp_path: Path) -> None:
    async with running(tmp_path) as desk:
        desk.state.set()
        await desk.until(lambda: bool(desk.heard("Adopt")))
        desk.supervisor.allow(1, 0, "device gone")
        await desk.until(lambda: bool(desk.all(TrainerDown)))
        assert desk.all(TrainerDown) == [TrainerDown("--device cuda: no GPU", 1.0, False)]


async def bad_values(desk: Desk, n: int) -> None:
    """The trainer says so often that its loss is not finite."""
    before = len(desk.all(frames.NotFinite))
    for _ in range(n):
        desk.supervisor.allow(1, 0, "bad")
    await desk.until(lambda: len(desk.all(frames.NotFinite)) == before + n)


async def test_three_times_not_finite_in_a_row_and_the_brake_holds(tmp_path: Path) -> None:
    """S18: no flood of empty passes; a good pass between them forgives."""
    async with running(tmp_path) as desk:
        desk.state.set()
        await desk.until(lambda: len(desk.heard("Adopt")) == 1)
        await bad_values(desk, 2)
        desk.supervisor.allow(1, 0, "pass")
        await desk.until(lambda: bool(desk.all(frames.PassDone)))
        await bad_values(desk, 2)
        assert desk.all(TrainerDown) == []
        for life, pause_s in ((1, 600), (2, 1200)):
            await bad_values(desk, 1 if life == 1 else 3)
            await desk.until(lambda life=life: len(desk.all(TrainerDown)) == life)  # type: ignore[misc]
            why = "3 times in a row its values were not finite"
            assert desk.all(TrainerDown)[-1] == TrainerDown(why, pause_s, braked=True)
            assert desk.supervisor.pid is None
            desk.supervisor.allow(1, 0, "free")
            desk.go_on.release()
            await desk.until(lambda life=life: len(desk.heard("Adopt")) == life + 1)  # type: ignore[misc]


async def test_passes_that_become_no_delta_count_as_not_finite(tmp_path: Path) -> None:
    async with running(tmp_path) as desk:
        hear = desk.supervisor._on_event

        async def lost(event: Told) -> None:
            if isinstance(event, frames.PassDone):
                desk.supervisor.pass_lost()
            await hear(event)

        desk.supervisor._on_event = lost
        desk.state.set()
        await desk.until(lambda: bool(desk.heard("Adopt")))
        desk.supervisor.allow(3, 0, "pass")  # each lost pass gives its permission back: ordered again
        await desk.until(lambda: bool(desk.all(TrainerDown)))
        assert desk.all(TrainerDown)[0].braked


async def test_half_a_frame_is_a_crash(tmp_path: Path) -> None:
    async with running(tmp_path) as desk:
        desk.state.set()
        await desk.until(lambda: bool(desk.heard("Adopt")))
        desk.supervisor.allow(1, 0, "half a frame")
        await desk.until(lambda: bool(desk.all(TrainerDown)))
        assert desk.all(TrainerDown)[0].why.startswith("exit status 1")


async def test_a_trainer_that_cannot_be_started(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.supervisor._command = ("/does/not/exist",)
    task = asyncio.create_task(desk.supervisor.run())
    await desk.until(lambda: bool(desk.all(TrainerDown)))
    assert "could not be started" in desk.all(TrainerDown)[0].why
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_stopping_is_orderly_and_fast(tmp_path: Path) -> None:
    async with running(tmp_path) as desk:
        desk.state.set()
        await desk.until(lambda: bool(desk.heard("Adopt")))
        pid = desk.supervisor.pid
        began = time.monotonic()
    assert time.monotonic() - began < 1.5
    assert pid is not None
    assert not psutil.pid_exists(pid)


async def test_a_trainer_that_does_not_listen_is_killed(tmp_path: Path) -> None:
    async with running(tmp_path, "hang") as desk:
        desk.state.set()
        await desk.until(lambda: bool(desk.heard("Adopt")))
        pid = desk.supervisor.pid
        began = time.monotonic()
    assert 1.5 < time.monotonic() - began < 4
    assert pid is not None
    assert not psutil.pid_exists(pid)


async def test_killed_from_outside_it_is_noticed_and_replaced(tmp_path: Path) -> None:
    """E2: never "training but deaf"."""
    async with running(tmp_path) as desk:
        desk.state.set()
        await desk.until(lambda: bool(desk.heard("Adopt")))
        first = desk.supervisor.pid
        assert first is not None
        os.kill(first, 9)
        await desk.until(lambda: bool(desk.all(TrainerDown)))
        desk.go_on.release()
        await desk.until(lambda: len(desk.heard("Adopt")) == 2)
        assert desk.supervisor.pid not in {None, first}


async def test_checkpoints_come_at_their_cadence_and_are_found_after_a_crash(tmp_path: Path) -> None:
    async with running(tmp_path) as desk:
        desk.state.set()
        await desk.until(lambda: bool(desk.heard("Adopt")))
        assert "moments=''" in desk.heard("Configure")[0]
        desk.supervisor.allow(1, 0, "pass")
        await desk.until(lambda: len(desk.all(frames.PassDone)) == 1)
        assert desk.heard("SaveCheckpoint") == []
        desk.now = 301.0
        desk.supervisor.allow(2, 0, "pass")
        await desk.until(lambda: len(desk.all(frames.Saved)) == 1)
        for n in range(16):
            desk.supervisor.allow(3 + n, 0, "pass")
        await desk.until(lambda: len(desk.all(frames.Saved)) == 2)
        desk.supervisor.allow(0, 0, "crash")
        await desk.until(lambda: bool(desk.all(TrainerDown)))
        desk.supervisor.allow(0, 0, "free")
        desk.go_on.release()
        await desk.until(lambda: len(desk.heard("Configure")) == 2)
        assert "moments.2" in desk.heard("Configure")[1]


async def test_a_reset_makes_old_moments_void(tmp_path: Path) -> None:
    async with running(tmp_path) as desk:
        path = desk.checkpoints.next_path()
        path.write_bytes(b"old")
        desk.checkpoints.commit(frames.Saved(str(path), 3, digest_of(b"old")))
        await desk.supervisor.adopt(5, 0, 7000, desk.view, reset=True)
        desk.state.set()
        await desk.until(lambda: bool(desk.heard("Configure")))
        assert "moments=''" in desk.heard("Configure")[0]


async def test_a_pause_outlives_a_crash(tmp_path: Path) -> None:
    async with running(tmp_path) as desk:
        desk.state.set()
        await desk.until(lambda: bool(desk.heard("Adopt")))
        desk.supervisor.pause()
        desk.supervisor.allow(0, 0, "crash")
        await desk.until(lambda: bool(desk.all(TrainerDown)))
        desk.supervisor.allow(0, 0, "free")
        desk.go_on.release()
        await desk.until(lambda: len(desk.heard("Pause")) == 2)
        desk.supervisor.resume()
        await desk.until(lambda: len(desk.heard("Resume")) == 1)


async def test_left_over_files_of_a_life_before_are_removed(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    for name in ("delta-3.f32", "anchor-1.f32"):
        (tmp_path / "exchange" / name).touch()
    (tmp_path / "exchange" / "notes").touch()
    task = asyncio.create_task(desk.supervisor.run())
    await desk.until(lambda: bool(desk.all(frames.Ready)))
    assert [p.name for p in (tmp_path / "exchange").iterdir()] == ["notes"]
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_the_daemons_own_errors_are_not_swallowed(tmp_path: Path) -> None:
    """A full disk while a pass is taken is the daemon's to say; the trainer is gone by then."""
    desk = Desk(tmp_path)
    desk.state.set()

    async def fail(event: Told) -> None:
        raise OperatorError("the disk is full", 6)

    desk.supervisor._on_event = fail
    with pytest.raises(ExceptionGroup) as caught:
        await desk.supervisor.run()
    assert caught.group_contains(OperatorError, match="disk is full")
    assert desk.supervisor.pid is None


def test_arrays_of_another_size_are_our_own_fault(tmp_path: Path) -> None:
    path = tmp_path / "array.f32"
    path.write_bytes(bytes(8))
    with pytest.raises(AssertionError, match="instead of 3"):
        read_array(path, 3)
