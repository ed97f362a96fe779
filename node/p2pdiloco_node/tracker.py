"""`p2pdiloco tracker`: directory, witness, data seed and public page in one process, without torch.

Nobody has to trust it: nodes verify the run by its digest and the log by its certificates. Kill it, and a
running swarm goes on; start it again, and announces fill the directory within one interval, the witness
goes on from its log and votes, and the page's history comes back from the database.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import shutil
import socket
import time
from collections import deque
from collections.abc import Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from aiohttp import web

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError, PeerError, TransportError
from p2pdiloco.exit_codes import USAGE
from p2pdiloco.ids import Digest, RunId
from p2pdiloco.protocol import events as fact
from p2pdiloco.protocol.run_log import RunLog
from p2pdiloco.protocol.tracker import Directory
from p2pdiloco.run_spec import RunSpec, open_run_spec
from p2pdiloco.status import LOOPBACK, RunStatus, StatusBuilder, join_hint
from p2pdiloco.wire.codec import encode
from p2pdiloco.wire.envelope import ANYBODY, Opened, open_envelope
from p2pdiloco.wire.messages import PASSED_ON, Announce, DeltaHeader, EvalReport, Goodbye, NodeReport
from p2pdiloco.wire.signing import verify_ed25519
from p2pdiloco_node import __version__
from p2pdiloco_node.config import HostPort, TrackerConfig, parse_address
from p2pdiloco_node.hosting.checkpoint_maker import CheckpointMaker, Seen, heard_of, listing
from p2pdiloco_node.hosting.checkpoint_shelf import CheckpointShelf
from p2pdiloco_node.hosting.page_feed import PageFeed
from p2pdiloco_node.ports import Purpose
from p2pdiloco_node.process.hosts import reachable_hosts
from p2pdiloco_node.process.lifetime import Leaving, note_address, run_life
from p2pdiloco_node.status_page import StatusPage
from p2pdiloco_node.storage.blob_store import DiskBlobStore
from p2pdiloco_node.storage.data_dir import DataDir
from p2pdiloco_node.storage.files import guarded
from p2pdiloco_node.storage.keys import load_key
from p2pdiloco_node.storage.run_folder import (
    BLOBS,
    CHECKPOINTS,
    HISTORY,
    MAKING,
    SPEC,
    WITNESS,
    WITNESS_KEY,
    others_in,
)
from p2pdiloco_node.storage.tracker_db import TrackerDb
from p2pdiloco_node.taking_part.participant import Participant, Setting, deltas_named
from p2pdiloco_node.telemetry import Telemetry
from p2pdiloco_node.tracking.boards import About, Tracking, Wanted
from p2pdiloco_node.tracking.figures import OfRun, about_run
from p2pdiloco_node.transport.addresses import is_dialable
from p2pdiloco_node.transport.answers import remote_ip
from p2pdiloco_node.transport.downloads import Downloads
from p2pdiloco_node.transport.traffic import Traffic

log = logging.getLogger("p2pdiloco.tracker")
# A witness in two places would vote twice.
KEEP_THE_OTHER = "leave it running: a run has one tracker, and a copy of its folder is never served beside it"
SLICE_S = 0.02  # of replaying the log at a time
FEED_S = 1.0  # the page's builder sees the directory so often; the database is written then too


def run_tracker(config: TrackerConfig) -> int:
    """The command. Raises: OperatorError."""
    return run_life(
        lambda leaving: _live(config, leaving), level=config.log_level, orphan=not config.die_with_parent
    )


async def _live(config: TrackerConfig, leaving: Leaving) -> int:
    async with Tracker(config, leaving) as tracker:
        return await tracker.run()


class Archive:
    """Keeps delta blobs that the rules no longer need, the newest up to a number of bytes."""

    def __init__(self, blobs: DiskBlobStore, bytes_max: int, kept: Iterable[Digest] = ()) -> None:
        """`kept`: those of earlier lives, oldest first."""
        self._blobs = blobs
        self._bytes_max = bytes_max
        self._kept = deque(kept)
        self._make_room()

    def keeps(self, delta: Digest) -> bool:
        """Always, at the price of the oldest. Called in one thread at a time."""
        self._kept.append(delta)
        self._make_room()
        return True

    def _make_room(self) -> None:
        while self._kept and self._blobs.used(Purpose.DELTA) > self._bytes_max:
            self._blobs.delete(self._kept.popleft())


class Tracker:
    """One run's tracker."""

    def __init__(self, config: TrackerConfig, leaving: Leaving) -> None:
        """Raises: OperatorError (usage)."""
        self.config = config
        self._leaving = leaving
        self._listen = parse_address(config.listen, "--listen")
        if not config.run:
            raise OperatorError(
                "No run is named: give --run DIR, the folder that p2pdiloco run new made.", USAGE
            )
        self._dir = Path(config.run).expanduser()
        self._public = config.public_url.rstrip("/")
        if self._public and urlsplit(self._public).scheme not in ("http", "https"):
            raise OperatorError(
                f"--public-url {self._public!r} has no scheme: write http://HOST:PORT.", USAGE
            )
        try:
            urlsplit(self._public).port  # noqa: B018 - read for what it raises
        except ValueError:
            raise OperatorError(
                f"--public-url {self._public!r} has no valid port: 1 to 65535.", USAGE
            ) from None
        self._wanted = Wanted(config.tensorboard, config.wandb)
        self._wanted.check()
        self._stack = AsyncExitStack()
        self._started_unix = time.time()

    async def __aenter__(self) -> Self:
        """Raises: OperatorError."""
        try:
            await self._enter()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            self.participant.note_crash(error)
        await self._stack.aclose()

    async def _enter(self) -> None:
        self._run, self._spec, signed = _open_run(self._dir)
        local = self._spec.admission == "local"
        data = self._stack.enter_context(DataDir(self._dir / WITNESS, otherwise=KEEP_THE_OTHER))
        # A making that was killed once the run was signed left as much again as the run's data.
        shutil.rmtree(self._dir / MAKING, ignore_errors=True)
        signer = load_key(self._dir / WITNESS_KEY)
        if signer.peer_id != self._spec.committee.genesis.witness:
            raise OperatorError(
                f"{self._dir / WITNESS_KEY} is not the key of this run's witness: put back the one that run "
                "new made."
            )
        self.telemetry = Telemetry(
            "witness",
            signer.peer_id,
            self._run,
            self._spec.name,
            role="witness",
            pid=os.getpid(),
            inner_steps=0,
        )
        self.directory = Directory(local=local)
        setting = Setting(
            run=self._run,
            spec=self._spec,
            signed_spec=signed,
            signer=signer,
            folder=data.root,
            role="witness",
            listen=self._listen,
            also=(self._dir / BLOBS,),
        )
        page = StatusPage(self._status, address_of=remote_ip)
        self._shelf = CheckpointShelf(self._dir / CHECKPOINTS, self.config.checkpoints)
        downloads = Downloads(
            self._shelf.find, lambda: listing(self._run, self._shelf, self.builder), Traffic(), local=local,
            known=self._known_address,
        )  # fmt: skip
        routes = [web.post("/v1/announce", self._announce), *page.routes(), *downloads.routes()]
        self.participant = participant = Participant(setting, self.telemetry, routes=routes)
        participant.takes_message = self._takes_message
        self._maker = CheckpointMaker(
            self._run,
            self._spec,
            self._shelf,
            seen=self._seen,
            read=lambda digest: participant.blobs.read(digest),  # noqa: PLW0108 - opened later
            heard=lambda version: heard_of(self.builder, version),
            say=self.telemetry.say,
        )
        await self._stack.enter_async_context(participant)
        self._stack.push_async_callback(page.close)
        about = About(f"{self._spec.name}-tracker", self._dir, about_run(self._spec))
        self._tracking = await self._stack.enter_async_context(
            Tracking(self._wanted, about, say=self.telemetry.say)
        )
        self._tracked = OfRun(self._spec, lambda version: self.builder.tokens_at(version))  # noqa: PLW0108
        db = await self._stack.enter_async_context(TrackerDb(self._dir / HISTORY, self._run))
        note_address(self._stack, data.root, participant.listener, self._listen.host)
        url = self._url()
        # The folder's name alone: where it lies on this machine is nobody else's business.
        self._join = join_hint(self._run, url, local=local, folder=shlex.quote(self._dir.absolute().name))
        self.page = PageFeed(
            self._spec, db, log=self._log, new_builder=self._new_builder, entry=self._maker.entry,
            went_back=self._maker.went_back, say=self.telemetry.say,
        )  # fmt: skip
        participant.own_record = participant.peer_record("witness", await self._public_addresses())
        self._print_addresses(url)
        if not local and not any(is_dialable(h) for h in participant.own_record.hosts):
            print(
                "this run is open, and nodes of open runs connect to public addresses only: name one with "
                "--public-url, or make the run with p2pdiloco run new --admission local",
                flush=True,
            )

    @property
    def builder(self) -> StatusBuilder:
        """Another one after a recovery."""
        return self.page.builder

    def _new_builder(self) -> StatusBuilder:
        return StatusBuilder(
            self._run, self._spec, join=self._join, build=__version__, started_unix=self._started_unix
        )

    def _known_address(self, address: str) -> bool:
        return self.participant.server is not None and self.participant.server.known_address(address)

    def _log(self) -> RunLog:
        assert self.participant.node is not None, "begun"
        return self.participant.node.log

    def _url(self) -> str:
        """Where nodes reach this tracker, as far as it can know."""
        if self._public:
            return self._public
        host = reachable_hosts(self._listen.host)[0] if reachable_hosts(self._listen.host) else "127.0.0.1"
        return f"http://{f'[{host}]' if ':' in host else host}:{self.participant.listener.port}"

    async def _public_addresses(self) -> list[HostPort]:
        """Where --public-url leads: behind a port forwarding this machine's own addresses are of no use.

        A proxy with TLS serves people and announces; peers are then reached beside it, on the port itself.
        """
        parts = urlsplit(self._public)
        if not parts.hostname:
            return []
        own_port = self.participant.listener.port
        port = own_port if parts.scheme == "https" else parts.port or 80
        try:
            found = await asyncio.get_running_loop().getaddrinfo(
                parts.hostname, port, type=socket.SOCK_STREAM
            )
        except OSError as error:
            log.warning("The name in --public-url %s is not known here (%s).", self._public, error.strerror)
            return []
        hosts = dict.fromkeys(str(place[0]) for *_, place in found)
        if port == own_port:  # from inside the network, too
            hosts |= dict.fromkeys(reachable_hosts(self._listen.host))
        return [HostPort(host, port) for host in hosts]

    def _print_addresses(self, url: str) -> None:
        """The join line and the page, for people; never a loopback address as if others could use it."""
        print(f"Run {self._spec.name} ({self._run.hex()})", flush=True)
        host = urlsplit(url).hostname or ""
        print(f"Page: {url}/", flush=True)
        print(f"Join: p2pdiloco node --join {url}/#{self._run.hex()}", flush=True)
        if host.startswith("127.") or host in ("::1", "localhost"):
            print(LOOPBACK, flush=True)

    async def run(self) -> int:
        """Until somebody asks to leave. Raises: what ended it."""
        participant = self.participant
        await participant.open_state()
        self.archive = await asyncio.to_thread(
            lambda: Archive(participant.blobs, self.config.archive_bytes_max, self._archived())
        )
        await participant.begin(desk=None, keeps_delta=self.archive.keeps)
        await self.page.begin()
        self.telemetry.on_installed = self.page.installed
        self.telemetry.on_said = self._said
        self.builder.event("tracker", "the tracker started", when_unix=time.time())
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._feed()), group.create_task(self._leave_when_asked())]
            if self.config.checkpoints:
                tasks.append(group.create_task(self._maker.run()))
            await participant.live()
            for task in tasks:
                task.cancel()
        await self._save()
        for point in self._tracked.last(self._status()):
            self._tracking.add(point)
        return 0

    def _archived(self) -> list[Digest]:
        """What earlier lives kept and the rules need no more: first what the log does not list, then in its
        order.
        """
        participant = self.participant
        needed = {held.header.delta for held in participant.held.load(participant.blobs)}
        place = {delta: n for n, delta in enumerate(deltas_named(participant.entries))}
        kept = [d for d in participant.blobs.digests(Purpose.DELTA) if d not in needed]
        return sorted(kept, key=lambda delta: place.get(delta, -1))

    async def _leave_when_asked(self) -> None:
        await self._leaving.wait()
        log.info("Leaving: %s.", self._leaving.why)
        assert self.participant.driver is not None, "begun"
        self.participant.driver.put(fact.GoodbyeWanted("the tracker stops"))

    # The directory.

    async def _announce(self, request: web.Request) -> web.Response:
        assert self.participant.server is not None, "entered"
        opened, _, address = await self.participant.server.receive(request)
        message = opened.message
        if not isinstance(message, Announce):
            raise PeerError("MALFORMED", "an announce was expected")
        record = await asyncio.to_thread(
            open_envelope, message.record, verify_ed25519, run=self._run, me=ANYBODY
        )
        node = self.participant.node
        committee = node.committee if node is not None else self._spec.committee.genesis
        reply = self.directory.announce(
            opened,
            record,
            message.record,
            address=address,
            now=time.monotonic(),
            unix=time.time(),
            prefer=committee.members,
        )
        self.participant.client.remember(opened.sender, message.record)
        if self.participant.own_record is not None:
            own = await self.participant.client.seal(self.participant.own_record)
            kept = reply.records[: limits.announce_peers_max - 1]
            reply = type(reply)(reply.interval_s, (own, *kept), reply.notice)
        return web.Response(body=encode(reply), content_type="application/octet-stream")

    def _takes_message(self, opened: Opened, _sealed: bytes, _address: str) -> bool:
        """What is for the tracker alone. Raises: PeerError; TransportError: say it again later."""
        message = opened.message
        try:
            if isinstance(message, NodeReport):
                self.directory.report(opened, now=time.monotonic())
            elif isinstance(message, EvalReport):
                self._evaluation(opened, message)
            elif isinstance(message, Goodbye):
                self.directory.goodbye(opened, now=time.monotonic())
            elif type(message) not in PASSED_ON:  # anybody may have brought those
                self.builder.heard(opened.sender, when_unix=time.time())
                if isinstance(message, DeltaHeader):
                    self.page.note_loss(message)
        except PeerError as error:
            # A restarted tracker knows nobody before the next announce, and its witness may lag.
            if error.reason not in ("UNKNOWN_PEER", "TOO_EARLY"):
                raise
            if isinstance(message, EvalReport):  # nobody says it again if it counts as taken
                raise TransportError(str(error)) from None
        return isinstance(message, NodeReport | EvalReport)

    def _evaluation(self, opened: Opened, said: EvalReport) -> None:
        """Raises: PeerError."""
        root = self.page.root_of(said.version, said.state_root)
        report = self.directory.evaluation(opened, self._spec, root_of=lambda _version: root)
        self.builder.evaluated(opened.sender, report, when_unix=time.time())

    def _seen(self) -> Seen:
        """What the maker of checkpoints goes by."""
        node, keeper = self.participant.node, self.participant.keeper
        assert node is not None, "begun"
        whole = keeper.index == node.index
        return Seen(node.log, node.state.finished, keeper.params if whole else None, keeper.snapshots)

    # The page.

    def _said(self, kind: str, text: str) -> None:
        self.builder.said(kind, text, when_unix=time.time())

    def _status(self) -> RunStatus:
        return self.builder.build(time.time())

    async def _feed(self) -> None:
        """Directory and database, once a second."""
        while True:
            await asyncio.sleep(FEED_S)
            await self.page.look()
            now = time.monotonic()
            self.directory.forget_old(now)
            self.builder.directory(self.directory.listed(now), when_unix=time.time())
            self.builder.checkpoints = self._shelf.offered
            node = self.participant.node
            if node is not None:
                self.builder.term_seen(node.term, when_unix=time.time())
            await self._save()

    async def _save(self) -> None:
        new = await self.page.save()
        if self._tracking.is_on and (new.versions or new.evaluations):
            for point in self._tracked.points(new, self._status()):
                self._tracking.add(point)


def _open_run(folder: Path) -> tuple[RunId, RunSpec, bytes]:
    try:
        signed = (folder / SPEC).read_bytes()
    except FileNotFoundError:
        # run new refuses a folder that holds other things.
        taken = folder.is_dir() and guarded(lambda: others_in(folder), folder)
        make = "one in another folder" if taken else "one"
        out = "DIR" if taken else shlex.quote(str(folder))
        raise OperatorError(
            f"There is no run in {folder}: name a run's folder, or make {make} with p2pdiloco run new --out "
            f"{out}."
        ) from None
    except OSError as error:
        raise OperatorError(f"{folder / SPEC} cannot be read: {error.strerror}.") from None
    try:
        run, spec = open_run_spec(signed, verify_ed25519)
    except PeerError as error:
        raise OperatorError(
            f"The RunSpec in {folder} is damaged ({error}): put it back from a backup."
        ) from None
    return run, spec, signed
