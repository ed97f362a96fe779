"""Files over HTTP: whole or one range, from a slot, at a pace. What is served never changes while it is read,
or only grows at its end."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any

from aiohttp import web

from p2pdiloco import limits
from p2pdiloco.errors import PeerError
from p2pdiloco_node.transport.answers import refusal, remote_ip
from p2pdiloco_node.transport.bodies import Pace, Paced, TooSlow
from p2pdiloco_node.transport.slots import Slots
from p2pdiloco_node.transport.traffic import Traffic

RANGE = re.compile(r"bytes=(\d{1,15})-(\d{0,15})")
NO_HEADERS: Mapping[str, str] = {}


class FileAnswers:
    """Answers with files, at most as many at once as there are `slots`. Called on the event loop only."""

    def __init__(self, slots: Slots, pace: Pace, traffic: Traffic) -> None:
        self._slots = slots
        self._pace = pace
        self._traffic = traffic

    async def answer(
        self,
        request: web.Request,
        path: Path,
        size: int,
        tag: str,
        *,
        known: bool = False,
        headers: Mapping[str, str] = NO_HEADERS,
        donors: Callable[[], Sequence[str]] | None = None,
    ) -> web.StreamResponse:
        """The first `size` bytes of `path`, or the range of them that is asked for. HEAD: without them.

        `tag`: names this content, for ETag and If-Range. `known`: whoever asks has a share of the slots that
        strangers cannot take. `donors`: who else has it, asked for where no slot is free.

        Raises: PeerError BAD_RANGE.
        """
        quoted = f'"{tag}"'
        first, last = 0, size - 1
        wanted = request.headers.get("Range")
        ranged = wanted is not None and request.headers.get("If-Range", quoted) == quoted
        if ranged:
            first, last = _range(wanted or "", size)
        answer = web.StreamResponse(
            status=206 if ranged else 200,
            headers={
                "ETag": quoted,
                "Accept-Ranges": "bytes",
                "Content-Type": "application/octet-stream",
                **headers,
            },
        )
        answer.content_length = last + 1 - first
        if ranged:
            answer.headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        if request.method == "HEAD":
            await answer.prepare(request)
            return answer
        address = remote_ip(request)
        if not self._slots.is_free(address, known=known):
            more: dict[str, Any] = {} if donors is None else {"donors": list(donors())}
            return refusal(
                "BUSY", "no slot is free for this address", retry_after_s=limits.retry_after_s, **more
            )  # fmt: skip
        with self._slots.held(address):
            try:
                await answer.prepare(request)
                await self._send(answer, path, first, last + 1 - first)
            except (TooSlow, OSError):
                if request.transport is not None:
                    request.transport.abort()
        return answer

    async def _send(self, answer: web.StreamResponse, path: Path, first: int, length: int) -> None:
        """Raises: TooSlow; OSError if the file or the connection is gone."""
        opened = _Opened(path)
        try:
            file = await asyncio.to_thread(opened.open)
            await asyncio.to_thread(file.seek, first)
            async with Paced(self._pace.for_size(length)) as paced:
                while length:
                    data = await asyncio.to_thread(file.read, min(length, limits.io_bytes))
                    if not data:
                        raise OSError("the file is shorter than it was")
                    await answer.write(data)
                    paced.moved(len(data))
                    self._traffic.up_data += len(data)
                    length -= len(data)
        finally:
            # At once: a loop that is ending lends no threads. A read that is under way is waited for.
            opened.close()


def _range(text: str, size: int) -> tuple[int, int]:
    """First and last byte of a single range."""
    found = RANGE.fullmatch(text)
    if found is None:
        raise PeerError("BAD_RANGE", "one range of the form bytes=FIRST-[LAST]")
    first = int(found[1])
    last = min(int(found[2]) if found[2] else size - 1, size - 1)
    if first > last:
        raise PeerError("BAD_RANGE", f"there are {size} bytes")
    return first, last


class _Opened:
    """A file that a thread opens: whoever asked may be gone meanwhile, and the loop with them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._file: BufferedReader | None = None
        self._gone = False

    def open(self) -> BufferedReader:
        """Raises: OSError."""
        file = self._path.open("rb")
        with self._lock:
            self._file = file
            if self._gone:
                file.close()
        return file

    def close(self) -> None:
        with self._lock:
            self._gone = True
            if self._file is not None:
                self._file.close()
