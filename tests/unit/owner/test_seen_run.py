"""The owner's tool without a swarm: whom a word names, where a run is, what a slip is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from p2pdiloco.errors import OperatorError
from p2pdiloco.ids import PeerId
from p2pdiloco.sim.keys import FastSigner
from p2pdiloco.sim.tiny_run import tiny_run
from p2pdiloco_node.cli import run_command
from p2pdiloco_node.export.log_reader import LogReader
from p2pdiloco_node.owner.seen_run import Host, SeenRun, link_of
from p2pdiloco_node.owner.words import find_peer
from p2pdiloco_node.progress import Quiet


def seen_with(**names: str) -> SeenRun:
    tiny = tiny_run(FastSigner("owner"), FastSigner("witness").peer_id)
    seen: Any = SeenRun.__new__(SeenRun)
    seen.run, seen.spec, seen.urls = tiny.run, tiny.spec, ["http://x"]
    peers = {name: PeerId(bytes.fromhex(start.ljust(64, "0"))) for name, start in names.items()}
    seen.hosts = {peer: Host(peer, name, witness=False, urls=()) for name, peer in peers.items()}

    seen.tail = LogReader(cast("Any", None), tiny.run, tiny.spec, "http://x", Quiet().progress, advice="")
    return seen  # type: ignore[no-any-return]


def test_a_peer_is_named_by_its_id_its_beginning_or_its_name() -> None:
    seen = seen_with(ada="abcd1", bob="abcd2", eve="ffff")
    eve = PeerId(bytes.fromhex("ffff".ljust(64, "0")))
    for words in ("eve", "EVE", "ffff", "ffff0000", eve.hex()):
        assert find_peer(seen, words) == eve
    assert find_peer(seen, "witness") == seen.spec.committee.genesis.witness
    assert find_peer(seen, "12" * 32) == bytes.fromhex("12" * 32)  # one that was never heard of
    with pytest.raises(OperatorError, match=r"names 2 peers: ada \(abcd1.*bob \(abcd2"):
        find_peer(seen, "abcd")
    for words in ("fff", "mallory", "zz" * 32):
        with pytest.raises(OperatorError, match="No peer"):
            find_peer(seen, words)


def test_a_run_is_named_by_its_link_or_by_a_folder_whose_daemon_runs(tmp_path: Path) -> None:
    assert link_of("http://h:1/#" + "ab" * 32).run == bytes.fromhex("ab" * 32)
    with pytest.raises(OperatorError, match=f"{tmp_path} holds no run: name a run's folder"):
        link_of(str(tmp_path))
    for spec in (tmp_path / "spec.bin", tmp_path / "node" / "runs" / "ab" / "spec.bin"):
        spec.parent.mkdir(parents=True, exist_ok=True)
        spec.write_bytes(b"")
        with pytest.raises(OperatorError, match="start its tracker"):
            link_of(str(tmp_path if spec.parent == tmp_path else tmp_path / "node"))
    (tmp_path / "witness").mkdir()
    (tmp_path / "witness" / "address.json").write_text(json.dumps({"url": "http://127.0.0.1:7", "pid": 1}))
    assert link_of(str(tmp_path)).url == "http://127.0.0.1:7"
    with pytest.raises(OperatorError, match=r"^RUN 'h:1' has no scheme"):
        link_of("h:1")


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["pause", "http://127.0.0.1:9/"], 4, "Nobody answers: tried http://127.0.0.1:9 (refused)"),
        (["extend", "http://127.0.0.1:9/", "--tokens", "some"], 2, "not a number of tokens"),
        (["finish", "http://127.0.0.1:9/"], 4, "Nobody answers"),  # a question would name the run
        (["pause", "http://127.0.0.1:9/", "--wait-s", "0"], 2, "--wait-s is above 0"),
        (["recover", "http://127.0.0.1:9/", "--wait-s", "0"], 2, "--wait-s is above 0"),
        (["recover", "127.0.0.1:9"], 2, "RUN '127.0.0.1:9' has no scheme: write http://127.0.0.1:9"),
        (["pause", "http://127.0.0.1:9/#ab"], 2, "RUN: 'ab' after # is not a RunId"),
        # A slip in a folder's name: it spoke of --join, which these commands do not have.
        *(
            (words, 3, "There is no folder austn, and it is no link: name")
            for words in (["pause", "austn"], ["inspect", "austn"], ["fork", "austn", "--out", "o"])
        ),
        (["inspect", "."], 3, "holds no run: name"),
        (["revoke", "http://127.0.0.1:9/"], 2, ""),
        (["pause", "http://127.0.0.1:9/", "--peers", ""], 2, "list of peers is empty"),
        (["fork", "http://127.0.0.1:9/", "--out", "o", "--set", "model.model=x"], 2, "model is the parent's"),
        (["new", "--out", "o"], 2, "run new needs --name and --model"),
        (["new", "--out", "o", "--name", "x"], 2, "run new needs --model"),
    ],
)
def test_slips_at_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str],
    code: int, sentence: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert run_command(["run", *words]) == code
    assert sentence in capsys.readouterr().err
    assert not [p for p in tmp_path.iterdir() if p.name == "o"]
