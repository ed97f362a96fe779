"""The page over real HTTP: headers, hostile names, JSON, metrics, live events and their limits."""

from __future__ import annotations

import asyncio
import gzip
import html as html_lib
import json
import re
from contextlib import asynccontextmanager
from html.parser import HTMLParser

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client.parser import text_string_to_metric_families

from p2pdiloco import limits
from p2pdiloco.status import clean_name
from p2pdiloco_node.status_page import StatusPage, add_status_routes, routes

HOSTILE = [
    "<script>alert(1)</script>",
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "'><svg onload=alert(1)>",
    "<iframe srcdoc='<script>1</script>'>",
    "javascript:alert(1)",
    "<a href='javascript:alert(1)'>x</a>",
    "{{ 7*7 }}{% raw %}",
    "{{ s.__class__ }}",
    "&lt;script&gt;alert(1)",
    "]]><script>x</script>",
    "--><script>x</script><!--",
    "\u202e<script>gpj\u202c",
    "\u200b\u200b\u200b",
    "a\nb\r\ndata: {}\n\n",
    'node{name="x"} 1\n# HELP',
    'back\\slash"quote\\n',
    "\x00\x07\x1b[2J",
    "x" * 10_000,
    "Z" + "\u0351" * 900,
    "\ud83d\ude00 😀",
    "<b onmouseover=x>",
    "<style>*{display:none}</style>",
    "<base href=//evil>",
    "<meta http-equiv=refresh content=0>",
    "=cmd|' /C calc'!A0",
    "%3Cscript%3E",
    "\\u003cscript\\u003e",
    "＜script＞",
    "<ScRiPt>alert(1)",
    "<x onfocus=alert(1) autofocus>",
    "<form action=//evil><input>",
    "data:text/html,<script>",
]
HOSTILE += [f"{i}{tag}" for i, tag in enumerate((HOSTILE * 3)[: 100 - len(HOSTILE)])]


