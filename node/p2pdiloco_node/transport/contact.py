"""First words with a tracker or a node: is it one, which version, which run (product.md 5).

Everything that comes back is untrusted: capped, timed, typed. What a person can mend becomes one sentence
that names the address tried and what answered.
"""

from __future__ import annotations

import asyncio
import json
from typing import NamedTuple

import aiohttp

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError, PeerError, TransportError
from p2pdiloco.exit_codes import RUN
from p2pdiloco.ids import RunId
from p2pdiloco.protocol.tracker import AnnounceReply
from p2pdiloco.run_spec import RunSpec, open_run_spec
from p2pdiloco.wire.codec import decode
from p2pdiloco.wire.envelope import PROTOCOL_VERSION
from p2pdiloco.wire.messages import Peers
from p2pdiloco.wire.signing import verify_ed25519
from p2pdiloco_node import __version__
from p2pdiloco_node.transport.http_session import read_capped, read_refusal, what_happened

REPLY_BYTES_MAX = 128 * limits.KIB  # 64 records of up to 1 KiB, and their frame


class NotATracker(TransportError):
    """Something answered there, and it is not a p2pdiloco tracker."""


class Refused(TransportError):
    """A tracker or peer says no to this node for a reason that waiting may not mend."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class Greeting(NamedTuple):
    protocol: int
    build: str
    run: RunId


async def greet(session: aiohttp.ClientSession, url: str) -> Greeting:
    """Who serves `url`.

    Raises: TransportError with what happened; NotATracker; OperatorError for another protocol version.
    """
    data = await _get(session, f"{url}/v1/version", 4 * limits.KIB)
    try:
        said = json.loads(data)
        greeting = Greeting(int(said["protocol"]), str(said["build"])[:32], RunId(bytes.fromhex(said["run"])))
    except (ValueError, KeyError, TypeError, RecursionError):
        raise NotATracker("answered, but is not a p2pdiloco tracker") from None
    if greeting.protocol != PROTOCOL_VERSION:
        raise OperatorError(
            f"{url} speaks protocol {greeting.protocol} (p2pdiloco {greeting.build}), this is protocol "
            f"{PROTOCOL_VERSION} (p2pdiloco {__version__}): upgrade the older one with "
            "pip install --upgrade p2pdiloco.",
            RUN,
        )
    return greeting


async def fetch_run_spec(
    session: aiohttp.ClientSession, url: str, expected: RunId | None
) -> tuple[RunId, RunSpec, bytes]:
    """The run that `url` serves, and its signed RunSpec as it came.

    Raises: TransportError; NotATracker; OperatorError where it serves another run than `expected`, or one
    that needs another version or cannot be.
    """
    greeting = await greet(session, url)
    if expected is not None and greeting.run != expected:
        raise OperatorError(f"{another_run(url, greeting.run, expected)}.", RUN)
    data = await _get(session, f"{url}/v1/run", limits.run_spec_bytes_max + 1024)
    try:
        run, spec = await asyncio.to_thread(open_run_spec, data, verify_ed25519, expected=greeting.run)
    except PeerError as error:
        if error.reason == "BAD_RUN_SPEC":
            raise OperatorError(
                f"{url} serves run {greeting.run.hex()[:16]}, which nobody can take part in ({error}). Its "
                "owner has to make it anew; its tracker and this machine are as they should be.",
                RUN,
            ) from None
        raise NotATracker(f"answered with a RunSpec that is not valid ({error})") from None
    return run, spec, data


def another_run(url: str, served: RunId | None, expected: RunId) -> str:
    """What to say and do where `url` serves `served` (None: it does not say) instead of `expected`."""
    serves = f"serves run {served.hex()[:16]}" if served else "serves another run"
    return (
        f"{url} {serves}, not {expected.hex()[:16]}: copy the join line of the run that you want, or give "
        "this run a --data-dir of its own"
    )


async def fetch_peers(session: aiohttp.ClientSession, url: str) -> tuple[bytes, ...]:
    """Sealed peer records that the node at `url` knows. Raises: TransportError."""
    data = await _get(session, f"{url}/v1/peers", limits.message_bytes_max)
    try:
        return decode(data, Peers).records
    except PeerError as error:
        raise TransportError(f"answered with peers that do not open ({error})") from None


async def announce(session: aiohttp.ClientSession, url: str, sealed: bytes) -> AnnounceReply:
    """Say to the tracker at `url` that this node is here.

    Raises: TransportError; Refused (another copy of this identity runs, say); NotATracker.
    """
    try:
        async with (
            asyncio.timeout(limits.request_timeout_s),
            session.post(f"{url}/v1/announce", data=sealed, allow_redirects=False) as answer,
        ):
            if answer.status == 200:
                return decode(await read_capped(answer, REPLY_BYTES_MAX), AnnounceReply)
            said = await read_refusal(answer)
            status = answer.status
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise TransportError(what_happened(error, "tracker")) from None
    except PeerError as error:
        raise NotATracker(f"answered what no tracker answers ({error})") from None
    reason = str(said.get("reason", ""))[:64]
    if not reason or reason == "NOT_FOUND":
        raise NotATracker(f"answered {status}, but is not a p2pdiloco tracker")
    detail = str(said.get("detail", ""))[:200].removeprefix(f"{reason}: ")
    text = f"{reason}: {detail}" if detail != reason else reason
    if reason in ("REPLACED", "WRONG_RUN", "WRONG_VERSION"):
        raise Refused(text, reason)
    raise TransportError(text)


async def _get(session: aiohttp.ClientSession, url: str, bytes_max: int) -> bytes:
    try:
        async with (
            asyncio.timeout(limits.request_timeout_s),
            session.get(url, allow_redirects=False) as answer,
        ):
            if answer.status == 429 or answer.status >= 500:
                raise TransportError(f"answered {answer.status}")
            if answer.status != 200:
                raise NotATracker(f"answered {answer.status}, but is not a p2pdiloco tracker")
            return await read_capped(answer, bytes_max)
    except PeerError:
        raise TransportError("the answer ended early") from None
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise TransportError(what_happened(error, "tracker")) from None
