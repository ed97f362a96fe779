"""Real daemons, real trainers, real sockets: join late, leave, die, come back, go on without the tracker."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2pdiloco.errors import OperatorError
from p2pdiloco_node.verify import verify_run

from .conftest import EndedRun
from .swarm_kit import Swarm, free_port, make_run, processes_of, swarm_in, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timed]

START_S = 60.0  # imports of several trainers on a busy machine
STEP_S = 40.0  # for anything that takes a pass or an election


def test_a_node_alone_finishes_and_its_log_verifies(ended_run: EndedRun) -> None:
    by_witness = verify_run(ended_run.folder / "run")
    by_node = verify_run(ended_run.folder / "node-1")
    assert (by_witness.first_version, by_witness.version) == (0, 6)
    assert by_witness.state_root == by_node.state_root
    assert by_witness.deltas >= 6


def test_a_run_that_is_over_says_so_and_keeps_the_model(ended_run: EndedRun) -> None:
    folder = ended_run.folder
    with swarm_in(folder, ended_run.run, ended_run.port) as swarm:
        swarm.start_tracker()
        wait_for(
            lambda: swarm.page()["learning"] == ended_run.page["learning"], 20, "all is back without any node"
        )
        # The newest files of the state are torn meanwhile: the ones before are used (scenario F2).
        newest = max((folder / "node-1").glob("runs/*/state/*/params"))
        with newest.open("r+b") as file:
            file.truncate(100)
        node = swarm.node("node-1")
        assert node.wait(START_S + STEP_S) == 0, node.text()
        assert node.text().count("The run is over at version 6") >= 2
        assert "is unfinished or damaged and is skipped" in node.text()


def copy_of(run: Path, folder: Path) -> Path:
    shutil.copytree(run, folder / "run")
    return folder / "run"


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_verify_finds_a_damaged_log_and_names_the_entry(ended_run: EndedRun, tmp_path: Path) -> None:
    run = copy_of(ended_run.folder / "run", tmp_path)
    log = run / "witness" / "journal" / "log"
    flip(log, log.stat().st_size // 2)
    before = log.read_bytes()
    with pytest.raises(OperatorError, match=r"entry [1-9]\d*: the log is damaged at byte") as caught:
        verify_run(run)
    assert caught.value.exit_code == 1
    assert log.read_bytes() == before


def test_verify_finds_a_damaged_delta(ended_run: EndedRun, tmp_path: Path) -> None:
    run = copy_of(ended_run.folder / "run", tmp_path)
    delta = next(p for p in sorted((run / "witness" / "blobs" / "delta").rglob("*")) if p.is_file())
    flip(delta, 200)
    with pytest.raises(OperatorError, match=r"entry \d+: .*damaged"):
        verify_run(run)


def test_verify_refuses_another_run_s_log(ended_run: EndedRun, tmp_path: Path) -> None:
    run = copy_of(ended_run.folder / "run", tmp_path)
    flip(run / "spec.bin", 40)
    with pytest.raises(OperatorError, match="does not verify: the RunSpec"):
        verify_run(run)


def test_verify_of_an_empty_folder_says_what_to_name(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="no kept run") as caught:
        verify_run(tmp_path)
    assert caught.value.exit_code == 3


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    run = make_run(tmp_path, versions=500)
    with swarm_in(tmp_path, run, free_port()) as swarm:
        yield swarm


def same_model(swarm: Swarm) -> bool:
    """Every living node shows the same version and state at some moment."""
    statuses = [node.status() for node in swarm.nodes.values() if node.alive]
    return len({(s.index, s.state_digest) if s is not None else None for s in statuses}) == 1


def test_late_join_leave_kill_and_a_tracker_that_goes_away(swarm: Swarm) -> None:
    swarm.start_tracker()
    for name in ("node-1", "node-2"):
        swarm.node(name)
    wait_for(lambda: swarm.listed("node-1") and swarm.listed("node-2"), START_S, "two nodes contribute")

    # `p2pdiloco status` finds the daemons of this machine.
    asked = subprocess.run(
        [sys.executable, "-m", "p2pdiloco_node.cli", "status", "--json"], capture_output=True, check=True,
        env=os.environ | {"XDG_STATE_HOME": str(swarm.folder / "state")},
    )  # fmt: skip
    assert {one["name"] for one in json.loads(asked.stdout)} == {"node-1", "node-2", "witness"}

    # A third joins late and contributes; the committee has three seats.
    swarm.node("node-3")
    wait_for(lambda: swarm.listed("node-3"), START_S, "the late node contributes")
    wait_for(lambda: len(swarm.page()["committee"]["members"]) == 3, STEP_S, "a committee of three")  # type: ignore[index]

    # A model leaves it while it is trained.
    out = swarm.folder / "out"
    exported = subprocess.run(
        [sys.executable, "-m", "p2pdiloco_node.cli", "export", "--join", swarm.link, str(out)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert exported.returncode == 0, exported.stderr
    facts = json.loads((out / "p2pdiloco.json").read_bytes())
    assert facts["run"]["id"] == swarm.run.hex()
    assert {c["name"] for c in facts["contributors"]} >= {"node-1", "node-2"}
    assert 1 <= facts["version"] <= swarm.version()

    # The tracker dies: the swarm goes on for three versions and says so; a new node is told.
    swarm.tracker.kill()
    before = swarm.version()
    wait_for(lambda: swarm.version() >= before + 3, STEP_S, "three versions without the tracker")
    status = swarm.nodes["node-1"].status()
    assert status is not None
    assert status.tracker.startswith("unreachable since")
    stranger = swarm.node("stranger")
    assert stranger.wait(30) == 4
    assert "No reachable tracker: tried http://127.0.0.1" in stranger.text()
    del swarm.nodes["stranger"]

    # It comes back empty and is filled again by announces; the page's history is there.
    swarm.start_tracker()
    wait_for(lambda: len(swarm.page()["nodes"]) == 3, STEP_S, "three nodes announced again")  # type: ignore[arg-type]
    wait_for(lambda: swarm.page()["progress"]["version"] >= before + 3, STEP_S, "the witness has caught up")  # type: ignore[index]

    # kill -9 of a node: the others go on; it comes back with the same identity and contributes.
    victim = swarm.nodes["node-2"]
    was = victim.status()
    victim.kill()
    before = swarm.version()
    wait_for(lambda: swarm.version() >= before + 2, STEP_S, "two versions without the victim")
    swarm.node("node-2")
    wait_for(lambda: swarm.listed("node-2") > before, START_S, "the victim contributes again")
    again = victim.status()
    assert was is not None
    assert again is not None
    assert again.peer == was.peer

    # SIGTERM: a goodbye within five seconds; the page says that it left; the others go on.
    code, seconds = swarm.nodes["node-3"].terminate()
    assert code == 0
    assert seconds < 5
    before = swarm.version()
    wait_for(lambda: swarm.version() >= before + 2, STEP_S, "two versions after the goodbye")
    rows = {row["who"]["name"]: row["state"]["word"] for row in swarm.page()["nodes"]}  # type: ignore[attr-defined]
    assert rows["node-3"] == "offline"

    wait_for(lambda: same_model(swarm), STEP_S, "the same model everywhere")


def test_the_whole_swarm_stops_and_resumes(swarm: Swarm) -> None:
    """Scenario F3: same version, clock and data cursor, in another order of starts."""
    swarm.start_tracker()
    for name in ("node-1", "node-2"):
        swarm.node(name)
    wait_for(
        lambda: swarm.version() >= 4 and swarm.listed("node-1") and swarm.listed("node-2"),
        START_S,
        "4 versions",
    )
    for process in (*swarm.nodes.values(), swarm.tracker):
        process.kill()
    node = swarm.node("node-2")
    # Its state file may be older than its log: the deltas on its disk bring it up again.
    wait_for(lambda: (s := node.status()) is not None and s.version >= 3, START_S, "the state is back")
    first = node.status()
    assert first is not None
    assert first.clock > 0
    swarm.start_tracker()
    swarm.node("node-1")
    before = first.version
    wait_for(
        lambda: swarm.listed("node-1") > before and swarm.listed("node-2") > before,
        START_S + STEP_S,
        "both again",
    )
    wait_for(lambda: same_model(swarm), STEP_S, "the same model everywhere")


def test_a_dead_trainer_is_started_again_and_a_second_signal_ends_at_once(swarm: Swarm) -> None:
    import psutil

    swarm.start_tracker()
    node = swarm.node("node-1")
    wait_for(lambda: swarm.listed("node-1"), START_S, "the node contributes")
    assert node.popen is not None
    (trainer,) = psutil.Process(node.popen.pid).children()
    trainer.kill()
    before = swarm.version()
    wait_for(lambda: swarm.version() > before + 1, START_S, "versions after the trainer's death")
    assert "The trainer ended" in node.text()
    node.popen.send_signal(signal.SIGINT)
    node.popen.send_signal(signal.SIGINT)
    began = time.monotonic()
    node.wait(5)
    assert time.monotonic() - began < 5
    wait_for(lambda: processes_of(swarm.folder / "node-1") == [], 5, "no trainer is left")
