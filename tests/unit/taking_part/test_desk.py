"""Own work in step with the log: order, only the newest state, nothing said before it is durable."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from p2pdiloco import limits
from p2pdiloco.errors import PeerError
from p2pdiloco.ids import Digest, PeerId, RunId
from p2pdiloco.protocol import events as fact
from p2pdiloco.protocol.actions import AdoptState, Settled
from p2pdiloco.wire.messages import DeltaHeader
from p2pdiloco_node.ports import Array
from p2pdiloco_node.taking_part.desk import State, TrainerDesk
from p2pdiloco_node.telemetry import Telemetry
from p2pdiloco_node.training import frames
from p2pdiloco_node.training.arrays import write_array
from p2pdiloco_node.training.contributor import AnchorView
from p2pdiloco_node.training.supervisor import TrainerDown

DELTA, ROOT, ME = Digest(b"d" * 32), Digest(b"r" * 32), PeerId(b"m" * 32)
HEADER = DeltaHeader(DELTA, 10, "int4", 0, 0, 7, 5, 0, 5, 1.0, bytes(64))
PARAMS = 3


class Data:
    """The run's data, and what they are told."""

    paths: Sequence[Path] = (Path("a"), Path("b"))
    evaluation_paths: Sequence[Path] = (Path("e"),)
    tokenizer_paths: Sequence[Path] = (Path("t"),)

    def __init__(self) -> None:
        self.told: list[object] = []

    def at(self, cursor: int) -> None:
        self.told.append(("at", cursor))

    def passed(self, cursor: int) -> None:
        self.told.append(("passed", cursor))

    def missed(self, shards: Sequence[int]) -> None:
        self.told.append(("missed", tuple(shards)))

    def evaluation_failed(self) -> None:
        self.told.append("evaluation failed")

    def trainer_failed(self) -> None:
        self.told.append("trainer failed")


