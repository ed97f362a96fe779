"""A process's life: logging, signals, faults by whose fault they are, and where it can be found.

The first SIGTERM or Ctrl-C asks to leave, and so does a terminal that is closed; everything ends within five
seconds of it. The second ends the process at once; nothing durable depends on a tidy end (scenario E4).
"""

from __future__ import annotations

import asyncio
import ctypes
import ipaddress
import json
import logging
import os
import signal
import stat
import sys
import traceback
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError, P2PDiLoCoError, TransportError
from p2pdiloco.exit_codes import OURS
from p2pdiloco_node.process.local_status import note_daemon
from p2pdiloco_node.storage.run_folder import ADDRESS, WITNESS
from p2pdiloco_node.transport.listener import Listener

log = logging.getLogger("p2pdiloco")
NETWORK = 4
PR_SET_PDEATHSIG = 1


class Leaving:
    """Somebody asked this process to end."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()
        self.why = ""

    def ask(self, why: str) -> None:
        self.why = self.why or why
        self._asked.set()

    @property
    def asked(self) -> bool:
        return self._asked.is_set()

    async def wait(self) -> None:
        await self._asked.wait()


def run_life(life: Callable[[Leaving], Awaitable[int]], *, level: str, orphan: bool) -> int:
    """Run a daemon to its end; the exit code. `orphan`: it may outlive the process that started it.

    Raises: OperatorError.
    """
    logging.basicConfig(
        level=level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname).1s %(name)s: %(message)s",
        force=True,
    )
    if not orphan:
        _die_with_parent()
    try:
        return asyncio.run(_lived(life))
    except BaseExceptionGroup as group:
        fault = first_fault(group)
    except TransportError as error:
        fault = error
    if isinstance(fault, OperatorError):
        raise fault
    if isinstance(fault, TransportError):
        raise OperatorError(f"The network failed: {fault}.", NETWORK)
    if isinstance(fault, KeyboardInterrupt):
        raise fault
    traceback.print_exception(fault)
    log.error("This is a fault of p2pdiloco itself (%s); please report it with the lines above.", fault)
    return OURS


async def _lived(life: Callable[[Leaving], Awaitable[int]]) -> int:
    leaving = Leaving()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _asked, leaving, number)
    on_hang_up(lambda: leaving.ask("SIGHUP"))
    work = asyncio.ensure_future(life(leaving))
    watch = asyncio.ensure_future(leaving.wait())
    try:
        await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            await asyncio.wait((work,), timeout=limits.shutdown_s_max)
        if not work.done():
            log.warning("The end takes too long and is cut short; what was saved is saved.")
            work.cancel()
            await asyncio.wait((work,), timeout=0.5)
            if not work.done():
                os._exit(0)
        return work.result() if not work.cancelled() else 0
    finally:
        watch.cancel()


def on_hang_up(do: Callable[[], object]) -> None:
    """When the terminal is closed, unless nohup said that it does not matter. It may come twice, from the
    system and the shell. What goes to that terminal afterwards goes nowhere, instead of failing.
    """

    hung = False

    def hung_up() -> None:
        nonlocal hung
        if hung:
            return
        hung = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            with suppress(OSError):
                if stat.S_ISCHR(os.fstat(stream).st_mode):
                    os.dup2(nowhere, stream)
        os.close(nowhere)
        do()

    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hung_up)


def _asked(leaving: Leaving, number: signal.Signals) -> None:
    if leaving.asked:
        os._exit(128 + number)  # children die with this process
    leaving.ask(number.name)


def first_fault(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one to speak of: our own faults before the disk's, those before the network's."""
    leaves = list(_leaves(group))

    def weight(fault: BaseException) -> int:
        match fault:
            case P2PDiLoCoError():
                return 2 if isinstance(fault, TransportError) else 1
            case asyncio.CancelledError() | KeyboardInterrupt():
                return 3
            case _:
                return 0

    return min(leaves, key=weight)


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for fault in group.exceptions:
        found += _leaves(fault) if isinstance(fault, BaseExceptionGroup) else [fault]
    return found


def note_address(stack: AsyncExitStack, folder: Path, listener: Listener, host: str) -> None:
    """Leave word where this process can be asked: in its folder, and for `p2pdiloco status`."""
    address = ipaddress.ip_address(host)
    name = host if not address.is_unspecified else ("127.0.0.1" if address.version == 4 else "::1")
    url = f"http://{f'[{name}]' if ':' in name else name}:{listener.port}"
    path = folder / ADDRESS
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({"url": url, "pid": os.getpid()}))
    temporary.replace(path)
    note = note_daemon(url, (folder.parent if folder.name == WITNESS else folder).absolute())

    def remove() -> None:
        for one in (path, note):
            if one is not None:
                with suppress(OSError):
                    one.unlink()

    stack.callback(remove)


def _die_with_parent() -> None:
    """On Linux: SIGKILL when the process that started this one ends, however it ends."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)
