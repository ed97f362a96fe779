"""Slow clients, too many of them, and a port that is taken (targets H2, scenario E2)."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from p2pdiloco.errors import OperatorError, TransportError
from p2pdiloco_node.transport import listener as module
from p2pdiloco_node.transport.listener import Listener, check_c_parser, check_open_files


async def hello(_request: web.Request) -> web.Response:
    return web.Response(text="hello")


def app() -> web.Application:
    made = web.Application()
    made.add_routes([web.get("/", hello)])
    return made


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port)


async def close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


@pytest.mark.parametrize(
    "rubbish", [b"\x16\x03\x01\x02\r\n\r\n", b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n\r\n"]
)
async def test_rubbish_from_strangers_does_not_fill_the_log(
    rubbish: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with Listener(app(), "127.0.0.1", 0) as listener:
        reader, writer = await connect(listener.port)
        writer.write(rubbish)
        assert b" 400 " in await asyncio.wait_for(reader.readline(), 5)
        await close(writer)
    assert caplog.records == []


async def test_slow_headers_are_closed_and_honest_clients_served(http: aiohttp.ClientSession) -> None:
    async with Listener(app(), "127.0.0.1", 0, per_address_max=300, idle_s=0.5) as listener:
        slow = [await connect(listener.port) for _ in range(100)]
        for _, writer in slow[:50]:
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        started = time.monotonic()

        async def dribble() -> None:
            while time.monotonic() - started < 1.5:
                for _, writer in slow[:50]:
                    writer.write(b"x")
                await asyncio.sleep(0.1)

        waits = []
        async with asyncio.TaskGroup() as group:
            group.create_task(dribble())
            for _ in range(30):
                before = time.monotonic()
                async with http.get(f"http://127.0.0.1:{listener.port}/") as answer:
                    assert answer.status == 200
                waits.append(time.monotonic() - before)
                await asyncio.sleep(0.02)
        assert sorted(waits)[-2] < 0.25
        async with asyncio.timeout(2):
            for reader, writer in slow:
                with suppress(ConnectionError):
                    await reader.read()
                await close(writer)
        assert listener.open.total() <= 1  # the honest one


async def test_connections_are_capped_in_total_and_per_address(until: Any) -> None:
    async with Listener(
        app(), "0.0.0.0", 0, connections_max=5, per_address_max=3, idle_s=5
    ) as listener:  # fmt: skip
        mine = [await connect(listener.port) for _ in range(4)]
        async with asyncio.timeout(2):
            with suppress(ConnectionError):
                assert await mine[3][0].read() == b""
        others = []
        for n in range(3):
            sock = socket.create_connection(
                ("127.0.0.1", listener.port), source_address=(f"127.0.0.{n + 5}", 0)
            )
            sock.setblocking(False)
            others.append(await asyncio.open_connection(sock=sock))
        await until(lambda: listener.refused == 2)
        assert listener.open == Counter({"127.0.0.1": 3, "127.0.0.5": 1, "127.0.0.6": 1})
        for _, writer in mine + others:
            await close(writer)
        await until(lambda: not listener.open)
        reader, writer = await connect(listener.port)
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.0 200")
        await close(writer)


async def test_a_port_in_use_is_one_sentence() -> None:
    async with Listener(app(), "127.0.0.1", 0) as first:
        with pytest.raises(OperatorError, match=f"Port {first.port} on 127.0.0.1 is in use") as caught:
            async with Listener(app(), "127.0.0.1", first.port):
                pass
        assert caught.value.exit_code == 6
    with pytest.raises(OperatorError, match="--listen"):
        async with Listener(app(), "192.0.2.1", 0):
            pass


async def test_a_server_that_dies_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WATCH_S", 0.01)
    async with Listener(app(), "127.0.0.1", 0) as listener:
        watch = asyncio.create_task(listener.watch())
        await asyncio.sleep(0.05)
        assert not watch.done()
        assert listener._server is not None
        listener._server.close()
        with pytest.raises(TransportError, match="stopped"):
            async with asyncio.timeout(1):
                await watch


def test_checks_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    check_c_parser()
    check_open_files(64)
    with pytest.raises(OperatorError, match="ulimit"):
        check_open_files(10**9)
    monkeypatch.setattr(
        aiohttp.http_parser, "HttpRequestParser", aiohttp.http_parser.HttpRequestParserPy
    )  # fmt: skip
    with pytest.raises(OperatorError, match="C parser"):
        check_c_parser()
