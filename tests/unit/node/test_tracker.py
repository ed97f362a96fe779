"""Where a tracker says that its witness is reached."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2pdiloco.errors import OperatorError, PeerError, TransportError
from p2pdiloco.ids import PeerId
from p2pdiloco.wire.messages import EvalReport, SetLoss
from p2pdiloco_node.cli import run_command
from p2pdiloco_node.config import HostPort, TrackerConfig
from p2pdiloco_node.process.lifetime import Leaving
from p2pdiloco_node.tracker import Tracker


def tracker(public_url: str) -> Tracker:
    made = Tracker(
        TrackerConfig(run="run", listen="127.0.0.1:7474", public_url=public_url), cast("Leaving", None)
    )
    made.participant = cast("Any", SimpleNamespace(listener=SimpleNamespace(port=7474)))
    return made


@pytest.mark.parametrize(
    ("public_url", "announced"),
    [
        ("", []),
        ("http://8.8.8.8:7000/", [("8.8.8.8", 7000)]),  # behind a port forwarding
        ("http://8.8.8.8", [("8.8.8.8", 80)]),
        ("http://8.8.8.8:7474", [("8.8.8.8", 7474), ("127.0.0.1", 7474)]),
        ("https://8.8.8.8", [("8.8.8.8", 7474), ("127.0.0.1", 7474)]),  # peers go beside the proxy
        ("http://[2600::1]:7000", [("2600::1", 7000)]),
        ("http://no-such-name.invalid:7000", []),
    ],
)
async def test_the_public_address_is_what_the_witness_announces(
    public_url: str, announced: list[tuple[str, int]]
) -> None:
    """Nodes of an open run connect to public addresses only; behind a router a machine has none."""
    assert await tracker(public_url)._public_addresses() == [HostPort(*place) for place in announced]


@pytest.mark.parametrize("public_url", ["8.8.8.8:7474", "http://8.8.8.8:99999", "http://8.8.8.8:x"])
def test_a_public_url_that_is_none_is_refused(public_url: str) -> None:
    with pytest.raises(OperatorError, match="--public-url") as caught:
        tracker(public_url)
    assert caught.value.exit_code == 2


def test_who_aggregates_is_said_once_on_the_page(fake_run: Any) -> None:
    """The builder tells it of every node; the witness's own line would only double it."""
    made = tracker("")
    made.page = cast("Any", SimpleNamespace(builder=fake_run().builder))
    made._said("elected", "this node aggregates in term 1")
    made._said("tracker", "the tracker started")
    assert [e.kind for e in made.builder.events] == ["tracker"]


@pytest.mark.parametrize(("holds", "out"), [((), "books"), (("blobs",), "books"), (("a.txt",), "DIR")])
def test_a_folder_without_a_run_comes_with_advice_that_run_new_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    holds: tuple[str, ...], out: str,
) -> None:  # fmt: skip
    """`run new --out books` is refused where books holds the text."""
    monkeypatch.chdir(tmp_path)
    for name in holds:
        (tmp_path / "books" / name).mkdir(parents=True)
    assert run_command(["tracker", "--run", "books"]) == 3
    said = capsys.readouterr().err
    assert "There is no run in books: name a run's folder" in said
    assert said.endswith(f"run new --out {out}.\n")
    assert ("in another folder" in said) == (out == "DIR")


@pytest.mark.parametrize("reason", ["UNKNOWN_PEER", "TOO_EARLY"])
def test_an_evaluation_that_comes_too_early_is_asked_for_again(reason: str) -> None:
    """A tracker that had just started took the report, knew nobody yet, and nobody said it again."""
    made = tracker("")

    def root_of(version: int, said: bytes) -> bytes:
        raise PeerError(reason, f"version {version} is not known here")

    made.page = cast("Any", SimpleNamespace(root_of=root_of))
    report = EvalReport(4, bytes(32), (SetLoss(2.0, 10),))
    opened = cast("Any", SimpleNamespace(message=report, sender=PeerId(bytes(32))))
    with pytest.raises(TransportError, match="version 4 is not known here"):
        made._takes_message(opened, b"", "127.0.0.1")
