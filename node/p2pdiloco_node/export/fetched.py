"""A run read from a link: RunSpec, log and list of snapshots at once, blobs into a folder as they are needed.

The link's host is a stranger, and so are the peers that it names: every answer is capped and timed, and what
counts is checked by digest, signature and certificate. A reader has no key and nobody dials it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp
import msgspec

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError, PeerError, TransportError
from p2pdiloco.exit_codes import NETWORK
from p2pdiloco.ids import Digest, PeerId, RunId
from p2pdiloco.run_spec import RunSpec
from p2pdiloco.wire.codec import decode
from p2pdiloco.wire.envelope import ANYBODY, open_envelope
from p2pdiloco.wire.messages import PeerRecord, SnapshotOffer
from p2pdiloco.wire.signing import verify_ed25519
from p2pdiloco_node import __version__
from p2pdiloco_node.config import JoinLink
from p2pdiloco_node.export.chain import Chain
from p2pdiloco_node.export.facts import Evaluation, Heard
from p2pdiloco_node.export.log_reader import LogReader
from p2pdiloco_node.ports import Purpose
from p2pdiloco_node.progress import Watch
from p2pdiloco_node.storage.blob_store import DiskBlobStore
from p2pdiloco_node.transport.addresses import check_address, url_host
from p2pdiloco_node.transport.bodies import Pace
from p2pdiloco_node.transport.contact import fetch_peers, fetch_run_spec
from p2pdiloco_node.transport.fetching import Fetcher
from p2pdiloco_node.transport.guards import Strikes
from p2pdiloco_node.transport.http_session import make_session, read_capped, read_refusal, retry_after_s
from p2pdiloco_node.transport.readers import Snapshots
from p2pdiloco_node.transport.traffic import Traffic

HOST = PeerId(b"the host of the link".ljust(32, b"\0"))  # it need not be a peer: a proxy may stand before it
TRIES = 4  # of one request, each where the one before broke off
PAUSE_S = 1.0
PAGE_BYTES_MAX = 8 * limits.MIB  # the page as JSON: a thousand nodes at 2 KiB
SNAPSHOTS_BYTES_MAX = limits.snapshots_kept * limits.message_bytes_max + limits.KIB
BLOBS = "Fetching"
ADVICE = "--join http://HOST:PORT/#RUNID"


class _Point(msgspec.Struct):
    version: int
    loss: float
    tokens: int
    losses: tuple[float, ...] = ()


class _Learning(msgspec.Struct):
    evaluations: list[_Point]


class _Who(msgspec.Struct):
    fingerprint: str
    name: str


class _Row(msgspec.Struct):
    who: _Who


class _Page(msgspec.Struct):
    """What is read of a tracker's page."""

    learning: _Learning
    nodes: list[_Row]


async def read_spec(session: aiohttp.ClientSession, link: JoinLink) -> tuple[RunId, RunSpec]:
    """Raises: OperatorError: nobody answers there, or with another run."""
    try:
        run, spec, _ = await fetch_run_spec(session, link.url, link.run)
    except TransportError as error:
        raise OperatorError(
            f"No reachable tracker: tried {link.url} ({error}). Check the address, or ask its host whether "
            "it runs.",
            NETWORK,
        ) from None
    return run, spec


