"""The trainer process: torch, a thread that reads commands, and the loop of worker.py.

`python -m p2pdiloco_node.training.trainer_process [NICE [DEVICE]]` reads commands from stdin and writes
events to stdout. It may crash without taking the daemon along, and it ends at once when the daemon does.

Under the launcher (launch.py) it is one of several ranks, with their devices and the longest wait for another
as arguments. Rank 0 is this same process; the others do what it tells them (led_loop.py).
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, BinaryIO, NoReturn

from p2pdiloco.errors import OperatorError
from p2pdiloco.exit_codes import FILES, RESOURCES
from p2pdiloco_node.training import frames
from p2pdiloco_node.training.device import DeviceMissing
from p2pdiloco_node.training.families import ModelRefused
from p2pdiloco_node.training.frames import Command, Event
from p2pdiloco_node.training.worker import Worker

if TYPE_CHECKING:
    from p2pdiloco_node.training.process_group import ProcessGroup

PR_SET_PDEATHSIG = 1


def main() -> NoReturn:
    """The process, from its first word to its last."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the daemon's: it ends this process in order
    die_with_parent()
    if len(sys.argv) > 1:
        os.nice(int(sys.argv[1]))  # before the imports: they are what hurts others most
    # Whatever a library prints goes to stderr; stdout belongs to the frames.
    events = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    devices = sys.argv[2].split(",") if len(sys.argv) > 2 else []
    try:
        status = _lead(events, devices, None) if len(sys.argv) <= 3 else _be_rank(events, devices)
    except Exception:  # noqa: BLE001 - said, and the end
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # At once: Python's own end would wait for the thread that reads stdin, and then abort.
    os._exit(status)


def _be_rank(events: BinaryIO, devices: list[str]) -> int:
    """One of several, under the launcher."""
    from p2pdiloco_node.training.process_group import reasons_recorded

    device, seconds = devices[int(os.environ["LOCAL_RANK"])], float(sys.argv[3])

    def join() -> ProcessGroup:
        from p2pdiloco_node.training.inner_loop import choose_device
        from p2pdiloco_node.training.process_group import ProcessGroup

        return ProcessGroup(choose_device(device), seconds=seconds)

    with reasons_recorded():
        if os.environ["RANK"] == "0":
            return _lead(events, devices, join)
        from p2pdiloco_node.training.led_loop import follow

        events.close()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # commands are rank 0's
        group = join()
        follow(group)
        group.close()
    return 0


def _lead(events: BinaryIO, devices: list[str], join: Callable[[], ProcessGroup] | None) -> int:
    """The only rank, or the first. Returns: the exit status; another than 0 was said to the daemon."""
    lock = threading.Lock()

    def emit(event: Event) -> None:
        with lock:
            frames.write_event(events, event)

    inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
    # Of several ranks none may go on: the launcher ends all of them when one fails.
    at_the_end = 0 if join is None else 1
    threading.Thread(target=_read_commands, args=(inbox, at_the_end), name="commands", daemon=True).start()
    try:
        began = time.monotonic()
        from p2pdiloco_node.training import inner_loop

        emit(frames.Ready(time.monotonic() - began))
        for device in devices:  # before any data is fetched for it
            inner_loop.choose_device(device)
        group = join() if join is not None else None
        _work(inbox, emit, group)
        if group is not None:
            from p2pdiloco_node.training.led_loop import End, tell

            tell(group, End())
            group.close()
    except ModuleNotFoundError as error:
        emit(frames.Failed(f"{error.name} is not installed: pip install 'p2pdiloco[node]'.", FILES))
        return FILES
    except OSError as error:
        emit(frames.Failed(f"the trainer cannot use a file: {error}; check the disk and its free space."))
        return RESOURCES
    except (DeviceMissing, ModelRefused) as error:
        emit(frames.Failed(str(error), error.exit_code))
        return error.exit_code
    except OperatorError as error:
        emit(frames.Failed(str(error)))
        return error.exit_code
    return 0


def _work(
    inbox: queue.SimpleQueue[Command], emit: Callable[[Event], None], group: ProcessGroup | None
) -> None:
    """Until it is told to stop."""
    first = _next_command(inbox, group)
    if isinstance(first, frames.Stop):
        return
    assert isinstance(first, frames.Configure), f"the first command is {type(first).__name__}"
    worker = Worker(first, emit, time.monotonic, group)
    while True:
        if worker.idle:
            worker.obey(_next_command(inbox, group))
        while not (inbox.empty() or worker.stopped):
            worker.obey(inbox.get())
        if worker.stopped:
            worker.join_saves()
            return
        worker.turn()


def _next_command(inbox: queue.SimpleQueue[Command], group: ProcessGroup | None) -> Command:
    """Blocks; meanwhile the other ranks hear that this one is there."""
    if group is None:
        return inbox.get()
    from p2pdiloco_node.training.led_loop import Beat, tell

    while True:
        try:
            return inbox.get(timeout=group.beat_s)
        except queue.Empty:
            tell(group, Beat())


def _read_commands(inbox: queue.SimpleQueue[Command], status: int) -> None:
    while (command := frames.read_command(sys.stdin.buffer)) is not None:
        inbox.put(command)
    os._exit(status)  # the daemon is gone: whatever this process does now, nobody will read it


def die_with_parent() -> None:
    """On Linux the kernel ends us with the process that started us, should stdin stay open without it."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)


if __name__ == "__main__":
    main()
