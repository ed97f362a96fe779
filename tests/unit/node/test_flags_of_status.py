"""The flags of `status`, `verify` and `config show`: what they print, and of whom."""

from __future__ import annotations

import http.server
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from p2pdiloco.ids import Digest, PeerId, RunId
from p2pdiloco_node.cli import run_command
from p2pdiloco_node.process import local_status
from p2pdiloco_node.telemetry import BrainView, Telemetry
from tests.unit.export.conftest import KeptRun

ME = PeerId(b"m" * 32)


class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = self.server.body  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def daemons(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """Addresses of two that this user runs, named one and two."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    servers, urls = [], []
    for name in ("one", "two"):
        telemetry = Telemetry(name, ME, RunId(bytes(32)), "tiny", role="node", pid=1, inner_steps=4)
        brain = BrainView(
            index=0, version=7, term=1, leads=False, aggregator=ME, members=(), clock=0, in_flight=0, peers=0,
            root=Digest(bytes(32)),
        )  # fmt: skip
        status = telemetry.status(brain, bytes_up=0, bytes_down=0, bytes_setup=0, lag_s_max=0.0)
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        server.body = msgspec.json.encode(status)  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        urls.append(f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setattr(local_status, "_noted", lambda: [local_status.Note(url, "") for url in urls])
    yield urls
    for server in servers:
        server.shutdown()
        server.server_close()


def test_status_of_all_or_of_one_for_people_or_programs(
    daemons: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*flags: str) -> str:
        assert run_command(["status", *flags]) == 0
        return capsys.readouterr().out

    assert "one (node), run tiny" in said()
    assert "two (node), run tiny" in said()
    alone = said("--url", daemons[1])
    assert "one (node)" not in alone
    assert "two (node), run tiny" in alone
    assert [s["name"] for s in json.loads(said("--json"))] == ["one", "two"]


@pytest.mark.parametrize(
    "url",
    [
        "http://127.example.com",
        "http://localhost.example.com:80",
        "http://127.0.0.1:80@example.com",
        "https://[::1]",
        "http://[::1",
        "http://[::1]:port",
        "http://127.0.0.1:99999",
    ],
)
def test_status_asks_this_machine_only(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Else a name that only begins like it would be asked."""
    assert run_command(["status", "--url", url]) == 2
    assert "daemons answer on this machine only" in capsys.readouterr().err


def test_verify_for_people_or_programs(
    tmp_path: Path, fake_run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run = KeptRun(tmp_path / "run", fake_run().spec)
    run.blobs.close()
    run.journal.close()
    assert run_command(["verify", str(run.folder)]) == 0
    assert "verifies: 0 entries" in capsys.readouterr().out
    assert run_command(["verify", str(run.folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["entries"] == 0


def test_config_show_of_which_command_and_with_which_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "node.toml"
    file.write_text('log_level = "error"\n')

    def shown(*words: str) -> dict[str, list[str]]:
        assert run_command(["config", "show", *words]) == 0
        return {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}

    assert "threads" in shown()
    assert "threads" not in shown("--which", "tracker")
    assert "checkpoints" in shown("tracker")
    assert shown()["log_level"] == ["info", "default"]
    assert shown("--config", str(file))["log_level"] == ["error", str(file)]


def test_config_show_prints_settings_as_people_write_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`()`, `None` and `''` are words of a programming language."""
    monkeypatch.setenv("P2PDILOCO_ADVERTISE", "8.8.8.8:1,8.8.4.4:2")
    assert run_command(["config", "show"]) == 0
    rows = [re.split(r"  +", line.strip()) for line in capsys.readouterr().out.splitlines()]
    assert ["advertise", "8.8.8.8:1, 8.8.4.4:2", "P2PDILOCO_ADVERTISE"] in rows
    values = {key: value for key, value, _ in rows}
    assert [values[key] for key in ("join", "peers", "threads", "device", "stay")] == [
        "-", "-", "1", "auto", "false",
    ]  # fmt: skip
