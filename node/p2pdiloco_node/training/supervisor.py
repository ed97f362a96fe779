"""The daemon's side of the trainer process: starts it, restarts it with a brake, ends it, loses nothing else.

`run` is the trainer's whole story and ends only by cancellation. The other methods may be called at any
time: what a trainer that is not there yet cannot hear is contained in the `Beginning` of its next life.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco_node.training import frames
from p2pdiloco_node.training.arrays import Floats, write_array
from p2pdiloco_node.training.brake import RestartBrake
from p2pdiloco_node.training.checkpoints import MomentsCheckpoints
from p2pdiloco_node.training.contributor import AnchorView
from p2pdiloco_node.training.ranks import WORKER

log = logging.getLogger(__name__)


class Beginning(NamedTuple):
    """What a fresh trainer starts from."""

    configure: frames.Configure  # cursor from the contributor; sequence, exchange, moments are filled in here
    version: int
    clock: int  # tokens merged at that version
    target_tokens: int  # of the run, as the log says
    view: AnchorView


class TrainerDown(NamedTuple):
    """The trainer ended by itself; it is started again after `retry_s`."""

    why: str
    retry_s: float
    braked: bool  # it crashed too often


Told = frames.Event | TrainerDown


class Supervisor:
    """One trainer process at a time."""

    def __init__(
        self,
        exchange: Path,
        checkpoints: MomentsCheckpoints,
        *,
        begin: Callable[[], Awaitable[Beginning]],
        on_event: Callable[[Told], Awaitable[None]],
        threads: int = 1,
        nice: int = 0,
        device: str = "auto",
        command: Sequence[str] = WORKER,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`exchange`: a folder of this run's alone, for array files; they are removed here.

        `begin` is awaited at each start of a trainer, beside its imports; it may wait until there is a
        certified state and data. `on_event` is called for one event at a time, in order.
        """
        self._exchange = exchange
        self._checkpoints = checkpoints
        self._begin = begin
        self._on_event = on_event
        self._threads, self._nice, self._device = threads, nice, device
        self._command = command
        self._clock, self._sleep = clock, sleep
        self._process: asyncio.subprocess.Process | None = None
        self._life = 0
        self._configured = False
        self._adoptions = 0  # asked for, heard or not
        self._files = itertools.count(1)
        self._last_sequence = 0  # of the passes that any life finished
        self._last_cursor = 0
        self._allow: frames.Allow | None = None
        self._paused = False
        self._asked: deque[tuple[int, bytes, Floats]] = deque(maxlen=limits.evaluations_waiting_max)
        self._moments_void = False
        self._passes_unsaved = 0
        self._saved_at = clock()
        self._not_finite = 0  # in a row, in this life
        self._passed = False  # a good pass came in this life
        self._ever_began = False  # any trainer of this daemon's life was ready to train

    @property
    def pid(self) -> int | None:
        """Of the trainer, for those who watch or test; None while there is none."""
        return self._process.pid if self._process is not None else None

    # What the daemon says.

    async def adopt(
        self, version: int, clock: int, target_tokens: int, view: AnchorView, *, reset: bool = False
    ) -> None:
        """A new certified state. Call in order; with `reset`, after the contributor's reset."""
        self._adoptions += 1
        self._last_sequence = max(self._last_sequence, view.sequence)
        if reset:
            self._moments_void = True
        if not self._configured:
            return
        life = self._life
        path = self._file("anchor")
        await asyncio.to_thread(write_array, path, view.anchor)
        if not self._configured or self._life != life:
            path.unlink(missing_ok=True)
            return
        self._send(_adoption(version, clock, target_tokens, view, path, reset=reset))

    def allow(self, allowed: int, known_sequence: int, why: str, *, prolong: bool = True) -> None:
        """`allowed` more passes after `known_sequence`, the last own delta that the rules know of."""
        self._allow = frames.Allow(known_sequence + allowed, why, prolong)
        if self._configured:
            self._send(self._allow)

    def pass_lost(self) -> None:
        """A finished pass became no delta (not finite): its number is used up, its permission is not."""
        self._not_finite += 1
        if self._allow is not None:
            self.allow(self._allow.until_sequence + 1, 0, self._allow.why, prolong=self._allow.prolong)

    async def evaluate(self, version: int, state_root: bytes, params: Floats) -> None:
        """Ends in `Evaluated`, unless the trainer crashes before."""
        if not self._configured:
            self._asked.append((version, state_root, params))
            return
        path = self._file("evaluation")
        await asyncio.to_thread(write_array, path, params)
        self._send(frames.Evaluate(version, state_root, str(path)))

    def withdraw(self, version: int) -> bool:
        """Whether an evaluation of `version` waited for the trainer; it does so no longer."""
        kept = [asked for asked in self._asked if asked[0] != version]
        found = len(kept) < len(self._asked)
        self._asked = deque(kept, limits.evaluations_waiting_max)
        return found

    def pause(self) -> None:
        self._paused = True
        if self._configured:
            self._send(frames.Pause())

    def resume(self) -> None:
        self._paused = False
        if self._configured:
            self._send(frames.Resume())

    def shards_changed(self, gone: Sequence[int]) -> None:
        """Files of data shards came or went; those of `gone` are not to be read any more, or anew."""
        if self._configured:
            self._send(frames.ShardsChanged(tuple(gone)))

    def save_checkpoint(self) -> None:
        """Now, whatever the cadence; ends in `Saved`."""
        self._passes_unsaved, self._saved_at = 0, self._clock()
        if self._configured:
            self._send(frames.SaveCheckpoint(str(self._checkpoints.next_path())))

    # The trainer's story.

    async def run(self) -> None:
        """Until cancelled; the process is gone when it returns, within `trainer_stop_s`.

        Raises: OperatorError: a setting of this machine is wrong, and was from the start.
        """
        brake = RestartBrake()
        for stale in self._exchange.glob("*.f32"):
            stale.unlink(missing_ok=True)
        while True:
            started_at = self._clock()
            why = await self._live()
            if self._is_astray:
                pause = brake.astray(passed=self._passed)
            else:
                pause = brake.crashed(started_at, self._clock())
            log.warning("The trainer ended (%s); it is started again in %.0f s.", why, pause.seconds)
            await self._on_event(TrainerDown(why, pause.seconds, pause.braked))
            await self._sleep(pause.seconds)

    async def _live(self) -> str:
        """One process, from start to end. Returns: why it ended."""
        self._life += 1
        self._not_finite, self._passed = 0, False
        last_words: deque[str] = deque(maxlen=limits.trainer_stderr_lines)
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *self._command,
                str(self._nice),
                self._device,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=trainer_environment(self._threads),
            )
        except OSError as error:
            return f"it could not be started: {error}"
        failed, wrong = "", None
        try:
            assert process.stdout is not None and process.stderr is not None  # noqa: PT018
            async with asyncio.TaskGroup() as group:
                group.create_task(_keep_last(process.stderr, last_words))
                configuring = group.create_task(self._configure())
                while (event := await frames.read_event(process.stdout)) is not None:
                    if isinstance(event, frames.Failed):
                        failed = event.message
                        if event.exit_code and not self._ever_began:
                            wrong = OperatorError(failed, event.exit_code)
                            break
                    await self._take(event)
                    if self._is_astray:
                        failed = f"{self._not_finite} times in a row its values were not finite"
                        await self._end(process)
                        break
                configuring.cancel()
            code = await process.wait()
        finally:
            self._configured = False
            await self._end(process)
            self._process = None
        if wrong is not None:
            raise wrong
        if failed:
            return failed
        last = next((line for line in reversed(last_words) if line.strip()), "it said nothing")
        return f"exit status {code}: {last.strip()[:300]}"

    async def _configure(self) -> None:
        """Tell a fresh trainer where to begin; again, if the state moved on meanwhile."""
        while True:
            seen = self._adoptions
            beginning = await self._begin()
            moments = await asyncio.to_thread(self._moments)
            path = self._file("anchor")
            await asyncio.to_thread(write_array, path, beginning.view.anchor)
            if self._adoptions == seen:
                break
            path.unlink(missing_ok=True)
        # From here to the end nothing is awaited: no adoption can slip in between.
        view = beginning.view
        self._last_sequence = max(self._last_sequence, view.sequence)
        self._last_cursor = max(self._last_cursor, beginning.configure.cursor)
        self._send(
            msgspec.structs.replace(
                beginning.configure,
                exchange=str(self._exchange),
                moments=str(moments or ""),
                next_sequence=self._last_sequence + 1,
                cursor=self._last_cursor,
                threads=self._threads,
            )
        )
        self._send(
            _adoption(beginning.version, beginning.clock, beginning.target_tokens, view, path, reset=False)
        )
        if self._allow is not None:
            self._send(self._allow)
        if self._paused:
            self._send(frames.Pause())
        self._configured = True
        waiting, self._asked = self._asked, deque(maxlen=limits.evaluations_waiting_max)
        for version, state_root, params in waiting:
            await self.evaluate(version, state_root, params)

    async def _take(self, event: frames.Event) -> None:
        match event:
            case frames.Configured():
                self._ever_began = True
                await self._on_event(event)
            case frames.PassDone():
                self._last_sequence = max(self._last_sequence, event.sequence)
                self._last_cursor = event.data_first + event.data_count
                self._passes_unsaved += 1
                bad = self._not_finite
                await self._on_event(event)
                if self._not_finite == bad:  # `pass_lost` was not called
                    self._not_finite, self._passed = 0, True
                if (
                    self._passes_unsaved >= limits.checkpoint_passes
                    or self._clock() - self._saved_at >= limits.checkpoint_s
                ):
                    self.save_checkpoint()
            case frames.NotFinite():
                self._not_finite += 1
                await self._on_event(event)
            case frames.Saved():
                await asyncio.to_thread(self._checkpoints.commit, event)
                await self._on_event(event)
            case _:
                await self._on_event(event)

    @property
    def _is_astray(self) -> bool:
        return self._not_finite >= limits.trainer_not_finite_max

    def _moments(self) -> Path | None:
        if self._moments_void:
            self._moments_void = False
            self._checkpoints.forget()
        return self._checkpoints.newest()

    def _send(self, frame: frames.Command) -> None:
        process = self._process
        if process is not None and process.stdin is not None and not process.stdin.is_closing():
            process.stdin.write(frames.pack(frame))

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        """In order within `trainer_stop_s`, else by force; also when cancelled a second time."""
        if process.returncode is not None:
            return
        try:
            self._send(frames.Stop())
            # Not asyncio.timeout, which Python before 3.11.3 mistakes for the cancellation that led here.
            ended = asyncio.ensure_future(process.wait())
            await asyncio.wait((ended,), timeout=limits.trainer_stop_s)
            ended.cancel()
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()

    def _file(self, what: str) -> Path:
        return self._exchange / f"{what}-{next(self._files)}.f32"


def _adoption(
    version: int, clock: int, target_tokens: int, view: AnchorView, path: Path, *, reset: bool
) -> frames.Adopt:
    seen = clock + view.unmerged_tokens
    return frames.Adopt(version, seen, target_tokens, str(path), view.sequence, reset)


async def _keep_last(stream: asyncio.StreamReader, lines: deque[str]) -> None:
    """What the trainer says on stderr: its last lines are the best explanation of a crash."""
    rest = b""
    while data := await stream.read(4096):
        *whole, rest = (rest + data).split(b"\n")
        rest = rest[-4096:]
        for line in whole:
            lines.append(line.decode(errors="replace"))
            log.debug("trainer: %s", lines[-1])


def trainer_environment(threads: int) -> dict[str, str]:
    """Ours, with threads limited before torch starts, and no library calling home."""
    return os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
