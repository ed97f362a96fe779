"""Own deltas to voters: PUT with the offset where the last try broke (scenario S6b, S11d)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp

from p2pdiloco import limits
from p2pdiloco.errors import TransportError
from p2pdiloco.ids import Digest, PeerId, RunId, short
from p2pdiloco.wire.signing import Signer
from p2pdiloco_node.ports import BlobStore
from p2pdiloco_node.transport.bodies import Pace, Paced
from p2pdiloco_node.transport.http_session import (
    answer_head_bytes,
    read_refusal,
    request_head_bytes,
    retry_after_s,
)
from p2pdiloco_node.transport.traffic import Traffic
from p2pdiloco_node.transport.upload_proof import proof_headers

Urls = Callable[[PeerId], list[str]]


class Uploader:
    def __init__(
        self,
        session: aiohttp.ClientSession,
        blobs: BlobStore,
        urls: Urls,
        signer: Signer,
        run: RunId,
        traffic: Traffic,
        pace: Pace,
    ) -> None:
        self._session = session
        self._blobs = blobs
        self._urls = urls
        self._signer = signer
        self._run = run
        self._traffic = traffic
        self._pace = pace
        self._slots = asyncio.Semaphore(limits.uploads_per_node_max)
        self._under_way = 0

    @property
    def busy(self) -> bool:
        """Whether an upload is under way or waits for a slot."""
        return self._under_way > 0

    async def upload(self, peer: PeerId, delta: Digest, size: int) -> None:
        """Raises: TransportError, with the pause that the peer asked for."""
        self._under_way += 1
        try:
            await self._upload(peer, delta, size)
        finally:
            self._under_way -= 1

    async def _upload(self, peer: PeerId, delta: Digest, size: int) -> None:
        path = self._blobs.path(delta)
        if path is None:
            raise TransportError(f"delta {short(delta)} is not here any more")
        proof = await asyncio.to_thread(proof_headers, self._signer, self._run, delta)
        async with self._slots:
            last = TransportError(f"no address of peer {short(peer)} is known")
            for url in self._urls(peer):
                place = f"{url}/v1/deltas/{delta.hex()}"
                try:
                    for _ in range(limits.upload_tries_max):
                        offset = await self._offset(place)
                        if offset >= size or await self._put(place, path, offset, size, proof):
                            return
                    last = TransportError(f"peer {short(peer)} did not take delta {short(delta)}")
                except TransportError as error:
                    last = error
                except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                    last = TransportError(f"upload to {url}: {type(error).__name__} {error}"[:300])
            raise last

    async def _offset(self, place: str) -> int:
        """Bytes that the peer has already."""
        async with (
            asyncio.timeout(limits.request_timeout_s),
            self._session.head(place, allow_redirects=False) as answer,
        ):
            self._count(answer)
            if answer.status != 200:
                raise TransportError(f"{place} answered {answer.status}", retry_after_s(answer))
            text = answer.headers.get("Upload-Offset", "")
            if not text.isdecimal() or len(text) > 15:
                raise TransportError(f"{place} named no offset")
            return int(text)

    async def _put(self, place: str, path: Path, offset: int, size: int, proof: dict[str, str]) -> bool:
        """True: the peer has the whole blob. False: ask for the offset again."""
        headers = {
            **proof,
            "Content-Length": str(size - offset),
            "Content-Range": f"bytes {offset}-{size - 1}/{size}",
            "Content-Type": "application/octet-stream",
        }
        async with Paced(self._pace.for_size(size - offset)) as paced:
            body = self._body(path, offset, size - offset, paced)
            async with self._session.put(
                place, data=body, headers=headers, allow_redirects=False
            ) as answer:  # fmt: skip
                self._count(answer)
                if answer.status in (200, 201):
                    return True
                said = await read_refusal(answer)
                if answer.status == 409 and said.get("reason") == "BAD_OFFSET":
                    return False
                raise TransportError(
                    f"{place} answered {answer.status} {str(said.get('reason', ''))[:64]}",
                    retry_after_s(answer),
                )

    async def _body(self, path: Path, offset: int, length: int, paced: Paced) -> AsyncIterator[bytes]:
        file = await asyncio.to_thread(path.open, "rb")
        try:
            await asyncio.to_thread(file.seek, offset)
            while length:
                data = await asyncio.to_thread(file.read, min(length, limits.io_bytes))
                if not data:
                    raise TransportError("the delta's file is shorter than it was")
                yield data
                paced.moved(len(data))
                self._traffic.up_data += len(data)
                length -= len(data)
        finally:
            file.close()

    def _count(self, answer: aiohttp.ClientResponse) -> None:
        self._traffic.up_control += request_head_bytes(answer)
        self._traffic.down_control += answer_head_bytes(answer)
