"""Flags that the owner's words share: whom they ask, how they answer, and whether they ask back.

What each word does in a live swarm, with whose key and how long it waits: tests/e2e/test_owner_words.py.
"""

from __future__ import annotations

import asyncio
import io
import json
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp.test_utils import TestServer
from rich.console import Console

from p2pdiloco.errors import OperatorError
from p2pdiloco_node.cli import run_command
from p2pdiloco_node.owner import command
from p2pdiloco_node.owner.rescue import Recovered, recover
from p2pdiloco_node.owner.words import Followed, Wanted
from p2pdiloco_node.progress import Bar
from tests.unit.export.conftest import KeptRun
from tests.unit.protocol.builders import NODES, Chain, make_run

from .conftest import Swarm

A, B, C = NODES[:3]  # C never had a seat
LINK = "http://127.0.0.1:9/"


async def test_peers_are_asked_where_the_tracker_is_away(
    tmp_path: Path, fake_run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The way to the run is the same for every word."""
    run = KeptRun(tmp_path / "run", fake_run().spec).steps(2)
    run.routes()
    words = ["run", "inspect", f"{LINK}#{run.run.hex()}", "--json"]
    assert await asyncio.to_thread(run_command, words) == 4
    assert "name nodes of the run with --peers" in capsys.readouterr().err
    async with TestServer(run.app) as server:
        words += ["--peers", f"127.0.0.1:{server.port}"]
        assert await asyncio.to_thread(run_command, words) == 0
    assert json.loads(capsys.readouterr().out)["now"]["version"] == 2


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A swarm that follows every word, and a person who has to be asked first."""

    async def nobody(*_: Any) -> None:
        return None

    async def say_word(_seen: Any, wanted: Wanted, _key: Path, *, wait_s: float, agree: Any) -> Followed:
        assert wait_s > 0
        if agree is not None and wanted.kind in ("extend", "finish", "revoke"):
            agree("This is what will be.")
        return Followed(wanted.kind, 7, 3, 0, 1, "It is so.")

    async def rescue(_seen: Any, _key: Path, *, agree: Any, **_: Any) -> Recovered:
        assert agree("The committee is lost.")
        return Recovered(1, 7, 3, ("attic",), 1)

    monkeypatch.setattr(command, "open_run", nobody)
    monkeypatch.setattr(command, "say_word", say_word)
    monkeypatch.setattr(command, "recover", rescue)


@pytest.mark.usefixtures("followed")
@pytest.mark.parametrize(
    ("words", "asks"),
    [
        (["pause", LINK], False),
        (["resume", LINK], False),
        (["revoke", LINK, "node-1"], True),
        (["extend", LINK, "--tokens", "1M"], True),
        (["finish", LINK], True),
        (["recover", LINK], True),
    ],
)
def test_yes_answers_and_json_is_for_programs(
    capsys: pytest.CaptureFixture[str], words: list[str], asks: bool
) -> None:
    yes = ["--yes"] if asks else []
    if asks:
        assert run_command(["run", *words]) == 2
        assert "Where nobody can be asked, say so with --yes" in capsys.readouterr().err
    assert run_command(["run", *words, *yes]) == 0
    said = capsys.readouterr().out
    assert said.startswith("E")
    assert "entry 7" in said.lower()
    assert run_command(["run", *words, *yes, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["index"], shown["version"]) == (7, 3)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("yes", ""), (" Y ", ""), ("no", "Nothing was said."), ("", "Nothing was said."),
        ("maybe", "Nothing was said. 'maybe' is neither yes nor no."), (None, "Nothing was said."),
    ],
)  # fmt: skip
def test_a_person_is_told_which_answers_there_are(
    monkeypatch: pytest.MonkeyPatch, answer: str | None, said: str
) -> None:
    """No bar draws over the question meanwhile; it took `[y/N]` for a colour. None: Ctrl-D."""
    bar = Bar(Console(file=io.StringIO(), force_terminal=True))

    def asked(question: str) -> str:
        assert question == "It ends run '[b]'. Go on, yes or no? "
        assert not bar.bars.live.is_started
        if answer is None:
            raise EOFError
        return answer

    monkeypatch.setattr("builtins.input", asked)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    with bar.bars:
        if said:
            with pytest.raises(OperatorError) as no:
                command._agreed("It ends run '[b]'.", bar)
            assert str(no.value) == said
        else:
            command._agreed("It ends run '[b]'.", bar)
        assert bar.bars.live.is_started


@pytest.mark.usefixtures("followed")
@pytest.mark.parametrize("words", [["finish", LINK], ["recover", LINK]])
def test_ctrl_c_answers_a_question(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    """The event loop has its own answer to it, which is none while somebody is asked."""

    def asked(_question: str) -> str:
        signal.raise_signal(signal.SIGINT)
        return "yes"

    monkeypatch.setattr("builtins.input", asked)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    assert run_command(["run", *words]) == 130
    shown = capsys.readouterr()
    assert shown.err.endswith("\nNothing was said.\n")
    assert "7" not in shown.out


@pytest.mark.parametrize(("named", "seats"), [((), {"A"}), (("C",), {"C"})])
async def test_seats_are_for_those_who_are_named(
    swarm: Swarm, named: tuple[str, ...], seats: set[str]
) -> None:
    run = make_run(A, B)
    chain = Chain(run)
    chain.steps(2)
    for who in (A, C):
        (await swarm.serve(run, who)).has(chain)
    seen, asked = swarm.seen(run), []

    def refuse(text: str) -> bool:
        asked.append(text)
        return False

    peers = {"A": A.peer_id.hex(), "C": C.peer_id.hex()}
    with pytest.raises(OperatorError, match="Nothing was signed"):
        await recover(
            seen, swarm.key, seats=[peers[n] for n in named], force=False, agree=refuse, wait_s=20.0
        )
    assert {name for name, peer in peers.items() if peer[:16] in asked[0]} == seats
