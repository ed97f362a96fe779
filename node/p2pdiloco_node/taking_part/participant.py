"""What a training node and a witness have in common: files, sockets, brain and driver, in that order.

Entering opens the files of one run and the port; `begin` makes the brain from what is on disk; `live` is
its life. The daemon adds a trainer and an announcer, the tracker adds a directory and a page.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from aiohttp import web

from p2pdiloco import limits
from p2pdiloco.diloco.golden import check_golden
from p2pdiloco.errors import OperatorError, P2PDiLoCoError, PeerError, TransportError
from p2pdiloco.exit_codes import RESOURCES
from p2pdiloco.ids import NO_DIGEST, Digest, PeerId, RunId
from p2pdiloco.protocol import events as fact
from p2pdiloco.protocol.context import Identity, Restored
from p2pdiloco.protocol.node import Node
from p2pdiloco.run_spec import RunSpec, chunk_sizes
from p2pdiloco.status.read_model import to_json
from p2pdiloco.wire.codec import encode
from p2pdiloco.wire.envelope import Opened
from p2pdiloco.wire.log import Entry, OuterStep, open_body
from p2pdiloco.wire.messages import (
    OF_AN_EPOCH,
    PASSED_ON,
    DeltaHeader,
    DeltaReceipt,
    Head,
    Heartbeat,
    Outcome,
    PeerRecord,
    Peers,
    SnapshotOffer,
    StateShown,
)
from p2pdiloco.wire.signing import Ed25519Signer, verify_ed25519
from p2pdiloco_node import __version__
from p2pdiloco_node.config import HostPort
from p2pdiloco_node.driver import Desk, Driver, Ports
from p2pdiloco_node.ports import Purpose
from p2pdiloco_node.process.flight_recorder import FlightRecorder
from p2pdiloco_node.process.hosts import names_loopback, reachable_hosts
from p2pdiloco_node.process.lifetime import first_fault
from p2pdiloco_node.storage.address_book import DiskAddressBook
from p2pdiloco_node.storage.blob_store import BUDGETS, DiskBlobStore
from p2pdiloco_node.storage.files import Files
from p2pdiloco_node.storage.held_deltas import HeldDeltas
from p2pdiloco_node.storage.journal import DiskJournal
from p2pdiloco_node.storage.run_folder import BLOBS, JOURNAL, LOG
from p2pdiloco_node.storage.state_keeper import DiskStateKeeper
from p2pdiloco_node.taking_part.blobs import RunBlobs
from p2pdiloco_node.taking_part.heads import Heads
from p2pdiloco_node.telemetry import BrainView, Telemetry
from p2pdiloco_node.transport.answers import remote_ip
from p2pdiloco_node.transport.client import Client
from p2pdiloco_node.transport.listener import Listener
from p2pdiloco_node.transport.readers import ReaderRoutes
from p2pdiloco_node.transport.server import Server

log = logging.getLogger("p2pdiloco.node")
NONCE = re.compile("[0-9a-f]{64}")


class Setting(NamedTuple):
    """Who takes part in which run, from which folder and port."""

    run: RunId
    spec: RunSpec
    signed_spec: bytes
    signer: Ed25519Signer
    folder: Path  # of this run and identity
    role: str  # node, witness
    listen: HostPort
    also: tuple[Path, ...] = ()  # folders of blobs that are served and never changed
    keeps_all: bool = False  # keep deltas that the rules no longer need
    data_bytes_max: int = limits.shard_store_bytes_max  # of the run's data (--data-disk)


class Participant:
    """One identity in one run, in this process. `telemetry` is told everything."""

    def __init__(
        self, setting: Setting, telemetry: Telemetry, *, routes: Sequence[web.RouteDef] = ()
    ) -> None:
        self.setting = setting
        self.telemetry = telemetry
        self._more_routes = routes
        self._stack = AsyncExitStack()
        self._recorder = FlightRecorder()
        self.node: Node | None = None
        self.driver: Driver | None = None
        self.server: Server | None = None
        self._head: bytes | None = None
        self.heads = Heads(setting.signer.peer_id, time.monotonic)
        self._trusted: tuple[int, frozenset[bytes]] = (-1, frozenset())  # version, who has trust then
        # What a tracker adds: True if the message was for it alone.
        self.takes_message: Callable[[Opened, bytes, str], bool] = lambda _opened, _sealed, _address: False

    @property
    def me(self) -> PeerId:
        return self.setting.signer.peer_id

    @property
    def epoch(self) -> int:
        return self.node.epoch if self.node is not None else 0

    async def __aenter__(self) -> Self:
        """Files, port and client. Raises: OperatorError."""
        try:
            await asyncio.to_thread(self._open_files)
            await self._open_sockets()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def _open_files(self) -> None:
        fault = check_golden()
        if fault is not None:
            raise OperatorError(
                f"This machine's arithmetic is not the one that all nodes share ({fault}), so it cannot take "
                "part: unset what changes floating point (fast-math libraries), or use another machine.",
                RESOURCES,
            )
        setting = self.setting
        self.files = Files()
        self.journal = DiskJournal(setting.folder / JOURNAL, self.files)
        self.record = self.journal.load_record()
        self.entries = self.journal.load_entries()
        self.boot = self.journal.next_boot()
        budgets = {**BUDGETS, Purpose.SHARD: setting.data_bytes_max}
        self.blobs = DiskBlobStore(setting.folder / BLOBS, self.files, budgets=budgets, also=setting.also)
        self.held = HeldDeltas(setting.folder / "held", self.files)
        self.book = DiskAddressBook(setting.folder / "peers", setting.run, verify_ed25519, self.files)
        self._stack.callback(self.blobs.close)
        self._stack.callback(self.journal.close)

    async def _open_sockets(self) -> None:
        setting = self.setting
        self.server = server = Server(
            run=setting.run,
            me=self.me,
            run_spec=setting.signed_spec,
            build=__version__,
            blobs=self.blobs,
            verify=verify_ed25519,
            on_message=self._on_message,
            on_delta=self._on_delta,
            head=lambda: self._head,
            health=self._health,
            known=self._knows,
            local=setting.spec.admission == "local",
            donors=lambda _digest: self.run_blobs.donors()[:8],
        )
        app = server.app()
        app.add_routes([web.get("/v1/peers", self._get_peers), web.get("/v1/status", self._get_status)])
        app.add_routes([web.get("/v1/state", self._get_state)])
        readers = ReaderRoutes(
            setting.run, setting.folder / JOURNAL / LOG, lambda: self.journal.rewrites, self._shown,
            server.traffic, local=setting.spec.admission == "local", known=server.known_address,
        )  # fmt: skip
        app.add_routes([*readers.routes(), *self._more_routes])
        self.listener = await self._stack.enter_async_context(
            Listener(app, setting.listen.host, setting.listen.port)
        )
        hosts = reachable_hosts(setting.listen.host)
        self.client = await self._stack.enter_async_context(
            Client(
                run=setting.run,
                signer=setting.signer,
                boot=self.boot,
                build=__version__,
                book=self.book,
                blobs=self.blobs,
                on_not_sent=lambda peer, _why: self._put(fact.MessageNotSent(peer)),
                on_failure=self._failed,
                on_met=lambda peer: self._put(fact.PeerMet(peer)),
                local=setting.spec.admission == "local",
                own=frozenset((host, self.listener.port) for host in hosts),
                traffic=server.traffic,
                strikes=server.strikes,
            )
        )
        self.run_blobs = RunBlobs(
            setting.spec, self.client, self.blobs, self.telemetry, self._peers,
            random.Random(),  # noqa: S311 - whom to ask first
        )  # fmt: skip
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def peer_record(self, name: str, advertise: Sequence[HostPort] = ()) -> PeerRecord:
        """How to reach this process, as far as it knows."""
        hosts = [a.host for a in advertise] or reachable_hosts(self.setting.listen.host)
        port = advertise[0].port if advertise else self.listener.port
        return PeerRecord(tuple(hosts[:4]), port, name, self.setting.role, self.boot)

    def _peers(self) -> list[PeerId]:
        return [p for p in self.book.records() if p != self.me]

    def _shown(self) -> tuple[SnapshotOffer, ...]:
        """Snapshots that are whole here; none before the state is open."""
        return self.keeper.snapshots if self.node is not None else ()

    # Brain and driver.

    async def open_state(self) -> None:
        """The arrays on this disk, or version 0. Raises: OperatorError."""
        setting, last = self.setting, len(self.entries)
        self.keeper = await asyncio.to_thread(
            lambda: DiskStateKeeper(setting.folder, setting.spec, self.blobs, self.files, index_max=last)
        )

    async def begin(
        self,
        *,
        desk: Desk | None,
        in_flight: tuple[DeltaHeader, ...] = (),
        evaluated_version: int = -1,
        keeps_delta: Callable[[Digest], bool] | None = None,
    ) -> None:
        """The brain, from everything that is durable. Call after `open_state`."""
        setting, keeper = self.setting, self.keeper
        held = await asyncio.to_thread(self.held.load, self.blobs)
        state = keeper.restored
        restored = Restored(
            record=self.record,
            entries=tuple(self.entries),
            state_index=state.index,
            rules=state.rules,
            params_root=state.roots.params,
            momentum_root=state.roots.momentum,
            in_flight=in_flight,
            held=held,
            snapshots=keeper.snapshots,
            adopted_version=state.version,
            evaluated_version=evaluated_version,
        )
        identity = Identity(setting.run, setting.spec, setting.signer, self.boot, setting.role)
        self.node = await asyncio.to_thread(Node, identity, restored, random.SystemRandom().random)
        assert self.server is not None, "entered"
        self.server.reveal(*deltas_named(self.entries))
        keeps = keeps_delta or (lambda _delta: setting.keeps_all)
        ports = Ports(
            me=self.me,
            key=setting.signer.public_key,
            journal=self.journal,
            keeper=keeper,
            blobs=self.blobs,
            transport=self.client,
            door=_Door(self.server),
            shelf=self.held,
            watcher=self.telemetry,
            desk=desk,
            chunk_bytes_max=max(chunk_sizes(setting.spec.model.params)),
            keeps_delta=keeps,
        )
        self.driver = Driver(self.node, ports, self._recorder)
        self.client.enter_epoch(self.node.epoch)
        for peer in self.book.records():
            self._put(fact.PeerMet(peer))
        if self.node.state.finished:  # in an earlier life: the rules say it once
            self.telemetry.run_ended(self.node.version)
            if desk is not None:
                desk.run_ended(self.node.version)

    async def live(self) -> None:
        """Until the brain has left. Raises: what ended it otherwise."""
        assert self.driver is not None, "begun"
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(self.listener.watch())
            fail = group.create_task(self._raise_failure())
            head = group.create_task(self._keep_head())
            await self.driver.run()
            for task in (watch, fail, head):
                task.cancel()
        await self.client.drain(0.5)
        with suppress(P2PDiLoCoError):  # only saves time at the next start
            await asyncio.to_thread(self.keeper.save, self.brain_view().version)

    def note_crash(self, error: Exception) -> None:
        """Our own fault: write down what happened before it, beside the run's files."""
        fault = first_fault(error) if isinstance(error, BaseExceptionGroup) else error
        if isinstance(fault, P2PDiLoCoError):
            return
        path = self.setting.folder / f"flight-{self.boot}.bin"
        try:
            self._recorder.write(path)
        except OSError as failed:
            log.warning("The last events before this crash cannot be written (%s).", failed)
        else:
            log.error("The last events before this crash are in %s.", path)

    def caught_up(self) -> bool:
        """Whether this node may begin to train: it has what a quorum of its committee has (heads.py)."""
        return self.node is not None and self.heads.caught_up(self.node.index, self.node.committee)

    def catching_up(self) -> str:
        """In words, and how far it is."""
        words = "catching up with the swarm"
        node = self.node
        there = self.heads.said_by_quorum(node.committee) if node is not None else None
        if node is None or not there:
            return words
        if node.certified_index < there:
            return f"{words}, {node.certified_index} of {there} log entries are here"
        return f"{words}, its log is here"

    def _knows(self, peer: PeerId) -> bool:
        """Whether the log knows this peer: it has a seat, or deltas of it were accepted."""
        node = self.node
        if node is None:
            return peer == self.setting.spec.committee.genesis.witness
        if self._trusted[0] != node.version:
            trusted = frozenset(p.peer for p in node.state.peers if p.trust > 0)
            self._trusted = (node.version, trusted)
        return peer in self._trusted[1] or peer in node.committee.members

    def brain_view(self) -> BrainView:
        node = self.node
        if node is None:
            return BrainView(
                index=0,
                version=0,
                term=0,
                leads=False,
                aggregator=PeerId(bytes(32)),
                members=(),
                clock=0,
                in_flight=0,
                peers=len(self.book.records()),
                root=NO_DIGEST,
            )
        committee = node.committee
        return BrainView(
            index=node.index,
            version=node.version,
            term=node.term,
            leads=node.leading,
            aggregator=committee.aggregator_of(node.term),
            members=tuple((member, member == committee.witness) for member in committee.members),
            clock=node.state.clock,
            in_flight=len(node.in_flight),
            peers=len(self.book.records()),
            root=node.root,
        )

    # Ends of the server and the client.

    async def _on_message(self, opened: Opened, sealed: bytes, address: str) -> None:
        """Raises: PeerError, TransportError (busy)."""
        message = opened.message
        if type(message) not in PASSED_ON:  # anybody may have brought those
            self.telemetry.heard(opened.sender)
        if self.takes_message(opened, sealed, address):
            return
        if isinstance(message, Peers):
            for record in message.records:
                self.client.remember(opened.sender, record)
            return
        if isinstance(message, DeltaReceipt):
            self.telemetry.receipt(message)
        elif isinstance(message, Heartbeat) and opened.epoch >= self.epoch:
            node = self.node
            committee = node.committee if node is not None else self.setting.spec.committee.genesis
            self.heads.heard(opened.sender, message.index, committee)
        if self.driver is None or not self.driver.put(
            fact.MessageReceived(opened.sender, opened.key, opened.boot, message, sealed, opened.epoch)
        ):
            raise TransportError("busy", limits.retry_after_s)
        if opened.epoch < self.epoch and type(message) in OF_AN_EPOCH:
            raise PeerError(  # the rules have heard of it, and tell the sender the way
                "WRONG_EPOCH", f"epoch {opened.epoch} is over: the owner began epoch {self.epoch} of the run"
            )

    async def _on_delta(self, delta: Digest) -> None:
        if self.driver is not None:
            self.driver.delta_whole(delta)

    def _put(self, event: fact.Event) -> None:
        if self.driver is not None:
            self.driver.put(event)

    def _failed(self, error: BaseException) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    async def _raise_failure(self) -> None:
        await self._failure

    async def _keep_head(self) -> None:
        """For those who ask for a recent head."""
        index = -1
        while True:
            node = self.node
            if node is not None and node.index != index:
                index = node.index
                self._head = await self.client.seal(Head(index, node.log.head_at(index), node.term))
            await asyncio.sleep(self.setting.spec.committee.heartbeat_s)

    def _health(self) -> Mapping[str, object]:
        view = self.brain_view()
        return {"index": view.index, "version": view.version, "role": self.setting.role, "build": __version__}

    async def _get_peers(self, _request: web.Request) -> web.Response:
        records = list(self.book.records().values())[-limits.announce_peers_max :]
        if self.own_record is not None:
            records.append(await self.client.seal(self.own_record))
        return web.Response(body=encode(Peers(tuple(records))), content_type="application/octet-stream")

    async def _get_state(self, request: web.Request) -> web.Response:
        """How far this node is, sealed: what the owner asks before a rescue. The log proves it, or does not.

        Raises: PeerError MALFORMED, NOT_HERE.
        """
        asked = request.query.get("nonce", NO_DIGEST.hex())
        if NONCE.fullmatch(asked) is None:
            raise PeerError("MALFORMED", "nonce is 64 hex digits")
        node = self.node
        if node is None or node.roots is None:
            raise PeerError("NOT_HERE", "no state is here yet")
        head = node.log.head_at(node.index)
        shown = StateShown(
            bytes.fromhex(asked), node.epoch, node.index, head, *node.roots, node.term, node.votes
        )
        return web.Response(body=await self.client.seal(shown), content_type="application/octet-stream")

    own_record: PeerRecord | None = None

    async def _get_status(self, request: web.Request) -> web.Response:
        """For this machine only: no address, path or token is in it, but it is nobody else's business."""
        if not ipaddress.ip_address(remote_ip(request)).is_loopback or not names_loopback(request.host):
            raise PeerError("NOT_HERE", "status is for this machine only")
        traffic = self.client.traffic
        lag_s = self.driver.lag_s_max if self.driver is not None else 0.0
        status = self.telemetry.status(
            self.brain_view(),
            bytes_up=traffic.up,
            bytes_down=traffic.down,
            bytes_setup=self.run_blobs.bytes_fetched,
            lag_s_max=lag_s,
        )
        return web.Response(body=to_json(status), content_type="application/json")


class _Door:
    """The server as the driver sees it."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def allow(self, header: DeltaHeader, sender: PeerId) -> None:
        self._server.allow(Digest(header.delta), header.size, sender)

    def reveal(self, delta: Digest) -> None:
        self._server.reveal(delta)

    def forget(self, delta: Digest) -> None:
        self._server.forget(delta)

    def strike(self, sender: PeerId, outcome: Outcome) -> None:
        self._server.strikes.strike(sender, outcome)


def deltas_named(entries: Sequence[Entry]) -> list[Digest]:
    """Deltas that certified entries list: they may be shown to anyone."""
    named = []
    for entry in entries:
        content = open_body(entry.body).content
        if isinstance(content, OuterStep):
            named += [Digest(c.delta) for c in content.contributions]
    return named
