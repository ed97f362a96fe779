"""Exports from a link: a tracker on loopback, and hosts that lie, break off or serve something else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from safetensors.numpy import load_file

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.run_spec import TokenizerSpec
from p2pdiloco.wire.codec import encode
from p2pdiloco.wire.messages import SnapshotOffer
from p2pdiloco_node.export import command, fetched, sources
from p2pdiloco_node.export.command import Options, export
from p2pdiloco_node.ports import Purpose
from p2pdiloco_node.transport.readers import Snapshots

Make = Callable[..., Any]
Change = Callable[[web.Request], web.StreamResponse | None]
Serve = Callable[..., Awaitable[str]]


def quiet(*_: object) -> None:
    """Nobody watches."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "full_config", lambda *_: None)
    monkeypatch.setattr(fetched, "PAUSE_S", 0.0)
    monkeypatch.setattr(limits, "log_retry_s", 0.0)


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """`serve(run)`: its address. `change` may answer instead of it."""
    servers = []

    async def start(run: Any, change: Change = lambda _request: None) -> str:
        run.routes()

        @web.middleware
        async def middleware(request: web.Request, handler: Any) -> web.StreamResponse:
            return change(request) or await handler(request)

        run.app.middlewares.append(middleware)
        servers.append(TestServer(run.app))
        await servers[-1].start_server()
        return f"http://127.0.0.1:{servers[-1].port}"

    yield start
    for server in servers:
        await server.close()


async def exported(url: str, out: Path, **options: Any) -> dict[str, Any]:
    """In a thread, as the command has a loop of its own."""
    await asyncio.to_thread(export, Options(out, join=url, **options), quiet)
    return load_file(out / "model.safetensors")


def same(tensors: dict[str, Any], run: Any, version: int) -> bool:
    flat = b"".join(tensors[t.name].tobytes() for t in run.model.tensors)
    return bool(flat == run.params[version].tobytes())


@pytest.mark.parametrize("asked", ["newest", "2", "1", "0"])
async def test_a_version_over_the_network(serve: Serve, kept_run: Make, tmp_path: Path, asked: str) -> None:
    """Snapshot and deltas since; a snapshot alone; version 0 and deltas; version 0."""
    run = kept_run().steps(2)
    run.snapshot()
    run.steps(1)
    url = await serve(run)
    tensors = await exported(f"{url}/#{run.run.hex()}", tmp_path / "out", version=asked, held_out=True)
    assert same(tensors, run, 3 if asked == "newest" else int(asked))
    facts = json.loads((tmp_path / "out/p2pdiloco.json").read_bytes())
    assert facts["run"]["id"] == run.run.hex()
    assert facts["evaluation"] is None, "a node has no page: nothing is made up"
    assert (tmp_path / "out/held-out.npy").stat().st_size > run.held_out.tokens


async def test_loss_and_names_come_from_the_page(serve: Serve, kept_run: Make, tmp_path: Path) -> None:
    run = kept_run().steps(2)
    page = {
        "learning": {"evaluations": [{"version": v, "loss": 1.5 + v, "tokens": 7} for v in (0, 1, 9)]},
        "nodes": [{"who": {"fingerprint": run.delta(0).peer.hex()[:8], "name": "attic"}}],
    }

    def change(request: web.Request) -> web.StreamResponse | None:
        return web.json_response(page) if request.path == "/api/status" else None

    url = await serve(run, change)
    await exported(url, tmp_path / "out")
    facts = json.loads((tmp_path / "out/p2pdiloco.json").read_bytes())
    assert (facts["evaluation"]["version"], facts["evaluation"]["loss"]) == (1, 2.5)
    assert sorted(c["name"] for c in facts["contributors"]) == ["", "attic"]


