"""Answers that programs can read: `{"reason": WORD, "detail": sentence}` with a status that fits."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from math import ceil

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Middleware

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError, PeerError, TransportError
from p2pdiloco_node.transport.addresses import canonical
from p2pdiloco_node.transport.bodies import TooSlow
from p2pdiloco_node.transport.guards import Strikes

log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

STATUS: Mapping[str, int] = {
    "BAD_CERTIFICATE": 403,
    "BAD_OFFSET": 409,
    "BAD_RANGE": 416,
    "BAD_SIGNATURE": 403,
    "BANNED": 429,
    "BUSY": 503,
    "ENCODED": 415,
    "MALFORMED": 400,
    "NOT_ALLOWED": 403,
    "NOT_HERE": 404,
    "NO_LENGTH": 411,
    "RATE_LIMITED": 429,
    "REPLAYED": 409,
    "TOO_BIG": 413,
    "TOO_SLOW": 408,
    "WRONG_DIGEST": 422,
    "WRONG_EPOCH": 409,
    "WRONG_RECEIVER": 421,
    "WRONG_RUN": 403,
    "WRONG_SIZE": 409,
    "WRONG_VERSION": 426,
}
# Slips of an honest peer: a race, another run, an older build, an address that changed hands. No strike.
HARMLESS = frozenset(
    {"BAD_OFFSET", "BANNED", "BUSY", "NOT_ALLOWED", "NOT_HERE", "RATE_LIMITED", "REPLAYED", "WRONG_RUN"}
    | {"WRONG_EPOCH", "WRONG_RECEIVER", "WRONG_VERSION"}
)


def refusal(
    reason: str, detail: str, *, status: int | None = None, retry_after_s: float | None = None, **more: object
) -> web.Response:
    """An answer that says no. The connection is closed after it: its body may be unread."""
    body = {"reason": reason, "detail": detail, **more}
    headers = {} if retry_after_s is None else {"Retry-After": str(ceil(retry_after_s))}
    answer = web.Response(
        body=json.dumps(body).encode(),
        status=status or STATUS.get(reason, 400),
        headers=headers,
        content_type="application/json",
    )
    answer.force_close()
    return answer


def remote_ip(request: web.Request) -> str:
    """From the socket, never from a header."""
    return canonical(request.remote or "")


def content_length(request: web.Request, bytes_max: int) -> int:
    """The announced length of the body, refused before a byte of it is read.

    Raises: PeerError NO_LENGTH, TOO_BIG.
    """
    length = request.content_length
    if length is None or "Transfer-Encoding" in request.headers:
        raise PeerError("NO_LENGTH", "send the body with a Content-Length")
    if length > bytes_max:
        raise PeerError("TOO_BIG", f"{length} bytes, at most {bytes_max}")
    return length


def faults_as_answers(strikes: Strikes) -> Middleware:
    """The outermost middleware: whoever's fault it is, an answer goes out and the server lives on."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        address = remote_ip(request)
        refused_for_s = strikes.refused_for_s(address)
        if refused_for_s > 0:
            return refusal("BANNED", "too many faults from this address", retry_after_s=refused_for_s)
        try:
            if request.headers.get("Content-Encoding", "identity").lower() != "identity":
                raise PeerError("ENCODED", "send the body without a Content-Encoding")
            return await handler(request)
        except PeerError as error:
            if error.reason not in HARMLESS:
                strikes.strike(address, error.reason)
            wait = limits.retry_after_s if STATUS.get(error.reason) in (429, 503) else None
            return refusal(error.reason, str(error), retry_after_s=wait)
        except TooSlow as error:
            strikes.strike(address, "TOO_SLOW")
            return refusal("TOO_SLOW", str(error))
        except TransportError as error:
            return refusal("BUSY", str(error), retry_after_s=error.retry_after_s or limits.retry_after_s)
        except OperatorError as error:
            # This machine's trouble (its disk): never held against the sender, and no paths go out.
            log.warning("%s", error)
            return refusal(
                "NO_ROOM",
                "this node cannot store it now",
                status=507,
                retry_after_s=limits.full_store_retry_s,
            )
        except web.HTTPException as error:
            return refusal(error.reason.upper().replace(" ", "_"), f"{request.method} {request.path[:80]}",
                           status=error.status)  # fmt: skip
        except (ConnectionError, aiohttp.ClientError, web.RequestPayloadError) as error:
            return refusal("MALFORMED", f"the connection broke: {type(error).__name__}")
        except Exception:
            log.exception("a request failed: %s %s", request.method, request.path)
            return refusal("OURS", "a fault of this node", status=500)

    return middleware
