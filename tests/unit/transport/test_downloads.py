"""What is there for readers without a key: the log, snapshots, checkpoints; with ranges, slots and rates."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from p2pdiloco import limits
from p2pdiloco.ids import RunId
from p2pdiloco.wire.codec import decode
from p2pdiloco.wire.messages import SnapshotOffer
from p2pdiloco_node.transport.answers import faults_as_answers
from p2pdiloco_node.transport.downloads import Downloads, Offered
from p2pdiloco_node.transport.guards import Strikes
from p2pdiloco_node.transport.readers import ReaderRoutes, Snapshots
from p2pdiloco_node.transport.traffic import Traffic

Client = TestClient[web.Request, web.Application]
Serve = Callable[[list[web.RouteDef]], Awaitable[Client]]
RUN = RunId(bytes(32))
DATA = bytes(range(256)) * 40
SHA = "ab" * 32
NAME = "v16/model.safetensors"


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    clients: list[Client] = []

    async def start(routes: list[web.RouteDef]) -> Client:
        app = web.Application(middlewares=[faults_as_answers(Strikes(lambda: 0.0))])
        app.add_routes(routes)
        clients.append(TestClient(TestServer(app)))
        await clients[-1].start_server()
        return clients[-1]

    yield start
    for client in clients:
        await client.close()


def downloads(folder: Path, now: list[float], *, local: bool = True, known: str = "") -> Downloads:
    path = folder / "weights"
    path.write_bytes(DATA)
    offered = {NAME: Offered(path, len(DATA), SHA), "v0/gone": Offered(folder / "none", 1, SHA)}
    return Downloads(
        offered.get, lambda: b'{"kept":1}', Traffic(), local=local, known=known.__eq__, clock=lambda: now[0]
    )


async def test_a_checkpoint_comes_whole_and_in_ranges_and_is_never_shown_as_a_page(
    serve: Serve, tmp_path: Path
) -> None:
    client = await serve(downloads(tmp_path, [0.0]).routes())
    async with client.get(f"/checkpoints/{NAME}") as answer:
        assert await answer.read() == DATA
        assert answer.headers["ETag"] == f'"{SHA}"'
        assert answer.headers["P2PDiLoCo-SHA256"] == SHA
        assert answer.headers["Content-Disposition"] == 'attachment; filename="model.safetensors"'
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert "sandbox" in answer.headers["Content-Security-Policy"]
    async with client.get(f"/checkpoints/{NAME}", headers={"Range": "bytes=10-19"}) as answer:
        assert answer.status == 206
        assert await answer.read() == DATA[10:20]
        assert answer.headers["Content-Range"] == f"bytes 10-19/{len(DATA)}"
    other = {"Range": "bytes=10-19", "If-Range": '"cd"'}
    async with client.get(f"/checkpoints/{NAME}", headers=other) as answer:
        assert answer.status == 200, "another file meanwhile: from the start"
        assert await answer.read() == DATA
    async with client.head(f"/checkpoints/{NAME}") as answer:
        assert (answer.status, answer.content_length) == (200, len(DATA))
    async with client.get(f"/checkpoints/{NAME}", headers={"Range": "bytes=99999999-"}) as answer:
        assert answer.status == 416
    async with client.get("/v1/checkpoints") as answer:
        assert json.loads(await answer.read()) == {"kept": 1}


@pytest.mark.parametrize("name", ["v0/gone", "v16/none", "../weights", "v16/%2e%2e/weights"])
async def test_what_is_not_offered_is_not_there(serve: Serve, tmp_path: Path, name: str) -> None:
    client = await serve(downloads(tmp_path, [0.0]).routes())
    async with client.get(f"/checkpoints/{name}") as answer:
        assert answer.status == 404


async def test_downloads_have_slots_and_a_rate_of_their_own(serve: Serve, tmp_path: Path) -> None:
    now = [0.0]
    made = downloads(tmp_path, now, local=False)
    client = await serve(made.routes())
    with ExitStack() as taken:
        for n in range(limits.downloads_max - limits.downloads_kept):
            taken.enter_context(made._files._slots.held(f"192.0.2.{n}"))
        async with client.get(f"/checkpoints/{NAME}") as answer:
            assert answer.status == 503
            assert "Retry-After" in answer.headers
    statuses = []
    for _ in range(limits.downloads_per_address_burst):
        async with client.head(f"/checkpoints/{NAME}") as answer:
            statuses.append(answer.status)
    assert statuses.count(200) == limits.downloads_per_address_burst - 1
    assert statuses[-1] == 429
    now[0] = 1.0
    async with client.head(f"/checkpoints/{NAME}") as answer:
        assert answer.status == 200


def log_readers(folder: Path, known: str = "") -> ReaderRoutes:
    path = folder / "log"
    path.write_bytes(DATA)
    return ReaderRoutes(RUN, path, lambda: 0, list, Traffic(), local=False, known=known.__eq__)


def weights(folder: Path, known: str = "") -> Downloads:
    return downloads(folder, [0.0], local=False, known=known)


@pytest.mark.parametrize(("make", "path"), [(log_readers, "/v1/log"), (weights, f"/checkpoints/{NAME}")])
async def test_one_address_that_reads_slowly_holds_up_nobody_else(
    serve: Serve, tmp_path: Path, make: Callable[..., Any], path: str
) -> None:
    made = make(tmp_path)
    slots = made._files._slots
    client = await serve(made.routes())
    with ExitStack() as taken:
        while slots.is_free("192.0.2.1", known=False):
            taken.enter_context(slots.held("192.0.2.1"))
        async with client.get(path) as answer:
            assert answer.status == 200
        assert slots.is_free("192.0.2.2", known=False)


@pytest.mark.parametrize(("make", "path"), [(log_readers, "/v1/log"), (weights, f"/checkpoints/{NAME}")])
async def test_whom_the_log_knows_has_places_that_strangers_cannot_take(
    serve: Serve, tmp_path: Path, make: Callable[..., Any], path: str
) -> None:
    made = make(tmp_path, known="127.0.0.1")
    slots = made._files._slots
    client = await serve(made.routes())
    with ExitStack() as taken:
        for n in range(100):
            if slots.is_free(f"192.0.2.{n}", known=False):
                taken.enter_context(slots.held(f"192.0.2.{n}"))
        assert not slots.is_free("203.0.113.1", known=False)
        async with client.get(path) as answer:
            assert answer.status == 200


async def test_the_log_is_there_to_read_and_to_go_on_reading(serve: Serve, tmp_path: Path) -> None:
    log = tmp_path / "log"
    offers = [SnapshotOffer(i, (bytes(32),), (bytes(32),), b"r") for i in (16, 32, 48)]
    client = await serve(ReaderRoutes(RUN, log, lambda: 0, lambda: offers, Traffic(), local=True).routes())
    async with client.get("/v1/log") as answer:
        assert answer.status == 404
    log.write_bytes(DATA)
    async with client.get("/v1/log") as answer:
        assert await answer.read() == DATA
    log.write_bytes(DATA + b"more")
    async with client.get("/v1/log", headers={"Range": f"bytes={len(DATA)}-"}) as answer:
        assert await answer.read() == b"more"
    async with client.get("/v1/snapshots") as answer:
        found = decode(await answer.read(), Snapshots).offers
    assert [offer.index for offer in found] == [32, 48], "the newest, as many as a node keeps"


async def test_readers_have_a_rate(serve: Serve, tmp_path: Path) -> None:
    routes = ReaderRoutes(RUN, tmp_path / "log", lambda: 0, list, Traffic(), local=True, clock=lambda: 0.0)
    client = await serve(routes.routes())
    for n in range(limits.reads_per_address_burst + 1):
        async with client.get("/v1/snapshots") as answer:
            assert answer.status == (200 if n < limits.reads_per_address_burst else 429)


async def test_a_log_that_was_cut_does_not_go_on_from_a_byte(serve: Serve, tmp_path: Path) -> None:
    """A recovery cuts it, and then it may grow beyond what a reader has: that would be half of each."""
    log, rewrites = tmp_path / "log", [0]
    readers = ReaderRoutes(RUN, log, lambda: rewrites[0], list, Traffic(), local=True)
    client = await serve(readers.routes())
    log.write_bytes(DATA)
    async with client.get("/v1/log") as answer:
        tag = answer.headers["ETag"]
    rest = {"Range": f"bytes={len(DATA)}-", "If-Range": tag}
    log.write_bytes(DATA + b"more")
    async with client.get("/v1/log", headers=rest) as answer:
        assert (answer.status, await answer.read()) == (206, b"more")
    log.write_bytes(DATA[::-1] + b"other")
    rewrites[0] += 1
    async with client.get("/v1/log", headers=rest) as answer:
        assert (answer.status, await answer.read()) == (200, DATA[::-1] + b"other")
    again = ReaderRoutes(RUN, log, lambda: 0, list, Traffic(), local=True)  # the process began anew
    client = await serve(again.routes())
    async with client.get("/v1/log", headers=rest) as answer:
        assert answer.status == 200
