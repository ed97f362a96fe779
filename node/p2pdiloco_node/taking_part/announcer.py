"""Telling the tracker that this node is here, for as long as it lives (protocol.md 6; scenarios B1, C1).

A running swarm does not need the answer: when the tracker is away, peers tell each other where they are, it
is tried again with capped and jittered back-off, and the person is told since when it is away.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from random import Random

import aiohttp

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError, TransportError
from p2pdiloco.exit_codes import RUN
from p2pdiloco.ids import PeerId, RunId
from p2pdiloco.protocol.tracker import NODE_STATES
from p2pdiloco.wire.messages import Announce, PeerRecord, Peers
from p2pdiloco_node.storage.address_book import DiskAddressBook
from p2pdiloco_node.telemetry import Telemetry
from p2pdiloco_node.transport.client import Client
from p2pdiloco_node.transport.contact import Refused, announce, another_run, greet

BACK_OFF_MAX_INTERVALS = 4.0
TOLD_PEERS_MAX = 16  # peers that are told directly while no tracker answers


class Announcer:
    """`first` at the start, then `run` as a task."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        urls: Sequence[str],
        record: PeerRecord,
        client: Client,
        book: DiskAddressBook,
        telemetry: Telemetry,
        *,
        witness: PeerId,
        local: bool,
        rng: Random,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`urls`: trackers, the first that answers is used. `local`: the run's admission."""
        self._session = session
        self._urls = list(urls)
        self._record = record
        self._client = client
        self._book = book
        self._telemetry = telemetry
        self._witness = witness
        self._rng = rng
        self._wall = wall
        self._interval_s = limits.announce_interval_local_s if local else limits.announce_interval_s
        self._notice = ""

    async def once(self, *, joining: bool = False) -> None:
        """Announce to the first tracker that takes this node, and remember the peers that it names.

        `joining`: for the first time, with nothing to lose yet. Anybody between here and a tracker can say no
        in its name, so afterwards no answer ends anything.

        Raises: Refused where the last word was a no; TransportError with each address tried and what
        answered; OperatorError where it is `joining` and the answer is no for good (the same identity runs
        elsewhere, another run, another version).
        """
        tried = []
        refused: Refused | None = None
        sealed_record = await self._client.seal(self._record)
        state = self._telemetry.state if self._telemetry.state in NODE_STATES else "waiting"
        message = Announce(sealed_record, state, self._wall())
        for url in self._urls:
            try:
                reply = await announce(self._session, url, await self._client.seal(message, self._witness))
            except Refused as error:
                refused = Refused(await self._why_refused(url, error), error.reason)
                continue
            except TransportError as error:
                tried.append(f"{url} ({error})")
                continue
            self._interval_s = min(max(reply.interval_s, 0.5), 3600.0)
            for sealed in reply.records:
                await self._client.learn(self._witness, sealed)
            self._telemetry.tracker_url = url
            self._telemetry.tracker_answered()
            if reply.notice and reply.notice != self._notice:
                self._telemetry.say("clock", reply.notice)
            self._notice = reply.notice
            return
        if refused is not None:
            if joining:
                why = str(refused)
                pinned = refused.reason == "WRONG_RUN"
                raise OperatorError(f"{why}." if pinned else f"The tracker refuses this node: {why}.", RUN)
            raise refused
        raise TransportError("tried " + " and ".join(tried) if tried else "no tracker is named")

    async def _why_refused(self, url: str, error: Refused) -> str:
        """A sentence; a tracker whose address serves another run now is asked which."""
        if error.reason != "WRONG_RUN":
            return f"{url}: {error}"
        served: RunId | None = None
        with suppress(TransportError, OperatorError):
            served = (await greet(self._session, url)).run
        return another_run(url, served if served != self._client.run else None, self._client.run)

    async def run(self) -> None:
        """Until cancelled: whatever a tracker answers is said and tried again."""
        failures = 0
        while True:
            try:
                await self.once()
                failures = 0
            except TransportError as error:
                failures += 1
                self._telemetry.tracker_failed(str(error), refuses=isinstance(error, Refused))
            if failures:
                await self.tell_peers()
            stretch = min(2.0 ** max(0, failures - 1), BACK_OFF_MAX_INTERVALS)
            await asyncio.sleep(self._interval_s * stretch * self._rng.uniform(0.8, 1.2))

    async def tell_peers(self) -> None:
        """Without a tracker: own record, and everybody else's, to some peers."""
        records = await asyncio.to_thread(self._book.records)
        told = list(records)
        self._rng.shuffle(told)
        others = Peers(tuple(records[p] for p in told[: limits.announce_peers_max]))
        for peer in told[:TOLD_PEERS_MAX]:
            await self._client.send(peer, self._record)
            await self._client.send(peer, others)
