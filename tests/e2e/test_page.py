"""The public page in a real browser: no name becomes a script, the page lives, and says when it does not."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, ClientWebSocketResponse, web
from aiohttp.test_utils import TestServer

from p2pdiloco_node.status_page import StatusPage

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium here (Debian: apt-get install chromium)"),
]
QUIET = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--remote-debugging-port=0")  # fmt: skip
# Whatever runs asks for /canary or leaves a mark. A name on the wire has at most 32 characters.
ATTACKS = (
    "<script src=/canary></script>",
    "<img src=/canary onerror=f()>",
    "<svg onload=fetch('/canary')>",
    '"><iframe src=/canary>',
    "' onmouseover=fetch('/canary') '",
    "<base href=/canary/>",
    "<link rel=stylesheet href=canary>",
    "<meta http-equiv=refresh content=0>",
    "javascript:fetch('/canary')",
    "<style>@import'/canary'</style>",
    "</td></tr></table><script>1//",
    "{{ cycler.__init__ }}",
)


class Site:
    """One page on loopback that notes every address asked for."""

    def __init__(self, run) -> None:
        self.run = run
        self.asked: list[str] = []
        self.url = ""

    @asynccontextmanager
    async def served(self) -> AsyncIterator[Site]:
        @web.middleware
        async def note(request: web.Request, handler) -> web.StreamResponse:
            self.asked.append(request.path)
            return await handler(request)

        app = web.Application(middlewares=[note])
        page = StatusPage(lambda: self.run.builder.build(self.run.now + 1), interval_s=0.1)
        app.add_routes(page.routes())
        app.on_shutdown.append(page.close)
        async with TestServer(app) as server:
            self.url = str(server.make_url("/"))
            yield self


class Tab:
    """A page of a headless Chromium, over its own debugging protocol."""

    def __init__(self, socket: ClientWebSocketResponse) -> None:
        self._socket = socket
        self._n = 0
        self.complaints: deque[str] = deque(maxlen=100)  # errors, policy reports, exceptions

    async def call(self, method: str, **params: object) -> dict[str, Any]:
        self._n += 1
        await self._socket.send_json({"id": self._n, "method": method, "params": params})
        while True:
            said = await self._socket.receive_json()
            if said.get("method") == "Runtime.exceptionThrown":
                self.complaints.append(str(said["params"]["exceptionDetails"]))
            elif said.get("method") == "Log.entryAdded":
                self.complaints.append(said["params"]["entry"]["text"])
            if said.get("id") == self._n:
                assert "error" not in said, said
                return said["result"]

    async def js(self, expression: str) -> Any:
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, expression: str, seconds: float = 15.0) -> None:
        for _ in range(int(seconds / 0.05)):
            if await self.js(expression):
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"not within {seconds} s: {expression}")

    async def open(self, url: str) -> None:
        for domain in ("Runtime", "Log", "Page"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && location.href !== 'about:blank'")


@pytest.fixture
async def tab(tmp_path: Path) -> AsyncIterator[Tab]:
    profile = tmp_path / "profile"
    process = await asyncio.create_subprocess_exec(
        str(CHROMIUM), *QUIET, f"--user-data-dir={profile}", "about:blank",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        async with asyncio.timeout(60), ClientSession() as session:
            port = await debugging_port(profile / "DevToolsActivePort")
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                (page,) = [t for t in await answer.json() if t["type"] == "page"]
            async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                yield Tab(socket)
    finally:
        process.terminate()
        await process.wait()


async def debugging_port(file: Path) -> str:
    for _ in range(600):
        text = file.read_text() if file.exists() else ""  # noqa: ASYNC240
        if "\n" in text:
            return text.splitlines()[0]
        await asyncio.sleep(0.05)
    raise AssertionError("chromium did not start within 30 s")


async def test_no_name_becomes_a_script(fake_run, tab: Tab) -> None:  # P4, H6
    run = fake_run()
    run.lifelike(8)
    for i, name in enumerate(ATTACKS):
        run.node(10 + i, name, why=name * 3, device=name, build=name, last_outcome=name)
        run.builder.event(name, name * 2, when_unix=run.now)
    run.listed()
    async with Site(run).served() as site:
        await tab.open(site.url)
        seen = await tab.js("document.body.innerText")
        run.builder.event("tracker", ATTACKS[0] + " by the live feed", when_unix=run.now)
        await tab.until("document.body.innerText.includes('by the live feed')")
        await tab.js("document.querySelectorAll('*').forEach(e => e.dispatchEvent(new Event('mouseover')))")
        elements = await tab.js("[...new Set([...document.querySelectorAll('*')].map(e => e.localName))]")
        scripts = await tab.js("document.scripts.length")
        assert scripts == 1
        assert not {"iframe", "img", "base", "style", "form", "object"} & set(elements)
        assert all(name in seen for name in ATTACKS if '"' not in name and "cycler" not in name)
    assert not [path for path in site.asked if "canary" in path], site.asked
    assert not tab.complaints, tab.complaints  # nor does the page break its own policy


async def test_the_page_shows_news_without_a_reload(fake_run, tab: Tab) -> None:
    run = fake_run()
    run.node(1, "first-name")
    run.listed()
    async with Site(run).served() as site:
        await tab.open(site.url)
        run.node(1, "second-name")
        run.listed()
        await tab.until("document.querySelector('tbody th').innerText.includes('second-name')")
        assert site.asked.count("/") == 1
        # "Find me" outlives the exchange of the table.
        await tab.js(
            "find.value = 'Second-Name'; find.dispatchEvent(new Event('input'));"
            "localStorage.getItem('p2pdiloco.me')"
        )
        run.step([(1, 1000, 3.0)])
        await tab.until("document.querySelector('tr.me')?.innerText.includes('ACCEPTED')")


async def test_a_dead_feed_greys_the_page_and_says_so(fake_run, tab: Tab) -> None:  # S22
    run = fake_run()
    run.lifelike(8)
    banner = "!document.getElementById('feed').hidden && document.getElementById('feed').innerText"
    async with Site(run).served() as site:
        await tab.open(site.url)
        await tab.until("performance.getEntriesByType('resource').length >= 2")
        assert not await tab.js(banner)
    # The server is gone; to the page it is gone for 20 s more with each look.
    await tab.until("(heard -= 20000, document.body.classList.contains('stale'))", 5)
    assert re.match(r"Data is \d+ s old: the tracker does not answer", await tab.js(banner))


@pytest.mark.parametrize("width", [320, 390, 820, 1280])
async def test_nothing_is_wider_than_the_screen(fake_run, tab: Tab, width: int) -> None:
    run = fake_run()
    run.node(9, "a-name-that-has-32-characters-in", why="x" * 120, device="y" * 48)
    run.lifelike(8)
    async with Site(run).served() as site:
        await tab.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
        )
        await tab.open(site.url)
        wide = (
            "[...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > "
            f"{width} && !e.closest('.scroll')).map(e => e.outerHTML.slice(0, 80))"
        )
        assert await tab.js("document.documentElement.scrollWidth") <= width, await tab.js(wide)


async def test_everything_that_can_be_used_has_a_name(fake_run, tab: Tab) -> None:
    run = fake_run()
    run.lifelike(8)
    async with Site(run).served() as site:
        await tab.open(site.url)
        tree = await tab.call("Accessibility.getFullAXTree")
    named = {"link", "button", "searchbox", "textbox", "img", "image", "progressbar", "region", "table"}
    found = [
        (n["role"]["value"], n.get("name", {}).get("value", ""))
        for n in tree["nodes"]
        if not n["ignored"] and n["role"]["value"] in named
    ]
    assert {role for role, _ in found} >= {"link", "searchbox", "progressbar", "table"}
    assert not [role for role, name in found if not name.strip()]
