"""Blobs from several donors: resumed at the last byte, hashed, the liar struck, the next one asked
(protocol.md 2, 5; scenarios L2, L3, L4, S4b)."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable, Sequence
from random import Random
from time import monotonic
from typing import NamedTuple, NoReturn

import aiohttp

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError, PeerError, TransportError
from p2pdiloco.exit_codes import RUN
from p2pdiloco.ids import DIGEST_BYTES, Digest, PeerId, short
from p2pdiloco_node.ports import BlobStore, Purpose, Tell, unheard
from p2pdiloco_node.transport.bodies import Pace, TooSlow, read_parts
from p2pdiloco_node.transport.guards import Strikes
from p2pdiloco_node.transport.http_session import (
    answer_head_bytes,
    read_refusal,
    request_head_bytes,
    retry_after_s,
    what_happened,
)
from p2pdiloco_node.transport.traffic import Traffic

CONTENT_RANGE = re.compile(r"bytes (\d{1,15})-(\d{1,15})/(\d{1,15})")
DONORS_MAX = 32  # donors asked for one blob, those named by a busy one included

Urls = Callable[[PeerId], list[str]]


class _Busy(TransportError):
    """The donor has no free slot; it may have named others."""

    def __init__(self, donor: PeerId, retry_after_s: float, donors: list[PeerId]) -> None:
        super().__init__(f"peer {short(donor)} is busy", retry_after_s)
        self.donors = donors


class _Unjudged(Exception):
    """In the middle of a blob a donor tells that it is too large: only all of its bytes show that."""


class _Wanted(NamedTuple):
    digest: Digest
    size_max: int  # bytes
    purpose: Purpose
    of_spec: bool


class Fetcher:
    def __init__(
        self,
        session: aiohttp.ClientSession,
        blobs: BlobStore,
        urls: Urls,
        strikes: Strikes,
        traffic: Traffic,
        pace: Pace,
        rng: Random,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._session = session
        self._clock = clock
        self._blobs = blobs
        self._urls = urls
        self._strikes = strikes
        self._traffic = traffic
        self._pace = pace
        self._rng = rng
        self._slots = asyncio.Semaphore(limits.fetches_per_node_max)
        self._under_way: dict[Digest, asyncio.Lock] = {}
        self._places: dict[PeerId, asyncio.Semaphore] = {}  # a donor gives one address no more at once
        self._avoided: dict[
            PeerId, float
        ] = {}  # donors that gave nothing, or lies: until when they come last
        self._deltas = 0  # under way

    async def fetch(
        self,
        digest: Digest,
        size_max: int,
        donors: Sequence[PeerId],
        purpose: Purpose,
        *,
        of_spec: bool = False,
        tell: Tell = unheard,
    ) -> None:
        """Into the store. Two calls for one blob take turns, and the second finds it there.

        `of_spec`: the RunSpec names the blob. If it is larger, that is the owner's fault and nobody's who
        has it. `tell` hears what each donor did that gave nothing: to ask all may take minutes.

        Raises: TransportError, OperatorError (disk; RUN: the owner's fault).
        """
        wanted = _Wanted(digest, size_max, purpose, of_spec)
        lock = self._under_way.setdefault(digest, asyncio.Lock())
        self._deltas += purpose is Purpose.DELTA
        try:
            async with lock, self._slots:
                if not self._blobs.has(digest):
                    await self._fetch(wanted, donors, tell)
        finally:
            self._deltas -= purpose is Purpose.DELTA
            if not lock.locked():
                self._under_way.pop(digest, None)

    @property
    def fetching_deltas(self) -> bool:
        """Whether a delta is on its way here, or waits for a slot."""
        return self._deltas > 0

    async def _fetch(self, wanted: _Wanted, donors: Sequence[PeerId], tell: Tell) -> None:
        digest = wanted.digest
        asked = sorted(
            dict.fromkeys(donors),
            key=lambda d: (self._comes_last(d), self._place_at(d).locked()),
        )
        gave: set[PeerId] = set()  # whose bytes are in the part; an earlier life's count as unknown
        if self._blobs.part_size(digest):
            gave.add(PeerId(b""))
        alone = False  # bytes of several donors came out damaged: the whole blob from one shows who lies
        why = TransportError("nobody is known who may have it")
        if not asked:
            tell(str(why))
        for _ in range(limits.fetch_rounds_max):
            wait, again = 0.0, False
            for donor in asked:  # grows while it runs: a busy donor names others
                if self._blobs.has(digest):  # its sender put it meanwhile
                    return
                if alone and self._blobs.part_size(digest):
                    await asyncio.to_thread(self._blobs.delete, digest)
                    gave.clear()
                try:
                    async with self._place_at(donor):
                        if await self._from(donor, wanted, gave):
                            return
                    why = TransportError(f"it came damaged, last from peer {short(donor)}")
                    alone = again = alone or gave != {donor}
                    gave.clear()
                except _Busy as busy:
                    why, wait, again = busy, max(wait, busy.retry_after_s or 0), True
                    asked += [d for d in busy.donors if d not in asked][: DONORS_MAX - len(asked)]
                except TransportError as error:
                    why = error
                tell(str(why))
            if not again:
                break
            if wait:
                await asyncio.sleep(wait * self._rng.uniform(0.7, 1.3))
        raise TransportError(f"blob {short(digest)}: {why}", why.retry_after_s)

    def _comes_last(self, donor: PeerId) -> bool:
        return self._strikes.refused_for_s(donor) > 0 or self._avoided.get(donor, 0.0) > self._clock()

    def _avoid(self, donor: PeerId) -> None:
        if len(self._avoided) >= limits.peers_max:
            self._avoided = {d: at for d, at in self._avoided.items() if at > self._clock()}
        self._avoided[donor] = self._clock() + limits.donor_avoided_s

    def _place_at(self, donor: PeerId) -> asyncio.Semaphore:
        if len(self._places) > limits.peers_max:
            self._places = {d: p for d, p in self._places.items() if p.locked()}
        return self._places.setdefault(donor, asyncio.Semaphore(limits.slots_per_address_max))

    async def _from(self, donor: PeerId, wanted: _Wanted, gave: set[PeerId]) -> bool:
        """True: the blob is here. False: what is here now hashes to something else, and is gone."""
        digest = wanted.digest
        last = TransportError(f"no address of peer {short(donor)} is known")
        for url in self._urls(donor):
            try:
                await self._read(f"{url}/v1/blobs/{digest.hex()}", donor, wanted, gave)
            except PeerError as error:
                self._avoid(donor)
                self._strikes.strike(donor, error.reason)
                raise TransportError(f"peer {short(donor)}: {error}") from None
            except TooSlow as error:
                self._avoid(donor)
                self._strikes.strike(donor, "TOO_SLOW")
                raise TransportError(f"peer {short(donor)}: {error}") from None
            except (aiohttp.ClientError, TimeoutError, ConnectionError, ValueError) as error:
                last = TransportError(f"peer {short(donor)} at {url}: {what_happened(error, 'node')}")
                continue
            if await asyncio.to_thread(self._blobs.finish_part, digest):
                return True
            if gave == {donor}:
                self._avoid(donor)
                self._strikes.strike(donor, "WRONG_DIGEST")
            return False
        self._avoid(donor)
        raise last

    async def _read(self, url: str, donor: PeerId, wanted: _Wanted, gave: set[PeerId]) -> None:
        try:
            await self._read_on(url, donor, wanted, gave)
        except _Unjudged:
            await self._read_to_judge(url, donor, wanted)

    async def _read_to_judge(self, url: str, donor: PeerId, wanted: _Wanted) -> NoReturn:
        """From the first byte on. What is here stays: else a lie would be enough to be rid of it."""
        async with self._session.get(url, allow_redirects=False) as answer:
            self._traffic.up_control += request_head_bytes(answer)
            self._traffic.down_control += answer_head_bytes(answer)
            if answer.status != 200:
                raise TransportError(
                    f"peer {short(donor)} answered {answer.status} for {short(wanted.digest)}"
                )
            _, size = _extent(answer)
            if size <= wanted.size_max:
                raise PeerError("TOO_BIG", "it told two sizes of a blob")
            await self._judge(answer, donor, wanted, 0, size)

    async def _read_on(self, url: str, donor: PeerId, wanted: _Wanted, gave: set[PeerId]) -> None:
        digest, purpose = wanted.digest, wanted.purpose
        offset = self._blobs.part_size(digest)
        headers = {"Range": f"bytes={offset}-", "If-Range": f'"{digest.hex()}"'} if offset else {}
        async with self._session.get(url, headers=headers, allow_redirects=False) as answer:
            self._traffic.up_control += request_head_bytes(answer)
            self._traffic.down_control += answer_head_bytes(answer)
            if answer.status == 503 or answer.status == 429:
                said = await read_refusal(answer)
                raise _Busy(donor, retry_after_s(answer), _peers_in(said.get("donors")))
            if answer.status == 416 and offset:
                return  # nothing is left to send: what is here shows whether it is the blob
            if answer.status not in (200, 206):
                raise TransportError(f"peer {short(donor)} answered {answer.status} for {short(digest)}")
            first, size = _extent(answer)
            if size > wanted.size_max:
                await self._judge(answer, donor, wanted, first, size)
            if first != offset or size < offset:
                # It does not resume, or tells another size than the one before: begin again.
                if first != 0:
                    raise PeerError("BAD_RANGE", f"bytes from {first} where {offset} were asked for")
                if not self._blobs.has(digest):
                    await asyncio.to_thread(self._blobs.delete, digest)
                gave.clear()
                offset = 0
            async for part in read_parts(answer.content, size - first, self._pace.for_size(size - first)):
                self._traffic.down_data += len(part)
                gave.add(donor)
                try:
                    await asyncio.to_thread(self._blobs.append_part, digest, offset, part, size, purpose)
                except TransportError:
                    if self._blobs.has(digest):
                        return
                    if self._blobs.part_size(digest) <= offset:
                        # Not another writer that is ahead: the donor before told another size.
                        await asyncio.to_thread(self._blobs.delete, digest)
                        gave.clear()
                    raise
                offset += len(part)

    async def _judge(
        self, answer: aiohttp.ClientResponse, donor: PeerId, wanted: _Wanted, first: int, size: int
    ) -> NoReturn:
        """The donor says that the blob is larger than it may be: a lie, unless the RunSpec names such a blob.

        The bytes show it. They are not kept.

        Raises: PeerError: it lies; OperatorError: the run's owner; TransportError: nobody knows.
        """
        digest, size_max = wanted.digest, wanted.size_max
        why = f"a blob of {size} bytes where {size_max} are the most"
        if not wanted.of_spec:
            raise PeerError("TOO_BIG", why)
        if size > size_max + limits.oversize_bytes_max:
            raise TransportError(
                f"peer {short(donor)} says that {short(digest)} is {why}: it lies, or the run's owner has to "
                "make the run anew"
            )
        if first:
            raise _Unjudged
        found = hashlib.sha256()
        async for part in read_parts(answer.content, size, self._pace.for_size(size)):
            self._traffic.down_data += len(part)
            found.update(part)
        if found.digest() != digest:
            raise PeerError("TOO_BIG", why)
        raise OperatorError(
            f"The RunSpec of this run names {why}: the run's owner has to make the run anew; nothing can be "
            "mended here.",
            RUN,
        )


def _extent(answer: aiohttp.ClientResponse) -> tuple[int, int]:
    """First byte and size of the whole blob, as the answer's head says.

    Raises: PeerError if it says nothing that can be true.
    """
    if answer.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise PeerError("ENCODED", "a blob with a Content-Encoding")
    length = answer.content_length
    if length is None or length <= 0:
        raise PeerError("NO_LENGTH", "a blob without a length")
    if answer.status == 200:
        return 0, length
    found = CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range", ""))
    if found is None:
        raise PeerError("BAD_RANGE", "a part without its place")
    first, last, size = int(found[1]), int(found[2]), int(found[3])
    if last + 1 != size or first + length != size:
        raise PeerError("BAD_RANGE", f"bytes {first} to {last} of {size} in {length} bytes")
    return first, size


def _peers_in(value: object) -> list[PeerId]:
    """Peers that a busy donor named."""
    if not isinstance(value, list):
        return []
    found = []
    for text in value[:DONORS_MAX]:
        try:
            name = bytes.fromhex(text)
        except (TypeError, ValueError):
            continue
        if len(name) == DIGEST_BYTES:
            found.append(PeerId(name))
    return found
