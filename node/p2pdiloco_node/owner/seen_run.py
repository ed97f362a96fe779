"""A run as its owner's tool sees it: who can be reached, and one log in which every entry was checked.

The hosts are strangers. An entry counts when its certificate does, a state when the log names its root.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import aiohttp

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError, PeerError, TransportError
from p2pdiloco.ids import PeerId, RunId, short
from p2pdiloco.protocol.run_log import RunLog
from p2pdiloco.rules.state import (
    RulesState,
    after_membership,
    after_outer_step,
    after_owner,
    genesis_state,
)
from p2pdiloco.run_spec import RunSpec, open_run_spec
from p2pdiloco.status.names import clean_name
from p2pdiloco.wire.codec import decode
from p2pdiloco.wire.envelope import ANYBODY, open_envelope, verify_entry
from p2pdiloco.wire.log import Content, Entry, Membership, OuterStep
from p2pdiloco.wire.messages import PeerRecord, StateShown
from p2pdiloco.wire.signing import verify_ed25519
from p2pdiloco_node.config import HostPort, JoinLink, parse_join
from p2pdiloco_node.contact import NETWORK, fetch_peers, fetch_run_spec
from p2pdiloco_node.corpus.progress import Told
from p2pdiloco_node.storage import journal
from p2pdiloco_node.transport.addresses import check_address, url_host
from p2pdiloco_node.transport.bodies import Pace
from p2pdiloco_node.transport.http_session import read_capped, retry_after_s

RUN = 5  # exit code
SPEC, ADDRESS = "spec.bin", "address.json"
TRIES = 4  # of a log that does not come


class Host(NamedTuple):
    """A peer that said where it is."""

    peer: PeerId
    name: str
    witness: bool
    urls: tuple[str, ...]


def link_of(words: str) -> JoinLink:
    """A join line, or a folder of this machine whose daemon runs: a run's DIR or a node's data folder.

    Raises: OperatorError.
    """
    folder = Path(words).expanduser()
    if "://" in words or not folder.is_dir():
        return parse_join(words)
    run: RunId | None = None
    for spec in (folder / SPEC, folder / "run" / SPEC):
        if spec.is_file():
            with suppress(PeerError, OSError):
                run, _ = open_run_spec(spec.read_bytes(), verify_ed25519)
    for place in (folder / "witness", folder / "run" / "witness", folder):
        with suppress(OSError, ValueError, KeyError, TypeError):
            return JoinLink(str(json.loads((place / ADDRESS).read_text())["url"]), run)
    raise OperatorError(
        f"No daemon of this machine serves {folder}: start its tracker, or name the run's link "
        "(http://HOST:PORT/#RUNID)."
    )


class SeenRun:
    """Made by `open_run`; `catch_up` brings the log up to date."""

    def __init__(
        self, session: aiohttp.ClientSession, run: RunId, spec: RunSpec, urls: Sequence[str], told: Told
    ) -> None:
        """`urls`: the addresses that were named and answered, the link's first."""
        self.session = session
        self.run, self.spec = run, spec
        self.urls = list(urls)
        self.hosts: dict[PeerId, Host] = {}
        self.told = told
        self._log = _CheckedLog(session, run, spec, urls[0], told)

    @property
    def log(self) -> RunLog:
        return self._log.log

    @property
    def rules(self) -> RulesState:
        """After the newest entry of `log`."""
        return self._log.states[-1]

    def rules_at(self, index: int) -> RulesState:
        return self._log.states[index]

    async def meet(self) -> None:
        """Who is there, from everybody who was named. Raises: TransportError where nobody says."""
        last: TransportError | None = None
        for url in self.urls:
            try:
                records = await fetch_peers(self.session, url)
            except TransportError as error:
                last = error
                continue
            for sealed in records[: limits.announce_peers_max + 1]:
                await self._remember(sealed)
        if last is not None and not self.hosts:
            raise last

    async def _remember(self, sealed: bytes) -> None:
        local = self.spec.admission == "local"
        try:
            opened = await asyncio.to_thread(open_envelope, sealed, verify_ed25519, run=self.run, me=ANYBODY)
        except PeerError:
            return
        record, urls = opened.message, []
        if not isinstance(record, PeerRecord):
            return
        for host in record.hosts:
            with suppress(PeerError):
                address = check_address(host, record.port, local=local, own=frozenset())
                urls.append(f"http://{url_host(address)}:{record.port}")
        witness = opened.sender == self.spec.committee.genesis.witness
        if witness and not urls:  # behind a proxy: the link reaches it
            urls = self.urls[:1]
        if urls:
            name = clean_name(record.name) or short(opened.sender)
            self.hosts[opened.sender] = Host(opened.sender, name, witness, tuple(urls))

    def name_of(self, peer: PeerId) -> str:
        host = self.hosts.get(peer)
        if peer == self.spec.committee.genesis.witness:
            return "witness"
        return host.name if host else short(peer)

    async def catch_up(self) -> list[Content]:
        """The contents of what was certified since the last call. Raises: OperatorError."""
        return await self._log.catch_up()

    async def read_from(self, url: str) -> None:
        """Another host's log instead. Raises: OperatorError."""
        other = _CheckedLog(self.session, self.run, self.spec, url, self.told)
        await other.catch_up()
        self._log = other

    async def state_of(self, host: Host) -> tuple[StateShown, str] | None:
        """How far a peer says to be, and at which address; None where it does not answer."""
        for url in host.urls:
            try:
                async with (
                    asyncio.timeout(limits.request_timeout_s),
                    self.session.get(f"{url}/v1/state", allow_redirects=False) as answer,
                ):
                    if answer.status == 200:
                        data = await read_capped(answer, limits.KIB)
                        return decode(data, StateShown), url
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError, PeerError, TransportError):
                continue
        return None

    async def states(self) -> dict[PeerId, tuple[StateShown, str]]:
        """Of everybody who answers."""
        asked = list(self.hosts.values())
        found = await asyncio.gather(*(self.state_of(host) for host in asked))
        return {host.peer: state for host, state in zip(asked, found, strict=True) if state is not None}