class Kit:
    """A contributor and a supervisor that write down what they are asked, and a desk between them."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.events: list[fact.Event] = []
        self.evaluations: list[frames.Evaluated] = []
        self.next_sequence = 7
        self.cursor = 0
        self.fails: PeerError | None = None
        self.overtaken = False
        self.target_tokens = 0
        telemetry = Telemetry("n", ME, RunId(bytes(32)), "r", role="node", pid=1, inner_steps=4)
        self.telemetry = telemetry
        self.said: list[str] = []
        self.kinds: list[str] = []
        telemetry.on_said = self.hear
        spec: Any = type("Spec", (), {"model": type("Model", (), {"params": PARAMS})})
        self.desk = TrainerDesk(
            b"",
            spec,
            ME,
            self,
            State(0, 0, 900, np.zeros(PARAMS, np.float32)),
            telemetry,
            put=self.events.append,  # type: ignore[arg-type]
            on_evaluated=self.evaluations.append,
            settings=frames.TrainerSettings(device="cpu"),
        )
        self.desk.attach(self)  # type: ignore[arg-type]
        self.data = Data()
        self.desk.follow(self.data)

    def hear(self, kind: str, text: str) -> None:
        self.kinds.append(kind)
        self.said.append(text)

    # DiskContributor
    def evaluated(self, version: int) -> None:
        self.done.append(f"evaluated {version}")

    def settle(self, delta: Digest, how: Settled) -> None:
        self.done.append(f"settle {how}")

    def reset(self) -> None:
        self.done.append("reset")

    def go_back(self) -> None:
        self.done.append("go back")

    def go_on_after(self, sequence: int) -> None:
        if sequence:
            self.done.append(f"go on after {sequence}")

    def view(self, params: Array) -> AnchorView:
        self.done.append(f"view {params[0]:.0f}")
        return AnchorView(params, 6, 0)

    def finish_pass(self, delta: Array, done: frames.PassDone) -> DeltaHeader | None:
        if self.fails is not None:
            raise self.fails
        if self.overtaken:
            return None
        self.done.append(f"durable {done.sequence}")
        return HEADER

    # Supervisor
    async def adopt(
        self, version: int, clock: int, target_tokens: int, view: AnchorView, *, reset: bool = False
    ) -> None:
        self.done.append(f"adopt {version} {'reset' if reset else 'carry'}")
        self.target_tokens = target_tokens

    def allow(self, allowed: int, known_sequence: int, why: str, *, prolong: bool = True) -> None:
        self.done.append(f"allow {known_sequence}+{allowed}" + ("" if prolong else ", nothing prolonged"))

    async def evaluate(self, version: int, state_root: bytes, params: Array) -> None:
        self.done.append(f"evaluate {version}")

    def withdraw(self, version: int) -> bool:
        return f"evaluate {version}" in self.done

    def pause(self) -> None:
        self.done.append("pause")

    def pass_lost(self) -> None:
        self.done.append("pass lost")

    async def carry_out(self) -> None:
        """Let the desk work until nothing is ordered."""
        orders = self.desk._orders
        while orders:
            await self.desk._carry_out(orders.popleft())


@pytest.fixture
def kit() -> Kit:
    return Kit()


def soon(value: float) -> Awaitable[Array]:
    future: asyncio.Future[Array] = asyncio.get_running_loop().create_future()
    future.set_result(np.full(PARAMS, value, np.float32))
    return future


async def test_deltas_are_settled_before_the_state_that_contains_them_is_adopted(kit: Kit) -> None:
    kit.desk.settle(DELTA, Settled.LISTED)
    kit.desk.adopt(AdoptState(1, 100, 1000, 0, False), soon(1))
    kit.desk.allow(2, "")
    await kit.carry_out()
    assert kit.done == ["settle LISTED", "view 1", "adopt 1 carry", "allow 6+2"]


async def test_only_the_newest_state_is_handed_over_but_every_delta_is_settled(kit: Kit) -> None:
    kit.desk.adopt(AdoptState(1, 100, 1000, 0, False), soon(1))
    kit.desk.settle(DELTA, Settled.LISTED)
    kit.desk.adopt(AdoptState(2, 200, 1000, 0, False), soon(2))
    await kit.carry_out()
    assert kit.done == ["settle LISTED", "view 2", "adopt 2 carry"]


async def test_a_reset_is_not_lost_with_an_adoption_that_was_overtaken(kit: Kit) -> None:
    kit.desk.adopt(AdoptState(1, 100, 1000, 0, True), soon(1))
    kit.desk.adopt(AdoptState(2, 200, 1000, 0, False), soon(2))
    kit.desk.adopt(AdoptState(3, 300, 1000, 0, False), soon(3))
    await kit.carry_out()
    assert kit.done == ["reset", "view 3", "adopt 3 reset"]


async def test_a_delta_refused_as_not_finite_resets_the_trainer_at_once(kit: Kit) -> None:
    """algorithm.md 6, row 3: not only when the next state comes, which may be long in coming."""
    kit.desk.settle(DELTA, Settled.NOT_FINITE)
    await kit.carry_out()
    assert kit.done == ["settle NOT_FINITE", "view 0", "adopt 0 reset"]
    kit.desk.settle(DELTA, Settled.NOT_FINITE)
    kit.desk.adopt(AdoptState(1, 100, 1000, 0, False), soon(1))
    kit.done.clear()
    await kit.carry_out()
    assert kit.done == ["settle NOT_FINITE", "view 1", "adopt 1 reset"]


async def test_the_log_knows_more_than_the_own_record(kit: Kit, tmp_path: Path) -> None:
    """A lost `work/`: numbers go on after the log's, permissions too, and a pass on its way is given up."""
    kit.desk.adopt(AdoptState(5, 100, 1000, 40, False), soon(1))
    kit.desk.allow(2, "")
    await kit.carry_out()
    assert kit.done == ["go on after 40", "view 1", "adopt 5 carry", "allow 40+2"]
    kit.overtaken = True
    await kit.desk.trainer_said(passed(tmp_path))
    assert kit.events == []
    assert "lost" in kit.said[-1]


async def test_the_learning_rate_ends_where_the_log_says(kit: Kit) -> None:
    kit.desk.may_train()
    assert (await kit.desk.begin()).target_tokens == 900
    kit.desk.adopt(AdoptState(1, 100, 5000, 0, False), soon(1))
    await kit.carry_out()
    assert kit.target_tokens == 5000
    assert (await kit.desk.begin()).target_tokens == 5000


async def test_permission_counts_from_the_delta_that_the_rules_know(kit: Kit) -> None:
    kit.desk.known(9)
    kit.desk.allow(1, "")
    kit.desk.known(10)
    kit.desk.allow(0, "waiting")
    kit.desk.allow(0, "the owner paused the run", prolong=False)
    await kit.carry_out()
    assert kit.done == ["allow 9+1", "allow 10+0", "allow 10+0, nothing prolonged"]


