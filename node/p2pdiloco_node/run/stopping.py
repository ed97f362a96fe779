"""How the making of a run is stopped: Ctrl-C or SIGTERM, also where a library's call holds a thread."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from p2pdiloco import limits
from p2pdiloco.exit_codes import INTERRUPTED
from p2pdiloco_node.progress import Told
from p2pdiloco_node.storage.run_folder import BLOBS, MAKING

T = TypeVar("T")


def run_making(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` of a command, ended with its process where Ctrl-C does not end it soon.

    A library's call that a thread is in cannot be stopped, and a loop waits for its threads.
    """
    end = threading.Timer(limits.making_stop_s, os._exit, (INTERRUPTED,))
    end.daemon = True

    async def watched() -> T:
        try:
            return await work
        except (asyncio.CancelledError, KeyboardInterrupt):  # the second: SIGTERM
            end.start()
            raise

    try:
        return asyncio.run(watched())
    finally:
        end.cancel()  # whoever called goes on: everything has ended


@contextmanager
def stoppable(out: Path, told: Told) -> Iterator[None]:
    """SIGTERM ends the making of a run in `out` as Ctrl-C does; whether anything was made so far is said."""
    with sigterm_is_ctrl_c():
        try:
            yield
        except asyncio.CancelledError:
            begun = (out / MAKING).exists() or (out / BLOBS).exists()
            told.say(f"Stopped. {'The same command goes on where it was.' if begun else 'Nothing was made.'}")
            raise


@contextmanager
def sigterm_is_ctrl_c() -> Iterator[None]:
    """SIGTERM ends what the event loop runs as Ctrl-C does, unless somebody else answers it (`demo`)."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL or (
        threading.current_thread() is not threading.main_thread()
    ):
        yield
        return
    loop, task, ended = asyncio.get_running_loop(), asyncio.current_task(), False
    assert task is not None

    def end() -> None:  # SIGINT itself may be ignored, as it is for what a script starts with `&`
        nonlocal ended
        ended = True
        task.cancel()

    loop.add_signal_handler(signal.SIGTERM, end)
    try:
        yield
    except asyncio.CancelledError:
        if ended:
            raise KeyboardInterrupt from None
        raise
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
