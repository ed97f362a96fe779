"""Checkpoints for anybody to download: `GET /v1/checkpoints` says which, `/checkpoints/NAME` gives the files.

Fewer slots than blobs have, and of their own: whoever downloads never takes a place from the swarm.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from aiohttp import web

from p2pdiloco import limits
from p2pdiloco.errors import PeerError
from p2pdiloco_node.transport.answers import remote_ip
from p2pdiloco_node.transport.bodies import Pace
from p2pdiloco_node.transport.file_answers import FileAnswers
from p2pdiloco_node.transport.guards import Clock, Rate, Rates
from p2pdiloco_node.transport.slots import Slots
from p2pdiloco_node.transport.traffic import Traffic

PACE = Pace(total_s=limits.download_s_max, bytes_per_s_min=limits.download_rate_bytes_per_s_min)
RATE = Rate(limits.downloads_per_address_per_s, limits.downloads_per_address_burst)


class Offered(NamedTuple):
    """A file that may be downloaded; it never changes, but may be gone."""

    path: Path
    size: int  # bytes
    sha256: str  # 64 hex digits


class Downloads:
    """`find(name)`: the file of this name, or None. `listing()`: the JSON of what there is.

    Both are called on the event loop and must return at once. `local`: the run's admission. `known(address)`:
    whether a peer that the log knows was heard from there; such addresses have places of their own.
    """

    def __init__(
        self,
        find: Callable[[str], Offered | None],
        listing: Callable[[], bytes],
        traffic: Traffic,
        *,
        local: bool,
        known: Callable[[str], bool] = lambda _address: False,
        pace: Pace = PACE,
        clock: Clock = time.monotonic,
    ) -> None:
        self._find = find
        self._listing = listing
        self._rates = Rates(clock)
        self._known = known
        slots = Slots(
            limits.downloads_max, kept=limits.downloads_kept, local=local,
            per_address=limits.downloads_per_address_max,
        )  # fmt: skip
        self._files = FileAnswers(slots, pace, traffic)

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/checkpoints", self._list),
            web.get("/checkpoints/{name:[A-Za-z0-9._/-]{1,128}}", self._get),  # HEAD as well
        ]

    async def _list(self, request: web.Request) -> web.StreamResponse:
        """Raises: PeerError RATE_LIMITED."""
        self._admit(request)
        # Anybody may read it from any page: it holds nothing that is not public.
        headers = {"Access-Control-Allow-Origin": "*", "Cache-Control": "no-store"}
        return web.Response(body=self._listing(), content_type="application/json", headers=headers)

    async def _get(self, request: web.Request) -> web.StreamResponse:
        """Raises: PeerError RATE_LIMITED, NOT_HERE, BAD_RANGE."""
        self._admit(request)
        name = request.match_info["name"]
        offered = self._find(name)
        if offered is None or not await asyncio.to_thread(offered.path.is_file):
            raise PeerError("NOT_HERE", "no such checkpoint is offered now")
        headers = {
            # A model card is text from strangers: it is saved, never shown as a page of this address.
            "Content-Disposition": f'attachment; filename="{name.rpartition("/")[2]}"',
            "Content-Security-Policy": "default-src 'none'; sandbox",
            "X-Content-Type-Options": "nosniff",
            "P2PDiLoCo-SHA256": offered.sha256,
        }
        known = self._known(remote_ip(request))
        return await self._files.answer(
            request, offered.path, offered.size, offered.sha256, known=known, headers=headers
        )

    def _admit(self, request: web.Request) -> None:
        if not self._rates.allow(remote_ip(request), RATE):
            raise PeerError("RATE_LIMITED", "too many downloads begun from this address")
