"""The lab: one swarm on a virtual clock, from one seed, with any trainer or none.

Nodes (node.py) take inner steps and offer deltas, a ledger for each fragment (ledger.py) lists them by the
product's rules, links (links.py) take their time, and churn.py makes nodes die, come and go.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from p2pdiloco import limits
from p2pdiloco.diloco.compress import encoded_size
from p2pdiloco.diloco.layout import Array
from p2pdiloco.errors import OperatorError
from p2pdiloco.exit_codes import USAGE
from p2pdiloco.run_spec import TensorSpec
from p2pdiloco.sim.chance import Chance
from p2pdiloco.sim.clock import Clock
from p2pdiloco.sim.lab.churn import Churn
from p2pdiloco.sim.lab.data_parallel import ring_bytes, run_data_parallel
from p2pdiloco.sim.lab.experiment import Experiment, check_experiment
from p2pdiloco.sim.lab.fragments import fragments_of, gather, scatter
from p2pdiloco.sim.lab.ledger import Held, Ledger
from p2pdiloco.sim.lab.links import Links
from p2pdiloco.sim.lab.node import LabNode
from p2pdiloco.sim.lab.result import NodeFigures, Point, Result, entropy_of
from p2pdiloco.sim.lab.terms import terms_of
from p2pdiloco.sim.lab.trainer import LabModel
from p2pdiloco.wire.log import OuterStep

ROTATION = 8  # outer steps of one aggregator
TRAIN_LOSS_SHARE = 0.05  # of the inner steps, the last ones, that `train_loss` is the mean of
STALL_PASSES = 1000  # virtual time without an outer step after which a run is given up

Told = Callable[[float, str], None]
"""The share of the run that is done, and a few words."""


def run_experiment(
    e: Experiment, seed: int, rng: np.random.Generator, model: LabModel | None, told: Told
) -> Result:
    """Live through one experiment. `rng` is made from `seed` by the caller; no model: nothing is learned.

    Raises: OperatorError: the experiment makes no sense, or its swarm never gets anywhere.
    """
    check_experiment(e)
    assert (model is None) == (e.model.kind == "none"), "a model for kind none, or none for a real one"
    if e.outer.policy == "data_parallel":
        assert model is not None
        return run_data_parallel(e, seed, rng, model, told)
    return Lab(e, rng, model, told).live(seed)


class Lab:
    """What nodes, churn and links share."""

    def __init__(self, e: Experiment, rng: np.random.Generator, model: LabModel | None, told: Told) -> None:
        self.e = e
        self.chance = Chance(rng)
        self.clock = Clock()
        self.links = Links(e.swarm)
        self.model = model
        self._told = told
        self.tensors = model.tensors if model is not None else _bare_tensors(e.model.params)
        self.fragments = fragments_of(self.tensors, e.outer.fragments)
        self.terms = terms_of(e, self.tensors)
        self.ledgers = [
            Ledger(
                e.outer, terms_of(e, f.tensors), f.tensors,
                None if model is None else gather(model.initial, f).copy(),
            )
            for f in self.fragments
        ]  # fmt: skip
        self.nodes = [self.make_node(i) for i in range(e.swarm.nodes)]
        self.churn = Churn(self)
        self._aggregator = 0  # place among the voters
        self._served = 0
        self._blocked_until = 0.0  # nobody leads before
        self._last_step_at = 0.0
        self._curve: list[Point] = []
        self._losses: list[float] = []
        self._staleness: list[tuple[float, int]] = []
        self._rho: list[float] = []
        self._wake: dict[int, float] = {}
        self._events = 0  # since the last outer step
        self._diverged = False  # nobody makes a finite delta any more

    def make_node(self, index: int) -> LabNode:
        return LabNode(self, index, None if self.model is None else self.model.trainer(index))

    # Questions

    @property
    def tokens(self) -> int:
        """The token clock; with several fragments their mean."""
        return sum(ledger.state.clock for ledger in self.ledgers) // len(self.ledgers)

    def members(self) -> list[LabNode]:
        return [n for n in self.nodes if n.member]

    def delta_bytes(self, number: int, codec: str) -> int:
        return encoded_size(codec, self.fragments[number].tensors)

    def codec_now(self, number: int) -> str:
        """Dense until `dense_rounds` full rounds are merged."""
        e = self.e
        round_tokens = e.swarm.nodes * e.round_steps * e.tokens_per_step
        if e.outer.dense_rounds and self.ledgers[number].state.clock < e.outer.dense_rounds * round_tokens:
            return "fp16"
        return e.outer.codec

    def params(self) -> Array:
        """The global state, float32 [params]."""
        assert self.model is not None
        whole = np.empty_like(self.model.initial)
        for fragment, ledger in zip(self.fragments, self.ledgers, strict=True):
            assert ledger.params is not None
            scatter(whole, fragment, ledger.params)
        return whole

    # Life

    def live(self, seed: int) -> Result:
        e = self.e
        end_s = e.run.hours * 3600 or math.inf
        self._evaluate()
        for node in self.nodes:
            node.member = True
            start_s = self.chance.random() * e.swarm.stagger * e.pass_s
            self.clock.at(start_s, partial(self.churn.start, node, fresh=True))
        while self.tokens < e.target_tokens and self.clock.advance(end_s):
            self._events += 1
            if self._events > limits.lab_events_max:
                raise OperatorError(
                    f"experiment {e.name!r}: {limits.lab_events_max} events without an outer step (at "
                    f"{self.tokens} of {e.target_tokens} tokens): do nodes die before a pass ends?",
                    exit_code=USAGE,
                )
            if self.clock.now - self._last_step_at > STALL_PASSES * e.pass_s + e.swarm.repair_s:
                if any(n.rolled_back for n in self.nodes):
                    self._diverged = True
                    break
                raise OperatorError(
                    f"experiment {e.name!r}: no outer step in {STALL_PASSES} passes (at {self.tokens} of "
                    f"{e.target_tokens} tokens): see whether a pass is shorter than its transfer, or whether "
                    "everybody is away.",
                    exit_code=USAGE,
                )
        for node in self.nodes:
            node.end()
        self.links.ended(self.clock.now)
        self._evaluate()
        return self._result(seed)

    def upload(self, sender: LabNode, size: int) -> float:
        """A delta goes to every voter, one after the other. Returns: when the last one has it.

        The witness is a voter beside the nodes; its tracker's link is not the bottleneck.
        """
        now = self.clock.now
        receivers = [v for v in self._voters() if v is not sender]
        arrival = self.links.upload(sender.index, now, size * (len(receivers) + 1))
        return max([arrival, *(self.links.download(v.index, now, size) for v in receivers)])

    def delta_arrived(self, number: int, held: Held) -> None:
        self.ledgers[number].arrived(held)
        self.consider(number)

    def swarm_changed(self) -> None:
        """Somebody came or went: a round may be complete now."""
        if not any(n.up and not n.entering for n in self.nodes):
            for node in self.nodes:
                if node.entering:
                    node.enter()
        for number in range(len(self.ledgers)):
            self.consider(number)

    def aggregator_may_be_gone(self, node: LabNode) -> None:
        """If it led, nobody does until the others have noticed and elected."""
        voters = self._voters()
        if voters and voters[self._aggregator % len(voters)] is node:
            self._blocked_until = self.clock.now + self.e.swarm.failover_s
            self._hand_over()
            self.clock.at(self.e.swarm.failover_s, self.swarm_changed)

    def step_done(self, loss: float) -> None:
        self._losses.append(loss)

    # Outer steps

    def consider(self, number: int) -> None:
        ledger, now = self.ledgers[number], self.clock.now
        if ledger.busy or now < self._blocked_until or self.tokens >= self.e.target_tokens:
            return
        silence = 2 * self.e.pass_s
        live = {
            n.peer for n in self.nodes if n.member and not n.entering and (n.up or now - n.heard_at < silence)
        }
        decision = ledger.decide(live, now=now)
        if not decision.close:
            self._ask_again(number, decision.wake_at)
            return
        step = ledger.plan()
        if step is None:
            return
        ledger.busy = True
        self.clock.at(self.e.swarm.commit_s, lambda: self._certified(number, step))

    def _ask_again(self, number: int, at: float | None) -> None:
        if at is None:
            return
        at = max(at, self.clock.now)
        known = self._wake.get(number, math.inf)
        if known <= at and known > self.clock.now:
            return
        self._wake[number] = at
        self.clock.at(at - self.clock.now, lambda: self._woken(number, at))

    def _woken(self, number: int, at: float) -> None:
        if self._wake.get(number) == at:
            del self._wake[number]
            self.consider(number)

    def _certified(self, number: int, step: OuterStep) -> None:
        ledger, now = self.ledgers[number], self.clock.now
        if now < self._blocked_until:  # the aggregator died: its successor proposes the same body again
            self.clock.at(self._blocked_until - now, lambda: self._certified(number, step))
            return
        before = self.tokens
        ledger.install(step, now=now)
        ledger.busy = False
        self._last_step_at = now
        self._events = 0
        self._staleness += [(c.staleness, c.tokens) for c in step.contributions]
        self._rho.append(step.scalars.rho)
        self._served += 1
        if self._served >= ROTATION:
            self._hand_over()
        self._spread(number, step)
        self.churn.tokens_merged(self.tokens)
        self._told(min(1.0, self.tokens / self.e.target_tokens), f"version {ledger.version}")
        if self._is_due(before):
            self._evaluate()
        self.consider(number)

    def _spread(self, number: int, step: OuterStep) -> None:
        """Every follower downloads what the entry lists and is not its own; voters have it already."""
        ledger, now = self.ledgers[number], self.clock.now
        size = self.delta_bytes(number, self.codec_now(number))
        listed = {c.peer for c in step.contributions}
        voters = {v.index for v in self._voters()}
        wanted = {
            n.index: 0 if n.index in voters else size * (len(listed) - (n.peer in listed))
            for n in self.nodes if n.up
        }  # fmt: skip
        if not wanted:
            return
        arrivals = self.links.spread(now, wanted, list(wanted))
        version, params = ledger.version, ledger.params
        for node in [self.nodes[i] for i in wanted]:
            self._later(arrivals[node.index] - now, node, number, version, params)

    def _later(self, delay_s: float, node: LabNode, number: int, version: int, params: Array | None) -> None:
        life = node.life
        self.clock.at(
            max(0.0, delay_s),
            lambda: node.state_arrived(number, version, params) if node.life == life else None,
        )

    def catch_up_s(self, node: LabNode, *, fresh: bool) -> float:
        """Seconds until a node that comes (back) has the newest state of all fragments; counts the bytes."""
        total = 0
        for number, part in enumerate(node.parts):
            ledger = self.ledgers[number]
            size = self.delta_bytes(number, self.codec_now(number))
            missed = sum(len(s.contributions) for s in ledger.entries[part.version :]) * size
            snapshot = 8 * ledger.params_count  # params and momentum, float32
            behind = ledger.version - part.version
            total += snapshot if fresh or behind > limits.catch_up_versions_max else missed
        return self.links.download(node.index, self.clock.now, total) - self.clock.now

    def _voters(self) -> list[LabNode]:
        """The witness has a seat; the others are taken by those who joined first."""
        up = sorted((n for n in self.nodes if n.up), key=lambda n: (n.joined_at, n.index))
        return up[: self.e.swarm.committee - 1]

    def _hand_over(self) -> None:
        self._aggregator += 1
        self._served = 0

    # Figures

    def _is_due(self, before: int) -> bool:
        every = self.e.target_tokens / (self.e.run.evaluations + 1)
        return self.tokens < self.e.target_tokens and int(before / every) < int(self.tokens / every)

    def _evaluate(self) -> None:
        if self.model is None:
            return
        loss = math.inf if self._diverged else self.model.evaluate(self.params())
        versions = sum(ledger.version for ledger in self.ledgers)
        self._curve.append(
            Point(self.tokens, self.clock.now / 3600, versions, loss if loss == loss else math.inf)
        )

    def _result(self, seed: int) -> Result:
        e = self.e
        # What is in a pass or on its way at the end would be merged in a longer run: neither lost nor won.
        unfinished = sum(n.unfinished_steps for n in self.nodes)
        possible = (sum(n.member_s / n.step_s for n in self.nodes) - unfinished) * e.tokens_per_step
        weights = sum(t for _, t in self._staleness) or 1
        last = self._losses[-max(1, int(len(self._losses) * TRAIN_LOSS_SHARE)) :]
        count = len(self.nodes)
        load = () if self.model is None else self.model.expert_load(self.params())
        return Result(
            arm=e.name, seed=seed, curve=tuple(self._curve),
            final_loss=self._curve[-1].loss if self._curve else None,
            train_loss=sum(last) / len(last) if last else None,
            tokens=self.tokens,
            trained_tokens=sum(self._merged_steps(n) for n in self.nodes) * e.tokens_per_step,
            versions=sum(ledger.version for ledger in self.ledgers),
            hours=self.clock.now / 3600, goodput=self.tokens / possible if possible > 0 else 0.0,
            staleness_mean=sum(k * t for k, t in self._staleness) / weights,
            staleness_max=max((k for k, _ in self._staleness), default=0.0),
            rho_mean=sum(self._rho) / len(self._rho) if self._rho else 0.0,
            bytes_up=sum(self.links.bytes_up.values()) / count,
            bytes_down=sum(self.links.bytes_down.values()) / count,
            data_parallel_bytes=ring_bytes(e.swarm.nodes, self.terms.model.params)
            * (self.tokens / (e.swarm.nodes * e.tokens_per_step)),
            nodes=tuple(self._figures(n) for n in self.nodes),
            expert_entropy=entropy_of(load), wall_s=0.0,
        )  # fmt: skip

    def _figures(self, n: LabNode) -> NodeFigures:
        return NodeFigures(
            n.speed, n.steps, self._merged_steps(n),
            self.links.bytes_up[n.index], self.links.bytes_down[n.index],
            n.waited_s, n.down_s, n.deltas, n.listed, n.late, n.passed_over, n.failures, n.rolled_back,
        )  # fmt: skip

    def _merged_steps(self, n: LabNode) -> int:
        steps = (s for ledger in self.ledgers for s in ledger.entries)
        return sum(c.steps for s in steps for c in s.contributions if c.peer == n.peer) // len(self.ledgers)


def _bare_tensors(params: int) -> tuple[TensorSpec, ...]:
    """A model of that many parameters, of which only the size counts."""
    rows, rest = divmod(params, 128)
    matrix = (TensorSpec("matrix", (rows, 128)),) if rows else ()
    return matrix + ((TensorSpec("rest", (rest,)),) if rest else ())
