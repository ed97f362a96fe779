"""Which run a data folder that was in one before takes part in."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from p2pdiloco.errors import OperatorError
from p2pdiloco.ids import RunId
from p2pdiloco.run_spec import RunSpec, run_id_of, sign_run_spec
from p2pdiloco.sim.tiny_run import tiny_run
from p2pdiloco.wire.codec import encode
from p2pdiloco.wire.envelope import PROTOCOL_VERSION
from p2pdiloco.wire.signing import Ed25519Signer
from p2pdiloco_node.config import parse_join
from p2pdiloco_node.storage.data_dir import DataDir
from p2pdiloco_node.taking_part.joining import Found, find_run
from p2pdiloco_node.transport.http_session import make_session
from p2pdiloco_node.transport.listener import Listener

OWNER = Ed25519Signer(b"o" * 32)


def run_named(name: str) -> tuple[RunId, bytes]:
    spec = msgspec.structs.replace(tiny_run(OWNER, OWNER.peer_id).spec, name=name)
    return run_id_of(encode(spec)), sign_run_spec(spec, OWNER)


@asynccontextmanager
async def serving(run: RunId, signed: bytes) -> AsyncIterator[str]:
    said = json.dumps({"protocol": PROTOCOL_VERSION, "build": "1", "run": run.hex()})
    app = web.Application()

    async def version(_: web.Request) -> web.Response:
        return web.Response(text=said)

    async def spec(_: web.Request) -> web.Response:
        return web.Response(body=signed)

    app.add_routes([web.get("/v1/version", version), web.get("/v1/run", spec)])
    async with Listener(app, "127.0.0.1", 0) as listener:
        yield f"http://127.0.0.1:{listener.port}"


async def joined(folder: Path, link: str) -> Found:
    async def fits(_spec: RunSpec, _folder: Path) -> None:
        pass

    async with make_session(connections_max=2, per_host_max=0, build="1") as session:
        with DataDir(folder) as data:
            return await find_run(data, session, parse_join(link), (), fits=fits)


async def test_a_bare_address_of_another_run_is_refused_before_the_folder_is_touched(tmp_path: Path) -> None:
    """The node took part in nothing, and said that training goes on."""
    (austen, first), (second, other) = run_named("austen"), run_named("second")
    folder = tmp_path / "n1"
    async with serving(austen, first) as url:
        assert (await joined(folder, url)).run == austen
        assert (await joined(folder, url)).run == austen, "the same run by its bare address"
    assert (await joined(folder, url)).run == austen, "a tracker that is away keeps nobody from its run"
    pinned = (folder / "join").read_text()
    async with serving(second, other) as url:
        with pytest.raises(OperatorError) as caught:
            await joined(folder, url)
        assert caught.value.exit_code == 5
        assert str(caught.value) == (
            f"{url} serves run second ({second.hex()[:16]}), and {folder} belongs to austen "
            f"({austen.hex()[:16]}): take another --data-dir, or join with the whole link, "
            f"{url}/#{second.hex()}"
        )
        assert (folder / "join").read_text() == pinned
        assert (await joined(folder, f"{url}/#{second.hex()}")).run == second, "the whole link says which"


async def test_what_does_not_say_its_run_keeps_nobody_from_its_own(tmp_path: Path) -> None:
    austen, first = run_named("austen")
    async with serving(austen, first) as url:
        await joined(tmp_path / "n1", url)
    async with serving(RunId(b"x" * 32), b"no RunSpec") as url:
        assert (await joined(tmp_path / "n1", url)).run == austen
