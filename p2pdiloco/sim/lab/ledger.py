"""One fragment's run log as it is when nothing is disputed: the product's rules, without a committee.

Who may be listed, with what weight, and when an outer step closes is decided by p2pdiloco.rules and the
merge and the step are computed by p2pdiloco.diloco; certification is a delay.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from p2pdiloco.diloco.layout import Array
from p2pdiloco.ids import NO_DIGEST, Digest, PeerId
from p2pdiloco.rules.caps import capped_tokens
from p2pdiloco.rules.closing import Arrival, ClosingView, Decision, Spreads
from p2pdiloco.rules.full_round import latest_tokens
from p2pdiloco.rules.outer_step import Candidate, plan_outer_step, too_late
from p2pdiloco.rules.state import RulesState, after_outer_step, genesis_state, last_sequence
from p2pdiloco.run_spec import RunSpec, TensorSpec
from p2pdiloco.sim.lab.experiment import Outer
from p2pdiloco.sim.lab.merging import merge_listed, untrained
from p2pdiloco.sim.lab.outer_optimizers import make_optimizer
from p2pdiloco.sim.lab.policies import decide
from p2pdiloco.wire.log import Left, OuterStep


class Held(NamedTuple):
    """A delta that arrived: what its header says, when it came, and what it decodes to (None: no arrays)."""

    candidate: Candidate
    at: float
    decoded: Array | None
    expert_tokens: tuple[float, ...]  # of each expert of each layer; empty if dense


class Ledger:
    """`params` and `optimizer` change with every outer step; `entries[v - 1]` made version v."""

    def __init__(
        self, outer: Outer, spec: RunSpec, tensors: tuple[TensorSpec, ...], params: Array | None
    ) -> None:
        """`params`: float32 of this fragment, version 0; None: no arrays."""
        self._outer = outer
        self.spec = spec
        self._tensors = tensors
        self.params = params
        self.params_count = sum(t.size for t in tensors)
        self.optimizer = None if params is None else make_optimizer(outer, len(params))
        self.state: RulesState = genesis_state(spec)
        self.entries: list[OuterStep] = []
        self.clocks: list[int] = [0]  # tokens merged at each version
        self.held: dict[Digest, Held] = {}
        self.gone: dict[PeerId, Digest] = {}  # said goodbye, not said in an entry yet
        self.busy = False  # an outer step is being certified
        self._last_step_at = 0.0
        self._spreads = Spreads()
        self._arrivals: tuple[Arrival, ...] = ()

    @property
    def version(self) -> int:
        return self.state.version

    def arrived(self, held: Held) -> None:
        self.held[held.candidate.delta] = held

    def knows(self, c: Candidate) -> bool:
        return c.delta in self.held or c.sequence <= last_sequence(self.state, c.peer)

    def is_too_late(self, base_version: int) -> bool:
        return too_late(self.state, self.spec, _Base(base_version))

    def decide(self, live: Collection[PeerId], *, now: float) -> Decision:
        """Whether to close the outer step now. `live`: nodes heard from within two passes."""
        ready: dict[PeerId, Held] = {}
        for held in self.held.values():
            c = held.candidate
            if c.sequence > last_sequence(self.state, c.peer) and not too_late(self.state, self.spec, c):
                first = ready.get(c.peer)
                if first is None or c.sequence < first.candidate.sequence:
                    ready[c.peer] = held
        counts = {p: h.candidate.steps * self.spec.tokens_per_inner_step for p, h in ready.items()}
        capped = capped_tokens(self.state, self.spec, counts)
        self._arrivals = tuple(Arrival(p, capped[p], h.at, trusted=True) for p, h in ready.items())
        tokens = latest_tokens(self.state)
        known = {p: tokens.get(p, 0) for p in live}
        view = ClosingView(
            self._last_step_at, self.version == 0, self._arrivals, known, frozenset(known),
            self._spreads.seconds,
        )  # fmt: skip
        return decide(self._outer.policy, view, self.spec, now=now, outer=self._outer)

    def plan(self) -> OuterStep | None:
        """The outer step that lists what is here now, as the aggregator proposes it."""
        tokens = latest_tokens(self.state)
        left = [Left(p, d) for p, d in sorted(self.gone.items()) if p in tokens]
        return plan_outer_step(self.state, self.spec, [h.candidate for h in self.held.values()], left)

    def install(self, step: OuterStep, *, now: float) -> None:
        """The certified step becomes the state."""
        if self.params is not None:
            assert self.optimizer is not None
            chosen = [self.held[Digest(c.delta)] for c in step.contributions]
            deltas = [h.decoded for h in chosen if h.decoded is not None]
            experts = [h.expert_tokens for h in chosen]
            mean = merge_listed(self._outer, step, deltas, self._tensors, self.optimizer.momentum, experts)
            # Whoever adopts an older version still holds the old array.
            params = self.params.copy()
            self.optimizer.step(params, mean, step)
            if self._outer.expert_weights:
                for part in untrained(self._tensors, experts):
                    params[part] = self.params[part]
            self.params = params
        listed = frozenset(PeerId(c.peer) for c in step.contributions)
        self._spreads = self._spreads.learn(
            self._arrivals, listed, last_step_at=self._last_step_at, pass_s=self.spec.inner.pass_s
        )
        self._last_step_at = now
        self.state = after_outer_step(self.state, step, self.spec)
        self.entries.append(step)
        self.clocks.append(self.state.clock)
        for gone in step.left:
            self.gone.pop(PeerId(gone.peer), None)
        done = {r.delta for r in step.refused}
        self.held = {
            d: h
            for d, h in self.held.items()
            if d not in done and h.candidate.sequence > last_sequence(self.state, h.candidate.peer)
        }

    def said_goodbye(self, peer: PeerId) -> None:
        self.gone[peer] = NO_DIGEST


class _Base(NamedTuple):
    base_version: int