def passed(tmp_path: Path) -> frames.PassDone:
    write_array(tmp_path / "delta", np.ones(PARAMS, np.float32))
    return frames.PassDone(7, str(tmp_path / "delta"), 0, 5, 0, 5, 1.0)


async def test_a_pass_is_durable_before_the_rules_hear_of_it(kit: Kit, tmp_path: Path) -> None:
    await kit.desk.trainer_said(passed(tmp_path))
    assert kit.done == ["durable 7"]
    assert kit.events == [fact.PassFinished(HEADER)]


async def test_a_pass_that_cannot_be_encoded_goes_back_to_the_swarm_s_state(kit: Kit, tmp_path: Path) -> None:
    kit.fails = PeerError("NOT_FINITE")
    await kit.desk.trainer_said(passed(tmp_path))
    await kit.carry_out()
    assert kit.events == [fact.TrainerNotFinite()]
    assert kit.done == ["pass lost", "go back", "view 0", "adopt 0 reset"]


async def test_an_evaluation_is_reported_with_the_root_that_was_asked_for(kit: Kit) -> None:
    kit.desk.evaluate(4, ROOT, soon(4))
    await kit.carry_out()
    assert kit.desk.evaluating
    await kit.desk.trainer_said(frames.Evaluated(3, ROOT, (9.0,), (10,)))
    await kit.desk.trainer_said(frames.Evaluated(4, ROOT, (2.0,), (10,)))
    assert kit.evaluations == [frames.Evaluated(4, ROOT, (2.0,), (10,))]
    assert not kit.desk.evaluating
    assert kit.said == []


@pytest.mark.parametrize("late", [False, True])
async def test_version_0_is_not_evaluated_by_one_who_comes_when_nobody_asks_for_it(
    kit: Kit, late: bool
) -> None:
    """A joiner knows of no later version when it starts, and catches up before its trainer begins."""
    kit.desk.evaluate(0, ROOT, soon(0))
    kit.desk.adopt(AdoptState(limits.genesis_reports_version_max + late, 100, 1000, 0, reset=False), soon(1))
    await kit.carry_out()
    assert kit.desk.evaluating is not late


async def test_an_evaluation_is_durable_when_the_tracker_has_it(kit: Kit) -> None:
    """It was when the trainer was done: a node that started again meanwhile never reported that version."""
    kit.desk.evaluate(4, ROOT, soon(4))
    await kit.desk.trainer_said(frames.Evaluated(4, ROOT, (2.0,), (10,)))
    await kit.carry_out()
    assert kit.done == ["evaluate 4"]
    kit.desk.reported(4)
    await kit.carry_out()
    assert kit.done == ["evaluate 4", "evaluated 4"]


async def test_what_was_found_in_an_ended_epoch_is_not_reported_of_the_new_one(kit: Kit) -> None:
    """The owner's recovery came in between, and the new epoch came to the same version."""
    new = Digest(b"n" * 32)
    kit.desk.evaluate(4, ROOT, soon(4))
    kit.desk.evaluate(4, new, soon(5))
    await kit.desk.trainer_said(frames.Evaluating(4, ROOT, (9.0,), (10,), 0.5))
    await kit.desk.trainer_said(frames.NotEvaluated(4, new, "a set is gone."))
    assert kit.evaluations == [], "nothing is known of the new state"
    kit.desk.evaluate(4, new, soon(5))
    await kit.desk.trainer_said(frames.Evaluated(4, ROOT, (9.0,), (10,)))
    assert kit.desk.evaluating
    await kit.desk.trainer_said(frames.Evaluated(4, new, (2.0,), (10,)))
    assert [(e.state_root, e.losses) for e in kit.evaluations] == [(ROOT, (9.0,)), (new, (2.0,))]


async def test_an_evaluation_without_samples_counts_and_says_why(kit: Kit) -> None:
    kit.desk.evaluate(4, ROOT, soon(4))
    await kit.desk.trainer_said(frames.Evaluated(4, ROOT, (2.0,), (10,), why="the tokenizer is none."))
    assert [e.losses for e in kit.evaluations] == [(2.0,)]
    assert kit.said == ["Version 4 writes no samples here: the tokenizer is none."]


