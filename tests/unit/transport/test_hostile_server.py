"""A server is an attacker too (targets H4): whatever it answers, the client ends with a TransportError."""

from __future__ import annotations

import asyncio
import gzip
import os
from typing import Any

import pytest

from p2pdiloco.errors import TransportError
from p2pdiloco.ids import digest_of
from p2pdiloco.wire.messages import Goodbye
from p2pdiloco.wire.signing import Ed25519Signer
from p2pdiloco_node.ports import Purpose

DATA = os.urandom(100_000)
NAME = digest_of(DATA)
LIAR = Ed25519Signer(b"l" * 32)
SIZE = str(len(DATA)).encode()


def answer(head: bytes, body: bytes = b"") -> bytes:
    return b"HTTP/1.1 " + head.replace(b"\n", b"\r\n") + b"\r\n\r\n" + body


REPLIES = {
    "wrong bytes": (answer(b"200 OK\nContent-Length: " + SIZE, bytes(len(DATA))), "WRONG_DIGEST"),
    "short": (answer(b"200 OK\nContent-Length: " + SIZE, DATA[:-1]), None),
    "endless": (answer(b"200 OK\nContent-Length: 999999999999", DATA), "TOO_BIG"),
    "no length": (answer(b"200 OK\nConnection: close", DATA), "NO_LENGTH"),
    "chunked": (answer(b"200 OK\nTransfer-Encoding: chunked", b"FFFFFFFF\r\n" + DATA), "NO_LENGTH"),
    "negative": (answer(b"200 OK\nContent-Length: -5", DATA), None),
    "two lengths": (answer(b"200 OK\nContent-Length: 5\nContent-Length: 6", DATA), None),
    "bomb": (
        answer(b"200 OK\nContent-Encoding: gzip\nContent-Length: " + SIZE, gzip.compress(bytes(10**6))),
        "ENCODED",
    ),
    "redirect": (answer(b"302 Found\nLocation: http://169.254.169.254/\nContent-Length: 0"), None),
    "error": (answer(b"500 Oops\nContent-Length: 5", b"oops!"), None),
    "other range": (
        answer(
            b"206 Partial\nContent-Range: bytes 5-99999/100000\nContent-Length: 99995",
            DATA[5:],
        ),
        "BAD_RANGE",
    ),
    "no range": (answer(b"206 Partial\nContent-Length: 5", DATA[:5]), "BAD_RANGE"),
    "odd range": (
        answer(b"206 Partial\nContent-Range: bytes 0-9/5\nContent-Length: 10", DATA[:10]),
        "BAD_RANGE",
    ),
    "long head": (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000, None),
    "many heads": (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 100_000, None),
    "not http": (b"SSH-2.0-OpenSSH_9.2\r\n", None),
    "zeros": (bytes(1000), None),
    "nothing": (b"", None),
}


@pytest.mark.parametrize("name", REPLIES)
async def test_a_lying_donor_is_left_for_an_honest_one(ends: Any, hostile: Any, name: str) -> None:
    one, two = await ends(2)
    two.blobs.put(NAME, DATA, Purpose.SHARD)
    reply, struck = REPLIES[name]

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)
        await writer.drain()

    async with hostile(script) as port:
        one.knows(LIAR, port)
        with pytest.raises(TransportError):
            await one.client.fetch(NAME, len(DATA), [LIAR.peer_id], Purpose.SHARD)
        listed = one.client.strikes.listed()
        assert [s.last_reason for s in listed.values()] == ([struck] if struck else [])
        await one.client.fetch(NAME, len(DATA), [LIAR.peer_id, two.peer], Purpose.SHARD)
    assert one.blobs.read(NAME) == DATA
    assert one.client.strikes.total(two.peer) == 0


async def test_a_donor_that_trickles_is_cut_off_and_its_bytes_are_used(ends: Any, hostile: Any) -> None:
    one, two = await ends(2)
    two.blobs.put(NAME, DATA, Purpose.SHARD)

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer(b"200 OK\nContent-Length: " + SIZE))
        for n in range(10_000):
            writer.write(DATA[n : n + 1])
            await writer.drain()
            await asyncio.sleep(0.02)

    async with hostile(script) as port:
        one.knows(LIAR, port)
        async with asyncio.timeout(2):
            await one.client.fetch(NAME, len(DATA), [LIAR.peer_id, two.peer], Purpose.SHARD)
    assert one.client.strikes.listed()[LIAR.peer_id].last_reason == "TOO_SLOW"
    assert one.blobs.read(NAME) == DATA


async def test_two_donors_one_lies_and_the_honest_one_is_not_struck(ends: Any, hostile: Any) -> None:
    one, two = await ends(2)
    two.blobs.put(NAME, DATA, Purpose.SHARD)

    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer(b"200 OK\nContent-Length: " + SIZE, bytes(50_000)))
        await writer.drain()

    async with hostile(half) as port:
        one.knows(LIAR, port)
        # The liar's half and the honest half do not hash to it: then the whole is taken from one at a time.
        await one.client.fetch(NAME, len(DATA), [LIAR.peer_id, two.peer], Purpose.SHARD)
    assert one.blobs.read(NAME) == DATA
    assert one.client.strikes.total(two.peer) == 0


async def test_a_reply_to_a_message_may_be_anything(ends: Any, hostile: Any) -> None:
    (one,) = await ends(1)
    replies = [r for r, _ in REPLIES.values()]
    replies += [
        answer(b"400 No\nContent-Length: 17", b'{"reason": [[[[[}'),
        answer(b"400 No\nContent-Length: 6", b"[1, 2]"),
        answer(b"400 No\nContent-Length: 20000", b"[" * 20_000),
        answer(b"400 No\nContent-Length: 10000", b"[" * 10_000),
        answer(b"503 No\nRetry-After: 1e99\nContent-Length: 0"),
        answer(b"503 No\nRetry-After: nan\nContent-Length: 0"),
        answer(b"429 No\nRetry-After: -7\nContent-Length: 0"),
    ]

    reply = b""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)
        await writer.drain()

    async with hostile(script) as port:
        one.knows(LIAR, port)
        for n in range(len(replies)):
            reply = replies[n]
            with pytest.raises(TransportError) as caught:
                await one.client._post(LIAR.peer_id, Goodbye(str(n)))
            assert 0 < (caught.value.retry_after_s or 1) <= 10


async def test_an_upload_to_one_that_stops_reading_is_cut_off(ends: Any, hostile: Any) -> None:
    (one,) = await ends(1)
    data = os.urandom(20_000_000)
    one.blobs.put(digest_of(data), data)

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"HEAD"):
            writer.write(answer(b"200 OK\nUpload-Offset: 0\nContent-Length: 0"))
            await writer.drain()
            await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(60)

    async with hostile(script) as port:
        one.knows(LIAR, port)
        with pytest.raises(TransportError, match="slower"):
            async with asyncio.timeout(10):
                await one.client.upload(LIAR.peer_id, digest_of(data), len(data))


@pytest.mark.parametrize("offset", [b"-1", b"x", b"9" * 40, b""])
async def test_an_offset_that_is_none(ends: Any, hostile: Any, offset: bytes) -> None:
    (one,) = await ends(1)
    one.blobs.put(NAME, DATA)

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer(b"200 OK\nUpload-Offset: " + offset + b"\nContent-Length: 0"))
        await writer.drain()

    async with hostile(script) as port:
        one.knows(LIAR, port)
        with pytest.raises(TransportError, match="offset"):
            await one.client.upload(LIAR.peer_id, NAME, len(DATA))
