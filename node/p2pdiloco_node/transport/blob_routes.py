"""Blobs over HTTP: serving from immutable files, taking deltas that were announced (protocol.md 5, 9)."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from aiohttp import web

from p2pdiloco import limits
from p2pdiloco.errors import PeerError, TransportError
from p2pdiloco.ids import DIGEST_BYTES, Digest, PeerId, RunId
from p2pdiloco.wire.signing import Verify
from p2pdiloco_node.ports import BlobStore, Origin, Purpose
from p2pdiloco_node.transport.answers import content_length, refusal, remote_ip
from p2pdiloco_node.transport.bodies import Pace, read_parts
from p2pdiloco_node.transport.file_answers import FileAnswers
from p2pdiloco_node.transport.guards import Strikes
from p2pdiloco_node.transport.slots import Slots
from p2pdiloco_node.transport.traffic import Traffic
from p2pdiloco_node.transport.upload_proof import check_proof

CONTENT_RANGE = re.compile(r"bytes (\d{1,15})-(\d{1,15})/(\d{1,15})")
DONORS_NAMED_MAX = 8

OnDelta = Callable[[Digest], Awaitable[None]]
Donors = Callable[[Digest], Sequence[PeerId]]
Known = Callable[[PeerId], bool]


class Allowed(NamedTuple):
    size: int  # bytes, as the signed header says
    sender: PeerId


class BlobRoutes:
    """State of the data plane's server side: who may put what, what may be shown, slots.

    A delta is served once it is revealed (commit before reveal, protocol.md 5); shards and chunks of
    snapshots always. Called on the event loop only.

    `known(peer)`: whether the log knows this peer; `known_address(ip)`: whether such a peer was heard from
    there of late. Both only ever decide who waits.
    """

    def __init__(
        self,
        blobs: BlobStore,
        *,
        run: RunId,
        verify: Verify,
        on_delta: OnDelta,
        donors: Donors,
        strikes: Strikes,
        traffic: Traffic,
        pace: Pace,
        known: Known,
        known_address: Callable[[str], bool],
        local: bool,
    ) -> None:
        self._blobs = blobs
        self._run = run
        self._verify = verify
        self._on_delta = on_delta
        self._donors = donors
        self._strikes = strikes
        self._traffic = traffic
        self._pace = pace
        self._allowed: dict[Digest, Allowed] = {}
        self._revealed: set[Digest] = set()
        self._receiving: set[Digest] = set()
        self._known = known
        self._known_address = known_address
        self._intake = Slots(limits.receives_per_node_max, kept=limits.receives_kept, local=local)
        self._outlet = Slots(limits.uploads_per_node_max, kept=limits.uploads_kept, local=local)
        self._files = FileAnswers(self._outlet, pace, traffic)
        self._shards_out = 0  # served just now

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/blobs/{digest}", self.get_blob, allow_head=False),
            web.head("/v1/blobs/{digest}", self.get_blob),
            web.head("/v1/deltas/{digest}", self.delta_offset),
            web.put("/v1/deltas/{digest}", self.put_delta),
        ]

    def allow(self, delta: Digest, size: int, sender: PeerId) -> None:
        """`sender` may put this delta here from now on (AllowDelta)."""
        self._allowed[delta] = Allowed(size, sender)

    def reveal(self, *deltas: Digest) -> None:
        """They may be served to anyone (RevealDelta); after a restart: those that the log names."""
        self._revealed.update(deltas)

    def forget(self, delta: Digest) -> None:
        """Neither taken nor served any more (DropDelta)."""
        self._allowed.pop(delta, None)
        self._revealed.discard(delta)

    def visible(self, digest: Digest) -> bool:
        purpose = self._blobs.purpose(digest)
        return purpose is not None and (purpose is not Purpose.DELTA or digest in self._revealed)

    async def get_blob(self, request: web.Request) -> web.StreamResponse:
        digest = _digest(request)
        size, path = self._blobs.size(digest), self._blobs.path(digest)
        if size is None or path is None or not self.visible(digest):
            raise PeerError("NOT_HERE", "this blob is not here, or not shown yet")

        def donors() -> list[str]:
            return [p.hex() for p in self._donors(digest)[:DONORS_NAMED_MAX]]

        is_shard = self._blobs.purpose(digest) is Purpose.SHARD and request.method != "HEAD"
        if is_shard and self._shards_out >= limits.shards_served_max:
            why = "as many data shards as may be are on their way"
            return refusal("BUSY", why, retry_after_s=limits.retry_after_s, donors=donors())
        self._shards_out += is_shard
        try:
            known = self._known_address(remote_ip(request))
            return await self._files.answer(request, path, size, digest.hex(), known=known, donors=donors)
        finally:
            self._shards_out -= is_shard

    async def delta_offset(self, request: web.Request) -> web.StreamResponse:
        """How much of an allowed delta is here, so that an upload goes on where it broke."""
        digest = _digest(request)
        allowed = self._allowed.get(digest)
        if allowed is None:
            raise PeerError("NOT_ALLOWED", "no header of this delta is known here")
        if self._blobs.part_size(digest) == allowed.size and digest not in self._receiving:
            await self._finish(digest, allowed.sender)  # this process died between the last byte and this
        here = allowed.size if self._blobs.has(digest) else self._blobs.part_size(digest)
        return web.Response(headers={"Upload-Offset": str(here)})

    async def put_delta(self, request: web.Request) -> web.StreamResponse:
        digest = _digest(request)
        allowed = self._allowed.get(digest)
        if allowed is None:
            raise PeerError("NOT_ALLOWED", "no header of this delta is known here")
        length = content_length(request, allowed.size)
        first = _first(request, length, allowed.size)
        await asyncio.to_thread(
            check_proof, request.headers, allowed.sender, self._run, digest, self._verify
        )  # fmt: skip
        if self._blobs.has(digest):
            return _whole(digest, status=200)
        if digest in self._receiving:
            raise PeerError("BUSY", "this delta is on its way already")
        address, origin = remote_ip(request), Origin(allowed.sender, self._known(allowed.sender))
        if not self._intake.is_free(address, known=origin.known):
            raise PeerError("BUSY", "all slots for this sender and address are taken")
        here = self._blobs.part_size(digest)
        if first != here:
            return refusal("BAD_OFFSET", f"{here} bytes are here", offset=here)
        self._receiving.add(digest)
        try:
            with self._intake.held(address):
                await self._receive(request, digest, first, length, allowed.size, origin)
                if first + length < allowed.size:
                    return web.json_response({"offset": first + length}, status=202)
                await self._finish(digest, allowed.sender)
        finally:
            self._receiving.discard(digest)
        return _whole(digest, status=201)

    async def _finish(self, digest: Digest, sender: PeerId) -> None:
        """Raises: PeerError WRONG_DIGEST; then nothing of it is here any more."""
        if not await asyncio.to_thread(self._blobs.finish_part, digest):
            self._strikes.strike(sender, "WRONG_DIGEST")
            raise PeerError("WRONG_DIGEST", "these bytes do not hash to that digest")
        await self._on_delta(digest)

    async def _receive(
        self, request: web.Request, digest: Digest, offset: int, length: int, size: int, origin: Origin
    ) -> None:
        async def append(data: bytes) -> None:
            try:
                await asyncio.to_thread(
                    self._blobs.append_part, digest, offset, data, size, Purpose.DELTA, origin
                )
            except TransportError as error:
                if error.retry_after_s is not None:
                    raise  # no room for it now: BUSY, nobody's fault
                raise PeerError("BAD_OFFSET", f"{error} (from {remote_ip(request)})") from None

        await append(b"")  # is there room? Asked before the body is taken, so that the answer gets through
        async for part in read_parts(request.content, length, self._pace.for_size(length)):
            self._traffic.down_data += len(part)
            await append(part)
            offset += len(part)


def _digest(request: web.Request) -> Digest:
    try:
        digest = bytes.fromhex(request.match_info["digest"])
    except ValueError:
        digest = b""
    if len(digest) != DIGEST_BYTES or digest.hex() != request.match_info["digest"]:
        raise PeerError("MALFORMED", "a digest is 64 hex digits in lower case")
    return Digest(digest)


def _first(request: web.Request, length: int, size: int) -> int:
    """First byte of an upload: 0, or what Content-Range says."""
    text = request.headers.get("Content-Range")
    if text is None:
        first, total = 0, length
    else:
        found = CONTENT_RANGE.fullmatch(text)
        if found is None or int(found[2]) + 1 - int(found[1]) != length:
            raise PeerError("BAD_RANGE", "Content-Range and Content-Length do not agree")
        first, total = int(found[1]), int(found[3])
    if total != size or first + length > size or length == 0:
        raise PeerError("WRONG_SIZE", f"the signed header says {size} bytes")
    return first


def _whole(digest: Digest, *, status: int) -> web.Response:
    return web.json_response({"whole": digest.hex()}, status=status)
