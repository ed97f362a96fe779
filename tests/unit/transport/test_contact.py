"""First words with what answers for a tracker: whose fault it is, and that nothing is followed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import web

from p2pdiloco.errors import OperatorError, TransportError
from p2pdiloco.ids import RunId
from p2pdiloco.run_spec import RunSpec, SignedRunSpec, run_id_of, sign_run_spec
from p2pdiloco.sim.tiny_run import tiny_run
from p2pdiloco.wire.codec import encode
from p2pdiloco.wire.envelope import PROTOCOL_VERSION
from p2pdiloco.wire.signing import Ed25519Signer
from p2pdiloco_node.transport.contact import NotATracker, fetch_peers, fetch_run_spec, greet
from p2pdiloco_node.transport.http_session import make_session
from p2pdiloco_node.transport.listener import Listener

OWNER = Ed25519Signer(bytes([1]) * 32)
TINY = tiny_run(OWNER, OWNER.peer_id)
Answer = Callable[[web.Request], web.StreamResponse]


@asynccontextmanager
async def serving(answers: dict[str, Answer]) -> AsyncIterator[tuple[Any, str, list[str]]]:
    """A session, the address, and the paths that were asked for."""
    asked: list[str] = []

    async def any_path(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        answer = answers.get(request.path)
        return answer(request) if answer else web.Response(status=404)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", any_path)
    async with (
        Listener(app, "127.0.0.1", 0) as listener,
        make_session(connections_max=2, per_host_max=0, build="1") as session,
    ):
        yield session, f"http://127.0.0.1:{listener.port}", asked


def serves(signed: bytes, run: RunId) -> dict[str, Answer]:
    said = {"protocol": PROTOCOL_VERSION, "build": "1", "run": run.hex()}
    return {"/v1/version": lambda _: web.json_response(said), "/v1/run": lambda _: web.Response(body=signed)}


def changed(**fields: Any) -> RunSpec:
    return msgspec.structs.replace(TINY.spec, **fields)


async def test_a_run_that_cannot_be_is_its_owners_to_mend() -> None:
    for spec in (
        changed(eval_every=0),
        changed(inner=msgspec.structs.replace(TINY.spec.inner, inner_steps=0)),
    ):
        run = run_id_of(encode(spec))
        async with serving(serves(sign_run_spec(spec, OWNER), run)) as (session, url, _):
            with pytest.raises(OperatorError, match="Its owner has to make it anew") as caught:
                await fetch_run_spec(session, url, run)
        assert caught.value.exit_code == 5


async def test_what_somebody_changed_on_the_way_is_no_tracker() -> None:
    """Another server may have it as it was signed."""
    data = encode(TINY.spec)
    for signed in (
        encode(SignedRunSpec(data, bytes(64))),
        b"rubbish",
        sign_run_spec(changed(name="x"), OWNER),
    ):
        async with serving(serves(signed, TINY.run)) as (session, url, _):
            with pytest.raises(NotATracker, match="RunSpec that is not valid"):
                await fetch_run_spec(session, url, TINY.run)


async def test_nobody_is_sent_elsewhere() -> None:
    def away(request: web.Request) -> web.StreamResponse:
        raise web.HTTPFound("/elsewhere")

    good = serves(sign_run_spec(TINY.spec, OWNER), TINY.run)
    async with serving({"/v1/version": away, "/v1/peers": away}) as (session, url, asked):
        for ask in (greet, fetch_peers):
            with pytest.raises(NotATracker, match="answered 302"):
                await ask(session, url)
        assert asked == ["/v1/version", "/v1/peers"]
    async with serving(good | {"/v1/run": away}) as (session, url, asked):
        with pytest.raises(NotATracker, match="answered 302"):
            await fetch_run_spec(session, url, None)
        assert asked == ["/v1/version", "/v1/run"]


async def test_an_answer_without_an_end_is_said_to_be_one() -> None:
    """It was "an answer of None bytes"."""
    async with serving({"/v1/version": lambda _: _without_length()}) as (session, url, _):
        with pytest.raises(TransportError, match=r"^an answer without a length$"):
            await greet(session, url)


def _without_length() -> web.Response:
    answer = web.Response(body=b"x")
    answer.enable_chunked_encoding()
    return answer