@pytest.mark.parametrize(
    "page",
    [
        b'{"learning":{"evaluations":[{"version":1e999,"loss":1,"tokens":1}]},"nodes":[]}',
        b'{"learning":{"evaluations":[{"version":1,"loss":1e999,"tokens":1}]},"nodes":[]}',
        b'{"learning":{"evaluations":[{"version":1,"loss":NaN,"tokens":1}]},"nodes":[]}',
        b'{"learning":{"evaluations":[{"version":1,"loss":1,"tokens":1}]},"nodes":[{"who":"me"}]}',
        b'{"learning":' + b"[" * 100_000,
        b"[]",
        b"\xff",
    ],
    ids=["a version", "a loss", "no number", "a name", "depth", "a list", "no text"],
)
async def test_a_page_that_makes_no_sense_costs_the_card_its_loss_alone(
    serve: Serve, kept_run: Make, tmp_path: Path, page: bytes
) -> None:
    run = kept_run().steps(1)

    def change(request: web.Request) -> web.StreamResponse | None:
        return web.Response(body=page) if request.path == "/api/status" else None

    assert same(await exported(await serve(run, change), tmp_path / "out"), run, 1)
    assert json.loads((tmp_path / "out/p2pdiloco.json").read_bytes())["evaluation"] is None


async def test_a_damaged_log_has_no_newest_version(serve: Serve, kept_run: Make, tmp_path: Path) -> None:
    run = kept_run().steps(3)
    path = run.folder / "witness" / "journal" / "log"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    url = await serve(run)
    with pytest.raises(OperatorError, match="damaged behind version 1") as caught:
        await exported(url, tmp_path / "out")
    assert caught.value.exit_code == 5
    nothing_written(tmp_path)


async def test_a_log_that_breaks_off_is_gone_on_with(serve: Serve, kept_run: Make, tmp_path: Path) -> None:
    run = kept_run().steps(2)
    asked: list[str | None] = []

    def change(request: web.Request) -> web.StreamResponse | None:
        if request.path == "/v1/log":
            asked.append(request.headers.get("Range"))
            if len(asked) == 1:
                return web.Response(status=503, headers={"Retry-After": "0"})
        return None

    url = await serve(run, change)
    assert same(await exported(url, tmp_path / "out"), run, 2)
    assert asked == [None, None]


async def test_another_run_is_refused(serve: Serve, kept_run: Make, tmp_path: Path) -> None:
    run = kept_run()
    url = await serve(run)
    with pytest.raises(OperatorError, match=r"serves run .*, not abababab") as caught:
        await exported(f"{url}/#{'ab' * 32}", tmp_path / "out")
    assert caught.value.exit_code == 5
    nothing_written(tmp_path)


async def test_nobody_there(tmp_path: Path, unused_tcp_port: int) -> None:
    with pytest.raises(OperatorError, match="No reachable tracker: tried") as caught:
        await exported(f"http://127.0.0.1:{unused_tcp_port}", tmp_path / "out")
    assert caught.value.exit_code == 4
    nothing_written(tmp_path)


def cut_blob(run: Any) -> Change:
    """Every blob ends early, and says that this is all."""

    def change(request: web.Request) -> web.StreamResponse | None:
        name = request.path.rpartition("/")[2]
        if not request.path.startswith("/v1/blobs/"):
            return None
        return web.Response(body=run.blobs.read(bytes.fromhex(name))[:-1])

    return change


def long_chunks(run: Any) -> Change:
    """A byte more than the model makes of them."""

    def change(request: web.Request) -> web.StreamResponse | None:
        name = request.path.rpartition("/")[2]
        if not request.path.startswith("/v1/blobs/") or bytes.fromhex(name) not in run.spec.genesis.params:
            return None
        return web.Response(body=run.blobs.read(bytes.fromhex(name)) + b"x")

    return change


def other_bytes(run: Any) -> Change:
    def change(request: web.Request) -> web.StreamResponse | None:
        name = request.path.rpartition("/")[2]
        if not request.path.startswith("/v1/blobs/"):
            return None
        return web.Response(body=bytes(len(run.blobs.read(bytes.fromhex(name)))))

    return change


def no_deltas(run: Any) -> Change:
    def change(request: web.Request) -> web.StreamResponse | None:
        name = request.path.rpartition("/")[2]
        delta = request.path.startswith("/v1/blobs/") and run.blobs.purpose(bytes.fromhex(name))
        return web.json_response({"reason": "NOT_HERE"}, status=404) if delta is Purpose.DELTA else None

    return change


def answer_at(path: str, body: bytes) -> Callable[[Any], Change]:
    return lambda _run: lambda request: web.Response(body=body) if request.path == path else None


