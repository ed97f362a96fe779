"""Messages to one peer: in order, bounded, never in the way of another peer's.

A queue that is full drops its oldest message: the rules say everything again that matters, and what is old
matters least. After a failure the queue rests, longer each time, so that a dead peer costs little.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from random import Random
from typing import Any

from p2pdiloco import limits
from p2pdiloco.errors import TransportError
from p2pdiloco.ids import PeerId
from p2pdiloco.wire.messages import Message

Post = Callable[[PeerId, Message], Awaitable[None]]  # raises TransportError
NotSent = Callable[[PeerId, str], None]
Start = Callable[[Coroutine[Any, Any, None]], None]

FIRST_PAUSE_S = 0.2
IDLE_S = 60.0  # a queue without messages ends its task after this time


class Outbox:
    """One peer's queue. `put` starts the task that empties it, in `start`'s TaskGroup, when there is none."""

    def __init__(self, peer: PeerId, post: Post, not_sent: NotSent, start: Start, rng: Random) -> None:
        self._peer = peer
        self._post = post
        self._not_sent = not_sent
        self._start = start
        self._rng = rng
        self._waiting: deque[Message] = deque()
        self._news = asyncio.Event()
        self._running = False
        self._empty = asyncio.Event()
        self._failures = 0

    @property
    def idle(self) -> bool:
        return not self._running

    async def emptied(self) -> None:
        """Return when nothing waits and nothing is on its way."""
        await self._empty.wait()

    def clear(self) -> None:
        """Drop what waits; what is on its way goes on."""
        self._waiting.clear()
        self._empty.set()

    def put(self, message: Message) -> None:
        if len(self._waiting) >= limits.send_queue_max:
            self._waiting.popleft()
            self._not_sent(self._peer, "too many messages wait for it")
        self._waiting.append(message)
        self._empty.clear()
        self._news.set()
        if not self._running:
            self._running = True
            self._start(self._run())

    async def _run(self) -> None:
        try:
            while True:
                self._news.clear()
                while self._waiting:
                    await self._send_first()
                try:
                    async with asyncio.timeout(IDLE_S):
                        await self._news.wait()
                except TimeoutError:
                    return
        finally:
            self._running = False

    async def _send_first(self) -> None:
        message = self._waiting.popleft()
        try:
            await self._post(self._peer, message)
        except TransportError as error:
            # What waited behind it was meant for the same moment and has failed with it.
            self._waiting.clear()
            self._empty.set()
            self._not_sent(self._peer, str(error))
            pause = min(FIRST_PAUSE_S * 2**self._failures, limits.send_backoff_s_max)
            self._failures = min(self._failures + 1, 16)
            await asyncio.sleep(max(error.retry_after_s or 0, pause * self._rng.uniform(0.5, 1)))
        else:
            self._failures = 0
        finally:
            if not self._waiting:
                self._empty.set()
