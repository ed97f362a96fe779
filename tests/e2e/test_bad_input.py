"""What a person gets wrong: one sentence that says what to do, the documented exit code, nothing lost."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from p2pdiloco.wire.envelope import PROTOCOL_VERSION

from .swarm_kit import free_port, make_run, swarm_in, wait_for

pytestmark = pytest.mark.e2e


def cli(*arguments: str, **environment: str) -> tuple[int, str]:
    """(exit code, what was said on stderr) of one command."""
    done = subprocess.run(
        [sys.executable, "-m", "p2pdiloco_node.cli", *arguments], capture_output=True, text=True, timeout=60,
        stdin=subprocess.DEVNULL, env=os.environ | environment, check=False,
    )  # fmt: skip
    return done.returncode, done.stderr


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1] if text.strip() else ""


@contextmanager
def web_server(answers: dict[str, bytes]) -> Iterator[str]:
    """Some other HTTP service."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = answers.get(self.path)
            self.send_response(200 if body is not None else 404)
            body = body if body is not None else b"nothing here"
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["node", "--jion", "x"], 2, "did you mean '--join'?"),
        (["nod"], 2, "did you mean 'node'?"),
        (["node", "--threads", "many"], 2, "--threads"),
        (["node"], 2, "No tracker is named"),
        (["node", "--join", "10.0.0.1:7474"], 2, "has no scheme: write http://10.0.0.1:7474"),
        (["node", "--join", "http://127.0.0.1:1/", "--peers", ""], 2, "The list of peers is empty"),
        (["node", "--join", "http://127.0.0.1:1/"], 4, "tried http://127.0.0.1:1 (refused)"),
        (["tracker"], 2, "No run is named"),
        (["tracker", "tiny-run"], 2, "did you mean --run tiny-run?"),
        (["tracker", "tiny-run", "--listen", "127.0.0.1:7474"], 2, "did you mean --run tiny-run?"),
        (["node", "http://127.0.0.1:1/#ab"], 2, "did you mean --join 'http://127.0.0.1:1/#ab'?"),
        (["status", "now"], 2, "'now' stands alone, without a flag before it (see"),
        (["tracker", "--run", "nowhere"], 3, "There is no run in nowhere"),
        (["verify", "nowhere"], 3, "There is no folder nowhere"),
        (
            ["run", "new", "--name", "x", "--model", "llama:9t", "--out", "x"],
            2,
            "there is no model 'llama:9t'",
        ),
        (
            ["run", "new", "--name", "x", "--model", "llama:tiny", "--tokens", "x", "--out", "x"],
            2,
            "like 20M",
        ),
        (
            ["run", "new", "--name", "x", "--model", "llama:tiny", "--data", "no*.txt", "--out", "x"],
            3,
            "no*.txt",
        ),
        (["status", "--url", "http://127.0.0.1:1"], 4, "does not answer as a p2pdiloco daemon"),
        (
            ["run", "new", "--name", "x", "--model", "llama:tiny", "--out", "x", "--outer-steps", "-1"],
            2,
            "--outer-steps is a whole number from 0 to",
        ),
        (
            ["run", "new", "--name", "x", "--model", "llama:tiny", "--out", "x", "--inner-steps", "9" * 30],
            2,
            "is not possible",
        ),
        (["demo", "--nodes", "0"], 2, "--nodes is 1 to 16"),
        (["demo", "--nodes", "1.5"], 2, "'1.5' is not a whole number"),
        (["demo", "--outer-steps", "0"], 2, "--outer-steps is 1 to"),
        (["demo", "--inner-steps", "-3"], 2, "--inner-steps is 1 to"),
        (["demo", "--seed", "9" * 30], 2, "--seed is 0 to"),
        (["demo", "--json", "nowhere/x.json"], 3, "nowhere/x.json is not a file in a folder that exists"),
    ],
)
def test_each_slip_gets_its_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    got, said = cli(*arguments, XDG_STATE_HOME=str(tmp_path), XDG_CONFIG_HOME=str(tmp_path))
    assert sentence in last_line(said)
    assert got == code
    assert "Traceback" not in said


