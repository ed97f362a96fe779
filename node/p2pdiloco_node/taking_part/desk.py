"""The node's own work, kept in step with the log: settle, adopt, allow, evaluate (algorithm.md 3, 6).

Between the driver and the trainer process. The driver's orders wait in one queue and are carried out in
order by one task; what takes long (arrays, disk) runs in threads. Adoptions that were overtaken in the
queue are left out: only the newest state is worth handing over. Finished passes come the other way: encoded
and durable first, then a `PassFinished` for the rules.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from p2pdiloco import limits
from p2pdiloco.errors import PeerError
from p2pdiloco.ids import Digest, PeerId
from p2pdiloco.protocol import events as fact
from p2pdiloco.protocol.actions import AdoptState, Settled
from p2pdiloco.run_spec import RunSpec
from p2pdiloco.wire.messages import DeltaHeader
from p2pdiloco.words import count_of
from p2pdiloco_node.ports import Array
from p2pdiloco_node.telemetry import Telemetry
from p2pdiloco_node.training import frames
from p2pdiloco_node.training.arrays import read_array
from p2pdiloco_node.training.contributor import DiskContributor
from p2pdiloco_node.training.supervisor import Beginning, Supervisor, Told, TrainerDown

log = logging.getLogger("p2pdiloco.node")


class State(NamedTuple):
    """A certified state that the trainer may stand on."""

    version: int
    clock: int  # tokens merged
    target_tokens: int  # of the run, as the log says
    params: Array  # (params,)


class _Asked(NamedTuple):
    """A state under evaluation. Two epochs may have had different ones of a version."""

    version: int
    state_root: bytes


class TrainingData(Protocol):
    """The run's data on this disk, and what they are told of the trainer (data/shards.py)."""

    @property
    def paths(self) -> Sequence[Path]:
        """One for each shard of the RunSpec, whether its file is there or not."""
        ...

    @property
    def evaluation_paths(self) -> Sequence[Path]: ...
    @property
    def tokenizer_paths(self) -> Sequence[Path]: ...
    def at(self, cursor: int) -> None: ...
    def passed(self, cursor: int) -> None: ...
    def missed(self, shards: Sequence[int]) -> None: ...
    def evaluation_failed(self) -> None: ...
    def trainer_failed(self) -> None: ...


class _Settle(NamedTuple):
    delta: Digest
    how: Settled


class _Adopt(NamedTuple):
    order: AdoptState
    params: Awaitable[Array]


class _GoBack(NamedTuple):
    """A pass ended in values that cannot be sent: theta <- anchor <- G."""


class _Allow(NamedTuple):
    allowed: int
    known_sequence: int
    why: str
    prolong: bool


class _Evaluate(NamedTuple):
    asked: _Asked
    params: Awaitable[Array]


class _Reported(NamedTuple):
    version: int


class _RunEnded(NamedTuple):
    version: int


_Order = _Settle | _Adopt | _GoBack | _Allow | _Evaluate | _Reported | _RunEnded


