"""The owner speaks to a swarm of real daemons: each word by its command, what it does, and a rescue."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from p2pdiloco_node.verify import verify_run

from .swarm_kit import Swarm, free_port, make_run, swarm_in, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.long]

START_S = 60.0  # imports of several trainers on a busy machine
STEP_S = 40.0  # for anything that takes a pass or an election


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    run = make_run(tmp_path, versions=500)
    with swarm_in(tmp_path, run, free_port()) as swarm:
        yield swarm


def say(swarm: Swarm, *words: str, where: str | None = None, key: Path | None = None, code: int = 0) -> Any:
    """`p2pdiloco run ...` with the owner's key; what it prints as JSON, or its sentence."""
    command, *more = words
    arguments = ["run", command, where or swarm.link, *more, "--json"]
    if command != "inspect":
        arguments += ["--owner-key", str(key or swarm.folder / "owner.key"), "--wait-s", "60"]
    done = subprocess.run(
        [sys.executable, "-m", "p2pdiloco_node.cli", *arguments],
        capture_output=True, text=True, timeout=120, env=os.environ, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout) if code == 0 else done.stderr


def start(swarm: Swarm, nodes: int) -> None:
    swarm.start_tracker()
    for number in range(1, nodes + 1):
        swarm.node(f"node-{number}")
    wait_for(lambda: swarm.version() >= 2, START_S, "two versions")


def seats(swarm: Swarm) -> int:
    status = swarm.nodes["node-1"].status()
    return len(status.committee) if status is not None else 0


def test_pause_resume_extend_revoke_finish(swarm: Swarm) -> None:
    start(swarm, 3)
    wait_for(lambda: seats(swarm) == 3, STEP_S, "a committee of three")
    said = say(swarm, "pause")
    assert (said["kind"], said["owner_sequence"], said["epoch"]) == ("pause", 1, 0)
    assert say(swarm, "pause") == {"kind": "pause", "effect": "The run is paused already."}
    words = lambda: {n: s.state.why for n, p in swarm.nodes.items() if (s := p.status()) is not None}  # noqa: E731
    wait_for(
        lambda: all("the owner paused the run" in why for why in words().values()), STEP_S, "paused nodes"
    )
    paused_at = swarm.version()
    # They serve and vote all the same: the next word is certified, and a newcomer catches up.
    newcomer = swarm.node("node-4")
    wait_for(lambda: (s := newcomer.status()) is not None and s.version == paused_at, START_S, "a newcomer")
    target = say(swarm, "inspect", where=str(swarm.folder / "run"))["now"]["target_tokens"]
    assert "no extension" in say(swarm, "extend", "--tokens", "1K", code=2)
    assert say(swarm, "extend", "--tokens", "2T", "--yes")["index"] > said["index"]
    now = say(swarm, "inspect")["now"]
    assert (now["paused"], now["target_tokens"], now["target_tokens"] > target) == (True, 2 * 10**12, True)
    assert swarm.version() == paused_at
    assert say(swarm, "resume")["kind"] == "resume"
    wait_for(lambda: swarm.version() > paused_at + 1, STEP_S, "versions after the pause")

    loser = swarm.nodes["node-2"].status()
    assert loser is not None
    said = say(swarm, "revoke", "node-2", "--yes")
    assert "node-2" in said["effect"]
    last = swarm.listed("node-2")
    wait_for(lambda: loser.peer not in say(swarm, "inspect")["now"]["committee"], STEP_S, "the seat taken")
    wait_for(lambda: swarm.version() > last + 3, STEP_S, "versions without the revoked node")
    assert swarm.listed("node-2") <= last + 1
    wait_for(
        lambda: "the run's owner revoked this node" in swarm.nodes["node-2"].text(), STEP_S, "it says so"
    )

    assert "where nobody can be asked" in say(swarm, "finish", code=2).lower()
    over = say(swarm, "finish", "--yes")
    for name in ("node-1", "node-3"):
        assert swarm.nodes[name].wait(STEP_S) == 0, swarm.nodes[name].text()
    assert f"The run is over at version {over['version']}" in swarm.nodes["node-1"].text()
    assert "nothing can be said to it" in say(swarm, "pause", code=5)
    swarm.tracker.terminate()
    assert verify_run(swarm.folder / "run").version == over["version"]


def test_a_key_that_is_not_the_owner_s(swarm: Swarm, tmp_path: Path) -> None:
    swarm.start_tracker()
    other = tmp_path / "other.key"
    other.write_text("7" * 64)
    other.chmod(0o600)
    assert "not the key" in say(swarm, "pause", key=other, code=3)


def test_a_run_that_lost_its_majority_is_rescued(swarm: Swarm) -> None:
    """Two of three voters die for good, the witness among them; the nodes that are left go on."""
    start(swarm, 4)
    wait_for(lambda: seats(swarm) == 3, STEP_S, "a committee of three")
    status = swarm.nodes["node-1"].status()
    assert status is not None
    voters = {seat.peer for seat in status.committee if not seat.witness}
    names = {s.peer: n for n, p in swarm.nodes.items() if (s := p.status()) is not None}
    dead = names[min(voters)]
    alive = [name for name in swarm.nodes if name != dead]
    swarm.tracker.kill()
    swarm.nodes[dead].kill()
    left = swarm.nodes[alive[0]]
    where = f"{left.url}/#{swarm.run.hex()}"
    wait_for(lambda: left.status() is not None, STEP_S, "a node that answers")
    stuck = swarm.version()
    done = say(swarm, "recover", "--yes", where=where)
    assert (done["epoch"], dead in done["committee"]) == (1, False)
    assert done["version"] >= stuck - 1
    wait_for(lambda: swarm.version() >= done["version"] + 3, START_S, "versions in the new epoch")
    assert say(swarm, "inspect", where=where)["now"]["epoch"] == 1
    # The dead come back: node and witness learn that their epoch is over, and follow.
    swarm.start_tracker()
    swarm.node(dead)
    wait_for(lambda: swarm.listed(dead) > done["version"] + 3, START_S, "its deltas listed again")
    wait_for(lambda: say(swarm, "inspect")["now"]["epoch"] == 1, STEP_S, "the witness in the new epoch")
    assert "the run goes on by itself" in say(swarm, "recover", "--yes", code=5)
    # A word in the new epoch.
    assert say(swarm, "pause")["epoch"] == 1
    swarm.tracker.terminate()
    verified = verify_run(swarm.folder / "run")
    assert verified.version >= done["version"] + 3
