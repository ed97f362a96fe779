"""What an answer with a file leaves behind."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from p2pdiloco_node.transport.bodies import Pace
from p2pdiloco_node.transport.file_answers import FileAnswers, _Opened
from p2pdiloco_node.transport.slots import Slots
from p2pdiloco_node.transport.traffic import Traffic


class Stuck:
    """Somebody who takes nothing."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def write(self, data: bytes) -> None:
        self.asked.set()
        await asyncio.Event().wait()


async def test_a_file_is_closed_when_the_daemon_ends_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    path.write_bytes(bytes(1000))
    opened: list[Any] = []
    really = Path.open

    def remember(self: Path, *arguments: Any, **more: Any) -> Any:
        opened.append(really(self, *arguments, **more))
        return opened[-1]

    monkeypatch.setattr(Path, "open", remember)
    threads = ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(threads)
    answer: Any = Stuck()
    answers = FileAnswers(Slots(1, kept=0, local=True), Pace(), Traffic())
    sending = asyncio.create_task(answers._send(answer, path, 0, 1000))
    await answer.asked.wait()
    threads.shutdown()
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    assert [file.closed for file in opened] == [True]


def test_a_file_that_is_opened_when_nobody_wants_it_any_more_is_closed(tmp_path: Path) -> None:
    """Whoever asked has gone while a thread opened it; the loop may have ended as well."""
    (tmp_path / "file").write_bytes(b"data")
    late, early = _Opened(tmp_path / "file"), _Opened(tmp_path / "file")
    late.close()
    assert late.open().closed
    file = early.open()
    assert not file.closed
    early.close()
    assert file.closed
