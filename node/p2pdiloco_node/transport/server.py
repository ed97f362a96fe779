"""The HTTP surface of a node under /v1: decode, check, hand over, answer (architecture.md 3, protocol.md 9).

Opening an envelope costs signatures and happens in threads of its own, so that neither the event loop nor
disk work ever waits for it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from time import monotonic

from aiohttp import web

from p2pdiloco import limits
from p2pdiloco.errors import PeerError
from p2pdiloco.ids import Digest, PeerId, RunId
from p2pdiloco.wire.envelope import PROTOCOL_VERSION, Opened, kind_of, open_envelope
from p2pdiloco.wire.messages import PASSED_ON
from p2pdiloco.wire.signing import Verify
from p2pdiloco_node.ports import BlobStore
from p2pdiloco_node.transport.answers import HARMLESS, content_length, faults_as_answers, remote_ip
from p2pdiloco_node.transport.blob_routes import BlobRoutes, Donors, Known, OnDelta
from p2pdiloco_node.transport.bodies import Pace, read_all
from p2pdiloco_node.transport.guards import (
    ADDRESS_RATE,
    HEAVY_ADDRESS_RATE,
    HEAVY_KINDS,
    HEAVY_RATE,
    PEER_RATE,
    Clock,
    Rates,
    Recent,
    Replays,
    Strikes,
)
from p2pdiloco_node.transport.traffic import Traffic, head_bytes

SEALED_BYTES_MAX = limits.message_bytes_max + 1024
OPENERS = 2  # threads that verify signatures

OnMessage = Callable[[Opened, bytes, str], Awaitable[None]]


@dataclass
class Server:
    """What a node serves. `app()` makes the aiohttp application; a tracker adds its own routes to it.

    `on_message(opened, sealed, remote_ip)` gets each verified message once; it may raise PeerError (a
    strike and 4xx) or TransportError (503). `on_delta(digest)`: an announced delta is whole in the store.
    """

    run: RunId
    me: PeerId
    run_spec: bytes  # signed, as the owner made it
    build: str  # this program's version
    blobs: BlobStore
    verify: Verify
    on_message: OnMessage
    on_delta: OnDelta
    head: Callable[[], bytes | None]  # a sealed Head
    health: Callable[[], Mapping[str, object]]
    known: Known  # whether the log knows a peer; in open runs it has a share of the slots for itself
    local: bool  # the RunSpec's admission: slots have no shares
    donors: Donors = lambda _digest: ()
    clock: Clock = monotonic
    pace: Pace = field(default_factory=Pace)
    message_pace: Pace = field(default_factory=lambda: Pace(total_s=limits.request_timeout_s))
    traffic: Traffic = field(default_factory=Traffic)
    strikes: Strikes = field(init=False)

    def __post_init__(self) -> None:
        self.strikes = Strikes(self.clock)
        self._rates = Rates(self.clock)
        self._replays = Replays()
        self._known_at: Recent[str, float] = Recent(limits.rate_buckets_max)  # address -> clock
        self._openers: ThreadPoolExecutor | None = None
        self._blob_routes = BlobRoutes(
            self.blobs,
            run=self.run,
            verify=self.verify,
            on_delta=self.on_delta,
            donors=self.donors,
            strikes=self.strikes,
            traffic=self.traffic,
            pace=self.pace,
            known=self.known,
            known_address=self.known_address,
            local=self.local,
        )

    def app(self) -> web.Application:
        app = web.Application(middlewares=[faults_as_answers(self.strikes), self._count])
        app.add_routes(
            [
                web.post("/v1/messages", self._message),
                web.get("/v1/run", self._run_spec),
                web.get("/v1/version", self._version),
                web.get("/v1/health", self._health),
                web.get("/v1/head", self._head),
                *self._blob_routes.routes(),
            ]
        )
        app.cleanup_ctx.append(self._threads)
        return app

    def allow(self, delta: Digest, size: int, sender: PeerId) -> None:
        """See BlobRoutes: `sender` may put this delta here."""
        self._blob_routes.allow(delta, size, sender)

    def reveal(self, *deltas: Digest) -> None:
        """See BlobRoutes: these deltas may be served to anyone."""
        self._blob_routes.reveal(*deltas)

    def forget(self, delta: Digest) -> None:
        """See BlobRoutes: this delta is neither taken nor served any more."""
        self._blob_routes.forget(delta)

    async def _threads(self, _app: web.Application) -> AsyncIterator[None]:
        self._openers = ThreadPoolExecutor(OPENERS, thread_name_prefix="open-envelope")
        yield
        self._openers.shutdown(wait=False, cancel_futures=True)

    @web.middleware
    async def _count(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        first_line = len(request.method) + len(request.raw_path) + 12
        self.traffic.down_control += head_bytes(first_line, request.raw_headers)
        answer = await handler(request)
        self.traffic.up_control += head_bytes(20, answer.headers.items())
        if isinstance(answer, web.Response) and isinstance(answer.body, bytes):
            self.traffic.up_control += len(answer.body)
        return answer

    async def receive(self, request: web.Request) -> tuple[Opened, bytes, str]:
        """The envelope in a request's body: (opened, as it came, address). For routes that answer themselves.

        Raises: PeerError, TooSlow; the middleware makes answers of them.
        """
        address = remote_ip(request)
        length = content_length(request, SEALED_BYTES_MAX)
        if not self._rates.allow(address, ADDRESS_RATE):
            raise PeerError("RATE_LIMITED", "too many messages from this address")
        sealed = await read_all(request.content, length, self.message_pace)
        self.traffic.down_control += length
        kind = kind_of(sealed)
        rate = HEAVY_RATE if kind in HEAVY_KINDS else PEER_RATE
        if kind in HEAVY_KINDS and not self._rates.allow((address, kind), HEAVY_ADDRESS_RATE):
            raise PeerError("RATE_LIMITED", f"too many messages of kind {kind} from this address")
        opened = await asyncio.get_running_loop().run_in_executor(
            self._openers, partial(open_envelope, sealed, self.verify, run=self.run, me=self.me)
        )
        if self.strikes.refused_for_s(opened.sender) > 0:
            raise PeerError("BANNED", "too many faults of this peer")
        if not self._rates.allow((opened.sender, kind), rate):
            raise PeerError("RATE_LIMITED", f"too many messages of kind {kind}")
        if not self._replays.fresh(opened.sender, opened.boot, opened.n):
            raise PeerError("REPLAYED", "this message was here before")
        if type(opened.message) not in PASSED_ON and self.known(opened.sender):
            self._known_at.put(address, self.clock())
        return opened, sealed, address

    def known_address(self, address: str) -> bool:
        """Whether a peer that the log knows was heard from there lately."""
        at = self._known_at.get(address)
        return at is not None and self.clock() - at <= limits.known_address_s_max

    async def _message(self, request: web.Request) -> web.StreamResponse:
        opened, sealed, address = await self.receive(request)
        try:
            await self.on_message(opened, sealed, address)
        except PeerError as error:
            if error.reason not in HARMLESS:
                self.strikes.strike(opened.sender, error.reason)
            raise
        return web.Response(status=202)

    async def _run_spec(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(body=self.run_spec, content_type="application/octet-stream")

    async def _version(self, _request: web.Request) -> web.StreamResponse:
        return _json({"protocol": PROTOCOL_VERSION, "build": self.build, "run": self.run.hex()})

    async def _health(self, _request: web.Request) -> web.StreamResponse:
        return _json(dict(self.health()))

    async def _head(self, _request: web.Request) -> web.StreamResponse:
        head = self.head()
        if head is None:
            raise PeerError("NOT_HERE", "no certified entry is known here yet")
        return web.Response(body=head, content_type="application/octet-stream")


def _json(value: Mapping[str, object]) -> web.Response:
    return web.Response(body=json.dumps(value).encode(), content_type="application/json")
