"""Many runs on a few processes. Each process serves one run after the other, so that it warms up once.

A process that dies takes its own run with it and nothing else. Results travel as MessagePack over pipes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import NamedTuple

import msgspec
import numpy as np

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.sim.lab.experiment import Experiment
from p2pdiloco.sim.lab.result import Result

Told = Callable[[float, str], None]
Work = Callable[[Experiment, int, Told], Result]
"""One run: (experiment, seed, told) -> result. A module's function: a fresh process imports it."""

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
END_S = 2.0  # a process that ignores SIGTERM for so long is killed


class Task(msgspec.Struct, frozen=True):
    """One arm with one seed."""

    experiment: Experiment
    seed: int


class Share(msgspec.Struct, frozen=True, tag=True):
    """A run says how much of it is done, in [0, 1]."""

    share: float
    text: str


class Done(msgspec.Struct, frozen=True, tag=True):
    result: Result


class Failed(msgspec.Struct, frozen=True, tag=True):
    """`story`: a traceback where it is our fault, empty where a person can mend it."""

    reason: str
    story: str


class Heard(NamedTuple):
    """What run number `task` of the list said."""

    task: int
    said: Share | Done | Failed


def run_live(experiment: Experiment, seed: int, told: Told) -> Result:
    """The real engine; torch is imported for a model only. `seed` makes the one Generator, PCG64(seed).

    Raises: what the engine and the model raise.
    """
    from p2pdiloco.sim.lab.engine import run_experiment

    began = time.monotonic()
    model = None
    if experiment.model.kind != "none":
        from p2pdiloco_node.lab.model import make_model

        told(0.0, "reading the data")
        model = make_model(experiment, seed)
    rng = np.random.Generator(np.random.PCG64(seed))
    result = run_experiment(experiment, seed, rng, model, told)
    return msgspec.structs.replace(result, wall_s=time.monotonic() - began)


def run_tasks(tasks: Sequence[Task], *, jobs: int, work: Work = run_live) -> Generator[Heard]:
    """All tasks, in their order, on at most `jobs` processes.

    Yields: shares as they are told, and for each task exactly one Done or Failed. Closing the iterator ends
    the processes at once.
    """
    waiting = deque(range(len(tasks)))
    workers: list[_Worker] = []
    try:
        while waiting or workers:
            while waiting and len(workers) < jobs:
                workers.append(_Worker(work))
                workers[-1].begin(waiting.popleft(), tasks)
            ready = set(wait([worker.pipe for worker in workers]))
            for worker in [w for w in workers if w.pipe in ready]:
                said = worker.said()
                yield Heard(worker.task, said)
                if isinstance(said, Share):
                    continue
                if worker.alive and waiting:
                    worker.begin(waiting.popleft(), tasks)
                else:
                    worker.end()
                    workers.remove(worker)
    finally:
        for worker in workers:
            worker.process.terminate()
        for worker in workers:
            worker.end()


class _Worker:
    """One process and the pipe to it."""

    def __init__(self, work: Work) -> None:
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_serve, args=(theirs, work), daemon=True)
        self.task = -1
        self.alive = True
        # Ctrl-C reaches all processes of a terminal; the one that the person sees ends the others.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Runs are the unit of parallelism. numpy and torch read these when imported: before `_serve`.
        for variable in THREADS:
            os.environ.setdefault(variable, "1")
        try:
            self.process.start()
        finally:
            signal.signal(signal.SIGINT, before)
        theirs.close()

    def begin(self, task: int, tasks: Sequence[Task]) -> None:
        self.task = task
        # A process that has died is heard of at the next `said`.
        with contextlib.suppress(BrokenPipeError):
            self.pipe.send_bytes(msgspec.msgpack.encode(tasks[task]))

    def said(self) -> Share | Done | Failed:
        try:
            data = self.pipe.recv_bytes(limits.lab_message_bytes_max)
        except (EOFError, OSError):
            self.alive = False
            self.process.join(END_S)
            return Failed(_death(self.process.exitcode), "")
        return msgspec.msgpack.decode(data, type=Share | Done | Failed)

    def end(self) -> None:
        self.pipe.close()
        self.process.join(END_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()


def _death(status: int | None) -> str:
    if status is None or status >= 0:
        return f"its process ended with status {status}"
    name = signal.Signals(-status).name
    hint = "; is the memory enough? --jobs 1 needs less" if name == "SIGKILL" else ""
    return f"its process was ended by {name}{hint}"


def _serve(pipe: Connection, work: Work) -> None:
    """The process: one task after the other until the pipe is closed."""
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            task = msgspec.msgpack.decode(pipe.recv_bytes(limits.lab_message_bytes_max), type=Task)
            pipe.send_bytes(msgspec.msgpack.encode(_outcome(pipe, task, work)))


def _outcome(pipe: Connection, task: Task, work: Work) -> Done | Failed:
    last = 0.0

    def told(share: float, text: str) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= limits.lab_told_s:
            last = now
            pipe.send_bytes(msgspec.msgpack.encode(Share(share, text)))

    try:
        return Done(work(task.experiment, task.seed, told))
    except (BrokenPipeError, ConnectionResetError):
        raise  # nobody listens any more
    except OperatorError as error:
        return Failed(str(error), "")
    except Exception as error:  # noqa: BLE001 - said with arm, seed and traceback; the other runs go on
        return Failed(f"{type(error).__name__}: {error}", traceback.format_exc())