class TrainerDesk:
    """Implements driver.Desk. `run` is its task; `begin` and `trainer_said` are the supervisor's ends."""

    def __init__(
        self,
        spec_bytes: bytes,
        spec: RunSpec,
        peer: PeerId,
        contributor: DiskContributor,
        state: State,
        telemetry: Telemetry,
        *,
        put: Callable[[fact.Event], object],
        on_evaluated: Callable[[frames.Evaluated], None],
        settings: frames.TrainerSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`state`: what this life starts from. `put` queues an event for the rules."""
        self._spec_bytes = spec_bytes
        self._spec = spec
        self._peer = peer
        self._contributor = contributor
        self._state = state
        self._telemetry = telemetry
        self._put = put
        self._on_evaluated = on_evaluated
        self._settings = settings
        self._supervisor: Supervisor | None = None
        self._orders: deque[_Order] = deque()
        self._ordered = asyncio.Event()
        self._data: TrainingData | None = None
        self._may_train = asyncio.Event()
        self._known_sequence = contributor.next_sequence - 1
        self._reset = False  # owed by an adoption that was overtaken
        self._clock = clock
        self._under_way: set[_Asked] = set()  # evaluations
        self._so_far: frames.Evaluating | None = None  # of the one that is under way
        self._evaluating_at = clock()  # when its trainer last told of it
        self._evaluation_told = asyncio.Event()
        self._not_evaluated_why = ""  # said last, since this node had evaluated all that it was asked to
        self.over = asyncio.Event()
        self.on_stepped: Callable[[frames.Stepped], None] | None = None

    def attach(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    def follow(self, data: TrainingData) -> None:
        """Tell the trainer of its data and them of the trainer, from here on."""
        self._data = data

    def may_train(self) -> None:
        """There is something to train on, and this node has what the swarm has."""
        self._may_train.set()

    @property
    def evaluating(self) -> bool:
        return bool(self._under_way)

    # The driver's orders: noted at once, carried out by `run`.

    def known(self, sequence: int) -> None:
        """The rules know of the own delta with this sequence now."""
        self._known_sequence = max(self._known_sequence, sequence)

    def settle(self, delta: Digest, how: Settled) -> None:
        self._order(_Settle(delta, how))

    def adopt(self, order: AdoptState, params: Awaitable[Array]) -> None:
        # An own record that was lost knows less than the log: permissions count from there.
        self.known(order.last_sequence)
        self._order(_Adopt(order, params))

    def allow(self, allowed: int, why: str, *, prolong: bool = True) -> None:
        self._order(_Allow(allowed, self._known_sequence, why, prolong))

    def evaluate(self, version: int, state_root: Digest, params: Awaitable[Array]) -> None:
        asked = _Asked(version, state_root)
        self._under_way.add(asked)
        self._tell_evaluates()
        self._order(_Evaluate(asked, params))

    def reported(self, version: int) -> None:
        """The tracker has this node's evaluation of `version`: no later life needs to do it again."""
        self._order(_Reported(version))

    def leaving_words(self) -> str:
        """What an end waits for that takes its time; empty: nothing."""
        if not self._under_way:
            return ""
        version, stop_s = max(self._under_way).version, limits.trainer_stop_s
        return f"; the evaluation of version {version} is given up, and the trainer has {stop_s:.0f} s to end"

    async def last_evaluation(self) -> None:
        """Until nothing is under evaluation: as long as the trainer shows progress, within a limit."""
        began = self._evaluating_at = self._clock()
        while self._under_way:
            now = self._clock()
            if now - began >= limits.last_evaluation_s_max:
                self._give_up(f"it took more than {limits.last_evaluation_s_max / 60:.0f} minutes.")
                return
            silent_s = limits.evaluation_silent_s_max - (now - self._evaluating_at)
            if silent_s <= 0:
                self._give_up(
                    f"the trainer showed no progress for {limits.evaluation_silent_s_max:.0f} s; the machine "
                    "may be too busy."
                )
                return
            self._evaluation_told.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(min(silent_s, began + limits.last_evaluation_s_max - now)):
                    await self._evaluation_told.wait()

    def _give_up(self, why: str) -> None:
        for asked in sorted(self._under_way):
            self._not_evaluated(asked, why)

    def _not_evaluated(self, asked: _Asked, why: str) -> None:
        """Say so; what is known of it is kept."""
        version, found = asked.version, self._so_far
        was_asked = self._ends(asked)
        if was_asked and found is not None and _state_of(found) == asked and found.losses:
            known = len(found.losses)
            what = f"is evaluated here on the first {count_of(known, 'evaluation set')} alone"
            self._telemetry.say("evaluation", f"Version {version} {what}: {why}")
            self._on_evaluated(frames.Evaluated(*asked, found.losses, found.tokens))
        elif was_asked and (why != self._not_evaluated_why or self.over.is_set()):
            # A slow machine leaves out version after version. The last one is what its owner waits for.
            self._not_evaluated_why = why
            self._telemetry.say("evaluation", f"Version {version} is not evaluated here: {why}")

    def _tell_evaluates(self) -> None:
        """For log and status: the version that the trainer is at, else the newest that waits for it."""
        words, at = "", self._so_far
        if at is not None and _state_of(at) in self._under_way:
            words = f"evaluating version {at.version}, {at.share:.0%}".replace("%", " %")
        elif self._under_way:
            words = f"evaluating version {max(self._under_way).version}"
        self._telemetry.evaluates = words

    def _ends(self, asked: _Asked) -> bool:
        """Nothing more comes of it. Returns: whether it was asked for and somebody still wants it."""
        was_asked = asked in self._under_way
        self._under_way.discard(asked)
        self._so_far = None
        self._tell_evaluates()
        self._evaluation_told.set()
        return was_asked

    def run_ended(self, version: int) -> None:
        self._order(_RunEnded(version))

    def _order(self, order: _Order) -> None:
        self._orders.append(order)
        self._ordered.set()

    async def run(self) -> None:
        """Carry out orders until cancelled. Raises: OperatorError (disk)."""
        while True:
            await self._ordered.wait()
            while self._orders:
                await self._carry_out(self._orders.popleft())
            self._ordered.clear()

    async def _carry_out(self, order: _Order) -> None:
        supervisor = self._supervisor
        assert supervisor is not None, "orders before the trainer's supervisor"
        match order:
            case _Settle(delta, how):
                await asyncio.to_thread(self._contributor.settle, delta, how)
                if how is Settled.NOT_FINITE:
                    await self._hand_over(supervisor, reset=True)
            case _GoBack():
                await asyncio.to_thread(self._contributor.go_back)
                await self._hand_over(supervisor, reset=True)
            case _Adopt():
                await self._adopt(order, supervisor)
            case _Allow(allowed, known_sequence, why, prolong):
                supervisor.allow(allowed, known_sequence, why, prolong=prolong)
            case _Evaluate(asked, params):
                await supervisor.evaluate(*asked, await params)
            case _Reported(version):
                await asyncio.to_thread(self._contributor.evaluated, version)
            case _RunEnded(last):
                supervisor.pause()
                # Of older versions, or where no trainer has begun, nobody waits for the figure any more.
                self._under_way = {asked for asked in self._under_way if asked.version == last}
                self._tell_evaluates()
                if not self._may_train.is_set():
                    self._give_up("the run was over before this node had its data.")
                self.over.set()

    async def _adopt(self, order: _Adopt, supervisor: Supervisor) -> None:
        version, clock, target_tokens, last_sequence, reset = msgspec.structs.astuple(order.order)
        self._state = State(version, clock, target_tokens, await order.params)
        if version > limits.genesis_reports_version_max and supervisor.withdraw(0):
            # Asked for when this node knew of no later version; nobody takes its report any more.
            for asked in [asked for asked in self._under_way if asked.version == 0]:
                self._ends(asked)
        await asyncio.to_thread(self._contributor.go_on_after, last_sequence)
        if reset:
            await asyncio.to_thread(self._contributor.reset)
        await self._hand_over(supervisor, reset=reset)

    async def _hand_over(self, supervisor: Supervisor, *, reset: bool) -> None:
        """Give the trainer the newest state; `reset`: theta <- anchor, progress discarded."""
        self._reset = self._reset or reset
        if any(isinstance(later, _Adopt) for later in self._orders):
            return  # overtaken; a reset is not forgotten
        reset, self._reset = self._reset, False
        version, clock, target_tokens, params = self._state
        view = await asyncio.to_thread(self._contributor.view, params)
        await supervisor.adopt(version, clock, target_tokens, view, reset=reset)

    # The trainer's side.

    async def begin(self) -> Beginning:
        """What a fresh trainer starts from; waits for the data."""
        await self._may_train.wait()
        state, data = self._state, self._data
        assert data is not None, "followed"
        view = await asyncio.to_thread(self._contributor.view, state.params)
        configure = frames.Configure(
            spec=self._spec_bytes,
            peer=self._peer,
            shards=tuple(map(str, data.paths)),
            evaluations=tuple(map(str, data.evaluation_paths)),
            tokenizer=tuple(map(str, data.tokenizer_paths)),
            exchange="",
            cursor=self._contributor.cursor,
            next_sequence=0,
            **self._settings._asdict(),
        )
        return Beginning(configure, state.version, state.clock, state.target_tokens, view)

    async def trainer_said(self, told: Told) -> None:
        telemetry, data = self._telemetry, self._data
        assert data is not None, "followed"
        match told:
            case frames.Configured(device, _, how):
                telemetry.begins(device)
                for sentence in how:
                    log.info("The trainer: %s", sentence)
            case frames.Stepped(step, inner_steps, loss, tokens_per_s, gap_s, version):
                telemetry.stepped(step, inner_steps, loss, tokens_per_s, gap_s, version)
                data.at(told.cursor)
                if self.on_stepped is not None:
                    self.on_stepped(told)
            case frames.PassDone():
                await self._pass_done(told)
            case frames.Waiting(why):
                telemetry.waiting(why)
            case frames.NotFinite(step, _, what):
                telemetry.say(
                    "trainer", f"A {what} that is not finite at inner step {step}: back to the anchor."
                )
                self._put(fact.TrainerNotFinite())
            case frames.Evaluating():
                self._so_far, self._evaluating_at = told, self._clock()
                self._tell_evaluates()
                self._evaluation_told.set()
            case frames.Evaluated(version):
                was_asked = self._ends(_state_of(told))
                if told.why:
                    telemetry.say("evaluation", f"Version {version} writes no samples here: {told.why}")
                if not self._under_way:
                    self._not_evaluated_why = ""
                if was_asked:
                    self._on_evaluated(told)
            case frames.NotEvaluated(why=why):
                self._not_evaluated(_state_of(told), why)
                data.evaluation_failed()
            case frames.ShardsMissing(shards, why):
                telemetry.say("data", _missing_words(shards, why))
                data.missed(shards)
            case TrainerDown(why, retry_s, braked):
                self._give_up(f"the trainer ended ({why}).")
                telemetry.trainer_down(why, retry_s, braked=braked)
                data.trainer_failed()
            case frames.Ready() | frames.Saved() | frames.Failed():
                pass  # Failed is followed by TrainerDown, which says it

    async def _pass_done(self, done: frames.PassDone) -> None:
        """Encoded, durable, then said to the rules."""

        def finish() -> DeltaHeader | None:
            delta = read_array(Path(done.delta), self._spec.model.params)
            return self._contributor.finish_pass(delta, done)

        try:
            header = await asyncio.to_thread(finish)
        except PeerError:
            # Not finite or absurdly large: as algorithm.md 6 says, back to G with a clean slate.
            self._telemetry.say(
                "trainer", "A pass ended in values that are not finite: back to the swarm's state."
            )
            self._put(fact.TrainerNotFinite())
            if self._supervisor is not None:
                self._supervisor.pass_lost()
            self._order(_GoBack())
            return
        if header is None:
            self._telemetry.say(
                "trainer", "A pass is lost: the log knows more of this node's deltas than its own record did."
            )
            return
        self._put(fact.PassFinished(header))
        self._telemetry.pass_sent()
        if self._data is not None:
            self._data.passed(done.data_first + done.data_count)
        if done.evenness:
            mean, least = sum(done.evenness) / len(done.evenness), min(done.evenness)
            log.info("Experts are used evenly to %.3f, in the least even layer to %.3f.", mean, least)


def _state_of(told: frames.Evaluating | frames.Evaluated | frames.NotEvaluated) -> _Asked:
    return _Asked(told.version, told.state_root)


def _missing_words(shards: Sequence[int], why: str) -> str:
    if not shards:
        return "Every data shard that is read now is here."
    named = ", ".join(map(str, shards[:8])) + (" and more" if len(shards) > 8 else "")
    return f"Training goes on without data shard {named} until it is there again. {why}".strip()
