"""Messages and blobs to and from peers over HTTP: implements ports.Transport (protocol.md 5, 9).

Control and data have sessions of their own. Relays and WebSockets for peers that nobody can dial are not
here yet: a peer whose record says port 0 is reported as not reachable.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from time import monotonic
from types import TracebackType
from typing import Any, Self

import aiohttp

from p2pdiloco import limits
from p2pdiloco.errors import P2PDiLoCoError, PeerError, TransportError
from p2pdiloco.ids import Digest, PeerId, RunId, short
from p2pdiloco.wire.envelope import ANYBODY, receiver_of, seal, sender_of
from p2pdiloco.wire.messages import Message
from p2pdiloco.wire.signing import Signer
from p2pdiloco_node.ports import AddressBook, BlobStore, Purpose, Tell, unheard
from p2pdiloco_node.transport.addresses import check_address, url_host
from p2pdiloco_node.transport.bodies import Pace
from p2pdiloco_node.transport.contact import Refused
from p2pdiloco_node.transport.fetching import Fetcher
from p2pdiloco_node.transport.guards import Strikes
from p2pdiloco_node.transport.http_session import (
    answer_head_bytes,
    make_session,
    read_refusal,
    request_head_bytes,
    retry_after_s,
)
from p2pdiloco_node.transport.outbox import NotSent, Outbox
from p2pdiloco_node.transport.traffic import Traffic
from p2pdiloco_node.transport.uploading import Uploader

log = logging.getLogger(__name__)
ADDRESS_BOOK_FLUSH_S = 10.0
# The receiver has the message, or will never want it: nothing to send again.
DELIVERED = frozenset({"REPLAYED"})


class _Misdirected(TransportError):
    """Another peer answers at this address; the next one may be right."""


@dataclass
class Client:
    """Entering opens the sessions. `local`: the RunSpec's admission is local (addresses.py).

    `on_not_sent(peer, why)` is called on the event loop for each message or queue of messages that was lost.
    A failure of a background task (a full disk while the address book is written) ends in `on_failure`.
    """

    run: RunId
    signer: Signer
    boot: int
    build: str
    book: AddressBook
    blobs: BlobStore
    on_not_sent: NotSent
    on_failure: Callable[[BaseException], None]
    local: bool
    on_met: Callable[[PeerId], None] = lambda _peer: None  # an address of this peer is news
    epoch: int = 0
    own: frozenset[tuple[str, int]] = frozenset()  # where this node listens
    rng: Random = field(default_factory=Random)  # jitter only
    pace: Pace = field(default_factory=Pace)
    traffic: Traffic = field(default_factory=Traffic)
    strikes: Strikes = field(default_factory=lambda: Strikes(monotonic))

    def __post_init__(self) -> None:
        self._n = 0
        self._outboxes: dict[PeerId, Outbox] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._sealed: list[tuple[Message, PeerId, bytes]] = []
        self._good_host: dict[PeerId, str] = {}
        self._control: aiohttp.ClientSession | None = None
        self._data: aiohttp.ClientSession | None = None
        self._book_changed = False

    async def __aenter__(self) -> Self:
        self._control = make_session(connections_max=256, per_host_max=0, build=self.build)
        self._data = make_session(connections_max=64, per_host_max=0, build=self.build)
        self._fetcher = Fetcher(
            self._data, self.blobs, self.urls, self.strikes, self.traffic, self.pace, self.rng
        )
        self._uploader = Uploader(
            self._data, self.blobs, self.urls, self.signer, self.run, self.traffic, self.pace
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for session in (self._control, self._data):
            if session is not None:
                await session.close()
        if self._book_changed:
            with suppress(P2PDiLoCoError):
                await asyncio.to_thread(self.book.flush)

    async def send(self, peer: PeerId, message: Message) -> None:
        """Queue a message for `peer`; it returns at once, whatever the peer does."""
        outbox = self._outboxes.get(peer)
        if outbox is None:
            if len(self._outboxes) >= limits.peers_max:
                self._outboxes = {p: o for p, o in self._outboxes.items() if not o.idle}
            outbox = Outbox(peer, self._post, self.on_not_sent, self._start, self.rng)
            self._outboxes[peer] = outbox
        outbox.put(message)

    async def deliver(self, peer: PeerId, message: Message) -> None:
        """Send now, beside what is queued. Raises: TransportError: not taken; Refused: nor will it be."""
        await self._post(peer, message)

    def enter_epoch(self, epoch: int) -> None:
        """Seal in this epoch from now on; what waits to be sent was said in another and is dropped."""
        self.epoch = epoch
        self._sealed = []
        for outbox in self._outboxes.values():
            outbox.clear()

    async def drain(self, seconds: float) -> None:
        """Wait until what is queued was sent, at most so long (a goodbye before the end)."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                for outbox in list(self._outboxes.values()):
                    await outbox.emptied()

    async def upload(self, peer: PeerId, delta: Digest, size: int) -> None:
        """Put an own delta to `peer`, resumed where an earlier try broke. Raises: TransportError."""
        await self._uploader.upload(peer, delta, size)

    async def fetch(
        self,
        digest: Digest,
        size_max: int,
        donors: Sequence[PeerId],
        purpose: Purpose = Purpose.DELTA,
        *,
        of_spec: bool = False,
        tell: Tell = unheard,
    ) -> None:
        """Get a blob into the store from any of `donors`, resumed at its last byte.

        `of_spec`: the RunSpec names it, and `size_max` is what its owner signed.
        `tell` hears what each donor did that gave nothing.

        Raises:
            TransportError: none of them gave it.
            OperatorError: it cannot be stored here; RUN: it is larger than the RunSpec says.
        """
        await self._fetcher.fetch(digest, size_max, donors, purpose, of_spec=of_spec, tell=tell)

    @property
    def deltas_on_the_way(self) -> bool:
        """Whether a delta is uploaded or fetched by this node just now."""
        return self._uploader.busy or self._fetcher.fetching_deltas

    def remember(self, peer: PeerId, sealed: bytes) -> None:
        """Keep a peer's signed record; written to disk within `ADDRESS_BOOK_FLUSH_S`."""
        self._start(self.learn(peer, sealed))

    def urls(self, peer: PeerId) -> list[str]:
        """Where `peer` may be reached, the host that answered last first. Raises: TransportError."""
        record = self.book.get(peer)
        if record is None:
            raise TransportError(f"no address of peer {short(peer)} is known")
        if record.port == 0:
            raise TransportError(f"peer {short(peer)} cannot be dialled: it has outgoing connections only")
        found, why = [], "no hosts"
        for host in sorted(record.hosts, key=lambda h: h != self._good_host.get(peer)):
            try:
                address = check_address(host, record.port, local=self.local, own=self.own)
            except PeerError as error:
                why = str(error)
                continue
            found.append(f"http://{url_host(address)}:{record.port}")
        if not found:
            raise TransportError(f"no address of peer {short(peer)} may be connected to: {why}")
        return found

    def can_dial(self, peer: PeerId) -> bool:
        """Whether an address of `peer` is known that may be connected to."""
        with suppress(TransportError):
            return bool(self.urls(peer))
        return False

    async def _post(self, peer: PeerId, message: Message) -> None:
        """Raises: TransportError."""
        assert self._control is not None, "entered"
        sealed = await self.seal(message, peer)
        last = TransportError(f"no address of peer {short(peer)} is known")
        for url in self.urls(peer):
            try:
                async with (
                    asyncio.timeout(limits.request_timeout_s),
                    self._control.post(
                        f"{url}/v1/messages", data=sealed, allow_redirects=False
                    ) as answer,
                ):  # fmt: skip
                    self.traffic.up_control += len(sealed) + request_head_bytes(answer)
                    self.traffic.down_control += answer_head_bytes(answer)
                    if answer.status == 202:
                        return
                    await self._refused(peer, message, answer)
                    return
            except _Misdirected as error:
                last = error
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                last = TransportError(f"peer {short(peer)} at {url}: {type(error).__name__} {error}"[:300])
        raise last

    async def _refused(self, peer: PeerId, message: Message, answer: aiohttp.ClientResponse) -> None:
        """Raises: TransportError where sending again later may help; Refused where it will not."""
        said = await read_refusal(answer)
        reason = str(said.get("reason", answer.status))[:64]
        if reason in DELIVERED:
            return
        if reason == "WRONG_RECEIVER":
            raise _Misdirected(f"{answer.url.origin()} is not peer {short(peer)}")
        text = f"peer {short(peer)} refused {type(message).__name__}: {reason}"
        log.info("%s (%s)", text, str(said.get("detail", ""))[:200].removeprefix(f"{reason}: "))
        again = answer.status == 429 or answer.status >= 500
        if not again:
            raise Refused(text, reason)
        raise TransportError(text, retry_after_s=retry_after_s(answer))

    async def seal(self, message: Message, peer: PeerId = ANYBODY) -> bytes:
        """A message of this node to `peer` as bytes; what is meant for anybody is signed once.

        In a thread: about 0.2 ms, more for entries.
        """
        to = receiver_of(message, peer)
        for known, receiver, sealed in self._sealed:
            if known is message and receiver == to:
                return sealed
        self._n += 1
        sealed = await asyncio.to_thread(
            seal, message, self.signer, run=self.run, epoch=self.epoch, boot=self.boot, n=self._n, to=to
        )
        self._sealed = [(message, to, sealed), *self._sealed[:3]]
        return sealed

    async def learn(self, peer: PeerId, sealed: bytes) -> None:
        """The same, and on return it can be dialled. `peer`: who passed it on."""
        try:
            record = await asyncio.to_thread(self.book.remember, sealed)
        except PeerError as error:
            self.strikes.strike(peer, error.reason)
            return
        if record is not None:
            self.on_met(sender_of(sealed))
        if record is not None and not self._book_changed:
            self._book_changed = True
            self._start(self._write_book())

    async def _write_book(self) -> None:
        await asyncio.sleep(ADDRESS_BOOK_FLUSH_S)
        self._book_changed = False
        await asyncio.to_thread(self.book.flush)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.on_failure(error)
