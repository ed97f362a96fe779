"""A file that is sent is closed, whatever becomes of who asked for it."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from p2pdiloco_node.transport.bodies import Pace
from p2pdiloco_node.transport.file_answers import FileAnswers
from p2pdiloco_node.transport.slots import Slots
from p2pdiloco_node.transport.traffic import Traffic


async def test_who_leaves_while_every_thread_is_busy_leaves_no_file_open(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"words")
    loop, busy, opened = asyncio.get_running_loop(), threading.Event(), []
    threads = ThreadPoolExecutor(1)
    loop.set_default_executor(threads)
    written = asyncio.Event()

    def open_file(mode: str) -> Any:
        opened.append(path.open(mode))
        return opened[0]

    async def write(_data: bytes) -> None:
        threads.submit(busy.wait, 10)
        written.set()

    answers = FileAnswers(Slots(1, kept=0, local=True, per_address=1), Pace(), Traffic())
    sending = asyncio.ensure_future(
        answers._send(
            cast("Any", SimpleNamespace(write=write)), cast("Any", SimpleNamespace(open=open_file)), 0, 5
        )
    )
    try:
        await asyncio.wait_for(written.wait(), 10)
        sending.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.wait_for(sending, 10)
    finally:
        busy.set()
    await asyncio.to_thread(lambda: None)  # behind what is to be closed
    assert [file.closed for file in opened] == [True]
