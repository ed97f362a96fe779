"""For readers without a key: the certified log and the snapshots that are whole here, as they lie on disk.

Whoever exports, inspects or forks a run may sit behind a router that nobody can dial, so what a node gets by
messages is here by GET as well. Nothing of it goes through the rules, and nothing of it is believed: entries
prove themselves, a snapshot by the state root that an entry certifies.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

from aiohttp import web
from msgspec import Meta

from p2pdiloco import limits
from p2pdiloco.errors import PeerError
from p2pdiloco.ids import RunId
from p2pdiloco.wire.codec import Struct, encode
from p2pdiloco.wire.messages import SnapshotOffer
from p2pdiloco_node.transport.answers import remote_ip
from p2pdiloco_node.transport.bodies import Pace
from p2pdiloco_node.transport.file_answers import FileAnswers
from p2pdiloco_node.transport.guards import Clock, Rate, Rates
from p2pdiloco_node.transport.slots import Slots
from p2pdiloco_node.transport.traffic import Traffic

RATE = Rate(limits.reads_per_address_per_s, limits.reads_per_address_burst)


class Snapshots(Struct, frozen=True):
    """Those that are complete at the sender, oldest first."""

    offers: Annotated[tuple[SnapshotOffer, ...], Meta(max_length=limits.snapshots_kept)]


class ReaderRoutes:
    """`log`: the journal's file. `rewrites()`: how often it was written anew, cut by a recovery perhaps; in
    between it only grows. `snapshots()`: on the event loop, at once. `known(address)`: whether a peer that
    the log knows was heard from there; such addresses have places of their own."""

    def __init__(
        self,
        run: RunId,
        log: Path,
        rewrites: Callable[[], int],
        snapshots: Callable[[], Sequence[SnapshotOffer]],
        traffic: Traffic,
        *,
        local: bool,
        known: Callable[[str], bool] = lambda _address: False,
        clock: Clock = time.monotonic,
    ) -> None:
        self._log = log
        self._rewrites = rewrites
        self._life = f"{run.hex()[:16]}-{secrets.token_hex(4)}"
        self._snapshots = snapshots
        self._rates = Rates(clock)
        self._known = known
        slots = Slots(
            limits.log_readers_max, kept=limits.log_readers_kept, local=local,
            per_address=limits.log_readers_per_address_max,
        )  # fmt: skip
        self._files = FileAnswers(slots, Pace(), traffic)

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/v1/log", self._get_log), web.get("/v1/snapshots", self._get_snapshots)]

    async def _get_log(self, request: web.Request) -> web.StreamResponse:
        """Raises: PeerError RATE_LIMITED, NOT_HERE, BAD_RANGE (also where nothing is new)."""
        self._admit(request)
        # Counted before the file is opened: what is asked for with this tag goes on from what came with it.
        tag = f"log-{self._life}-{self._rewrites()}"
        try:
            size = (await asyncio.to_thread(self._log.stat)).st_size
        except OSError:
            raise PeerError("NOT_HERE", "there is no log here yet") from None
        if size == 0:
            raise PeerError("NOT_HERE", "there is no log here yet")
        known = self._known(remote_ip(request))
        return await self._files.answer(request, self._log, size, tag, known=known)

    async def _get_snapshots(self, request: web.Request) -> web.StreamResponse:
        """Raises: PeerError RATE_LIMITED."""
        self._admit(request)
        offers = tuple(self._snapshots())[-limits.snapshots_kept :]
        body = await asyncio.to_thread(encode, Snapshots(offers))
        return web.Response(body=body, content_type="application/octet-stream")

    def _admit(self, request: web.Request) -> None:
        if not self._rates.allow(remote_ip(request), RATE):
            raise PeerError("RATE_LIMITED", "too many reads from this address")
