"""Blobs between real ends (scenarios A4, L2, L3, L4, R2, S6b)."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import io
from contextlib import ExitStack, suppress
from typing import Any

import aiohttp
import pytest

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError, TransportError
from p2pdiloco.ids import Digest, RunId, digest_of
from p2pdiloco.wire.messages import Goodbye, PeerRecord
from p2pdiloco_node.ports import Origin, Purpose
from p2pdiloco_node.transport.bodies import Pace
from p2pdiloco_node.transport.upload_proof import proof_headers

DATA = hashlib.shake_128(b"a blob").digest(1_500_000)
NAME = digest_of(DATA)
RUN = RunId(b"r" * 32)


async def test_an_upload_arrives_whole_and_is_told_once(ends: Any) -> None:
    one, two = await ends(2)
    one.blobs.put(NAME, DATA)
    two.server.allow(NAME, len(DATA), one.peer)
    await one.client.upload(two.peer, NAME, len(DATA))
    assert await two.deltas.get() == NAME
    assert two.blobs.read(NAME) == DATA
    await one.client.upload(two.peer, NAME, len(DATA))
    assert two.deltas.empty()
    assert one.client.traffic.up_data == two.server.traffic.down_data == len(DATA)


async def test_an_upload_goes_on_where_it_broke(ends: Any) -> None:
    one, two = await ends(2)
    one.blobs.put(NAME, DATA)
    two.blobs.append_part(NAME, 0, DATA[:1_000_000], len(DATA))
    two.server.allow(NAME, len(DATA), one.peer)
    await one.client.upload(two.peer, NAME, len(DATA))
    assert two.blobs.read(NAME) == DATA
    assert one.client.traffic.up_data == 500_000


async def test_an_upload_that_is_not_allowed_yet_is_offered_again_later(ends: Any) -> None:
    one, two = await ends(2)
    one.blobs.put(NAME, DATA)
    with pytest.raises(TransportError, match="403") as caught:
        await one.client.upload(two.peer, NAME, len(DATA))
    assert caught.value.retry_after_s == limits.retry_after_s
    two.server.allow(NAME, len(DATA), one.peer)
    two.server.forget(NAME)
    with pytest.raises(TransportError, match="403"):
        await one.client.upload(two.peer, NAME, len(DATA))


async def test_only_the_sender_may_put_it(ends: Any) -> None:
    one, two, three = await ends(3)
    one.blobs.put(NAME, DATA)
    two.server.allow(NAME, len(DATA), three.peer)
    with pytest.raises(TransportError, match="BAD_SIGNATURE"):
        await one.client.upload(two.peer, NAME, len(DATA))
    assert two.blobs.part_size(NAME) == 0


async def test_wrong_bytes_are_gone_and_the_sender_is_struck(ends: Any, http: aiohttp.ClientSession) -> None:
    one, two = await ends(2)
    two.server.allow(NAME, len(DATA), one.peer)
    headers = proof_headers(one.signer, RUN, NAME)
    url = f"{two.url}/v1/deltas/{NAME.hex()}"
    async with http.put(url, data=io.BytesIO(DATA[:-1] + bytes([DATA[-1] ^ 1])), headers=headers) as answer:
        assert (answer.status, (await answer.json())["reason"]) == (422, "WRONG_DIGEST")
    assert two.server.strikes.total(one.peer) == 1
    assert not two.blobs.has(NAME)
    assert two.blobs.used(Purpose.DELTA) == 0
    async with http.put(url, data=io.BytesIO(DATA), headers=headers) as answer:
        assert answer.status == 201


async def close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


@pytest.mark.parametrize(
    ("first", "last", "total", "status", "reason"),
    [
        (0, 99, 100, 409, "WRONG_SIZE"),
        (1, 100, len(DATA), 409, "BAD_OFFSET"),
        (0, 100, len(DATA), 416, "BAD_RANGE"),
        (len(DATA) - 50, len(DATA) + 49, len(DATA), 409, "WRONG_SIZE"),
        (0, 99, 10**12, 409, "WRONG_SIZE"),
        (None, None, None, 409, "WRONG_SIZE"),
    ],
)
async def test_ranges_that_lie(
    ends: Any, http: aiohttp.ClientSession, first: Any, last: Any, total: Any, status: int, reason: str
) -> None:
    one, two = await ends(2)
    two.server.allow(NAME, len(DATA), one.peer)
    headers = proof_headers(one.signer, RUN, NAME)
    if first is not None:
        headers["Content-Range"] = f"bytes {first}-{last}/{total}"
    async with http.put(
        f"{two.url}/v1/deltas/{NAME.hex()}", data=DATA[:100], headers=headers
    ) as answer:  # fmt: skip
        assert (answer.status, (await answer.json())["reason"]) == (status, reason)
    assert two.blobs.used(Purpose.DELTA) == 0


async def test_a_false_length_is_refused_before_a_byte_is_read(ends: Any) -> None:
    one, two = await ends(2)
    two.server.allow(NAME, len(DATA), one.peer)
    for head in ("Content-Length: 10000000000", "Transfer-Encoding: chunked", "X: y"):
        reader, writer = await asyncio.open_connection("127.0.0.1", two.listener.port)
        writer.write(f"PUT /v1/deltas/{NAME.hex()} HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n".encode())
        async with asyncio.timeout(2):
            line = await reader.readline()
        assert b" 413 " in line or b" 411 " in line
        await close(writer)


async def test_half_an_upload_that_stalls_is_cut_off_kept_and_resumed(ends: Any) -> None:
    one, two = await ends(2)
    one.blobs.put(NAME, DATA)
    two.server.allow(NAME, len(DATA), one.peer)
    reader, writer = await asyncio.open_connection("127.0.0.1", two.listener.port)
    proof = proof_headers(one.signer, RUN, NAME)
    lines = [f"{k}: {v}" for k, v in (proof | {"Host": "x", "Content-Length": str(len(DATA))}).items()]
    writer.write(f"PUT /v1/deltas/{NAME.hex()} HTTP/1.1\r\n".encode() + "\r\n".join(lines).encode())
    writer.write(b"\r\n\r\n" + DATA[:5_000])
    async with asyncio.timeout(3):
        assert b" 408 " in await reader.readline()
        await reader.read()
    await close(writer)
    assert two.server.strikes.listed()["127.0.0.1"].last_reason == "TOO_SLOW"
    await one.client.upload(two.peer, NAME, len(DATA))
    assert two.blobs.read(NAME) == DATA


async def test_an_upload_that_breaks_keeps_what_came(ends: Any, until: Any) -> None:
    one, two = await ends(2)
    one.blobs.put(NAME, DATA)
    two.server.allow(NAME, len(DATA), one.peer)
    _, writer = await asyncio.open_connection("127.0.0.1", two.listener.port)
    proof = proof_headers(one.signer, RUN, NAME)
    lines = [f"{k}: {v}" for k, v in (proof | {"Host": "x", "Content-Length": str(len(DATA))}).items()]
    writer.write(f"PUT /v1/deltas/{NAME.hex()} HTTP/1.1\r\n".encode() + "\r\n".join(lines).encode())
    writer.write(b"\r\n\r\n" + DATA[:1_000_000])
    await writer.drain()
    async with asyncio.timeout(2):
        await until(lambda: two.blobs.part_size(NAME) >= 3 * limits.io_bytes)
    writer.transport.abort()
    await until(lambda: not two.server._blob_routes._receiving)
    await one.client.upload(two.peer, NAME, len(DATA))
    assert one.client.traffic.up_data <= len(DATA) - 3 * limits.io_bytes
    assert two.blobs.read(NAME) == DATA


async def test_a_full_disk_is_not_the_senders_fault(ends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = await ends(2)
    one.blobs.put(NAME, DATA)
    two.server.allow(NAME, len(DATA), one.peer)

    def full(fd: int, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(two.blobs._files, "write", full)
    with pytest.raises(TransportError, match="507") as caught:
        await one.client.upload(two.peer, NAME, len(DATA))
    assert caught.value.retry_after_s == limits.retry_after_s_max
    assert two.server.strikes.listed() == {}
    monkeypatch.undo()
    await one.client.upload(two.peer, NAME, len(DATA))
    one.blobs.delete(NAME)
    monkeypatch.setattr(one.blobs._files, "write", full)
    two.server.reveal(NAME)
    with pytest.raises(OperatorError, match="full"):
        await one.client.fetch(NAME, len(DATA), [two.peer])
    assert one.client.strikes.listed() == {}


@pytest.mark.parametrize("why", ["its store is full", "too many are on their way"])
async def test_a_full_intake_is_not_the_senders_fault(
    ends: Any, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    one, two = await ends(2)
    one.blobs.put(NAME, DATA)
    two.server.allow(NAME, len(DATA), one.peer)
    if why == "its store is full":
        two.blobs._budgets = dict.fromkeys(Purpose, len(DATA) - 1)
    else:
        monkeypatch.setattr(limits, "blob_parts_put_max", 1)
        two.blobs.append_part(Digest(bytes(32)), 0, b"x", 2, Purpose.DELTA, Origin(two.peer, known=False))
    with pytest.raises(TransportError, match="503 BUSY") as caught:
        await one.client.upload(two.peer, NAME, len(DATA))
    assert caught.value.retry_after_s in (limits.retry_after_s, limits.retry_after_s_max)
    assert two.server.strikes.listed() == one.client.strikes.listed() == {}
    assert two.blobs.part_size(NAME) == 0


async def trickle(port: int, request: str, first: bytes = b"") -> tuple[Any, Any]:
    """A body that is begun and does not go on."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    writer.write(request.encode() + b"\r\n\r\n" + first)
    return reader, writer


