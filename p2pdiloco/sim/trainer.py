"""A trainer that only keeps time: every pass makes a small delta, encoded by the real codec.

It follows the rules of the real contributor (algorithm.md 3, 6, 7): base version as the pass began, error
feedback at send and at settlement, one durable record before a header leaves, prolonged passes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from p2pdiloco import limits
from p2pdiloco.diloco.compress import Origin
from p2pdiloco.diloco.error_feedback import ErrorFeedback
from p2pdiloco.ids import Digest
from p2pdiloco.protocol import events as fact
from p2pdiloco.protocol.actions import Settled
from p2pdiloco.sim.disk import OwnWork
from p2pdiloco.wire.messages import DeltaHeader
from p2pdiloco.wire.signing import delta_statement

if TYPE_CHECKING:
    from p2pdiloco.sim.machine import Machine


class Trainer:
    """`speed`: share of H that this machine manages in one pass (DyLU)."""

    def __init__(self, machine: Machine, speed: float) -> None:
        self._machine = machine
        self.speed = speed
        self._version: int | None = None  # the anchor's; None until the first adoption of this life
        self._base = 0  # the anchor's version when the pass began
        self._began = 0.0
        self._allowed = 0
        self._prolong = True  # False: the owner paused the run, and no pass begins
        self._resting = False  # no pass is under way
        self._waiting = False  # the pass is over, but no more deltas are allowed: it is prolonged
        self._pass = 0  # counts passes and stops, so that an old timer ends nothing
        self._params = machine.world.run.spec.model.params
        self._feedback = ErrorFeedback(self._params)
        self.made = 0  # deltas finished in all lives

    def start(self) -> None:
        """With the process: nothing is trained before the first adoption."""
        self.stop()
        kept = self._machine.disk.own.feedback
        if kept is not None:
            self._feedback = ErrorFeedback.from_arrays(kept, self._params)
        else:
            self._feedback = ErrorFeedback(self._params)

    def stop(self) -> None:
        self._version = None
        self._allowed = 0
        self._prolong, self._resting = True, False
        self._waiting = False
        self._pass += 1

    def adopt(self, version: int, *, reset: bool) -> None:
        own = self._machine.disk.own
        if reset:
            self._feedback.clear()
            own = own._replace(in_flight=())
        self._keep(own._replace(adopted_version=version))
        training = self._version is not None
        self._version = version
        if reset or not training:
            self._begin()

    def allow(self, allowed: int, *, prolong: bool) -> None:
        self._allowed, self._prolong = allowed, prolong
        if self._resting and prolong:
            self._begin()
        elif self._waiting and allowed > 0:
            self._finish()

    def settle(self, delta: Digest, how: Settled) -> None:
        match how:
            case Settled.LISTED:
                self._feedback.listed(delta)
            case Settled.PASSED_OVER:
                self._feedback.passed_over(delta)
            case Settled.REFUSED | Settled.TOO_LATE:
                self._feedback.dropped(delta)
            case Settled.NOT_FINITE:
                self._feedback.clear()
        own = self._machine.disk.own
        self._keep(own._replace(in_flight=tuple(h for h in own.in_flight if h.delta != delta)))

    def _keep(self, own: OwnWork) -> None:
        """The contributor's one record, replaced as a whole."""
        arrays = {name: array.copy() for name, array in self._feedback.to_arrays().items()}
        self._machine.disk.own = own._replace(feedback=arrays)

    def _begin(self) -> None:
        world = self._machine.world
        assert self._version is not None
        self._base, self._began, self._waiting = self._version, world.now, False
        self._pass += 1
        self._resting = not self._prolong
        if self._resting:
            return
        count = self._pass
        world.at(world.run.spec.inner.pass_s, lambda: self._due(count))

    def _due(self, count: int) -> None:
        if self._pass != count:
            return
        if self._machine.frozen or self._machine.disk.full:
            self._machine.world.at(0.5, lambda: self._due(count))
        elif self._allowed > 0:
            self._finish()
        else:
            self._waiting = True

    def _finish(self) -> None:
        """Encode, make durable, tell the brain, go on at once."""
        machine, world = self._machine, self._machine.world
        inner = world.run.spec.inner
        passed = (world.now - self._began) / inner.pass_s
        steps = int(passed * self.speed * inner.inner_steps + 0.5)
        steps = min(max(steps, 1), limits.pass_prolonged_factor * inner.inner_steps)
        own = machine.disk.own
        if machine.disk.full:
            count = self._pass
            world.at(0.5, lambda: self._due(count))
            return
        raw = (world.noise.standard_normal(self._params) * 0.01 * steps**0.5).astype(np.float32)
        sequence = own.sequence + 1
        spec = world.run.spec
        origin = Origin(machine.id, sequence)
        delta, blob, _ = self._feedback.send(raw, spec.outer.codec, spec.model.tensors, origin)
        statement = delta_statement(world.run.run, delta, 0, self._base, sequence, steps)
        header = DeltaHeader(
            delta=delta, size=len(blob), codec=world.run.spec.outer.codec, fragment=0,
            base_version=self._base, sequence=sequence, steps=steps, data_first=own.cursor,
            data_count=steps, loss=1.0, signature=machine.signer.sign(statement),
        )  # fmt: skip
        machine.disk.put_blob(delta, blob)
        own = own._replace(sequence=sequence, cursor=own.cursor + steps, in_flight=(*own.in_flight, header))
        self._keep(own)
        self._allowed -= 1
        self.made += 1
        world.checkers.made(machine, header)
        self._begin()
        machine.post(fact.PassFinished(header))
