"""Work on processes: all of it, once; ended when asked; a process that dies is said."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from p2pdiloco.errors import OperatorError
from p2pdiloco_node.corpus.processes import Processes, Stopped


def square(number: int) -> tuple[int, int]:
    return number * number, os.getpid()


def refuse(number: int) -> int:
    raise OperatorError(f"number {number} is not wanted.", exit_code=5)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_all_tasks_on_other_processes() -> None:
    with Processes(2, threading.Event()) as processes:
        found = list(processes.each(square, [(n,) for n in range(20)]))
        assert sorted(n for n, _ in found) == [n * n for n in range(20)]
        assert os.getpid() not in {pid for _, pid in found}
        with pytest.raises(OperatorError, match="number 3 is not wanted") as caught:
            list(processes.each(refuse, [(3,)]))
        assert caught.value.exit_code == 5


def test_without_processes_it_is_done_here() -> None:
    with Processes(0, threading.Event()) as processes:
        assert list(processes.each(square, [(2,), (3,)])) == [(4, os.getpid()), (9, os.getpid())]


@pytest.mark.parametrize("jobs", [0, 1])
def test_a_stop_is_heard_between_tasks(jobs: int) -> None:
    stop = threading.Event()
    done = []

    def work() -> None:
        with Processes(jobs, stop) as processes:
            for found in processes.each(square, [(n,) for n in range(1000)]):
                done.append(found)
                stop.set()

    with pytest.raises(Stopped):
        work()
    assert 1 <= len(done) <= 3


def test_a_process_that_dies_is_said() -> None:
    with Processes(1, threading.Event()) as processes:
        found = processes.each(die, [()])
        with pytest.raises(OperatorError, match="was killed; is the memory enough") as caught:
            next(found)
    assert caught.value.exit_code == 6
