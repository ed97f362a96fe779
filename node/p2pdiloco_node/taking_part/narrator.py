"""What a person at the node's terminal reads while nothing special happens: one line about every ten seconds.

Sentences about events (a tracker that is away, a version, a crash) are said where they happen; this line says
what the node does and how far it is.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable

from p2pdiloco.ids import PeerId, short
from p2pdiloco_node.telemetry import BrainView, Now, Telemetry, state_words, step_words

log = logging.getLogger("p2pdiloco.node")
LINE_EVERY_S = 10.0
LOOK_EVERY_S = 1.0
COUNTS = re.compile(r"\d+")


class Narrator:
    """`run` is its task."""

    def __init__(
        self,
        telemetry: Telemetry,
        brain: Callable[[], BrainView],
        me: PeerId,
        witness: PeerId,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._telemetry = telemetry
        self._brain = brain
        self._me = me
        self._witness = witness
        self._clock = clock
        self._said_at = float("-inf")
        self._said = ("", "")

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            if (line := self.due()) is not None:
                log.info("%s", line)
            await asyncio.sleep(LOOK_EVERY_S)

    def due(self) -> str | None:
        """The line that is to be said now: every ten seconds, and when the state or its reason changes.

        A reason in which only a number changes is the same reason, and so is one whose last try went
        otherwise. A run that is over and waits for nothing is said once.
        """
        now, at = self._telemetry.now(), self._clock()
        state = (now.state, COUNTS.sub("", now.why))
        waits = now.state != "over" or bool(now.why)
        if state == self._said and (not waits or at - self._said_at < LINE_EVERY_S):
            return None
        self._said, self._said_at = state, at
        return self._line(now, self._brain())

    def _line(self, now: Now, brain: BrainView) -> str:
        parts = [state_words(now.state, now.why)]
        parts += [f"last try: {now.last_try}"] if now.last_try else []
        if brain.members and not now.why.startswith("evaluating"):  # a run that is over: that very version
            parts.append(f"version {brain.version}")
        if now.step and now.state in ("training", "waiting"):
            parts.append(step_words(now.step, now.inner_steps, now.of_a_pass))
            parts += [f"loss {now.loss:.3f}"] if now.loss is not None else []
            parts += [f"{now.tokens_per_s:,.0f} tokens/s"] if now.tokens_per_s is not None else []
        if now.last_outcome:
            parts.append(f"last delta {now.last_outcome}")
        if brain.members and now.state != "over":
            parts.append(f"{self._who(brain.aggregator)} aggregates")
        return "; ".join(parts)

    def _who(self, peer: PeerId) -> str:
        if peer == self._me:
            return "this node"
        return "the witness" if peer == self._witness else f"node {short(peer)}"