def test_an_unknown_variable_or_key_is_refused(tmp_path: Path) -> None:
    code, said = cli("config", "show", P2PDILOCO_THRAEDS="2")
    assert (code, "did you mean 'P2PDILOCO_THREADS'?" in said) == (3, True)
    (tmp_path / "node.toml").write_text("thraeds = 2\n")
    code, said = cli("config", "show", "--config", str(tmp_path / "node.toml"))
    assert (code, "did you mean 'threads'?" in said) == (3, True)


def test_a_service_that_is_not_a_tracker(tmp_path: Path) -> None:
    with web_server({"/": b"hello"}) as url:
        code, said = cli("node", "--join", url, "--data-dir", str(tmp_path / "n"))
    assert code == 4
    assert f"tried {url} (answered 404, but is not a p2pdiloco tracker)" in last_line(said)
    with web_server({"/v1/version": b"<html>hello</html>"}) as url:
        code, said = cli("node", "--join", url, "--data-dir", str(tmp_path / "n"))
    assert code == 4
    assert "answered, but is not a p2pdiloco tracker" in last_line(said)


def test_another_version_is_named_on_both_sides(tmp_path: Path) -> None:
    version = json.dumps({"protocol": 99, "build": "9.9", "run": "00" * 32}).encode()
    with web_server({"/v1/version": version}) as url:
        code, said = cli("node", "--join", url, "--data-dir", str(tmp_path / "n"))
    assert code == 5
    assert f"speaks protocol 99 (p2pdiloco 9.9), this is protocol {PROTOCOL_VERSION} " in last_line(said)
    assert "pip install --upgrade p2pdiloco" in last_line(said)


def test_an_open_run_that_only_this_machine_reaches_says_what_to_do(tmp_path: Path) -> None:
    """Addresses are named by strangers: nodes of an open run never dial loopback (target H5)."""
    run = make_run(tmp_path, versions=500, admission="open")
    with swarm_in(tmp_path, run, free_port()) as swarm:
        swarm.start_tracker()
        code, said = cli("node", "--join", swarm.link, "--data-dir", str(tmp_path / "n"))
        assert code == 4
        assert "p2pdiloco run new --admission local" in last_line(said)
        assert "--public-url" in last_line(said)
        assert "nodes of open runs connect to public addresses only" in swarm.tracker.text()


def test_keys_runs_ports_and_folders_that_are_not_right(tmp_path: Path) -> None:
    run = make_run(tmp_path, versions=500)
    with swarm_in(tmp_path, run, free_port()) as swarm:
        swarm.start_tracker()
        where = f"http://{swarm.address}"

        code, said = cli("node", "--join", f"{where}/#{'ab' * 32}", "--data-dir", str(tmp_path / "wrong"))
        assert code == 5
        assert f"serves run {run.hex()[:16]}, not abababababababab" in last_line(said)

        code, said = cli("tracker", "--run", str(tmp_path / "run"), "--listen", swarm.address)
        assert code == 3
        assert "already uses" in last_line(said)

        code, said = cli(
            "node", "--join", swarm.link, "--data-dir", str(tmp_path / "p"), "--listen", swarm.address
        )
        assert code == 6
        assert "is in use by another program" in last_line(said)

        # A bare address: the run is shown and pinned.
        node = swarm.node("node-1")
        node.arguments[node.arguments.index(swarm.link)] = where
        wait_for(lambda: node.status() is not None, 30, "the node is there")
        code, said = cli("node", "--join", where, "--data-dir", str(tmp_path / "node-1"))
        assert code == 3
        assert "already uses" in last_line(said)
        node.terminate()

        key = tmp_path / "node-1" / "identity.key"
        key.chmod(0o644)
        code, said = cli("node", "--join", where, "--data-dir", str(tmp_path / "node-1"))
        assert code == 3
        assert f"chmod 600 {key}" in last_line(said)
        key.chmod(0o600)
        key.write_text("zz\n")
        code, said = cli("node", "--join", where, "--data-dir", str(tmp_path / "node-1"))
        assert code == 3
        assert "is damaged" in last_line(said)
