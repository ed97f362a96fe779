"""Routes of the public page: HTML, JSON, metrics, live events, static files; with strict headers on each.

One snapshot is taken and rendered per limits.page_interval_s for all readers together, in a thread. A
live page gets only the sections that changed since its last message, so a slow reader skips what is past,
and one that takes nothing is dropped.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.resources import files
from time import monotonic
from typing import NamedTuple

import msgspec
from aiohttp import web

from p2pdiloco import limits
from p2pdiloco.status.read_model import RunStatus, to_json
from p2pdiloco_node.status_page.metrics import CONTENT_TYPE as METRICS_TYPE
from p2pdiloco_node.status_page.metrics import metrics_text
from p2pdiloco_node.status_page.render import Rendering, render_page, render_sections

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
STATIC = {
    "page.css": "text/css",
    "page.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
RETRY_AFTER_S = 15


class Asset(NamedTuple):
    body: bytes
    content_type: str
    etag: str


class Page(NamedTuple):
    """One snapshot in every form. `revisions`: at which `revision` each section last changed."""

    revision: int
    rendering: Rendering
    revisions: dict[str, int]
    json: bytes
    html: bytes
    html_gzip: bytes
    made_at: float  # monotonic seconds


class StatusPage:
    """The public page over one source of snapshots."""

    def __init__(
        self,
        get_snapshot: Callable[[], RunStatus],
        *,
        address_of: Callable[[web.Request], str] = lambda request: request.remote or "",
        interval_s: float = limits.page_interval_s,
    ) -> None:
        """
        Args:
            get_snapshot: called on the event loop, at most once per `interval_s`.
            address_of: whom to count a live page for (behind a reverse proxy: from its header).
        """
        self._get_snapshot = get_snapshot
        self._address_of = address_of
        self._interval_s = interval_s
        self._assets = {name: _load(name, kind) for name, kind in STATIC.items()}
        self._addresses = {name: f"static/{name}?v={a.etag[:12]}" for name, a in self._assets.items()}
        self._page: Page | None = None
        self._making = asyncio.Lock()
        self._closing = asyncio.Event()
        self._streams: Counter[str] = Counter()

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/", self._html),
            web.get("/api/status", self._json),
            web.get("/api/schema", self._schema),
            web.get("/metrics", self._metrics),
            web.get("/events", self._events, allow_head=False),
            web.get("/static/{name}", self._static),
        ]

    async def close(self, _app: web.Application | None = None) -> None:
        """End the live pages, so that the server can stop."""
        self._closing.set()

    async def snapshot_html(self) -> str:
        """The page as one file for a plain web server: style sheet inside, no script (product.md 4)."""
        page = await self._current()
        css = self._assets["page.css"].body.decode()
        return await asyncio.to_thread(render_page, page.rendering, {}, inline_css=css)

    async def _current(self) -> Page:
        """The newest page, made anew when it is older than the interval."""
        async with self._making:
            page = self._page
            if page is None or monotonic() - page.made_at >= self._interval_s:
                status = self._get_snapshot()
                page = self._page = await asyncio.to_thread(_make, status, page, self._addresses)
            return page

    async def _html(self, request: web.Request) -> web.Response:
        page = await self._current()
        zipped = "gzip" in request.headers.get("Accept-Encoding", "").lower()
        headers = {**HEADERS, "Cache-Control": "no-store", "Vary": "Accept-Encoding"}
        if zipped:
            headers["Content-Encoding"] = "gzip"
        body = page.html_gzip if zipped else page.html
        return web.Response(body=body, content_type="text/html", charset="utf-8", headers=headers)

    async def _json(self, _request: web.Request) -> web.Response:
        page = await self._current()
        # Anybody may read it from any page: it holds nothing that is not public.
        headers = {**HEADERS, "Cache-Control": "no-store", "Access-Control-Allow-Origin": "*"}
        return web.Response(body=page.json, content_type="application/json", charset="utf-8", headers=headers)

    async def _schema(self, _request: web.Request) -> web.Response:
        body = await asyncio.to_thread(lambda: msgspec.json.encode(msgspec.json.schema(RunStatus)))
        return web.Response(body=body, content_type="application/json", charset="utf-8", headers=HEADERS)

    async def _metrics(self, _request: web.Request) -> web.Response:
        page = await self._current()
        body = await asyncio.to_thread(metrics_text, page.rendering.status, self._streams.total())
        return web.Response(body=body, headers={**HEADERS, "Content-Type": METRICS_TYPE})

    async def _static(self, request: web.Request) -> web.Response:
        asset = self._assets.get(request.match_info["name"])
        if asset is None:
            raise web.HTTPNotFound(headers=HEADERS)
        headers = {**HEADERS, "ETag": f'"{asset.etag}"', "Cache-Control": "public, max-age=86400"}
        if request.headers.get("If-None-Match") == headers["ETag"]:
            return web.Response(status=304, headers=headers)
        return web.Response(
            body=asset.body, content_type=asset.content_type, charset="utf-8", headers=headers
        )

    async def _events(self, request: web.Request) -> web.StreamResponse:
        async with self._seat(self._address_of(request)):
            response = web.StreamResponse(
                headers={**HEADERS, "Content-Type": "text/event-stream", "Cache-Control": "no-store",
                         "X-Accel-Buffering": "no"}
            )  # fmt: skip
            await response.prepare(request)
            revision = 0  # what the reader has; everything once, since its page may be from a cache
            try:
                while not self._closing.is_set():
                    page = await self._current()
                    async with asyncio.timeout(limits.stream_write_s_max):
                        await response.write(_message(page, revision))
                    revision = page.revision
                    try:
                        await asyncio.wait_for(self._closing.wait(), self._interval_s)
                    except TimeoutError:
                        continue
            except (TimeoutError, ConnectionError):
                # A reader that takes nothing: what is buffered for it goes too.
                if request.transport is not None:
                    request.transport.abort()
            return response

    @asynccontextmanager
    async def _seat(self, address: str) -> AsyncIterator[None]:
        """Count a live page while it is open. Raises: HTTPServiceUnavailable beyond the limits."""
        if (
            self._streams.total() >= limits.event_streams_max
            or self._streams[address] >= limits.event_streams_per_address_max
        ):
            raise web.HTTPServiceUnavailable(
                text="Too many live pages are open; the page itself works without.",
                headers={**HEADERS, "Retry-After": str(RETRY_AFTER_S)},
            )
        self._streams[address] += 1
        try:
            yield
        finally:
            self._streams[address] -= 1
            if not self._streams[address]:
                del self._streams[address]


def add_status_routes(
    app: web.Application,
    get_snapshot: Callable[[], RunStatus],
    *,
    address_of: Callable[[web.Request], str] = lambda request: request.remote or "",
) -> StatusPage:
    """Mount the page on `app` and end its live pages when the app shuts down."""
    page = StatusPage(get_snapshot, address_of=address_of)
    app.add_routes(page.routes())
    app.on_shutdown.append(page.close)
    return page


def _make(status: RunStatus, before: Page | None, addresses: dict[str, str]) -> Page:
    rendering = render_sections(status)
    revision = before.revision + 1 if before else 1
    revisions = {
        name: before.revisions[name] if before and before.rendering.sections[name] == html else revision
        for name, html in rendering.sections.items()
    }
    html = render_page(rendering, addresses).encode()
    return Page(
        revision, rendering, revisions, to_json(status), html, gzip.compress(html, 5, mtime=0), monotonic()
    )


def _message(page: Page, revision: int) -> bytes:
    changed = {n: page.rendering.sections[n] for n, r in page.revisions.items() if r > revision}
    data = json.dumps({"generated_unix": page.rendering.status.generated_unix, "sections": changed})
    return f"id: {page.revision}\ndata: {data}\n\n".encode()


def _load(name: str, kind: str) -> Asset:
    body = (files("p2pdiloco_node.status_page") / "static" / name).read_bytes()
    return Asset(body, kind, hashlib.sha256(body).hexdigest()[:32])
