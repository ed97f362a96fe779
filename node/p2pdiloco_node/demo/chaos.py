"""The faults of `p2pdiloco demo --chaos`: one at a time, the next only when the swarm is whole again.

Whole means: the machine that was hit is caught up and has a delta listed again (the tracker: announces are
answered), every node trains, and every seat of the committee answers. Fewer guarantees would measure two
faults as one.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from p2pdiloco_node.demo.summary import Fault
from p2pdiloco_node.demo.swarm import POLL_S, Daemon, Swarm

PAUSE_S = 6.0  # longer than two election timeouts of the demo
TRACKER_AWAY_S = 8.0
MID_PASS = 0.3  # the aggregator is hit when it is so far into a pass
SEAT_ANSWERS_S = 3.0  # heard within
WAIT_S_MAX = 90.0  # for any one condition: then the fault is reported as not recovered

Tell = Callable[[str], None]


class RunIsOver(Exception):
    """The run reached its last version before the next fault."""


async def inject_faults(swarm: Swarm, faults: list[Fault], tell: Tell) -> None:
    """All faults in turn, appended to `faults` as they are survived. Ends early when the run is over."""
    try:
        await _wait(swarm, lambda: _whole(swarm) and swarm.version >= 2)
        first = await _aggregator_in_mid_pass(swarm)
        await _kill_node(swarm, first, "kill aggregator", faults, tell)
        other = next(n for n in swarm.nodes if n is not first)
        await _kill_node(swarm, other, "kill node", faults, tell)
        rest = [n for n in swarm.nodes if n not in (first, other)] or [first]
        await _pause_node(swarm, rest[0], faults, tell)
        await _kill_tracker(swarm, faults, tell)
    except RunIsOver:
        tell(f"The run was over before all faults were made ({len(faults)} of 4): give --outer-steps more.")


async def _kill_node(swarm: Swarm, node: Daemon, kind: str, faults: list[Fault], tell: Tell) -> None:
    with _hit(node) as at:
        tell(f"Chaos: {kind}, kill -9 {node.name}.")
        node.kill()
        to_next_s = await _next_version(swarm, at)
        tell(f"Chaos: the next version came after {_s(to_next_s)}; {node.name} starts again.")
        node.start()
        to_contribution_s = await _contributes(swarm, node, at)
    faults.append(Fault(kind, node.name, to_next_s, to_contribution_s))
    tell(f"Chaos: {node.name} contributed again after {_s(to_contribution_s)}.")
    await _wait(swarm, lambda: _whole(swarm))


async def _pause_node(swarm: Swarm, node: Daemon, faults: list[Fault], tell: Tell) -> None:
    with _hit(node) as at:
        tell(f"Chaos: {node.name} is stopped for {PAUSE_S:.0f} s (SIGSTOP).")
        node.signal(signal.SIGSTOP)
        node.paused = True
        try:
            to_next_s = await _next_version(swarm, at)
            while time.monotonic() < at + PAUSE_S:
                await _look(swarm)
        finally:
            node.paused = False
            node.signal(signal.SIGCONT)
        to_contribution_s = await _contributes(swarm, node, at)
    faults.append(Fault("pause node", node.name, to_next_s, to_contribution_s))
    tell(f"Chaos: {node.name} contributed again after {_s(to_contribution_s)}.")
    await _wait(swarm, lambda: _whole(swarm))


async def _kill_tracker(swarm: Swarm, faults: list[Fault], tell: Tell) -> None:
    tracker = swarm.tracker
    at = time.monotonic()
    tell(f"Chaos: kill -9 the tracker with its witness, away for {TRACKER_AWAY_S:.0f} s.")
    tracker.kill()
    to_next_s = await _next_version(swarm, at)
    while time.monotonic() < at + TRACKER_AWAY_S:
        await _look(swarm)
    tracker.start()
    await _wait(swarm, lambda: tracker.url is not None)
    answered = await _wait(
        swarm, lambda: all(n.status is not None and n.status.tracker_silent_s is None for n in swarm.nodes)
    )
    faults.append(Fault("kill tracker", tracker.name, to_next_s, answered - at if answered else None))
    tell(f"Chaos: the next version came after {_s(to_next_s)}; the tracker serves again.")
    await _wait(swarm, lambda: _whole(swarm))


@contextmanager
def _hit(node: Daemon) -> Iterator[float]:
    """The pauses of this node's trainer do not count from the fault until it contributes again."""
    at = time.monotonic()
    node.hit.append((at, float("inf")))
    try:
        yield at
    finally:
        node.hit[-1] = (at, time.monotonic())


async def _aggregator_in_mid_pass(swarm: Swarm) -> Daemon:
    """The training node that leads, when it is in the middle of a pass."""

    def leader() -> Daemon | None:
        for node in swarm.nodes:
            status = node.status
            if status is not None and status.leads and status.inner_step >= MID_PASS * status.inner_steps:
                return node
        return None

    await _wait(swarm, lambda: leader() is not None)
    return leader() or swarm.nodes[0]


async def _next_version(swarm: Swarm, at: float) -> float | None:
    """Seconds from `at` to the first version that was seen for the first time after it."""
    before = swarm.version
    if await _wait(swarm, lambda: swarm.version > before, over_is_fine=True) is None:
        return None
    return round(swarm.version_seen[before + 1] - at, 2)


async def _contributes(swarm: Swarm, node: Daemon, at: float) -> float | None:
    """Seconds from `at` until a version newer than the node's return lists a delta of it."""
    version = swarm.version

    def listed() -> bool:
        status = node.status
        return (
            status is not None and status.version >= version and status.listed.get(status.peer, 0) > version
        )

    answered = await _wait(swarm, listed)
    return round(answered - at, 2) if answered is not None else None


def _whole(swarm: Swarm) -> bool:
    for node in swarm.nodes:
        status = node.status
        if status is None or status.state.word != "training" or status.version < swarm.version - 1:
            return False
        if not status.listed.get(status.peer):
            return False
        if status.committee and len(status.committee) < min(3, 1 + len(swarm.nodes) - len(swarm.nodes) % 2):
            return False
        if any(s.heard_s is None or s.heard_s > SEAT_ANSWERS_S for s in status.committee):
            return False
    return True


async def _wait(swarm: Swarm, condition: Callable[[], bool], *, over_is_fine: bool = False) -> float | None:
    """Poll until it holds; the monotonic time then, or None after `WAIT_S_MAX`. Raises: RunIsOver."""
    until = time.monotonic() + WAIT_S_MAX
    while time.monotonic() < until:
        await _look(swarm)
        if condition():
            return time.monotonic()
        if not over_is_fine and any(n.status is not None and n.status.over for n in swarm.nodes):
            raise RunIsOver
    return None


async def _look(swarm: Swarm) -> None:
    await swarm.poll()
    await asyncio.sleep(POLL_S)


def _s(seconds: float | None) -> str:
    return f"more than {WAIT_S_MAX:.0f} s" if seconds is None else f"{seconds:.1f} s"
