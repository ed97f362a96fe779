"""This node's evaluations on their way to the tracker, until it has them.

Nobody else keeps them, and the tracker may be away for a while. An evaluation counts as done, durably, once
its report was taken: a node that ends before evaluates that state again in its next life.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Protocol, Self

import msgspec

from p2pdiloco import limits
from p2pdiloco.errors import TransportError
from p2pdiloco.wire.messages import EvalReport
from p2pdiloco_node.transport.contact import Refused

log = logging.getLogger("p2pdiloco.node")


class Deliver(Protocol):
    async def __call__(self, report: EvalReport, /) -> None:
        """To the tracker, now. Raises: TransportError: not taken; Refused: nor will it be."""
        ...


class Reports:
    """Leaving it drops what was not said."""

    def __init__(
        self,
        deliver: Deliver,
        taken: Callable[[int], object],
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`taken(version)`: the tracker has the report."""
        self._deliver = deliver
        self._taken = taken
        self._pause = pause
        self._saying: dict[asyncio.Task[None], int] = {}  # with its version, oldest first

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._saying:
            task.cancel()
        await asyncio.gather(*self._saying, return_exceptions=True)

    def say(self, report: EvalReport) -> None:
        while (
            len(self._saying) >= limits.evaluations_due_max
        ):  # the tracker would not take the oldest any more
            oldest = next(iter(self._saying))
            oldest.cancel()
            del self._saying[oldest]
        task = asyncio.get_running_loop().create_task(self._say(report))
        self._saying[task] = report.version
        task.add_done_callback(lambda done: self._saying.pop(done, None))

    async def said(self, seconds: float) -> None:
        """Until all are said, at most so long."""
        if not self._saying:
            return
        _, left = await asyncio.wait(self._saying, timeout=seconds)
        if left:
            versions = ", ".join(str(self._saying[task]) for task in left)
            log.warning("The tracker was away: the evaluation of version %s is not reported.", versions)

    async def _say(self, report: EvalReport) -> None:
        pause_s = limits.evaluation_unsaid_s
        while True:
            try:
                # A copy, because the same message would be sealed once and be a replay afterwards.
                await self._deliver(msgspec.structs.replace(report))
            except Refused as error:
                # Of an epoch that the owner ended, or for others to evaluate; the client says why. Who is in
                # another epoch than the tracker just now is told of the newer one, or waits for it to follow.
                if error.reason != "WRONG_EPOCH":
                    return
            except TransportError:
                pass  # away, or its log is not so far yet
            else:
                break
            await self._pause(pause_s)
            pause_s = min(2 * pause_s, limits.evaluation_unsaid_s_max)
        self._taken(report.version)