async def test_missing_data_is_said_and_an_evaluation_that_failed_is_over(kit: Kit) -> None:
    kit.desk.evaluate(4, ROOT, soon(4))
    await kit.desk.trainer_said(frames.NotEvaluated(4, ROOT, "data shard 0 cannot be read"))
    assert not kit.desk.evaluating
    await kit.desk.trainer_said(frames.ShardsMissing((2, 5), "data shard 2 cannot be read."))
    await kit.desk.trainer_said(frames.ShardsMissing((), ""))
    wanted = ("not evaluated", "shard 2, 5", "is here")
    assert [words in text for words, text in zip(wanted, kit.said, strict=True)] == [True] * 3
    assert kit.data.told == ["evaluation failed", ("missed", (2, 5)), ("missed", ())]
    assert kit.evaluations == []


async def test_the_data_are_told_where_the_trainer_is(kit: Kit, tmp_path: Path) -> None:
    """A pass counts for them when it is durable, and not when it is lost."""
    await kit.desk.trainer_said(frames.Stepped(1, 4, 2.0, 10.0, 0.1, 0, 0.1, clock=0, cursor=8))
    kit.overtaken = True
    await kit.desk.trainer_said(passed(tmp_path))
    kit.overtaken = False
    await kit.desk.trainer_said(passed(tmp_path))
    await kit.desk.trainer_said(TrainerDown("exit status 1", 2.0, braked=False))
    assert kit.data.told == [("at", 8), ("passed", 5), "trainer failed"]


async def test_when_the_run_is_over_only_its_last_version_is_still_evaluated(kit: Kit) -> None:
    kit.desk.may_train()
    kit.desk.evaluate(0, ROOT, soon(0))
    kit.desk.evaluate(4, ROOT, soon(4))
    kit.desk.run_ended(4)
    await kit.carry_out()
    assert kit.desk.evaluating
    await kit.desk.trainer_said(frames.Evaluated(4, ROOT, (2.0,), (10,)))
    assert not kit.desk.evaluating


async def test_a_node_that_finds_the_run_over_before_it_has_the_data_evaluates_nothing(kit: Kit) -> None:
    """It waited for a trainer to start and evaluate version 0."""
    kit.desk.evaluate(0, ROOT, soon(0))
    kit.desk.evaluate(4, ROOT, soon(4))
    kit.desk.run_ended(4)
    await kit.carry_out()
    assert not kit.desk.evaluating


async def test_a_trainer_that_ends_takes_its_evaluation_along_and_is_said(kit: Kit) -> None:
    kit.desk.evaluate(4, ROOT, soon(4))
    await kit.desk.trainer_said(TrainerDown("exit status 1", 2.0, braked=False))
    assert not kit.desk.evaluating
    assert "exit status 1" in kit.telemetry.why
    assert kit.said[0] == "Version 4 is not evaluated here: the trainer ended (exit status 1)."


async def test_when_the_run_is_over_the_trainer_rests_after_what_was_ordered(kit: Kit) -> None:
    kit.desk.evaluate(4, ROOT, soon(4))
    kit.desk.run_ended(4)
    await kit.carry_out()
    assert kit.done == ["evaluate 4", "pause"]
    assert kit.desk.over.is_set()


async def test_a_fresh_trainer_waits_for_the_data_and_starts_from_the_newest_state(kit: Kit) -> None:
    beginning = asyncio.create_task(kit.desk.begin())
    kit.desk.adopt(AdoptState(5, 500, 1000, 0, False), soon(5))
    await kit.carry_out()
    assert not beginning.done()
    kit.desk.may_train()
    begun = await asyncio.wait_for(beginning, 5)
    assert (begun.version, begun.clock, begun.view.anchor[0]) == (5, 500, 5.0)
    assert begun.configure.shards == ("a", "b")
    assert (begun.configure.evaluations, begun.configure.tokenizer) == (("e",), ("t",))


async def test_of_an_evaluation_that_is_not_finished_the_sets_that_are_count(kit: Kit) -> None:
    kit.desk.evaluate(4, ROOT, soon(4))
    await kit.desk.trainer_said(frames.Evaluating(4, ROOT, (2.5,), (100,), 0.6))
    await kit.desk.trainer_said(frames.NotEvaluated(4, ROOT, "a set is gone."))
    assert kit.evaluations == [frames.Evaluated(4, ROOT, (2.5,), (100,))]
    assert "on the first 1 evaluation set alone: a set is gone." in kit.said[-1]


