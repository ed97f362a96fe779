"""Whose fault it was decides the exit code and what a person reads."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Iterator

import pytest

from p2pdiloco.errors import OperatorError, PeerError, TransportError
from p2pdiloco_node.process.lifetime import Leaving, first_fault, run_life


@pytest.fixture(autouse=True)
def _keep_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:], root.level = handlers, level


def life_of(*faults: Exception) -> Callable[[Leaving], Awaitable[int]]:
    """A life whose tasks end in these faults."""

    async def one(fault: Exception) -> None:
        raise fault

    async def life(_leaving: Leaving) -> int:
        async with asyncio.TaskGroup() as group:
            for fault in faults:
                group.create_task(one(fault))
        return 0

    return life


def test_our_own_fault_ends_with_70_and_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    faults = (TransportError("gone"), AssertionError("two certified bodies"), OperatorError("full", 6))
    assert run_life(life_of(*faults), level="info", orphan=True) == 70
    said = capsys.readouterr().err
    assert "AssertionError: two certified bodies" in said
    assert "a fault of p2pdiloco itself" in said


def test_what_a_person_can_mend_goes_before_the_network() -> None:
    with pytest.raises(OperatorError, match="the disk is full") as caught:
        run_life(
            life_of(TransportError("gone"), OperatorError("the disk is full", 6)), level="info", orphan=True
        )
    assert caught.value.exit_code == 6


def test_a_server_that_stopped_is_the_network_s_fault() -> None:
    with pytest.raises(OperatorError, match="the server on port 1 stopped") as caught:
        run_life(life_of(TransportError("the server on port 1 stopped")), level="info", orphan=True)
    assert caught.value.exit_code == 4


def test_a_closed_terminal_asks_to_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    async def life(leaving: Leaving) -> int:
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.wait_for(leaving.wait(), 5)
        return 0

    monkeypatch.setattr(os, "dup2", lambda *_: None)  # the terminal of this test is open
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert run_life(life, level="info", orphan=True) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_life_that_ends_well_gives_its_code() -> None:
    assert run_life(life_of(), level="info", orphan=True) == 0


def test_faults_are_found_however_deep() -> None:
    inner = ExceptionGroup("inner", [PeerError("BAD_SHAPE"), ValueError("ours")])
    assert isinstance(first_fault(ExceptionGroup("outer", [OperatorError("x"), inner])), ValueError)


async def test_asking_twice_keeps_the_first_reason() -> None:
    leaving = Leaving()
    assert not leaving.asked
    leaving.ask("SIGTERM")
    leaving.ask("SIGINT")
    await leaving.wait()
    assert leaving.why == "SIGTERM"
