"""Which run a node takes part in: from its disk, or from the tracker or a node that its owner names.

The RunId is pinned on first use: a folder that has been in a run asks nobody which run it is (protocol.md 7).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import aiohttp

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError, PeerError, TransportError
from p2pdiloco.exit_codes import NETWORK, RUN
from p2pdiloco.ids import RunId
from p2pdiloco.run_spec import RunSpec, open_run_spec
from p2pdiloco.wire.signing import verify_ed25519
from p2pdiloco_node.config import HostPort, JoinLink, parse_join
from p2pdiloco_node.storage.data_dir import DataDir
from p2pdiloco_node.storage.files import make_folder, replace_file
from p2pdiloco_node.storage.run_folder import LINK, SPEC
from p2pdiloco_node.transport.contact import fetch_run_spec, greet

NAME = "name"  # in the data folder
log = logging.getLogger("p2pdiloco.node")


class Found(NamedTuple):
    """The run to take part in."""

    run: RunId
    spec: RunSpec
    signed: bytes  # the RunSpec as its owner signed it
    link: JoinLink | None  # None: only peers are named


async def find_run(
    data: DataDir,
    session: aiohttp.ClientSession,
    join: JoinLink | None,
    peers: Sequence[HostPort],
    *,
    fits: Callable[[RunSpec, Path], Awaitable[None]],
) -> Found:
    """From disk where this node has been in it before, else from the tracker or the peers named.

    `fits` is asked about the run and its folder (which may not be there yet) before anything of the run is
    written or fetched.

    Raises: OperatorError: nobody answers, another run or version; what `fits` raises.
    """
    kept = _kept_link(data.root)
    link = join or kept
    wanted = (join.run if join else None) or (kept.run if kept else None)
    if join is not None and join.run is None and wanted is not None:
        await _check_served(session, join.url, data, wanted)
    if kept is not None and kept.run is not None and wanted != kept.run:
        log.info("This data folder was in run %s before.", kept.run.hex()[:16])
    here = _kept_run(data, wanted) if wanted is not None else None
    if wanted is None or here is None:
        run, spec, signed = await _ask(session, link, peers, wanted)
        await fits(spec, data.run_folder(run))
        make_folder(data.files, data.run_folder(run))
        replace_file(data.files, data.run_folder(run) / SPEC, signed)
    else:
        run, (spec, signed) = wanted, here
        await fits(spec, data.run_folder(run))
    if link is not None and (kept is None or (link.url, run) != kept):
        log.info("The run is %s (%s): pinned in %s from now on.", spec.name, run.hex(), data.root)
        replace_file(data.files, data.root / LINK, f"{link.url}/#{run.hex()}\n".encode())
    return Found(run, spec, signed, link)


async def _check_served(session: aiohttp.ClientSession, url: str, data: DataDir, pinned: RunId) -> None:
    """A bare address names whatever run it serves, which may not be the folder's.

    A tracker that is away, or of another build, does not keep a node from its run.

    Raises: OperatorError: it serves another run.
    """
    try:
        served = (await greet(session, url)).run
        if served == pinned:
            return
        _, spec, _ = await fetch_run_spec(session, url, served)
    except (TransportError, OperatorError):
        return
    here = _kept_run(data, pinned)
    belongs = f"{here[0].name} ({pinned.hex()[:16]})" if here else f"run {pinned.hex()[:16]}"
    raise OperatorError(
        f"{url} serves run {spec.name} ({served.hex()[:16]}), and {data.root} belongs to {belongs}: take "
        f"another --data-dir, or join with the whole link, {url}/#{served.hex()}",
        RUN,
    )


def check_named(root: Path, join: JoinLink | None, peers: Sequence[HostPort]) -> None:
    """Before anything is written to `root`. Raises: OperatorError (usage): nobody is named."""
    if join is None and not peers and _kept_link(root) is None:
        parse_join("")  # raises the sentence that says what to give


def kept_name(data: DataDir, given: str) -> str:
    """The name that its owner gave this node, now or before; empty: none. Raises: OperatorError."""
    path = data.root / NAME
    if given:
        replace_file(data.files, path, given.encode())
        return given
    try:
        return path.read_text()[: limits.name_chars_max]
    except (OSError, UnicodeDecodeError):
        return ""


def _kept_link(root: Path) -> JoinLink | None:
    try:
        return parse_join((root / LINK).read_text())
    except (OSError, UnicodeDecodeError, OperatorError):
        return None


def _kept_run(data: DataDir, run: RunId) -> tuple[RunSpec, bytes] | None:
    try:
        signed = (data.run_folder(run) / SPEC).read_bytes()
        _, spec = open_run_spec(signed, verify_ed25519, expected=run)
    except FileNotFoundError:
        return None
    except (OSError, PeerError) as error:
        log.warning("The RunSpec in %s is damaged (%s); it is fetched again.", data.root, error)
        return None
    return spec, signed


async def _ask(
    session: aiohttp.ClientSession, link: JoinLink | None, peers: Sequence[HostPort], wanted: RunId | None
) -> tuple[RunId, RunSpec, bytes]:
    urls = [link.url] if link else []
    urls += [f"http://{peer}" for peer in peers]
    tried = []
    for url in urls:
        try:
            return await fetch_run_spec(session, url, wanted)
        except TransportError as error:
            tried.append(f"{url} ({error})")
    raise OperatorError(
        f"No reachable tracker: tried {' and '.join(tried)}. Check the address, or ask its host whether it "
        "runs.",
        NETWORK,
    )