class LinkedRun:
    """`async with LinkedRun(link, folder) as linked`: the run behind a link; blobs go into `folder`."""

    def __init__(self, link: JoinLink, folder: Path, watch: Watch) -> None:
        self._link = link
        self._folder = folder
        self._watch = watch
        self._urls: dict[PeerId, list[str]] = {HOST: [link.url]}
        self._spec: RunSpec | None = None

    async def __aenter__(self) -> Self:
        self._session = make_session(connections_max=16, per_host_max=0, build=__version__)
        self.blobs = await asyncio.to_thread(DiskBlobStore, self._folder)
        self._fetcher = Fetcher(
            self._session, self.blobs, self._urls_of, Strikes(time.monotonic), Traffic(), Pace(),
            random.Random(),  # noqa: S311 - jitter
        )  # fmt: skip
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()
        self.blobs.close()

    async def open(self) -> tuple[RunId, RunSpec]:
        """The run and who has it. Raises: OperatorError: nobody answers there, or with another run."""
        run, spec = await read_spec(self._session, self._link)
        self._spec = spec
        await self._meet(run, spec)
        return run, spec

    async def _meet(self, run: RunId, spec: RunSpec) -> None:
        """Other peers that may have the blobs; without them the host alone gives everything."""
        try:
            records = await fetch_peers(self._session, self._link.url)
        except TransportError:
            return
        for sealed in records[: limits.announce_peers_max]:
            try:
                opened = await asyncio.to_thread(open_envelope, sealed, verify_ed25519, run=run, me=ANYBODY)
                record = opened.message
                if not isinstance(record, PeerRecord):
                    continue
                local = spec.admission == "local"
                hosts = [check_address(h, record.port, local=local, own=frozenset()) for h in record.hosts]
            except PeerError:
                continue
            if hosts:
                self._urls[opened.sender] = [f"http://{url_host(h)}:{record.port}" for h in hosts]

    def _urls_of(self, peer: PeerId) -> list[str]:
        return self._urls.get(peer, [])

    async def chain(self, run: RunId, spec: RunSpec) -> Chain:
        """The log that the host has. Raises: OperatorError."""
        reader = LogReader(self._session, run, spec, self._link.url, self._watch, advice=ADVICE)
        await reader.read()
        return Chain(reader.log, damaged=reader.damaged, where=self._link.url)

    async def offers(self) -> list[SnapshotOffer]:
        """Snapshots that the host has, not checked yet. Raises: OperatorError."""
        data = await self._get("/v1/snapshots", SNAPSHOTS_BYTES_MAX)
        try:
            opened = await asyncio.to_thread(
                decode, bytes(data), Snapshots, bytes_max=SNAPSHOTS_BYTES_MAX
            )  # fmt: skip
        except PeerError as error:
            raise OperatorError(
                f"{self._link.url} answered with snapshots that do not open ({error}).", NETWORK
            ) from None
        return list(opened.offers)

    async def heard(self, version: int) -> Heard:
        """What the tracker's page says of `version`, or of the nearest evaluated one before it."""
        try:
            data = await self._get("/api/status", PAGE_BYTES_MAX)
            return _heard(bytes(data), version)
        except (OperatorError, msgspec.MsgspecError, RecursionError):
            return Heard()  # a card without these is still a card

    async def fetch(
        self, digests: Sequence[Digest], sizes_max: int, what: str, *, of_spec: bool = False
    ) -> None:
        """Blobs into the folder, from whoever has them.

        `sizes_max`: bytes of one at most. `of_spec`: the RunSpec names them.

        Raises: OperatorError (network, disk): one did not come; RUN: it is larger than the RunSpec says.
        """
        wanted = [digest for digest in dict.fromkeys(digests) if not self.blobs.has(digest)]
        donors = list(self._urls)
        done = 0
        slots = asyncio.Semaphore(limits.fetches_per_node_max)
        since = time.monotonic()

        async def one(digest: Digest) -> None:
            nonlocal done, since
            async with slots:
                failures = 0
                while True:
                    try:
                        await self._fetcher.fetch(
                            digest, sizes_max, donors, Purpose.SNAPSHOT, of_spec=of_spec
                        )
                        break
                    except TransportError as error:
                        busy = error.retry_after_s is not None
                        failures += not busy
                        if failures == TRIES or time.monotonic() - since > limits.fetch_patience_s:
                            raise _not_fetched(what, donors, error) from None
                        await asyncio.sleep(error.retry_after_s or PAUSE_S * 2**failures)
            since = time.monotonic()
            done += 1
            self._watch(f"{BLOBS} {what}", done, len(wanted), "blobs")

        fault: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as group:
                for digest in wanted:
                    group.create_task(one(digest))
        except* OperatorError as failed:
            fault = failed.exceptions[0]
        if fault is not None:
            raise fault

    async def _get(self, path: str, bytes_max: int) -> bytes:
        """An answer's body. Raises: OperatorError."""
        why = "no answer"
        for number in range(TRIES):
            if number:
                await asyncio.sleep(PAUSE_S)
            try:
                return await self._get_once(path, bytes_max)
            except (aiohttp.ClientError, TimeoutError, OSError, PeerError, ValueError) as error:
                why = str(error) or type(error).__name__
            except TransportError as error:
                why = str(error)
                if error.retry_after_s is not None:
                    await asyncio.sleep(error.retry_after_s)
        raise OperatorError(
            f"{self._link.url}{path} did not come ({why}): it may run an older build, or be overloaded; try "
            f"again later, or name another node of the run with {ADVICE}.",
            NETWORK,
        )

    async def _get_once(self, path: str, bytes_max: int) -> bytes:
        """Raises: TransportError, PeerError, what aiohttp raises."""
        async with self._session.get(f"{self._link.url}{path}", allow_redirects=False) as answer:
            if answer.status in (429, 503):
                raise TransportError(f"answered {answer.status}", retry_after_s(answer))
            if answer.status != 200:
                said = await read_refusal(answer)
                raise TransportError(f"answered {answer.status} {str(said.get('reason', ''))[:40]}".strip())
            return await read_capped(answer, bytes_max, Pace().for_size(answer.content_length or 0))


def _not_fetched(what: str, donors: Sequence[PeerId], error: TransportError) -> OperatorError:
    return OperatorError(
        f"{what} did not come ({error}); asked: {len(donors)}. Try again later; "
        " --version of a snapshot needs no deltas.",
        NETWORK,
    )


def _heard(data: bytes, version: int) -> Heard:
    """Raises: MsgspecError, RecursionError: it is not our page."""
    page = msgspec.json.decode(data, type=_Page)
    said = [point for point in page.learning.evaluations if 0 <= point.version <= version]
    newest = max(said, key=lambda point: point.version, default=None)
    evaluation = (
        None if newest is None else Evaluation(newest.version, newest.loss, newest.tokens, newest.losses)
    )
    return Heard(evaluation, {row.who.fingerprint: row.who.name for row in page.nodes})
