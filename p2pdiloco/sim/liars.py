"""Aggregators that lie without equivocating (targets R1, B3): each sends one body, and it is wrong.

A liar's brain is honest; its hands are not. Its honest ack stays on its own disk and is said to nobody, so
that all that the others see of it is consistent, and false.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from p2pdiloco.ids import Digest, PeerId, digest_of
from p2pdiloco.protocol.actions import Action, Send
from p2pdiloco.rules.float32 import f32
from p2pdiloco.sim.machine import Machine
from p2pdiloco.wire.codec import encode
from p2pdiloco.wire.log import OuterStep, body_digest, open_body
from p2pdiloco.wire.messages import Ack, Proposal
from p2pdiloco.wire.signing import proposal_statement

Lie = Callable[[OuterStep, PeerId], OuterStep]


def wrong_weights(step: OuterStep, me: PeerId) -> OuterStep:
    """Its own delta, or the first one, weighs twice as much; the scalars follow."""
    place = next((i for i, c in enumerate(step.contributions) if c.peer == me), 0)
    c = step.contributions[place]
    heavier = replace(c, weight=f32(2 * c.weight))
    scalars = replace(step.scalars, weight_sum=f32(step.scalars.weight_sum + c.weight))
    contributions = (*step.contributions[:place], heavier, *step.contributions[place + 1 :])
    return replace(step, contributions=contributions, scalars=scalars)


def wrong_root(step: OuterStep, me: PeerId) -> OuterStep:  # noqa: ARG001 (one shape for all lies)
    """Another state than the step makes."""
    return replace(step, state_root=digest_of(step.state_root))


def counts_itself_twice(step: OuterStep, me: PeerId) -> OuterStep:
    """One delta listed under two digests' worth of weight."""
    place = next((i for i, c in enumerate(step.contributions) if c.peer == me), 0)
    c = step.contributions[place]
    return replace(
        step, contributions=(*step.contributions[: place + 1], c, *step.contributions[place + 1 :])
    )


def more_tokens(step: OuterStep, me: PeerId) -> OuterStep:
    """Claims tokens that were not trained."""
    place = next((i for i, c in enumerate(step.contributions) if c.peer == me), 0)
    c = step.contributions[place]
    contributions = (
        *step.contributions[:place], replace(c, tokens=4 * c.tokens), *step.contributions[place + 1 :]
    )  # fmt: skip
    return replace(step, contributions=contributions, clock=step.clock + 3 * c.tokens)


def fresher_base(step: OuterStep, me: PeerId) -> OuterStep:  # noqa: ARG001
    """A stale delta passed off as fresh."""
    fresh = tuple(replace(c, base_version=step.version - 1, staleness=0.0) for c in step.contributions)
    return replace(step, contributions=fresh, clock=step.clock + 1)


def jumps_ahead(step: OuterStep, me: PeerId) -> OuterStep:  # noqa: ARG001
    """A version that does not follow."""
    return replace(step, version=step.version + 1)


def faster_outer_step(step: OuterStep, me: PeerId) -> OuterStep:  # noqa: ARG001
    """An outer learning rate of its own."""
    return replace(step, scalars=replace(step.scalars, eta=f32(step.scalars.eta * 1.5)))


LIES: dict[str, Lie] = {
    lie.__name__: lie
    for lie in (
        wrong_weights, wrong_root, counts_itself_twice, more_tokens, fresher_base, jumps_ahead,
        faster_outer_step,
    )
}  # fmt: skip


class Liar:
    """Makes a machine lie whenever it aggregates. `told` holds the digests of its false bodies."""

    def __init__(self, machine: Machine, lie: Lie) -> None:
        self.told: set[Digest] = set()
        self._lie = lie
        self._bodies: dict[bytes, bytes] = {}
        machine.change = self._change
        machine.honest = False

    def _change(self, machine: Machine, actions: list[Action]) -> list[Action]:
        return [changed for a in actions if (changed := self._changed(machine, a)) is not None]

    def _changed(self, machine: Machine, action: Action) -> Action | None:
        if not isinstance(action, Send):
            return action
        message = action.message
        if isinstance(message, Proposal) and isinstance(open_body(message.body).content, OuterStep):
            return Send(action.peer, self._false(machine, message))
        if isinstance(message, Ack) and message.body in self._honest_twins:
            return None
        return action

    @property
    def _honest_twins(self) -> set[Digest]:
        return {body_digest(body) for body in self._bodies}

    def _false(self, machine: Machine, proposal: Proposal) -> Proposal:
        body = open_body(proposal.body)
        assert isinstance(body.content, OuterStep)
        false = self._bodies.get(proposal.body)
        if false is None:
            false = encode(replace(body, content=self._lie(body.content, machine.id)))
            self._bodies[proposal.body] = false
            self.told.add(body_digest(false))
        statement = proposal_statement(
            machine.world.run.run, body.epoch, Digest(body.committee), proposal.term, body.index,
            body_digest(false), last=proposal.last,
        )  # fmt: skip
        return Proposal(proposal.term, false, proposal.last, machine.signer.sign(statement))
