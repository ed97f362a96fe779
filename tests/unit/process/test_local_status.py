"""`p2pdiloco status` on a terminal of 80 columns, and why a daemon does not answer."""

from __future__ import annotations

import socket
import threading
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2pdiloco.errors import OperatorError
from p2pdiloco.ids import Digest, PeerId, RunId
from p2pdiloco.status.read_model import to_json
from p2pdiloco_node.process import local_status
from p2pdiloco_node.process.lifetime import note_address
from p2pdiloco_node.process.local_status import Note, in_words, note_daemon, print_status
from p2pdiloco_node.telemetry import BrainView, NodeStatus, Telemetry

ME = PeerId(b"m" * 32)


def status(telemetry: Telemetry) -> NodeStatus:
    brain = BrainView(
        index=3, version=1_234_567, term=1, leads=False, aggregator=ME, members=((ME, False),), clock=0,
        in_flight=0, peers=2, root=Digest(bytes(32)),
    )  # fmt: skip
    return telemetry.status(brain, bytes_up=0, bytes_down=0, bytes_setup=0, lag_s_max=0)


def test_everything_fits_eighty_columns_and_is_said_once() -> None:
    telemetry = Telemetry("n" * 32, ME, RunId(bytes(32)), "r" * 32, role="node", pid=1, inner_steps=100)
    telemetry.stepped(99, 100, 11.5, 123_456.0, 0.1, 2)
    telemetry.waiting("waiting for the swarm: 2 deltas are not settled yet")
    telemetry.tracker_failed("refused")
    lines = in_words(status(telemetry))
    assert max(map(len, lines)) <= 80
    said = " ".join(" ".join(lines).split())
    assert (
        "version 1,234,567 waiting for the swarm: 2 deltas are not settled yet; inner step 99 of 100" in said
    )
    assert said.count("waiting") == 1
    assert "tracker unreachable since 0 s" in said


def test_a_witness_is_named_once() -> None:
    telemetry = Telemetry("witness", ME, RunId(bytes(32)), "tiny", role="witness", pid=1, inner_steps=0)
    assert in_words(status(telemetry)) == ["witness (witness), run tiny, version 1,234,567"]


def serving(*statuses: NodeStatus) -> tuple[threading.Thread, str]:
    """A daemon that answers so, once each."""
    server = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        with server:
            for one in statuses:
                with server.accept()[0] as asked:
                    asked.recv(1 << 16)
                    body = to_json(one)
                    asked.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    thread = threading.Thread(target=answer)
    thread.start()
    return thread, f"http://127.0.0.1:{server.getsockname()[1]}"


def test_two_of_the_same_name_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By what belongs to each alone: the run, the address, the folder."""
    monkeypatch.setattr(local_status, "notes_folder", lambda: tmp_path / "daemons")
    telemetry = Telemetry("witness", ME, RunId(b"\xab" * 32), "tiny", role="witness", pid=1, inner_steps=0)
    thread, url = serving(*[status(telemetry)] * 2)
    note_daemon(url, tmp_path / "my run")
    where = f"  run abababababababab, {url}\n  {tmp_path / 'my run'}\n"
    for asked in (None, url):
        assert print_status(asked, as_json=False) == 0
        assert capsys.readouterr().out == f"witness (witness), run tiny, version 1,234,567\n{where}"
    thread.join()


async def test_a_tracker_is_where_its_run_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not in the folder of its witness, which nobody has named."""
    monkeypatch.setattr(local_status, "notes_folder", lambda: tmp_path / "daemons")
    listener: Any = SimpleNamespace(port=7)
    for folder, shown in (("run/witness", "run"), ("node", "node")):
        (tmp_path / folder).mkdir(parents=True)
        async with AsyncExitStack() as stack:
            note_address(stack, tmp_path / folder, listener, "0.0.0.0")
            assert local_status._noted() == [Note("http://127.0.0.1:7", str(tmp_path / shown))]
        assert local_status._noted() == []


def test_a_daemon_that_is_not_there_is_refused_in_words() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(OperatorError, match="refused: nothing listens there") as caught:
            print_status(url, as_json=False)
    assert caught.value.exit_code == 4
    assert "Errno" not in str(caught.value)


def test_a_port_of_something_else_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with server.accept()[0] as asked:
                asked.recv(1 << 16)
                asked.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

        answering = threading.Thread(target=answer)
        answering.start()
        with pytest.raises(OperatorError, match="it answers something else"):
            print_status(f"http://127.0.0.1:{server.getsockname()[1]}", as_json=False)
        answering.join()
