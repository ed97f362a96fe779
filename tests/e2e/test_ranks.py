"""A trainer of several ranks under the real launcher: it works as one, and whatever ends a rank ends all."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest

from p2pdiloco import limits
from p2pdiloco.ids import Digest
from p2pdiloco.protocol.actions import Settled
from p2pdiloco_node.training import frames
from p2pdiloco_node.training.ranks import LAUNCHER, LOOPBACK, Launch, Ranks
from p2pdiloco_node.training.supervisor import TrainerDown
from tests.e2e import test_trainer_process as one_rank
from tests.e2e.test_trainer_process import Node, end

from .swarm_kit import free_port, make_run, processes_of, swarm_in, wait_for
from .test_swarm import START_S, STEP_S, same_model

pytestmark = [pytest.mark.e2e, pytest.mark.timed]
TWO = Ranks(("cpu", "cpu"))

run_folder, texts = one_rank.run_folder, one_rank.texts  # its fixtures


def node_of(
    run_folder: Path, folder: Path, parallel: str, *, collective_s: float = limits.collective_s_max
) -> Node:
    launch = Launch(TWO.devices, str(folder / "ranks"), collective_s=collective_s)
    command = (*LAUNCHER, msgspec.json.encode(launch).decode())
    node = Node(run_folder, folder, command=command, device=TWO.device)
    node.parallel = parallel
    return node


def ranks_below(pid: int | None) -> list[psutil.Process]:
    """Of the launcher, by rank."""
    assert pid is not None
    found = psutil.Process(pid).children()
    return sorted(found, key=lambda process: int(process.environ()["RANK"]))


def settle_all(node: Node) -> None:
    for header in node.contributor.in_flight():
        node.contributor.settle(Digest(header.delta), Settled.LISTED)


def all_gone(processes: list[psutil.Process], seconds: float = 5.0) -> bool:
    return not psutil.wait_procs(processes, timeout=seconds)[1]


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends orphans on Linux")
async def test_a_rank_is_killed_and_the_trainer_starts_again(run_folder: Path, tmp_path: Path) -> None:
    node = node_of(run_folder, tmp_path, "ddp")
    task = asyncio.create_task(node.supervisor.run())
    await node.supervisor.evaluate(0, bytes(32), node.params)
    node.supervisor.allow(2, 0, "waiting for the swarm (no quorum)")
    await node.until(lambda: any(isinstance(e, frames.Waiting) for e in node.told))
    (configured,) = (e for e in node.told if isinstance(e, frames.Configured))
    assert configured.device == "2 x cpu, 1 thread"
    assert configured.how[0].startswith("2 ranks, each with the whole model (ddp); 2 sequences per forward")
    assert [(p.sequence, p.steps, p.data_first) for p in node.passes()] == [(1, 10, 0), (2, 10, 40)]
    (before,) = node.evaluated()
    assert before.losses[0] == pytest.approx(np.log(256), abs=0.3)
    node.supervisor.save_checkpoint()
    await node.until(lambda: any(isinstance(e, frames.Saved) for e in node.told))
    ranks = ranks_below(node.supervisor.pid)
    assert len(ranks) == 2
    # Nothing of it can be reached from another machine.
    for process in (psutil.Process(node.supervisor.pid), *ranks):
        listening = [c for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert all(c.laddr.ip in ("127.0.0.1", "::1") for c in listening)
    settle_all(node)
    node.supervisor.allow(1, 2, "")
    os.kill(ranks[1].pid, signal.SIGKILL)
    await node.until(lambda: any(isinstance(e, TrainerDown) for e in node.told))
    (down,) = (e for e in node.told if isinstance(e, TrainerDown))
    assert "rank 1 of 2 (from 0) was ended by SIGKILL" in down.why
    assert not down.braked
    assert all_gone(ranks)
    # The daemon lives, and at most the pass is lost.
    settle_all(node)
    known, cursor = len(node.passes()), node.contributor.cursor
    node.supervisor.allow(2, node.contributor.next_sequence - 1, "")
    await node.until(lambda: len(node.passes()) > known)
    assert node.passes()[known].data_first == cursor
    ranks = ranks_below(node.supervisor.pid)
    began = time.monotonic()
    await end(task)
    assert time.monotonic() - began < 4
    assert all_gone(ranks)


@pytest.mark.long
async def test_a_rank_that_hangs_is_a_crash(run_folder: Path, tmp_path: Path) -> None:
    node = node_of(run_folder, tmp_path, "fsdp", collective_s=8.0)
    task = asyncio.create_task(node.supervisor.run())
    node.supervisor.allow(2, 0, "waiting")
    await node.until(lambda: bool(node.passes()))
    ranks = ranks_below(node.supervisor.pid)
    ranks[1].suspend()
    await node.until(lambda: any(isinstance(e, TrainerDown) for e in node.told))
    (down,) = (e for e in node.told if isinstance(e, TrainerDown))
    assert "rank 0 of 2 (from 0) waited too long for another rank, which is stuck" in down.why
    assert all_gone(ranks)
    await end(task)


@pytest.mark.long
def test_one_rank_two_ddp_and_two_fsdp_are_one_swarm(tmp_path: Path) -> None:
    """And a node outlives a rank of its trainer."""
    run = make_run(tmp_path, versions=500)
    with swarm_in(tmp_path, run, free_port()) as swarm:
        swarm.start_tracker()
        swarm.node("one")
        for parallel in ("ddp", "fsdp"):
            swarm.node(parallel, "--ranks", "2", "--parallel", parallel)
        names = ("one", "ddp", "fsdp")
        wait_for(lambda: all(swarm.listed(name) for name in names), START_S, "deltas of all are merged")
        assert "each with 1/2 of the model (fsdp)" in swarm.nodes["fsdp"].text()
        daemon = swarm.nodes["fsdp"].popen
        assert daemon is not None
        (launcher,) = psutil.Process(daemon.pid).children()
        ranks = ranks_below(launcher.pid)
        ranks[1].kill()
        why = "rank 1 of 2 (from 0) was ended by SIGKILL"
        wait_for(lambda: why in swarm.nodes["fsdp"].text(), STEP_S, "the trainer ended")
        assert all_gone(ranks)
        # Two deltas may have been on their way.
        seen = swarm.version() + limits.in_flight_max
        wait_for(lambda: swarm.listed("fsdp") > seen, START_S, "it trains on")
        assert daemon.poll() is None
        wait_for(lambda: same_model(swarm), STEP_S, "all have the same model")
        (launcher,) = psutil.Process(daemon.pid).children()
        ranks = [launcher, *ranks_below(launcher.pid)]
        status, seconds = swarm.nodes["fsdp"].terminate()
        assert (status, seconds < 5) == (0, True), swarm.nodes["fsdp"].text()
        assert all_gone(ranks)
        swarm.nodes["ddp"].kill()  # the daemon and its group: the ranks are in groups of their own
    wait_for(lambda: processes_of(tmp_path) == [], 5, "nothing is left")


@pytest.mark.long
async def test_a_second_machine_lends_its_ranks(run_folder: Path, tmp_path: Path) -> None:
    """Two machines on loopback: the node's ranks come first, the lent ones come back after a crash."""
    rdzv = f"127.0.0.1:{free_port()}"
    node = Node(
        run_folder, tmp_path, device="cpu", command=Ranks(("cpu",), 2, rdzv).command(tmp_path / "ranks")
    )
    words = [
        "ranks", "--nnodes", "2", "--node-rank", "1", "--rdzv", rdzv, "--device", "cpu",
    ]  # fmt: skip
    with (tmp_path / "lent.log").open("wb") as log:
        lent = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "p2pdiloco_node.cli", *words),
            env=os.environ | {"GLOO_SOCKET_IFNAME": LOOPBACK},
            stderr=log,
        )
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    task = asyncio.create_task(node.supervisor.run())
    try:
        node.supervisor.allow(2, 0, "waiting for the swarm (no quorum)")
        await node.until(lambda: any(isinstance(e, frames.Waiting) for e in node.told), 90)
        assert len(ranks_below(node.supervisor.pid)) == 1
        (configured,) = (e for e in node.told if isinstance(e, frames.Configured))
        assert configured.device.startswith("2 x cpu")
        settle_all(node)
        node.supervisor.allow(1, 2, "")
        (launcher,) = psutil.Process(lent.pid).children()
        ranks_below(launcher.pid)[0].kill()
        await node.until(lambda: any(isinstance(e, TrainerDown) for e in node.told))
        settle_all(node)
        known = len(node.passes())
        node.supervisor.allow(2, node.contributor.next_sequence - 1, "")
        await node.until(lambda: len(node.passes()) > known, 120)
        await end(task)
        assert await asyncio.wait_for(lent.wait(), 20) == 0, (tmp_path / "lent.log").read_text()
    finally:
        await end(task)
        del os.environ["GLOO_SOCKET_IFNAME"]
        with suppress(ProcessLookupError):
            lent.kill()
        await lent.wait()
