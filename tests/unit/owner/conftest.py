"""Hosts of a run as the owner's tool meets them: each serves a log of its own and says how far it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from p2pdiloco import limits
from p2pdiloco.ids import PeerId
from p2pdiloco.wire.envelope import seal
from p2pdiloco.wire.log import Entry
from p2pdiloco.wire.messages import StateShown
from p2pdiloco.wire.signing import Ed25519Signer
from p2pdiloco_node.owner.seen_run import Host, SeenRun
from p2pdiloco_node.progress import Quiet
from p2pdiloco_node.storage.journal import DiskJournal
from p2pdiloco_node.transport.answers import faults_as_answers
from p2pdiloco_node.transport.guards import Strikes
from p2pdiloco_node.transport.readers import ReaderRoutes
from p2pdiloco_node.transport.traffic import Traffic
from tests.unit.protocol.builders import OWNER, WITNESS, Chain, Run, roots


class Served:
    """One host. `slow`: it sends the head of a log and then nothing."""

    def __init__(self, folder: Path, run: Run, who: Ed25519Signer, *, slow: bool = False) -> None:
        self.run, self.who, self.slow = run, who, slow
        self.journal = DiskJournal(folder / "journal")
        self.journal.load_entries()
        self.path = folder / "journal" / "log"
        self.shows: StateShown | None = None
        self.seals = who  # whose key its words are sealed with
        self.nonce = b""  # another than was asked with
        self.told: list[bytes] = []
        self.on_told: Callable[[], object] = lambda: None
        self.logs_asked = 0
        self.change: Callable[[web.Request, bytes], bytes] | None = None  # what it sends of what it announces
        self.over = asyncio.Event()
        self.url = ""

    def has(self, chain: Chain, *, votes: bool = True) -> Served:
        """Its log is the chain's, all of it applied."""
        self.journal.append_entries(chain.entries[len(self.journal.load_entries()) :])
        return self.says(chain, votes=votes)

    def has_entries(self, entries: Sequence[Entry]) -> Served:
        self.journal.append_entries(entries)
        return self

    def says(self, chain: Chain, *, votes: bool = True) -> Served:
        log, version = chain.log, chain.state.version
        genesis = self.run.spec.genesis
        at = roots(version) if version else (genesis.params_root, genesis.momentum_root)
        self.shows = StateShown(bytes(32), log.epoch, log.index, log.head, *at, 7, votes)
        return self

    def claims(self, *, epoch: int, index: int) -> Served:
        """More than it can prove."""
        self.shows = StateShown(bytes(32), epoch, index, b"h" * 32, b"p" * 32, b"m" * 32, 7, votes=True)
        return self

    async def _changed(
        self, request: web.Request, change: Callable[[web.Request, bytes], bytes]
    ) -> web.StreamResponse:
        data = self.path.read_bytes()
        wanted = request.headers.get("Range")
        answer = web.StreamResponse(status=206 if wanted else 200)
        first = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
        answer.content_length = len(data) - first
        await answer.prepare(request)
        await answer.write(change(request, data[first:]))
        assert request.transport is not None
        request.transport.close()
        return answer

    def app(self) -> web.Application:
        app = web.Application(middlewares=[faults_as_answers(Strikes(lambda: 0.0))])
        readers = ReaderRoutes(
            self.run.id, self.path, lambda: self.journal.rewrites, list, Traffic(), local=True
        )

        async def slow_log(request: web.Request) -> web.StreamResponse:
            self.logs_asked += 1
            if self.change is not None:
                return await self._changed(request, self.change)
            if not self.slow:
                return await readers._get_log(request)
            answer = web.StreamResponse()
            answer.content_length = limits.MIB
            await answer.prepare(request)
            await answer.write(self.path.read_bytes())
            await self.over.wait()
            return answer

        async def state(request: web.Request) -> web.Response:
            assert self.shows is not None
            nonce = self.nonce or bytes.fromhex(request.query["nonce"])
            shown = msgspec.structs.replace(self.shows, nonce=nonce)
            body = seal(shown, self.seals, run=self.run.id, epoch=shown.epoch, boot=1, n=1)
            return web.Response(body=body)

        async def told(request: web.Request) -> web.Response:
            self.told.append(await request.read())
            self.on_told()
            return web.Response(status=202)

        app.add_routes([web.get("/v1/log", slow_log), web.get("/v1/state", state)])
        app.add_routes([web.post("/v1/messages", told)])
        return app


class Swarm:
    """A run's hosts; `seen` is the owner's view of it, the first host being the one that was named."""

    def __init__(self, folder: Path, session: aiohttp.ClientSession) -> None:
        self.folder, self.session = folder, session
        self.hosts: list[Served] = []
        self._servers: list[TestServer] = []
        self.key = folder / "owner.key"
        self.key.write_text((bytes([99]) * 32).hex())
        self.key.chmod(0o600)
        assert OWNER.public_key == Ed25519Signer(bytes([99]) * 32).public_key

    async def serve(self, run: Run, who: Ed25519Signer, *, slow: bool = False) -> Served:
        host = Served(self.folder / f"host-{len(self.hosts)}", run, who, slow=slow)
        server = TestServer(host.app())
        await server.start_server()
        self._servers.append(server)
        self.hosts.append(host)
        host.url = str(server.make_url("")).rstrip("/")
        return host

    def seen(self, run: Run) -> SeenRun:
        seen = SeenRun(self.session, run.id, run.spec, [self.hosts[0].url], Quiet())
        for host in self.hosts:
            peer = PeerId(host.who.peer_id)
            seen.hosts[peer] = Host(peer, "n" + peer.hex()[:4], host.who is WITNESS, (host.url,))
        return seen

    async def close(self) -> None:
        for host in self.hosts:
            host.over.set()
        for server in self._servers:
            await server.close()


@pytest.fixture
async def swarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Swarm]:
    monkeypatch.setattr(limits, "log_retry_s", 0.0)
    async with aiohttp.ClientSession() as session:
        made = Swarm(tmp_path, session)
        yield made
        await made.close()
