"""Reading and writing bodies with a total time and a minimum rate, on either side of a connection.

aiohttp has no limit for a stalled body at any setting (traps.md): without these a few hundred half-open
uploads hold a node's memory and slots for ever (scenario A4, targets H2).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from p2pdiloco import limits
from p2pdiloco.errors import PeerError, TransportError


class Pace(NamedTuple):
    """How slow a body may be. Tests bring shorter ones."""

    total_s: float = limits.body_timeout_s
    grace_s: float = limits.body_rate_grace_s
    bytes_per_s_min: float = limits.body_rate_bytes_per_s_min

    def for_size(self, length: int) -> Pace:
        """For a body of `length` bytes: at least the rate that brings it over in the total time, from the
        start. Otherwise a large body holds its slot for the total time at the rate of a small one."""
        return self._replace(bytes_per_s_min=max(self.bytes_per_s_min, length / self.total_s))


class Stream(Protocol):
    """The part of aiohttp's StreamReader that is needed."""

    async def readany(self) -> bytes: ...
    def at_eof(self) -> bool: ...


class TooSlow(TransportError):
    """A body came or went slower than the minimum rate, or took too long altogether."""


class Paced:
    """`async with Paced(pace) as paced`: call `paced.moved(n)` for bytes that moved.

    The block is cut off with TooSlow once, after the grace, the average is below the minimum rate: the
    deadline moves with every byte, and never beyond the total time.
    """

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._moved = 0
        self._start = 0.0
        self._timeout = asyncio.timeout(None)

    def moved(self, count: int) -> None:
        self._moved += count
        earned = self._pace.grace_s + self._moved / self._pace.bytes_per_s_min
        self._timeout.reschedule(self._start + min(earned, self._pace.total_s))

    async def __aenter__(self) -> Self:
        self._start = asyncio.get_running_loop().time()
        await self._timeout.__aenter__()
        self.moved(0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            raise TooSlow(f"{self._moved} bytes moved, slower than the minimum rate") from None


async def read_all(stream: Stream, length: int, pace: Pace) -> bytes:
    """A body of exactly `length` bytes. Raises: TooSlow; PeerError MALFORMED if it ends early or not."""
    parts = [part async for part in read_parts(stream, length, pace, part_bytes=length or 1)]
    return b"".join(parts)


async def read_parts(
    stream: Stream, length: int, pace: Pace, *, part_bytes: int = limits.io_bytes
) -> AsyncIterator[bytes]:
    """The same in parts of about `part_bytes`, for bodies that go to disk; what came before a failure is
    given too, so that nothing is fetched twice.

    The clock runs while bytes are awaited, not while the consumer works with them.
    """
    left, spent = length, 0.0
    held: list[bytes] = []
    loop = asyncio.get_running_loop()
    while left:
        started = loop.time()
        try:
            data = await _some(stream, length, left, pace, spent)
        except Exception:
            if held:
                yield b"".join(held)
            raise
        spent += loop.time() - started
        left -= len(data)
        held.append(data)
        if not left or sum(map(len, held)) >= part_bytes:
            yield b"".join(held)
            held = []


async def _some(stream: Stream, length: int, left: int, pace: Pace, spent: float) -> bytes:
    """The next bytes, after `spent` seconds of waiting. Raises: TooSlow, PeerError, what `stream` raises."""
    moved = length - left
    earned = pace.grace_s + moved / pace.bytes_per_s_min
    try:
        async with asyncio.timeout(min(earned, pace.total_s) - spent):
            data = await stream.readany()
    except TimeoutError:
        raise TooSlow(f"{moved} of {length} bytes came, slower than the minimum rate") from None
    if not data and stream.at_eof():
        raise PeerError("MALFORMED", f"the body ended after {moved} of {length} bytes")
    if len(data) > left:
        raise PeerError("TOO_BIG", f"more than the {length} bytes that were announced")
    return data