class Seen(HTMLParser):
    """What a browser would make of it: elements, and their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text += data


@pytest.fixture
async def serve():
    clients = []

    async def start(run, **options) -> TestClient:
        app = web.Application()
        page = StatusPage(lambda: run.builder.build(run.now + 1), **options)
        app.add_routes(page.routes())
        app.on_shutdown.append(page.close)
        client = TestClient(TestServer(app))
        await client.start_server()
        clients.append(client)
        return client

    yield start
    for client in clients:
        await client.close()


def hostile_run(fake_run):
    run = fake_run()
    for i, name in enumerate(HOSTILE):
        # What arrives on the wire is valid text of any content; lone surrogates cannot.
        name = name.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        run.node(i, name, why=name, device=name, build=name, last_outcome=name, left=None)
    run.listed()
    run.step([(i, 1000, 3.0) for i in range(8)], refused=[(i, HOSTILE[i][:30]) for i in range(8)])
    return run


async def test_every_answer_has_the_strict_headers(serve, fake_run):
    client = await serve(fake_run())
    css = re.search(r'href="(static/page\.css[^"]*)"', await (await client.get("/")).text())[1]
    for path in ("/", "/api/status", "/api/schema", "/metrics", "/" + css, "/static/none", "/events"):
        async with client.get(path) as answer:
            policy = answer.headers["Content-Security-Policy"]
            for rule in ("default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'",
                         "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"):  # fmt: skip
                assert rule in policy, path
            assert "unsafe" not in policy
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            assert answer.headers["Referrer-Policy"] == "no-referrer"
            assert answer.headers["Cross-Origin-Opener-Policy"] == "same-origin"


async def test_a_hundred_hostile_names_are_text(serve, fake_run):  # P4, H6
    client = await serve(hostile_run(fake_run))
    text = await (await client.get("/")).text()
    clean = await (await (await serve(fake_run())).get("/")).text()
    seen, plain = Seen(text), Seen(clean)
    assert len(HOSTILE) == 100
    assert seen.tags.count("script") == plain.tags.count("script") == 1
    allowed = set(plain.tags) | {
        "table",
        "caption",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "ol",
        "li",
        "time",
        "bdi",
    }
    allowed |= {"polyline", "line", "circle"}
    assert set(seen.tags) <= allowed
    assert not [a for a, _ in seen.attributes if a.startswith("on") or a == "style"]
    for attribute, value in seen.attributes:
        if attribute in ("href", "src"):
            assert re.match(r"(static|api)/|metrics$|#", value or ""), value
    for name in HOSTILE[:12]:
        assert clean_name(name) in seen.text
    assert "{{ 7*7 }}" in seen.text
    assert not re.search("[\u200b\u202a-\u202e\u2066-\u2069\x00\x07\x1b]", text)


async def test_hostile_names_in_json_and_metrics(serve, fake_run):
    run = hostile_run(fake_run)
    client = await serve(run)
    status = json.loads(await (await client.get("/api/status")).read())
    assert {n["who"]["name"] for n in status["nodes"]} == {
        r.who.name for r in run.builder.build(run.now).nodes
    }
    metrics = await (await client.get("/metrics")).text()
    families = {f.name: f for f in text_string_to_metric_families(metrics)}
    names = {s.labels["name"] for s in families["p2pdiloco_node_info"].samples}
    assert names == {n["who"]["name"] for n in status["nodes"]}
    assert all(
        set(s.labels) <= {"node", "name", "state", "outcome"} for f in families.values() for s in f.samples
    )


async def test_series_are_bounded(serve, fake_run, monkeypatch):
    monkeypatch.setattr(limits, "metric_nodes_max", 5)
    client = await serve(hostile_run(fake_run))
    metrics = await (await client.get("/metrics")).text()
    families = {f.name: f for f in text_string_to_metric_families(metrics)}
    assert len(families["p2pdiloco_node_tokens"].samples) == 5
    assert len(families["p2pdiloco_deltas"].samples) <= 18


async def test_the_page_is_complete_without_script(serve, fake_run):
    run = fake_run(admission="open")
    run.lifelike(12)
    text = await (await (await serve(run)).get("/")).text()
    seen = Seen(text)
    words = " ".join(seen.text.split())
    for fact in ("training", "4 nodes are training", "attic-3090", "NVIDIA RTX 3090", "Müller’s laptop",
                 "ACCEPTED, version 12", "Evaluation loss", "Bits per byte", "of 2.00", "joined", "Term",
                 "p2pdiloco node --join http://203.0.113.7:8470/#"):  # fmt: skip
        assert fact in words, fact
    assert seen.tags.count("polyline") == 2
    assert seen.tags.count("script") == 1  # a file of its own, deferred
    assert "127.0.0.1" not in text
    # Every figure has its definition beneath.
    for tile in re.findall(r"<div><dt>.*?</div>", text, re.DOTALL):
        assert re.search(r'<dd class="def">[^<]{10,}', tile), tile


async def test_the_percentage_is_of_what_stands_beside_it(serve, fake_run):
    run = fake_run(target_version=10, target_tokens=147_000)
    for _ in range(5):
        run.step([(1, 11_880, 3.0)])
    words = " ".join(Seen(await (await (await serve(run)).get("/")).text()).text.split())
    assert re.search(r"version 5 of 10, 59\.4\sk tokens 50\.0\s%", words), words
    run = fake_run(target_tokens=147_000)
    run.step([(1, 58_800, 3.0)])
    words = " ".join(Seen(await (await (await serve(run)).get("/")).text()).text.split())
    assert re.search(r"58\.8\sk of 147\sk tokens 40\.0\s%", words), words


async def test_an_evaluation_says_of_which_version_it_is(serve, fake_run):
    """An old one beside a new training loss must not read as a failure."""
    run = fake_run()
    run.node(1)
    run.listed()
    run.evaluated(5.49)
    for _ in range(3):
        run.step([(1, 1000, 2.774)])
    words = " ".join(Seen(await (await (await serve(run)).get("/")).text()).text.split())
    assert re.search(r"Evaluation loss before training ?5\.490", words)
    assert "Bits per byte before training" in words
    assert "the model is at version 3" in words
    run.step([(1, 1000, 2.7)])
    run.evaluated(2.8)
    words = " ".join(Seen(await (await (await serve(run)).get("/")).text()).text.split())
    assert re.search(r"Evaluation loss at version 4 ?2\.800", words)
    assert "the model is at version" not in words


async def test_a_page_on_loopback_shows_the_line_and_its_limit(serve, fake_run):
    run = fake_run(admission="open", join="http://127.0.0.1:7474")
    words = " ".join(Seen(await (await (await serve(run)).get("/")).text()).text.split())
    assert "p2pdiloco node --join http://127.0.0.1:7474/#" in words
    assert "Bound to loopback, only nodes on this machine can join" in words
    assert "p2pdiloco tracker --run tiny-run --listen 0.0.0.0:7474" in words


async def test_before_the_first_data_there_are_dashes(serve, fake_run):
    text = await (await (await serve(fake_run())).get("/")).text()
    values = [html_lib.unescape(v) for v in re.findall(r'<dd class="value">(.*?)</dd>', text)]
    assert values == ["–"] * 8
    for bad in ("None", "nan", "inf", "Undefined"):
        assert not re.search(rf"\b{bad}\b", Seen(text).text)


async def test_numbers_that_are_none_do_not_break_the_page(serve, fake_run):  # P6, P8
    run = fake_run()
    run.node(1, "fine")
    run.node(2, "broken", bad="unknown state 'x'")
    run.node(3, "odd", loss=float("nan"), tokens_per_s=float("inf"), offset_s=float("nan"))
    run.listed()
    run.step([(3, 1000, float("nan"))])
    client = await serve(run)
    words = Seen(await (await client.get("/")).text()).text
    assert "bad report" in words
    assert "fine" in words
    status = json.loads(await (await client.get("/api/status")).read(), parse_constant=pytest.fail)
    assert [n["loss"] for n in status["nodes"] if n["who"]["name"] == "odd"] == [None]


async def test_old_data_is_greyed_and_said(serve, fake_run):  # P2, S22
    run = fake_run()
    run.lifelike(3)
    client = await serve(run, interval_s=0.0)
    assert 'class="stale"' not in await (await client.get("/")).text()
    run.now += 60
    answer = await client.get("/")
    text = await answer.text()
    assert answer.status == 200
    assert '<body class="stale">' in text
    assert "These numbers are old" in text
    status = await (await client.get("/api/status")).json()
    assert status["health"]["stale"]
    assert status["generated_unix"] == run.now + 1


async def test_one_snapshot_serves_everybody_for_a_second(fake_run):
    run, built = fake_run(), []
    app = web.Application()
    add_status_routes(app, lambda: built.append(1) or run.builder.build(run.now))
    async with TestClient(TestServer(app)) as client:
        await asyncio.gather(*(client.get(p) for p in ["/", "/api/status", "/metrics"] * 10))
    assert len(built) <= 2


async def test_the_page_is_small_on_the_wire(serve, fake_run):
    run = fake_run()
    run.lifelike(20)
    client = await serve(run)
    async with client.session.get(client.make_url("/"), headers={"Accept-Encoding": "gzip"}, auto_decompress=False) as answer:  # fmt: skip # noqa: E501
        body = await answer.read()
    assert answer.headers["Content-Encoding"] == "gzip"
    assert len(body) < 12_000
    assert b"</html>" in gzip.decompress(body)


async def test_static_files_are_a_fixed_list(serve, fake_run):
    client = await serve(fake_run())
    script = await client.get("/static/page.js")
    assert script.content_type == "text/javascript"
    again = await client.get("/static/page.js", headers={"If-None-Match": script.headers["ETag"]})
    assert again.status == 304
    for path in ("/static/routes.py", "/static/..%2froutes.py", "/static/%2e%2e/routes.py", "/static/"):
        assert (await client.get(path)).status == 404


async def next_event(answer) -> dict:
    data = ""
    while not data:
        line = (await answer.content.readline()).decode()
        assert line, "the stream ended"
        data = line.removeprefix("data: ").strip() if line.startswith("data: ") else ""
    return json.loads(data)


async def test_a_live_page_gets_everything_once_and_then_what_changed(serve, fake_run):
    run = fake_run()
    run.node(1, "one")
    run.listed()
    client = await serve(run, interval_s=0.02)
    async with client.get("/events") as answer:
        assert answer.content_type == "text/event-stream"
        first = await next_event(answer)
        assert set(first["sections"]) == {
            "notice", "summary", "figures", "curves", "evaluation", "nodes", "join", "checkpoints", "swarm",
            "events",
            "health",
        }  # fmt: skip
        assert (await next_event(answer))["sections"] == {}
        run.node(1, "\n\ndata: evil\n\n<script>")
        run.listed()
        later: dict = {}
        while "nodes" not in later:
            later = (await next_event(answer))["sections"]
        assert "&lt;script&gt;" in later["nodes"]
        assert "figures" not in later


async def test_live_pages_have_limits_and_free_their_seats(serve, fake_run, monkeypatch):
    monkeypatch.setattr(limits, "event_streams_per_address_max", 2)
    client = await serve(fake_run(), interval_s=0.02)
    streams = [await client.get("/events") for _ in range(2)]
    refused = await client.get("/events")
    assert refused.status == 503
    assert refused.headers["Retry-After"]
    assert (await client.get("/")).status == 200  # the page itself still works
    streams[0].close()
    status = 503
    async with asyncio.timeout(5):
        while status == 503:
            async with client.get("/events") as answer:
                status = answer.status
    assert status == 200


async def test_all_live_pages_together_have_a_limit(serve, fake_run, monkeypatch):
    monkeypatch.setattr(limits, "event_streams_max", 3)
    addresses = iter(range(100))
    client = await serve(fake_run(), address_of=lambda request: str(next(addresses)))
    streams = [await client.get("/events") for _ in range(4)]
    assert [s.status for s in streams] == [200, 200, 200, 503]


async def test_a_reader_that_takes_nothing_is_dropped(fake_run, monkeypatch):
    monkeypatch.setattr(limits, "stream_write_s_max", 0.2)
    # A message larger than all buffers between here and there together.
    monkeypatch.setattr(routes, "_message", lambda page, revision: b": " + b"x" * (32 << 20) + b"\n\n")
    page = StatusPage(lambda: fake_run().builder.build(1.0), interval_s=0.01)
    seat, freed = page._seat, asyncio.Event()

    @asynccontextmanager
    async def watched(address):
        try:
            async with seat(address):
                yield
        finally:
            freed.set()

    monkeypatch.setattr(page, "_seat", watched)
    app = web.Application()
    app.add_routes(page.routes())
    async with TestServer(app) as server:
        reader, writer = await asyncio.open_connection(server.host, server.port, limit=1024)
        writer.write(b"GET /events HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        assert page._streams.total() == 1
        async with asyncio.timeout(5):
            await freed.wait()
        assert page._streams.total() == 0
        writer.transport.abort()


async def test_closing_ends_live_pages_at_once(fake_run):
    app = web.Application()
    add_status_routes(app, lambda: fake_run().builder.build(1.0))
    client = TestClient(TestServer(app))
    await client.start_server()
    answer = await client.get("/events")
    await next_event(answer)
    async with asyncio.timeout(2):
        await client.close()


async def test_a_saved_copy_needs_no_server(fake_run):
    run = fake_run()
    run.lifelike(6)
    text = await StatusPage(lambda: run.builder.build(run.now)).snapshot_html()
    seen = Seen(text)
    assert "script" not in seen.tags
    assert "link" not in seen.tags
    assert "copy saved at" in seen.text
    assert "prefers-color-scheme: dark" in text


async def test_a_run_that_is_over_offers_what_it_made_and_asks_nobody_to_join(serve, fake_run):
    run = fake_run()
    run.step([(1, 1000, 3.0)])
    client = await serve(run)
    page = await (await client.get("/")).text()
    assert "Join with your machine" in page
    assert page.count('id="join-title"') == 1
    run.owner("finish")
    over = await (await (await serve(run)).get("/")).text()
    assert "One node is enough" not in over
    assert "Join with" not in over
    assert "p2pdiloco node --join" not in over
    assert "p2pdiloco export --join" in over
    assert "The run is over" in over
    assert "time to go" not in over
    assert "No version is offered yet" not in over
    assert "Less traffic" not in over, "of nobody there is no figure"
    assert "Less traffic" in page
