"""How long an inner step takes when N trainers share this machine: real trainer processes, timed at once."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.exit_codes import RESOURCES
from p2pdiloco.ids import tagged_digest
from p2pdiloco.run_spec import RunSpec
from p2pdiloco.wire.codec import encode
from p2pdiloco_node.ports import Array
from p2pdiloco_node.training import frames
from p2pdiloco_node.training.arrays import write_array
from p2pdiloco_node.training.ranks import WORKER
from p2pdiloco_node.training.supervisor import trainer_environment

START_S_MAX = 180.0  # imports of N trainers on a busy machine
STEPS_MIN = 3  # timed ones of each trainer, however slow


async def time_inner_steps(
    spec: RunSpec,
    params: Array,
    shards: Sequence[Path],
    folder: Path,
    *,
    trainers: int,
    seconds: float = 4.0,
    threads: int = 1,
    nice: int = 0,
    on_ready: Callable[[int], None] = lambda _trainers: None,
) -> float:
    """Seconds of an inner step: the mean of each trainer's, while all of them train; the median of these.

    `spec`: a draft will do (genesis and signature do not matter); `params`: (params,) version 0; `shards`:
    paths in the order of the spec; `folder`: an empty one, for the trainers' arrays. `on_ready` hears how
    many trainers have taken their first steps. Timing begins when the last trainer has.

    Raises: OperatorError: a trainer does not start here (torch missing, no memory) or takes too long.
    """
    endless = msgspec.structs.replace(
        spec, inner=msgspec.structs.replace(spec.inner, inner_steps=limits.inner_steps_max, pass_s=86400.0)
    )
    begun = asyncio.Barrier(trainers)
    ready = itertools.count(1)

    async def first_steps() -> None:
        on_ready(next(ready))
        await begun.wait()

    def one(number: int) -> asyncio.Task[float]:
        configure = frames.Configure(
            spec=encode(endless),
            peer=tagged_digest("timing", number.to_bytes(4, "big")),
            shards=tuple(map(str, shards)),
            evaluations=("",) * len(spec.data.evaluations),
            exchange=str(folder),
            cursor=0,
            next_sequence=1,
            threads=threads,
        )
        anchor = folder / f"anchor-{number}.f32"
        write_array(anchor, params)
        adopt = frames.Adopt(0, 0, spec.target_tokens, str(anchor), sequence=0, reset=False)
        said = folder / f"said-{number}"
        return group.create_task(_time_one(configure, adopt, first_steps, seconds, nice, said))

    fault: BaseException | None = None
    try:
        async with asyncio.timeout(START_S_MAX + 4 * seconds), asyncio.TaskGroup() as group:
            timed = [one(number) for number in range(trainers)]
    except* OperatorError as failed:
        fault = failed.exceptions[0]
    except* TimeoutError:
        fault = OperatorError(
            f"{trainers} trainers took more than {START_S_MAX:.0f} s to start here; close other "
            "programs, or start fewer nodes.",
            exit_code=RESOURCES,
        )
    if fault is not None:
        raise fault
    return statistics.median(task.result() for task in timed)


async def _time_one(
    configure: frames.Configure,
    adopt: frames.Adopt,
    first_steps: Callable[[], Awaitable[None]],
    seconds: float,
    nice: int,
    said: Path,
) -> float:
    """`first_steps` is called after the first ones, and returns once all trainers have taken theirs."""
    with said.open("wb") as words:
        process = await asyncio.create_subprocess_exec(
            *WORKER,
            str(nice),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=words,
            env=trainer_environment(configure.threads),
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(frames.pack(configure) + frames.pack(adopt))
        await _next_report(process.stdout, said)
        await first_steps()
        first = await _next_report(process.stdout, said)
        began = time.monotonic()
        while True:
            report = await _next_report(process.stdout, said)
            elapsed = time.monotonic() - began
            if elapsed >= seconds and report.step - first.step >= STEPS_MIN:
                return elapsed / (report.step - first.step)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _next_report(stream: asyncio.StreamReader, said: Path) -> frames.Stepped:
    while (event := await frames.read_event(stream)) is not None:
        if isinstance(event, frames.Stepped):
            return event
        if isinstance(event, frames.Failed):
            raise OperatorError(f"the trainer does not start: {event.message}", exit_code=RESOURCES)
    raise OperatorError(f"the trainer does not start here: {_last_line(said)[:300]}", exit_code=RESOURCES)


def _last_line(said: Path) -> str:
    return (said.read_text("utf-8", "replace").strip().splitlines() or ["it said nothing"])[-1]
