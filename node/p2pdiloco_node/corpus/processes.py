"""Work on several processes that end with the one that asked for it, however it ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import (
    FIRST_COMPLETED,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing.connection import wait as wait_for
from types import TracebackType
from typing import Any, Self, TypeVar

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.exit_codes import RESOURCES

T = TypeVar("T")


class Stopped(Exception):
    """Somebody asked to stop; what was done so far is kept."""


class Processes:
    """`jobs` processes; 0: everything is done in this one, by one thread. Tasks are a module's functions;
    what they raise is raised here, too."""

    def __init__(self, jobs: int, stop: threading.Event) -> None:
        self._jobs, self._stop = max(1, jobs), stop
        self._pool: Executor = ThreadPoolExecutor(1)
        if jobs:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(jobs, context, initializer=_begin, initargs=(jobs,))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and isinstance(self._pool, ProcessPoolExecutor):
            # What they are at is worth nothing now: a file that is not whole has no name yet.
            for process in list((self._pool._processes or {}).values()):
                process.kill()
        self._pool.shutdown(cancel_futures=True)

    def check(self) -> None:
        """Raises: Stopped."""
        if self._stop.is_set():
            raise Stopped

    def each(
        self,
        work: Callable[..., T],
        tasks: Iterable[tuple[Any, ...]],
        look: Callable[[], object] | None = None,
    ) -> Iterator[T]:
        """Results as they come. `look` is called every `limits.making_told_s` while there are none.

        Raises: Stopped; OperatorError: a process was killed; what `work` raises.
        """
        waiting = iter(tasks)
        running: set[Future[T]] = set()
        while True:
            self.check()
            # A few more than there are processes, so that none waits for this one.
            for task in islice(waiting, 2 * self._jobs - len(running)):
                running.add(self._pool.submit(work, *task))
            if not running:
                return
            done, running = wait(running, limits.making_told_s, FIRST_COMPLETED)
            if not done and look is not None:
                look()
            for future in done:
                yield _result(future)


def _result(future: Future[T]) -> T:
    try:
        return future.result()
    except BrokenProcessPool:
        raise OperatorError(
            "a process that prepares the data was killed; is the memory enough? Give the same command "
            "again, it goes on where it was; --jobs 1 needs less.",
            exit_code=RESOURCES,
        ) from None


def _begin(jobs: int) -> None:
    """In each process, before its first task."""
    # Ctrl-C reaches all processes of a terminal; the one that the person sees ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Processes are what runs in parallel here; training a tokenizer alone uses threads.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = str(jobs)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait_for([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