async def test_one_address_holds_no_more_than_its_share_of_the_slots(
    ends: Any, http: aiohttp.ClientSession, until: Any
) -> None:
    """Whoever comes first and sends nothing must not keep everybody out."""
    one, two = await ends(2, local=False)
    routes = two.server._blob_routes
    routes._pace = Pace(total_s=3.0, grace_s=1.0, bytes_per_s_min=10_000)
    deltas = [digest_of(bytes([n])) for n in range(3)]
    held = []
    for delta in deltas[:2]:
        two.server.allow(delta, 500_000, one.peer)
        proof = proof_headers(one.signer, RUN, delta)
        lines = [f"PUT /v1/deltas/{delta.hex()} HTTP/1.1"]
        lines += [f"{k}: {v}" for k, v in (proof | {"Host": "x", "Content-Length": "500000"}).items()]
        held.append(await trickle(two.listener.port, "\r\n".join(lines), b"x"))
    await until(lambda: len(routes._receiving) == 2)
    two.server.allow(deltas[2], 1, one.peer)
    url = f"{two.url}/v1/deltas/{deltas[2].hex()}"
    async with http.put(url, data=b"\2", headers=proof_headers(one.signer, RUN, deltas[2])) as answer:
        assert (answer.status, (await answer.json())["reason"]) == (503, "BUSY")
        assert float(answer.headers["Retry-After"]) > 0
    assert two.server.strikes.listed() == {}
    async with asyncio.timeout(3):
        for reader, _ in held:
            assert b" 408 " in await reader.readline()  # cut off: no news
    async with http.put(url, data=b"\2", headers=proof_headers(one.signer, RUN, deltas[2])) as answer:
        assert answer.status == 201
    for _, writer in held:
        await close(writer)


async def test_peers_that_the_log_knows_are_served_beside_a_crowd_of_strangers(
    ends: Any, http: aiohttp.ClientSession
) -> None:
    one, two = await ends(2, local=False)
    two.blobs.put(NAME, DATA, Purpose.SHARD)
    outlet, intake = two.server._blob_routes._outlet, two.server._blob_routes._intake
    with ExitStack() as places:
        for n in range(limits.uploads_per_node_max - limits.uploads_kept):
            places.enter_context(outlet.held(f"192.0.2.{n}"))
        for n in range(limits.receives_per_node_max - limits.receives_kept):
            places.enter_context(intake.held(f"192.0.2.{n}"))
        two.server.allow(NAME, len(DATA), one.peer)
        url = f"{two.url}/v1/blobs/{NAME.hex()}"
        async with http.get(url) as answer:
            assert answer.status == 503
        two.blobs.delete(NAME)
        one.blobs.put(NAME, DATA)
        with pytest.raises(TransportError, match="503 BUSY"):
            await one.client.upload(two.peer, NAME, len(DATA))
        two.known.add(one.peer)
        # A record may be passed on by anybody: it shows nobody's address.
        await one.client.send(two.peer, PeerRecord(("127.0.0.1",), 1, "one", "node", 2))
        await two.got.get()
        assert not two.server.known_address("127.0.0.1")
        await one.client.upload(two.peer, NAME, len(DATA))
        await one.client.send(two.peer, Goodbye("heard from there"))
        await two.got.get()
        two.server.reveal(NAME)
        async with http.get(url) as answer:
            assert answer.status == 200
            assert await answer.read() == DATA


def test_a_slot_is_not_held_for_long_by_trickling() -> None:
    """The rate follows from size and time: a large body cannot go at a small one's pace for ten minutes."""
    pace = Pace()
    size = 64 * limits.MIB  # one delta of a 125M model
    assert pace.for_size(size).bytes_per_s_min == pytest.approx(size / limits.body_timeout_s)
    assert pace.for_size(1000).bytes_per_s_min == limits.body_rate_bytes_per_s_min
    shard_s = limits.chunk_bytes / pace.for_size(limits.chunk_bytes).bytes_per_s_min
    assert shard_s < limits.body_timeout_s / 2


async def test_a_large_body_at_a_small_body_s_rate_is_cut_off(ends: Any) -> None:
    """30,000 bytes a second are enough for a small body here, and a tenth of what this one needs."""
    one, two = await ends(2)
    size = 900_000
    two.server.allow(NAME, size, one.peer)
    lines = [f"PUT /v1/deltas/{NAME.hex()} HTTP/1.1"]
    proof = proof_headers(one.signer, RUN, NAME)
    lines += [f"{k}: {v}" for k, v in (proof | {"Host": "x", "Content-Length": str(size)}).items()]
    reader, writer = await trickle(two.listener.port, "\r\n".join(lines))

    async def drip() -> None:
        with suppress(ConnectionError):
            while True:
                writer.write(bytes(1500))
                await writer.drain()
                await asyncio.sleep(0.05)

    dripping = asyncio.create_task(drip())
    async with asyncio.timeout(1.5):  # half of the total time
        assert b" 408 " in await reader.readline()
    dripping.cancel()
    await asyncio.gather(dripping, return_exceptions=True)
    await close(writer)


async def test_a_fetcher_asks_a_donor_for_no_more_than_it_gives(ends: Any) -> None:
    """Otherwise its own requests would be refused, and a snapshot from one donor would fail."""
    one, two = await ends(2, local=False)
    blobs = [hashlib.shake_128(bytes([n])).digest(300_000) for n in range(6)]
    for blob in blobs:
        two.blobs.put(digest_of(blob), blob, Purpose.SHARD)
    async with asyncio.timeout(limits.retry_after_s):  # nobody was told to come again
        await asyncio.gather(
            *(one.client.fetch(digest_of(b), len(b), [two.peer], Purpose.SHARD) for b in blobs)
        )
    assert two.server.traffic.up_data == 6 * 300_000


async def test_a_delta_is_served_once_revealed_other_blobs_always(ends: Any) -> None:
    one, two = await ends(2)
    two.blobs.put(NAME, DATA)
    shard, chunk = b"shard", b"chunk"
    two.blobs.put(digest_of(shard), shard, Purpose.SHARD)
    two.blobs.put(digest_of(chunk), chunk, Purpose.SNAPSHOT)
    await one.client.fetch(digest_of(shard), 100, [two.peer], Purpose.SHARD)
    await one.client.fetch(digest_of(chunk), 100, [two.peer], Purpose.SNAPSHOT)
    assert one.blobs.purpose(digest_of(shard)) is Purpose.SHARD
    with pytest.raises(TransportError, match="404"):
        await one.client.fetch(NAME, len(DATA), [two.peer])
    two.server.reveal(NAME)
    await one.client.fetch(NAME, len(DATA), [two.peer])
    assert one.blobs.read(NAME) == DATA
    two.server.forget(NAME)
    one.blobs.delete(NAME)
    with pytest.raises(TransportError, match="404"):
        await one.client.fetch(NAME, len(DATA), [two.peer])


@pytest.mark.parametrize(
    ("headers", "status", "expected"),
    [
        ({}, 200, DATA),
        ({"Range": "bytes=5-9"}, 206, DATA[5:10]),
        ({"Range": "bytes=1499990-"}, 206, DATA[1499990:]),
        ({"Range": "bytes=1499990-9999999"}, 206, DATA[1499990:]),
        ({"Range": "bytes=5-9", "If-Range": f'"{NAME.hex()}"'}, 206, DATA[5:10]),
        ({"Range": "bytes=5-9", "If-Range": '"other"'}, 200, DATA),
        ({"Range": "bytes=1500000-"}, 416, None),
        ({"Range": "bytes=9-5"}, 416, None),
        ({"Range": "bytes=0-1,3-4"}, 416, None),
        ({"Range": "bytes=-5"}, 416, None),
        ({"Range": "lines=1-2"}, 416, None),
    ],
)
async def test_ranges(
    ends: Any, http: aiohttp.ClientSession, headers: dict[str, str], status: int, expected: bytes | None
) -> None:
    (one,) = await ends(1)
    one.blobs.put(NAME, DATA, Purpose.SHARD)
    async with http.get(f"{one.url}/v1/blobs/{NAME.hex()}", headers=headers) as answer:
        assert answer.status == status
        if expected is not None:
            assert answer.headers["ETag"] == f'"{NAME.hex()}"'
            assert await answer.read() == expected


async def test_head_and_bad_names(ends: Any, http: aiohttp.ClientSession) -> None:
    (one,) = await ends(1)
    one.blobs.put(NAME, DATA, Purpose.SHARD)
    async with http.head(f"{one.url}/v1/blobs/{NAME.hex()}") as answer:
        assert (answer.status, answer.content_length) == (200, len(DATA))
    for name in ("x", "00", NAME.hex().upper(), NAME.hex() + "00", "..%2f..%2fidentity.key", "%00"):
        async with http.get(f"{one.url}/v1/blobs/{name}") as answer:
            assert answer.status in (400, 404)


@pytest.mark.parametrize(
    ("purpose", "at_once"),
    [(Purpose.SNAPSHOT, limits.uploads_per_node_max), (Purpose.SHARD, limits.shards_served_max)],
)
async def test_a_herd_gets_it_with_a_few_at_a_time(ends: Any, purpose: Purpose, at_once: int) -> None:
    """Scenario L2: ten joiners, one donor; nobody is served beyond the slots, everybody has it in the end.

    Data shards leave one slot to deltas, whatever crowd asks for them.
    """
    one, *others = await ends(7)
    one.blobs.put(NAME, DATA, purpose)
    most = 0
    routes = one.server._blob_routes
    send = routes._files._send

    async def watched(*args: Any) -> None:
        nonlocal most
        most = max(most, routes._outlet._taken.total())
        await asyncio.sleep(0.05)
        await send(*args)

    routes._files._send = watched
    await asyncio.gather(
        *(other.client.fetch(NAME, len(DATA), [one.peer], purpose) for other in others)
    )  # fmt: skip
    assert all(other.blobs.has(NAME) for other in others)
    assert most == at_once


async def test_two_fetches_of_one_blob_move_it_once(ends: Any) -> None:
    one, two = await ends(2)
    two.blobs.put(NAME, DATA, Purpose.SHARD)
    await asyncio.gather(
        *(one.client.fetch(NAME, len(DATA), [two.peer], Purpose.SHARD) for _ in range(3))
    )  # fmt: skip
    assert one.client.traffic.down_data == len(DATA)


async def test_nobody_has_it(ends: Any) -> None:
    one, two = await ends(2)
    with pytest.raises(TransportError, match="nobody is known"):
        await one.client.fetch(NAME, 100, [])
    with pytest.raises(TransportError, match="no address"):
        await one.client.fetch(NAME, 100, [Digest(b"?" * 32)])
    with pytest.raises(TransportError, match="404"):
        await one.client.fetch(NAME, 100, [two.peer])


async def test_a_part_that_is_full_but_was_never_finished_becomes_the_blob(ends: Any) -> None:
    """The receiver died between the last byte and the rename."""
    one, two = await ends(2)
    one.blobs.put(NAME, DATA)
    two.blobs.append_part(NAME, 0, DATA, len(DATA))
    two.server.allow(NAME, len(DATA), one.peer)
    await one.client.upload(two.peer, NAME, len(DATA))
    assert await two.deltas.get() == NAME
    assert two.blobs.has(NAME)
    one.blobs.delete(NAME)
    one.blobs.append_part(NAME, 0, DATA, len(DATA))
    two.server.reveal(NAME)
    await one.client.fetch(NAME, len(DATA), [two.peer])
    assert one.blobs.read(NAME) == DATA
    one.blobs.delete(NAME)
    one.blobs.append_part(NAME, 0, DATA[::-1], len(DATA))
    await one.client.fetch(NAME, len(DATA), [two.peer])
    assert one.blobs.read(NAME) == DATA
    assert one.client.strikes.listed() == {}
