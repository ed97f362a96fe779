"""Which pauses count against the demo: those of a node while it was not itself hit."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from p2pdiloco.ids import Digest, PeerId, RunId
from p2pdiloco_node.demo.swarm import Daemon
from p2pdiloco_node.telemetry import BrainView, Gap, NodeStatus, Telemetry


def status_with(*gaps: tuple[float, float], refused: dict[str, int] | None = None) -> NodeStatus:
    telemetry = Telemetry("n", PeerId(bytes(32)), RunId(bytes(32)), "r", role="node", pid=1, inner_steps=4)
    brain = BrainView(
        index=0,
        version=0,
        term=0,
        leads=False,
        aggregator=PeerId(bytes(32)),
        members=(),
        clock=0,
        in_flight=0,
        peers=0,
        root=Digest(bytes(32)),
    )
    status = telemetry.status(brain, bytes_up=10, bytes_down=5, bytes_setup=3, lag_s_max=0.0)
    listed = tuple(Gap(at_monotonic_s=at, seconds=s) for at, s in gaps)
    return msgspec.structs.replace(status, gaps=listed, refused=refused or {})


def test_pauses_during_the_own_fault_do_not_count() -> None:
    node = Daemon("n", [], Path(), Path())
    node.hit = [(100.0, 120.0)]
    node.learnt(status_with((90.0, 1.0), (101.0, 2.0), (119.0, 7.0), (122.0, 4.0), (130.0, 1.5)))
    assert node.gap_s == 1.5
    node.learnt(status_with((130.0, 1.5), (140.0, 1.7)))
    assert node.gap_s == 1.7


def test_a_real_node_s_settings_are_not_the_demo_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With P2PDILOCO_STAY it had never ended."""
    monkeypatch.setenv("P2PDILOCO_JOIN", "ftp://elsewhere")
    monkeypatch.setenv("P2PDILOCO_SLIP", "1")
    node = Daemon("n", ["node", "--data-dir", str(tmp_path / "n")], tmp_path / "n", tmp_path / "log")
    node.start()
    assert node.process is not None
    assert node.process.wait(60) == 2
    assert "No tracker is named" in (tmp_path / "log").read_text()


def test_sums_go_on_over_a_killed_life() -> None:
    node = Daemon("n", [], Path(), Path())
    node.learnt(status_with(refused={"RUN_OVER": 1}))
    node.end_life()
    node.learnt(status_with(refused={"RUN_OVER": 2}))
    node.end_life()
    assert (node.bytes_before, node.refused_before, node.status) == (24, {"RUN_OVER": 3}, None)
