"""Outgoing HTTP that trusts no server: no redirects, no cookies, no proxies from the environment, no
decompression, every answer capped, every wait bounded (traps.md, targets H4)."""

from __future__ import annotations

import json
import ssl
from math import isfinite
from typing import Any

import aiohttp

from p2pdiloco import limits
from p2pdiloco.errors import TransportError
from p2pdiloco_node.transport.bodies import Pace, read_parts
from p2pdiloco_node.transport.traffic import head_bytes


def make_session(*, connections_max: int, per_host_max: int, build: str) -> aiohttp.ClientSession:
    """One session for one kind of traffic, so that heartbeats never wait behind uploads for a connection.

    Timeouts for bodies are the callers' (`bodies.Pace`); connecting and an answer's head are bounded here.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=connections_max,
            limit_per_host=per_host_max,
            keepalive_timeout=limits.header_timeout_s - 5,  # before the server's own: no race at its end
            enable_cleanup_closed=False,
        ),
        timeout=aiohttp.ClientTimeout(
            total=None, sock_connect=limits.connect_timeout_s, sock_read=limits.request_timeout_s
        ),
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
        auto_decompress=False,
        max_line_size=limits.head_bytes_max,
        max_field_size=limits.head_bytes_max,
        headers={"User-Agent": f"p2pdiloco/{build}", "Accept-Encoding": "identity"},
    )


def answer_head_bytes(answer: aiohttp.ClientResponse) -> int:
    return head_bytes(20, answer.raw_headers)


def request_head_bytes(answer: aiohttp.ClientResponse) -> int:
    info = answer.request_info
    return head_bytes(len(info.method) + len(info.url.raw_path) + 12, info.headers.items())


async def read_capped(answer: aiohttp.ClientResponse, bytes_max: int, pace: Pace | None = None) -> bytes:
    """An answer's whole body, of at most `bytes_max` bytes.

    Raises: TransportError if it is longer, encoded, or slower than `pace`; PeerError if it ends early.
    """
    if answer.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise TransportError("the answer is encoded")
    length = answer.content_length
    if length is None:
        raise TransportError("an answer without a length")
    if length > bytes_max:
        raise TransportError(f"an answer of {length} bytes, at most {bytes_max} expected")
    pace = pace or Pace(total_s=limits.request_timeout_s)
    return b"".join([part async for part in read_parts(answer.content, length, pace)])


async def read_refusal(answer: aiohttp.ClientResponse) -> dict[str, Any]:
    """What an answer that says no gives as its reason; empty where it is not JSON as ours."""
    try:
        data = await read_capped(answer, limits.error_bytes_max)
        value = json.loads(data)
    except (TransportError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def retry_after_s(answer: aiohttp.ClientResponse) -> float:
    """What the answer asks for, within our own limits; for a date, the default."""
    text = answer.headers.get("Retry-After", "")
    try:
        wait = float(text)
    except ValueError:
        return limits.retry_after_s
    return min(max(wait, 0.1), limits.retry_after_s_max) if isfinite(wait) else limits.retry_after_s


def what_happened(error: BaseException, what: str) -> str:
    """A word or two for people. `what`: which daemon was asked for."""
    match error:
        case TimeoutError() | aiohttp.ServerTimeoutError():
            return "no answer in time"
        case aiohttp.ClientConnectorDNSError():
            return "this name is not known"
        case aiohttp.ClientConnectorSSLError() | aiohttp.ClientConnectorCertificateError() | ssl.SSLError():
            return "no valid TLS there; is it http:// perhaps?"
        case aiohttp.ClientConnectorError():
            refused = isinstance(error.os_error, ConnectionRefusedError)
            return "refused" if refused else (error.os_error.strerror or "not reachable")
        case aiohttp.ServerDisconnectedError() | ConnectionError():
            return "it hung up"
        case aiohttp.ClientResponseError() | aiohttp.http_exceptions.HttpProcessingError():
            return f"answered, but is not a p2pdiloco {what}"
        case _:
            return type(error).__name__
