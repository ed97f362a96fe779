"""Two real ends on loopback: servers and clients with stores of their own, and a hostile server by script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from typing import Self

import aiohttp
import pytest

from p2pdiloco.errors import TransportError
from p2pdiloco.ids import Digest, PeerId, RunId
from p2pdiloco.wire.envelope import Opened, seal
from p2pdiloco.wire.messages import PeerRecord
from p2pdiloco.wire.signing import Ed25519Signer, verify_ed25519
from p2pdiloco_node.storage.address_book import DiskAddressBook
from p2pdiloco_node.storage.blob_store import DiskBlobStore
from p2pdiloco_node.transport.bodies import Pace
from p2pdiloco_node.transport.client import Client
from p2pdiloco_node.transport.listener import Listener
from p2pdiloco_node.transport.server import Server

RUN = RunId(b"r" * 32)
FAST = Pace(total_s=3.0, grace_s=0.3, bytes_per_s_min=10_000)


class End:
    """One peer: key, store, address book, server and client."""

    def __init__(self, folder: Path, n: int, pace: Pace = FAST, *, local: bool = True) -> None:
        self.signer = Ed25519Signer(n.to_bytes(32, "big"))
        self.peer = self.signer.peer_id
        self.blobs = DiskBlobStore(folder / f"blobs{n}")
        self.book = DiskAddressBook(folder / f"peers{n}", RUN, verify_ed25519)
        self.got: asyncio.Queue[tuple[Opened, bytes, str]] = asyncio.Queue()
        self.deltas: asyncio.Queue[Digest] = asyncio.Queue()
        self.lost: list[tuple[PeerId, str]] = []
        self.failures: list[BaseException] = []
        self.named: list[PeerId] = []
        self.known: set[PeerId] = set()
        self.full = False
        self.server = Server(
            run=RUN,
            me=self.peer,
            run_spec=b"spec",
            build="1",
            blobs=self.blobs,
            verify=verify_ed25519,
            on_message=self._message,
            on_delta=self.deltas.put,
            head=lambda: None,
            health=lambda: {"state": "training"},
            known=self.known.__contains__,
            local=local,
            donors=lambda _digest: self.named,
            pace=pace,
            message_pace=pace,
        )
        self.client = Client(
            run=RUN,
            signer=self.signer,
            boot=1,
            build="1",
            book=self.book,
            blobs=self.blobs,
            on_not_sent=lambda peer, why: self.lost.append((peer, why)),
            on_failure=self.failures.append,
            local=True,
            rng=Random(1),
            pace=pace,
        )
        self.listener = Listener(self.server.app(), "127.0.0.1", 0, idle_s=0.5)

    async def _message(self, opened: Opened, sealed: bytes, ip: str) -> None:
        if self.full:
            raise TransportError("events wait", retry_after_s=1)
        await self.got.put((opened, sealed, ip))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.listener.port}"

    def knows(
        self, signer: Ed25519Signer, port: int, hosts: tuple[str, ...] = ("127.0.0.1",), issued: int = 1
    ) -> None:
        record = PeerRecord(hosts, port, "peer", "node", issued)
        assert self.book.remember(seal(record, signer, run=RUN, epoch=0, boot=1, n=1)) is not None

    async def __aenter__(self) -> Self:
        self._stack = AsyncExitStack()
        await self._stack.enter_async_context(self.listener)
        await self._stack.enter_async_context(self.client)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()
        self.blobs.close()
        assert not self.failures


Ends = Callable[..., Awaitable[list[End]]]


@pytest.fixture
async def ends(tmp_path: Path) -> AsyncIterator[Ends]:
    """`await ends(n)`: n peers that know each other. `local=False`: their servers are of an open run."""
    async with AsyncExitStack() as stack:

        async def make(count: int, *, local: bool = True) -> list[End]:
            made = [await stack.enter_async_context(End(tmp_path, n + 1, local=local)) for n in range(count)]
            for one in made:
                for other in made:
                    if other is not one:
                        one.knows(other.signer, other.listener.port)
            return made

        yield make


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        yield session


Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def scripted(script: Script) -> AsyncIterator[int]:
    """A TCP server that does what `script` says; gives its port."""
    open_ones: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        open_ones.add(task)
        try:
            await script(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            open_ones.discard(task)
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in open_ones:
            task.cancel()
        await asyncio.gather(*open_ones, return_exceptions=True)


@pytest.fixture
def hostile() -> Callable[[Script], object]:
    return scripted


async def poll(true: Callable[[], bool], seconds: float = 3.0) -> None:
    """Wait for something that another task of this loop does."""
    async with asyncio.timeout(seconds):
        while not true():  # noqa: ASYNC110 - the code under test has no event for it
            await asyncio.sleep(0.005)


@pytest.fixture
def until() -> Callable[..., Awaitable[None]]:
    return poll