async def open_run(
    session: aiohttp.ClientSession, link: JoinLink, also: Sequence[HostPort], told: Told
) -> SeenRun:
    """The run behind a link; where the tracker is away, behind `also`, addresses of any nodes.

    Raises: OperatorError: nobody answers, or with another run.
    """
    urls = list(dict.fromkeys([link.url, *(f"http://{place}" for place in also)]))
    tried, answered, found = [], [], None
    for url in urls:
        try:
            found = await fetch_run_spec(session, url, link.run or (found[0] if found else None))
        except TransportError as error:
            tried.append(f"{url} ({error})")
        else:
            answered.append(url)
    if found is None:
        raise OperatorError(
            f"Nobody answers: tried {' and '.join(tried)}. Check the address; where the tracker is gone, "
            "name nodes of the run with --peers HOST:PORT.",
            NETWORK,
        )
    run, spec, _ = found
    seen = SeenRun(session, run, spec, answered, told)
    with suppress(TransportError):
        await seen.meet()
    return seen


class _CheckedLog:
    """The log of one host, read on from where it was."""

    def __init__(
        self, session: aiohttp.ClientSession, run: RunId, spec: RunSpec, url: str, told: Told
    ) -> None:
        self._session = session
        self._run, self._spec = run, spec
        self._url = url
        self._told = told
        self._begin()

    def _begin(self) -> None:
        self._offset = 0  # bytes of the host's file that were read and are whole entries
        self.log = RunLog(self._run, self._spec)
        self.states = [genesis_state(self._spec)]

    async def catch_up(self) -> list[Content]:
        """Raises: OperatorError."""
        before = self.log.index
        data = await self._read()
        try:
            await asyncio.to_thread(self._add, data)
        except PeerError as error:
            if not self._offset or before == 0:
                raise OperatorError(
                    f"the log of {self._url} does not verify: entry {self.log.index + 1}: {error}. Name "
                    "another node of the run with --peers HOST:PORT.",
                    RUN,
                ) from None
            self._begin()  # what was cut off meanwhile: all of it again
            return await self.catch_up()
        return [self.log.content(index) for index in range(before + 1, self.log.index + 1)]

    def _add(self, data: bytes) -> None:
        """Raises: PeerError."""
        file = BytesIO(data)
        if not self._offset:
            head = file.read(len(journal.TAG))
            if head != journal.TAG:
                raise PeerError("MALFORMED", "no log")
            self._offset = len(head)
        for payload in journal.frames_of(file.read):
            entry = decode(payload, Entry, bytes_max=limits.log_frame_bytes_max)
            verify_entry(entry, self._run, verify_ed25519)
            self.log.append(entry)
            self.states.append(_after(self.states[-1], self.log.content(self.log.index), self._spec))
            self._offset += journal.FRAME_HEAD_BYTES + len(payload)
            self._told.progress("Checking the log", self._offset, max(self._offset, len(data)), "bytes")

    async def _read(self) -> bytes:
        """What comes after the offset. Raises: OperatorError."""
        why = ""
        for number in range(TRIES):
            if number:
                await asyncio.sleep(1.0)
            try:
                return await self._read_once()
            except TransportError as error:
                why = str(error)
                await asyncio.sleep(error.retry_after_s or 0)
            except (aiohttp.ClientError, TimeoutError, OSError, PeerError, ValueError) as error:
                why = str(error) or type(error).__name__
        raise OperatorError(
            f"{self._url}/v1/log did not come ({why}): try again later, or name another node of the run with "
            "--peers HOST:PORT.",
            NETWORK,
        )

    async def _read_once(self) -> bytes:
        headers = {"Range": f"bytes={self._offset}-"} if self._offset else {}
        url = f"{self._url}/v1/log"
        async with self._session.get(url, headers=headers, allow_redirects=False) as answer:
            if answer.status == 416 and self._offset:
                return b""
            if answer.status in (429, 503) and self._offset:
                return b""  # asked too soon: the next time
            if answer.status in (429, 503):
                raise TransportError(f"answered {answer.status}", retry_after_s(answer))
            if answer.status not in (200, 206):
                raise TransportError(f"answered {answer.status}")
            length = answer.content_length or 0
            if answer.status == 200:
                self._begin()
            return await read_capped(answer, limits.log_fetched_bytes_max, Pace().for_size(length))


def _after(state: RulesState, content: Content, spec: RunSpec) -> RulesState:
    """Raises: PeerError: a majority certified what cannot be."""
    try:
        if isinstance(content, OuterStep):
            return after_outer_step(state, content, spec)
        if isinstance(content, Membership):
            return after_membership(state, content.committee)
        return after_owner(state, content.word)
    except AssertionError as error:
        raise PeerError("BAD_CHAIN", str(error)) from None
