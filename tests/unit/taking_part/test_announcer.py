"""What a tracker says, or whoever speaks in its place, ends no node that has begun (scenarios B1, C1, H5)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from random import Random

import pytest
from aiohttp import web

from p2pdiloco.errors import OperatorError, TransportError
from p2pdiloco.ids import NO_DIGEST, RunId
from p2pdiloco.protocol.tracker import AnnounceReply
from p2pdiloco.wire.codec import encode
from p2pdiloco.wire.envelope import open_envelope, seal
from p2pdiloco.wire.messages import Announce, PeerRecord
from p2pdiloco.wire.signing import Ed25519Signer, verify_ed25519
from p2pdiloco_node.storage.address_book import DiskAddressBook
from p2pdiloco_node.storage.blob_store import DiskBlobStore
from p2pdiloco_node.taking_part.announcer import Announcer
from p2pdiloco_node.telemetry import BrainView, Telemetry
from p2pdiloco_node.transport.client import Client
from p2pdiloco_node.transport.contact import Refused
from p2pdiloco_node.transport.http_session import make_session
from p2pdiloco_node.transport.listener import Listener

RUN = RunId(b"r" * 32)
NODE, WITNESS = Ed25519Signer(b"n" * 32), Ed25519Signer(b"w" * 32)
BRAIN = BrainView(
    index=0, version=0, term=0, leads=False, aggregator=WITNESS.peer_id, members=(), clock=0, in_flight=0,
    peers=0, root=NO_DIGEST,
)  # fmt: skip


class FalseTracker:
    """Answers each announce with what the test gives."""

    def __init__(self) -> None:
        self.made: Callable[[], web.Response] = web.Response
        self.got: list[bytes] = []
        self.failures: list[BaseException] = []

    def says(self, reason: str, status: int = 400) -> None:
        self.made = lambda: web.json_response({"reason": reason, "detail": "go away"}, status=status)

    def gives(self, body: bytes) -> None:
        self.made = lambda: web.Response(body=body)

    async def announce(self, request: web.Request) -> web.Response:
        self.got.append(await request.read())
        return self.made()

    @asynccontextmanager
    async def with_node(
        self, folder: Path, *, local: bool = True
    ) -> AsyncIterator[tuple[Announcer, Telemetry, Client]]:
        app = web.Application()
        app.add_routes([web.post("/v1/announce", self.announce)])
        book = DiskAddressBook(folder / "peers", RUN, verify_ed25519)
        telemetry = Telemetry("n", NODE.peer_id, RUN, "run", role="node", pid=1, inner_steps=1)
        async with (
            Listener(app, "127.0.0.1", 0) as listener,
            make_session(connections_max=2, per_host_max=0, build="1") as session,
            Client(
                run=RUN, signer=NODE, boot=1, build="1", book=book, blobs=DiskBlobStore(folder / "blobs"),
                on_not_sent=lambda _peer, _why: None, on_failure=self.failures.append, local=local,
            ) as client,
        ):  # fmt: skip
            record = PeerRecord(("127.0.0.1",), 1, "n", "node", 1)
            announcer = Announcer(
                session, [f"http://127.0.0.1:{listener.port}"], record, client, book, telemetry,
                witness=WITNESS.peer_id, local=True, rng=Random(1),
            )  # fmt: skip
            yield announcer, telemetry, client
        assert not self.failures


def status(telemetry: Telemetry) -> tuple[str, list[str]]:
    shown = telemetry.status(BRAIN, bytes_up=0, bytes_down=0, bytes_setup=0, lag_s_max=0)
    return shown.tracker, [said.text for said in shown.said]


@pytest.mark.parametrize("reason", ["REPLACED", "WRONG_VERSION"])
async def test_a_no_ends_only_who_joins_for_the_first_time(tmp_path: Path, reason: str) -> None:
    tracker = FalseTracker()
    tracker.says(reason)
    async with tracker.with_node(tmp_path) as (announcer, _, _client):
        with pytest.raises(OperatorError, match=f"refuses this node: .*{reason}: go away") as caught:
            await announcer.once(joining=True)
        assert caught.value.exit_code == 5
        with pytest.raises(Refused, match=reason):
            await announcer.once()


async def test_an_address_that_serves_another_run_now_says_which_is_pinned(tmp_path: Path) -> None:
    """It said WRONG_RUN twice, and nothing of what to do."""
    tracker = FalseTracker()
    tracker.made = lambda: web.json_response(
        {"reason": "WRONG_RUN", "detail": "WRONG_RUN: the message is for run x"}, status=403
    )
    async with tracker.with_node(tmp_path) as (announcer, _, _client):
        pinned = f"serves another run, not {RUN.hex()[:16]}: copy the join line .* a --data-dir of its own"
        with pytest.raises(OperatorError, match=pinned) as caught:
            await announcer.once(joining=True)
        assert caught.value.exit_code == 5
        assert "WRONG_RUN" not in str(caught.value)
        with pytest.raises(Refused, match=pinned):
            await announcer.once()
        tracker.made = lambda: web.json_response(
            {"reason": "REPLACED", "detail": "REPLACED: newer"}, status=403
        )
        with pytest.raises(Refused, match=r"[0-9]: REPLACED: newer$"):
            await announcer.once()


async def test_a_running_node_says_what_a_tracker_answers_and_tries_again(tmp_path: Path) -> None:
    """An unsigned answer of eighty bytes ended a node with status 5."""
    tracker = FalseTracker()
    tracker.says("REPLACED", 403)
    async with tracker.with_node(tmp_path) as (announcer, telemetry, _client):
        announcer._interval_s = 0.01
        running = asyncio.create_task(announcer.run())
        async with asyncio.timeout(5):
            while len(tracker.got) < 3:  # noqa: ASYNC110 - the announcer has no event for it
                await asyncio.sleep(0.01)
            assert status(telemetry)[0].startswith("refuses this node since")
        assert not running.done()
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        for body in (
            b"",
            b"rubbish",
            b"\xdd\xff\xff\xff\xff",
            encode(AnnounceReply(1e300, (b"x" * 100,), "n" * 99)),
        ):
            tracker.gives(body)
            with suppress(TransportError):
                await announcer.once()
        assert announcer._interval_s <= 3600
        texts = status(telemetry)[1]
    assert [t for t in texts if "refuses this node" in t and "REPLACED" in t and "tried again" in t]
    assert len(texts) <= 4, "said at each change, not at each try"


async def test_an_announce_is_for_the_tracker_of_this_run_and_its_answer_is_there_at_once(
    tmp_path: Path,
) -> None:
    tracker = FalseTracker()
    record = PeerRecord(("127.0.0.1",), 7474, "witness", "witness", 1)
    tracker.gives(encode(AnnounceReply(2.0, (seal(record, WITNESS, run=RUN, epoch=0, boot=1, n=1),), "")))
    async with tracker.with_node(tmp_path) as (announcer, telemetry, client):
        await announcer.once(joining=True)
        assert client.can_dial(WITNESS.peer_id)
        assert status(telemetry)[0] == "ok"
    opened = open_envelope(tracker.got[0], verify_ed25519, run=RUN, me=WITNESS.peer_id)
    assert isinstance(opened.message, Announce)


async def test_nodes_of_an_open_run_dial_no_address_of_this_machine_or_network(tmp_path: Path) -> None:
    """Whatever the way by which they joined: addresses are named by strangers (protocol.md 6, target H5)."""
    tracker = FalseTracker()
    records = [
        seal(
            PeerRecord((host,), 80, "p", "node", 1),
            Ed25519Signer(bytes([n]) * 32),
            run=RUN,
            epoch=0,
            boot=1,
            n=1,
        )
        for n, host in enumerate(("127.0.0.1", "192.168.1.1", "10.1.2.3", "::1", "fd00::1", "8.8.8.8"))
    ]
    tracker.gives(encode(AnnounceReply(2.0, tuple(records), "")))
    for local, dialled in ((False, 1), (True, 6)):
        async with tracker.with_node(tmp_path / str(local), local=local) as (announcer, _, client):
            await announcer.once()
            peers = [Ed25519Signer(bytes([n]) * 32).peer_id for n in range(6)]
            assert sum(client.can_dial(peer) for peer in peers) == dialled
            with pytest.raises(TransportError, match="no address"):
                client.urls(NODE.peer_id)