async def test_a_stretch_of_versions_that_are_not_evaluated_is_said_once(kit: Kit) -> None:
    """A slow machine named each of eleven, as if its data were at fault."""
    for version in (4, 6, 8):
        kit.desk.evaluate(version, ROOT, soon(version))
    await kit.desk.trainer_said(frames.NotEvaluated(4, ROOT, "newer ones came."))
    await kit.desk.trainer_said(frames.Evaluated(6, ROOT, (2.0,), (10,)))
    kit.desk.evaluate(10, ROOT, soon(10))
    await kit.desk.trainer_said(frames.NotEvaluated(8, ROOT, "newer ones came."))
    assert kit.said == ["Version 4 is not evaluated here: newer ones came."]
    await kit.desk.trainer_said(frames.NotEvaluated(10, ROOT, "a set is gone."))
    assert kit.said[1:] == ["Version 10 is not evaluated here: a set is gone."]
    assert kit.kinds == ["evaluation"] * 2


async def test_a_later_stretch_and_the_last_version_are_said_again(kit: Kit) -> None:
    for version in (4, 6):
        kit.desk.evaluate(version, ROOT, soon(version))
        await kit.desk.trainer_said(frames.NotEvaluated(version, ROOT, "newer ones came."))
    kit.desk.evaluate(8, ROOT, soon(8))
    await kit.desk.trainer_said(frames.Evaluated(8, ROOT, (2.0,), (10,)))
    kit.desk.evaluate(10, ROOT, soon(10))
    await kit.desk.trainer_said(frames.NotEvaluated(10, ROOT, "newer ones came."))
    kit.desk.evaluate(12, ROOT, soon(12))
    kit.desk.run_ended(12)
    kit.desk.may_train()
    await kit.carry_out()
    await kit.desk.trainer_said(frames.NotEvaluated(12, ROOT, "newer ones came."))
    assert [words.split()[1] for words in kit.said] == ["4", "10", "12"]


async def test_the_last_evaluation_takes_as_long_as_it_shows_progress(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow machine was given sixty seconds, and left without a figure or a word."""
    now = 0.0
    kit.desk._clock = lambda: now
    kit.desk.evaluate(4, ROOT, soon(4))
    waiting = asyncio.create_task(kit.desk.last_evaluation())
    while now < limits.last_evaluation_s_max - 2 * limits.evaluation_silent_s_max:
        now += limits.evaluation_silent_s_max - 1
        await kit.desk.trainer_said(frames.Evaluating(4, ROOT, (), (), 0.1))
        await asyncio.sleep(0)
        assert not waiting.done()
    await kit.desk.trainer_said(frames.Evaluated(4, ROOT, (2.0,), (10,)))
    await asyncio.wait_for(waiting, 5)
    assert [e.losses for e in kit.evaluations] == [(2.0,)]
    assert kit.said == []


async def test_how_far_an_evaluation_is_is_known_to_log_and_status(kit: Kit) -> None:
    kit.desk.evaluate(4, ROOT, soon(4))
    kit.desk.evaluate(6, ROOT, soon(6))
    assert kit.telemetry.evaluates == "evaluating version 6"
    await kit.desk.trainer_said(frames.Evaluating(4, ROOT, (), (), 0.3))
    kit.telemetry.run_ended(6)
    assert kit.telemetry.now()[:2] == ("over", "evaluating version 4, 30 %")
    kit.desk.run_ended(6)
    kit.desk.may_train()
    await kit.carry_out()
    assert kit.telemetry.now()[:2] == ("over", "evaluating version 6")
    await kit.desk.trainer_said(frames.Evaluated(6, ROOT, (2.0,), (10,)))
    assert kit.telemetry.now()[:2] == ("over", "")


async def test_what_an_end_waits_for_is_said(kit: Kit) -> None:
    assert kit.desk.leaving_words() == ""
    kit.desk.evaluate(4, ROOT, soon(4))
    assert "evaluation of version 4 is given up, and the trainer has 2 s to end" in kit.desk.leaving_words()
    await kit.desk.trainer_said(frames.Evaluated(4, ROOT, (2.0,), (10,)))
    assert kit.desk.leaving_words() == ""


@pytest.mark.parametrize("limit", ["evaluation_silent_s_max", "last_evaluation_s_max"])
async def test_a_last_evaluation_that_does_not_come_is_said(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(limits, limit, 0.0)
    kit.desk.evaluate(4, ROOT, soon(4))
    await asyncio.wait_for(kit.desk.last_evaluation(), 5)
    assert not kit.desk.evaluating
    assert "Version 4 is not evaluated here: " in kit.said[-1]
