"""A run as its owner's tool sees it: who can be reached, and one log in which every entry was checked.

The hosts are strangers. An entry counts when its certificate does, a state when the log names its root.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import aiohttp

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError, PeerError, TransportError
from p2pdiloco.exit_codes import NETWORK
from p2pdiloco.ids import PeerId, RunId, short
from p2pdiloco.protocol.run_log import RunLog
from p2pdiloco.rules.state import RulesState
from p2pdiloco.run_spec import RunSpec, open_run_spec
from p2pdiloco.status.names import clean_name
from p2pdiloco.wire.envelope import ANYBODY, open_envelope
from p2pdiloco.wire.messages import PeerRecord, StateShown
from p2pdiloco.wire.signing import verify_ed25519
from p2pdiloco_node.config import HostPort, JoinLink, parse_join
from p2pdiloco_node.export.log_reader import LogReader
from p2pdiloco_node.progress import Told
from p2pdiloco_node.storage.run_folder import ADDRESS, RUN, RUNS, SPEC, WITNESS
from p2pdiloco_node.transport.addresses import check_address, url_host
from p2pdiloco_node.transport.contact import fetch_peers, fetch_run_spec
from p2pdiloco_node.transport.http_session import read_capped


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
    if "://" in words or (":" in words and not folder.is_dir()):  # with a colon an address is meant
        return parse_join(words, "RUN")
    if not folder.is_dir():
        raise OperatorError(
            f"There is no folder {folder}, and it is no link: name a run's folder, a node's data folder, or "
            "the run's link (http://HOST:PORT/#RUNID)."
        )
    specs = [spec for spec in (folder / SPEC, folder / RUN / SPEC) if spec.is_file()]
    run: RunId | None = None
    for spec in specs:
        with suppress(PeerError, OSError):
            run, _ = open_run_spec(spec.read_bytes(), verify_ed25519)
    for place in (folder / WITNESS, folder / RUN / WITNESS, folder):
        with suppress(OSError, ValueError, KeyError, TypeError):
            return JoinLink(str(json.loads((place / ADDRESS).read_text())["url"]), run)
    if not specs and not any(folder.glob(f"{RUNS}/*/{SPEC}")):
        raise OperatorError(
            f"{folder} holds no run: name a run's folder, a node's data folder, or the run's link "
            "(http://HOST:PORT/#RUNID)."
        )
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
        self._has_read = False
        self.tail = self.reader(urls[0])

    @property
    def log(self) -> RunLog:
        return self.tail.log

    @property
    def rules(self) -> RulesState:
        """After the newest entry of `log`."""
        return self.tail.rules

    def rules_at(self, index: int) -> RulesState:
        return self.tail.rules_at(index)

    def reader(self, url: str) -> LogReader:
        """Of another host's log; what it read becomes this run's where it is put in the place of `tail`."""
        return LogReader(self.session, self.run, self.spec, url, self._watch, advice="--peers HOST:PORT")

    def _watch(self, what: str, done: float, total: float, unit: str) -> None:
        """Who looks again and again for what is new in a log is waiting, and says for what."""
        if not self._has_read:
            self.told.progress(what, done, total, unit)

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

    async def catch_up(self) -> None:
        """Raises: OperatorError."""
        await self.tail.catch_up()
        self._has_read = True

    async def state_of(self, host: Host) -> tuple[StateShown, str] | None:
        """How far a peer says to be, and at which address; None where it does not answer itself."""
        nonce = secrets.token_bytes(32)
        for url in host.urls:
            try:
                async with (
                    asyncio.timeout(limits.request_timeout_s),
                    self.session.get(
                        f"{url}/v1/state", params={"nonce": nonce.hex()}, allow_redirects=False
                    ) as answer,
                ):
                    if answer.status != 200:
                        continue
                    data = await read_capped(answer, limits.KIB)
                opened = await asyncio.to_thread(
                    open_envelope, data, verify_ed25519, run=self.run, me=ANYBODY
                )
                shown = opened.message
                if isinstance(shown, StateShown) and (opened.sender, shown.nonce) == (host.peer, nonce):
                    return shown, url
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