def forged_entry(run: Any) -> Change:
    data = bytearray((run.folder / "witness/journal/log").read_bytes())
    other = bytes(data).replace(run.delta(0).key, bytes(32))
    return lambda request: web.Response(body=other) if request.path == "/v1/log" else None


@pytest.mark.parametrize(
    ("lie", "sentence"),
    [
        (cut_blob, "chunks of the model did not come|deltas did not come"),
        (long_chunks, "chunks of the model did not come .*TOO_BIG"),
        (other_bytes, "did not come .*came damaged"),
        (no_deltas, "deltas did not come .*--version of a snapshot"),
        (answer_at("/v1/log", b"<html>not a log</html>"), "is not a p2pdiloco log"),
        (answer_at("/v1/snapshots", b"nonsense"), "snapshots that do not open"),
    ],
)
async def test_a_lying_host_gets_one_sentence_and_nothing_is_written(
    serve: Serve, kept_run: Make, tmp_path: Path, lie: Callable[[Any], Change], sentence: str
) -> None:
    run = kept_run().steps(2)
    url = await serve(run, lie(run))
    with pytest.raises(OperatorError, match=sentence):
        await exported(url, tmp_path / "out")
    nothing_written(tmp_path)


async def test_a_version_0_that_no_such_model_has_is_the_owner_s_fault(
    serve: Serve, kept_run: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = kept_run()
    url = await serve(run)
    monkeypatch.setattr(sources, "chunk_sizes", lambda params: [4 * params - 4])
    with pytest.raises(OperatorError, match="the run's owner has to make the run anew") as caught:
        await exported(url, tmp_path / "out")
    assert caught.value.exit_code == 5
    nothing_written(tmp_path)


@pytest.mark.parametrize("what", ["tokenizer", "held-out text"])
@pytest.mark.parametrize(
    ("lie", "sentence"),
    [
        ("no end", "NO_LENGTH"),
        ("too long", "it lies, or the run's owner"),
        ("other bytes", "came damaged"),
        ("elsewhere", "answered 302"),
    ],
)
async def test_texts_that_have_no_end_or_are_others_are_not_waited_for(
    serve: Serve, kept_run: Make, tmp_path: Path, what: str, lie: str, sentence: str
) -> None:
    run = kept_run(tokenizer_json=b"{}", tokenizer=TokenizerSpec("json", 256, 0))
    data = run.spec.data
    digest = data.tokenizer.pieces[0].digest if what == "tokenizer" else data.evaluation.digest

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield bytes(1 << 16)

    def change(request: web.Request) -> web.StreamResponse | None:
        if request.path != f"/v1/blobs/{digest.hex()}":
            return None
        match lie:
            case "no end":
                return web.Response(body=endless())
            case "too long":
                return web.Response(body=endless(), headers={"Content-Length": str(10**12)})
            case "other bytes":
                return web.Response(body=b"x" * len(run.blobs.read(digest)))
            case _:
                return web.Response(status=302, headers={"Location": "http://169.254.169.254/"})

    url = await serve(run, change)
    async with asyncio.timeout(20):
        with pytest.raises(OperatorError, match=sentence) as caught:
            await exported(url, tmp_path / "out", held_out=True)
    assert caught.value.exit_code == 4
    nothing_written(tmp_path)


async def test_entries_after_a_forged_one_are_not_used(serve: Serve, kept_run: Make, tmp_path: Path) -> None:
    """The frame's checksum fails where bytes were changed: what stands before it still proves itself."""
    run = kept_run().steps(2)
    url = await serve(run, forged_entry(run))
    with pytest.raises(OperatorError, match="damaged behind version 0"):
        await exported(url, tmp_path / "out")
    assert same(await exported(url, tmp_path / "out", version="0"), run, 0)


async def test_a_snapshot_that_no_entry_certifies_is_left_out(
    serve: Serve, kept_run: Make, tmp_path: Path
) -> None:
    run = kept_run().steps(2)
    run.snapshot()
    true = run.keeper.snapshots[-1]
    false = SnapshotOffer(true.index, run.spec.genesis.params, true.momentum, true.rules)
    body = encode(Snapshots((false,)))
    url = await serve(run, answer_at("/v1/snapshots", body)(run))
    assert same(await exported(url, tmp_path / "out"), run, 2)


def nothing_written(folder: Path) -> None:
    assert not (folder / "out").exists()
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []
