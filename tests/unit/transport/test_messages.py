"""Messages between two real ends, and all that strangers may post (scenarios S6, S9, X2)."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import msgpack
import pytest

from p2pdiloco import limits
from p2pdiloco.errors import PeerError, TransportError
from p2pdiloco.ids import PeerId, RunId
from p2pdiloco.wire.envelope import PROTOCOL_VERSION, Opened, seal
from p2pdiloco.wire.messages import Goodbye, Have, PeerRecord
from p2pdiloco.wire.signing import Ed25519Signer
from p2pdiloco_node.transport.contact import Refused

RUN = RunId(b"r" * 32)
KEY = Ed25519Signer(b"k" * 32)
ONE, TWO = (Ed25519Signer(n.to_bytes(32, "big")).peer_id for n in (1, 2))  # the first two ends


def sealed(n: int = 1, *, run: RunId = RUN, boot: int = 1, text: str = "bye", to: PeerId = ONE) -> bytes:
    return seal(Goodbye(text), KEY, run=run, epoch=0, boot=boot, n=n, to=to)


async def test_messages_arrive_in_order_and_are_counted(ends: Any) -> None:
    one, two = await ends(2)
    for n in range(20):
        await one.client.send(two.peer, Goodbye(str(n)))
    got = [await two.got.get() for _ in range(20)]
    assert [o.message for o, _, _ in got] == [Goodbye(str(n)) for n in range(20)]
    assert {(o.sender, ip) for o, _, ip in got} == {(one.peer, "127.0.0.1")}
    await one.client.drain(2)
    assert one.client.traffic.up_control > sum(len(s) for _, s, _ in got)
    assert two.server.traffic.down_control > sum(len(s) for _, s, _ in got)
    assert one.client.traffic.up_data == two.server.traffic.down_data == 0
    assert not one.lost


async def test_a_dead_peer_blocks_nobody(ends: Any, hostile: Any, until: Any) -> None:
    one, two, dead = await ends(3)

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(-1)

    async with hostile(silent) as port:
        silent_peer = Ed25519Signer(b"s" * 32)
        one.knows(silent_peer, port)
        await dead.listener.__aexit__(None, None, None)
        for n in range(limits.send_queue_max + 10):
            await one.client.send(silent_peer.peer_id, Goodbye(str(n)))
            await one.client.send(dead.peer, Goodbye(str(n)))
            await one.client.send(two.peer, Goodbye(str(n)))
            await asyncio.sleep(0)
        async with asyncio.timeout(5):
            last = Goodbye(str(limits.send_queue_max + 9))
            while (await two.got.get())[0].message != last:
                pass
            await until(lambda: dead.peer in [peer for peer, _ in one.lost])
        assert (silent_peer.peer_id, "too many messages wait for it") in one.lost


async def test_who_cannot_be_reached_is_said(ends: Any) -> None:
    one, two = await ends(2)
    nowhere = Ed25519Signer(b"n" * 32)
    one.knows(nowhere, 80, hosts=("169.254.169.254", "0.0.0.0"))
    outbound = Ed25519Signer(b"o" * 32)
    one.knows(outbound, 0)
    for peer in (nowhere.peer_id, outbound.peer_id, RUN):
        await one.client.send(peer, Goodbye("x"))
    await one.client.drain(2)
    assert len(one.lost) == 3
    text = " ".join(why for _, why in one.lost)
    assert "metadata" in text or "unspecified" in text
    assert "outgoing connections only" in text
    assert "no address of peer" in text
    assert two.got.empty()


async def test_the_next_host_is_tried(ends: Any) -> None:
    one, two = await ends(2)
    one.knows(two.signer, two.listener.port, hosts=("127.0.0.9", "127.0.0.1"), issued=2)
    await one.client.send(two.peer, Goodbye("x"))
    assert (await two.got.get())[0].message == Goodbye("x")


async def test_what_was_said_to_another_is_refused_and_is_nobody_s_fault(
    ends: Any, http: aiohttp.ClientSession
) -> None:
    """What B sealed for S, posted to W by S or by anybody."""
    one, two = await ends(2)
    for body in (sealed(to=TWO), sealed(n=2, to=PeerId(b"x" * 32))):
        async with http.post(f"{one.url}/v1/messages", data=body) as answer:
            assert (answer.status, (await answer.json())["reason"]) == (421, "WRONG_RECEIVER")
    assert one.got.empty()
    assert one.server.strikes.listed() == {}
    async with http.post(f"{two.url}/v1/messages", data=sealed(to=TWO)) as answer:
        assert answer.status == 202


async def test_another_peer_at_the_address_is_passed_by(ends: Any) -> None:
    """A port that changed hands: the message goes to the next address, or is reported as not sent."""
    one, two, three = await ends(3)
    three.listener.port = two.listener.port
    one.knows(three.signer, two.listener.port, issued=2)
    await one.client.send(three.peer, Goodbye("x"))
    await one.client.drain(2)
    assert two.got.empty()
    assert [peer for peer, why in one.lost if "is not peer" in why] == [three.peer]


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        (b"", 400, "MALFORMED"),
        (b"x", 400, "MALFORMED"),
        (bytes(range(250)) * 2, 400, "MALFORMED"),
        (sealed()[: len(sealed()) // 2], 400, "MALFORMED"),
        (b"\x91" * 5000 + bytes(64), 400, "MALFORMED"),  # nesting
        (b"\xdd\xff\xff\xff\xff" + bytes(64), 400, "MALFORMED"),  # four billion items
        (b"\xc6\xff\xff\xff\xff" + bytes(64), 400, "MALFORMED"),  # four billion bytes
        (b"\x80\x04\x95" + bytes(100), 400, "MALFORMED"),  # a pickle
        (msgpack.packb({"a": 1}) + bytes(64), 400, "MALFORMED"),
        (sealed()[:-1] + bytes([sealed()[-1] ^ 1]), 403, "BAD_SIGNATURE"),
        (sealed(run=RunId(b"x" * 32)), 403, "WRONG_RUN"),
        (bytes(limits.message_bytes_max + 1025), 413, "TOO_BIG"),
    ],
)
async def test_bad_messages_get_a_reason_and_a_strike(
    ends: Any, http: aiohttp.ClientSession, body: bytes, status: int, reason: str
) -> None:
    (one,) = await ends(1)
    async with http.post(f"{one.url}/v1/messages", data=body) as answer:
        said = await answer.json()
        assert (answer.status, said["reason"]) == (status, reason)
        assert said["detail"]
    assert one.server.strikes.total("127.0.0.1") == (reason != "WRONG_RUN")
    async with http.post(f"{one.url}/v1/messages", data=sealed()) as answer:
        assert answer.status == 202
    assert (await one.got.get())[0].sender == KEY.peer_id
    assert one.got.empty()


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd", "br"])
async def test_no_encodings(ends: Any, http: aiohttp.ClientSession, encoding: str) -> None:
    (one,) = await ends(1)
    headers = {"Content-Encoding": encoding}
    async with http.post(f"{one.url}/v1/messages", data=sealed(), headers=headers) as answer:
        assert (answer.status, (await answer.json())["reason"]) == (415, "ENCODED")


async def test_no_bodies_without_a_length(ends: Any, http: aiohttp.ClientSession) -> None:
    (one,) = await ends(1)

    async def chunks() -> Any:
        yield sealed()

    async with http.post(f"{one.url}/v1/messages", data=chunks()) as answer:
        assert (answer.status, (await answer.json())["reason"]) == (411, "NO_LENGTH")


async def test_unknown_places_and_methods_are_json(ends: Any, http: aiohttp.ClientSession) -> None:
    (one,) = await ends(1)
    for method, path, status in (("GET", "/", 404), ("GET", "/v1/messages", 405), ("DELETE", "/v1/run", 405)):
        async with http.request(method, one.url + path) as answer:
            assert answer.status == status
            assert (await answer.json())["reason"]


async def test_small_answers(ends: Any, http: aiohttp.ClientSession) -> None:
    (one,) = await ends(1)
    async with http.get(f"{one.url}/v1/run") as answer:
        assert await answer.read() == b"spec"
    async with http.get(f"{one.url}/v1/version") as answer:
        assert await answer.json() == {"protocol": PROTOCOL_VERSION, "build": "1", "run": RUN.hex()}
    async with http.get(f"{one.url}/v1/health") as answer:
        assert await answer.json() == {"state": "training"}
    async with http.get(f"{one.url}/v1/head") as answer:
        assert answer.status == 404


async def test_a_message_counts_once(ends: Any, http: aiohttp.ClientSession) -> None:
    (one,) = await ends(1)
    statuses = []
    for n, boot in ((5, 1), (3, 1), (5, 1), (3, 1), (4, 1), (3, 2), (3, 2)):
        async with http.post(f"{one.url}/v1/messages", data=sealed(n, boot=boot)) as answer:
            statuses.append(answer.status)
    assert statuses == [202, 202, 409, 409, 202, 202, 409]
    assert one.got.qsize() == 4


async def test_rates_are_bounded_before_and_after_signatures(ends: Any, http: aiohttp.ClientSession) -> None:
    (one,) = await ends(1)
    now = [0.0]
    one.server._rates._clock = lambda: now[0]
    statuses = []
    for n in range(limits.messages_per_peer_burst + 20):
        async with http.post(f"{one.url}/v1/messages", data=sealed(n)) as answer:
            statuses.append(answer.status)
            if answer.status == 429:
                assert float(answer.headers["Retry-After"]) > 0
    assert statuses == [202] * limits.messages_per_peer_burst + [429] * 20
    other = Ed25519Signer(b"o" * 32)
    beat = seal(Have(()), other, run=RUN, epoch=0, boot=1, n=1, to=ONE)
    async with http.post(f"{one.url}/v1/messages", data=beat) as answer:
        assert answer.status == 202
    now[0] += 1
    async with http.post(f"{one.url}/v1/messages", data=sealed(999)) as answer:
        assert answer.status == 202


async def test_an_address_full_of_faults_is_refused_for_a_while(
    ends: Any, http: aiohttp.ClientSession
) -> None:
    (one,) = await ends(1)
    now = [0.0]
    one.server.strikes._clock = lambda: now[0]
    for _ in range(limits.strikes_max):
        async with http.post(f"{one.url}/v1/messages", data=b"rubbish") as answer:
            assert answer.status == 400
    async with http.post(f"{one.url}/v1/messages", data=sealed()) as answer:
        assert (answer.status, (await answer.json())["reason"]) == (429, "BANNED")
    now[0] += limits.strike_ban_s + 1
    async with http.post(f"{one.url}/v1/messages", data=sealed()) as answer:
        assert answer.status == 202
    assert one.server.strikes.total("127.0.0.1") == limits.strikes_max


async def test_a_peer_whose_content_the_rules_refuse_is_struck(ends: Any) -> None:
    one, two = await ends(2)

    async def refuse(opened: Opened, sealed: bytes, ip: str) -> None:
        raise PeerError("MALFORMED", "no")

    two.server.on_message = refuse
    await one.client.send(two.peer, Goodbye("x"))
    await one.client.drain(2)
    assert two.server.strikes.total(one.peer) == 1
    assert "refused Goodbye: MALFORMED" in one.lost[0][1]


async def test_a_full_queue_of_events_is_503_and_not_held_against_anybody(ends: Any) -> None:
    one, two = await ends(2)
    two.full = True
    await one.client.send(two.peer, Goodbye("x"))
    await one.client.drain(2)
    assert len(one.lost) == 1
    assert two.server.strikes.listed() == {}


async def test_what_is_for_anybody_is_signed_once_and_the_rest_for_its_receiver(ends: Any) -> None:
    one, two, three = await ends(3)
    for message, same in (
        (PeerRecord(("127.0.0.1",), 1, "one", "node", 1), True),
        (Have((bytes(32),)), False),
    ):
        await one.client.send(two.peer, message)
        first = await two.got.get()
        await one.client.send(three.peer, message)
        assert ((await three.got.get())[1] == first[1]) is same


async def test_a_new_epoch_is_on_every_envelope_and_drops_what_waited(ends: Any) -> None:
    one, two = await ends(2)
    await one.client.send(two.signer.peer_id, Goodbye("sent"))
    first, _, _ = await asyncio.wait_for(two.got.get(), 5)
    assert first.epoch == 0
    await one.client.send(two.signer.peer_id, Goodbye("waits"))
    one.client.enter_epoch(3)
    await one.client.send(two.signer.peer_id, Goodbye("said later"))
    later, _, _ = await asyncio.wait_for(two.got.get(), 5)
    assert (later.epoch, later.message) == (3, Goodbye("said later"))


async def test_a_fault_of_ours_is_500_and_the_server_lives(
    ends: Any, http: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    (one,) = await ends(1)

    async def broken(opened: Opened, sealed: bytes, ip: str) -> None:
        raise AssertionError("ours")

    one.server.on_message = broken
    async with http.post(f"{one.url}/v1/messages", data=sealed()) as answer:
        assert (answer.status, (await answer.json())["reason"]) == (500, "OURS")
    assert "ours" in caplog.text
    async with http.get(f"{one.url}/v1/health") as answer:
        assert answer.status == 200


async def test_who_delivers_hears_whether_it_was_taken(ends: Any) -> None:
    """An evaluation counts as done only when the tracker has it."""
    one, two = await ends(2)
    await one.client.deliver(two.peer, Goodbye("x"))
    assert (await two.got.get())[0].message == Goodbye("x")
    two.client.run = one.client.run = RunId(b"x" * 32)
    with pytest.raises(Refused, match="WRONG_RUN"):
        await one.client.deliver(two.peer, Goodbye("y"))
    await two.listener.__aexit__(None, None, None)
    with pytest.raises(TransportError) as away:
        await one.client.deliver(two.peer, Goodbye("z"))
    assert not isinstance(away.value, Refused)
