"""One node of the lab: passes, deltas in flight, adoptions, as a trainer and a contributor do them together.

Algorithm.md 2, 3, 6 and 7 for each fragment by itself. Every inner step is one event, at the moment it ends:
what arrived meanwhile is adopted at that boundary.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from p2pdiloco.diloco.compress import Origin, decode
from p2pdiloco.diloco.error_feedback import ErrorFeedback
from p2pdiloco.diloco.layout import Array
from p2pdiloco.diloco.norms import l2_norm
from p2pdiloco.errors import PeerError
from p2pdiloco.ids import Digest, tagged_digest
from p2pdiloco.rules.outer_step import Candidate
from p2pdiloco.rules.passes import Next, Pass, next_move, steps_left
from p2pdiloco.rules.schedule import learning_rate
from p2pdiloco.rules.state import last_sequence
from p2pdiloco.sim.lab.fragments import gather, scatter
from p2pdiloco.sim.lab.ledger import Held
from p2pdiloco.sim.lab.terms import peer_of
from p2pdiloco.sim.lab.trainer import LabTrainer
from p2pdiloco.wire.log import OuterStep

if TYPE_CHECKING:
    from p2pdiloco.sim.lab.engine import Lab

EPSILON_S = 1e-6  # a pass of H steps may not miss its end by the rounding of a sum


class Flight(NamedTuple):
    """An own delta that is not settled."""

    held: Held
    size: int  # bytes
    lost: bool  # never arrives and is never offered again (lab only)


class Newer(NamedTuple):
    """A state of a fragment that has arrived and waits for the next boundary."""

    version: int
    params: Array | None


class Part:
    """What a node keeps for one fragment."""

    def __init__(self, lab: Lab, number: int) -> None:
        outer = lab.e.outer
        self.number = number
        self.fragment = lab.fragments[number]
        self.version = 0  # adopted
        self.newer: Newer | None = None
        self.sequence = 0
        self.offers = 0  # rounds of offering
        self.on_its_way: dict[Digest, float] = {}  # until when an upload lasts
        self.flights: dict[Digest, Flight] = {}
        self.anchor: Array | None = None
        self.params: Array | None = None  # adopted
        self.feedback: ErrorFeedback | None = None
        if lab.model is not None:
            self.feedback = ErrorFeedback(
                lab.ledgers[number].params_count, beta=outer.error_feedback_beta,
                in_flight_max=outer.in_flight_max, enabled=outer.error_feedback,
            )  # fmt: skip
        self.current = Pass(0, 0)
        self.share = 1.0  # of a pass that this one lasts: fragments are staggered by their first

    def begin(self, share: float = 1.0) -> None:
        self.current = Pass(base_version=self.version, data_first=0)
        self.share = share


class LabNode:
    """`member`: has joined and not left. `up`: its process lives."""

    def __init__(self, lab: Lab, index: int, trainer: LabTrainer | None) -> None:
        self._lab = lab
        self.index = index
        self.peer = peer_of(index)
        self.speed = lab.e.speed(index)
        self.step_s = lab.e.swarm.step_s / self.speed
        self._pace_s = self.step_s  # of this pass
        self._strides = 0  # an old one ends in nothing
        self._stride_began = 0.0
        self.trainer = trainer
        self.parts = [Part(lab, f) for f in range(len(lab.fragments))]
        self.up = False
        self.member = False
        self.life = 0
        self.waiting = False
        self.entering = False  # under a barrier: in at the next round
        self.heard_at = 0.0  # the last moment at which it lived
        self.joined_at = 0.0
        self.member_s = 0.0
        self._idle_since: float | None = None
        self._down_since: float | None = None
        # Figures.
        self.steps = 0
        self.waited_s = self.down_s = 0.0
        self.deltas = self.listed = self.late = self.passed_over = self.failures = self.rolled_back = 0

    # Life

    def start(self, *, fresh: bool) -> None:
        """Join, or come back: the newest state of each fragment is here. Nothing of a lost pass is left."""
        lab, now = self._lab, self._lab.clock.now
        if fresh:
            self.member, self.joined_at = True, now
        self.up = True
        self.life += 1
        self.waiting = False
        if self._down_since is not None:
            self.down_s += now - self._down_since
            self._down_since = None
        self._idle_since = None
        for part in self.parts:
            ledger = lab.ledgers[part.number]
            away = ledger.is_too_late(min(part.version, ledger.version)) and not fresh
            self._take_over(part, ledger.version, ledger.params, afresh=fresh or away)
            if away and self.trainer is not None:
                self.trainer.zero_moments()
            count = len(self.parts)
            part.begin((part.number + 1) / count if count > 1 and fresh else 1.0)
            self._offer_all(part)
        self._draw_pace()
        others = any(n.up and not n.entering for n in lab.nodes if n is not self)
        if lab.e.outer.policy == "barrier" and others and lab.ledgers[0].version:
            # In the middle of a round: in at the next one, and nobody waits for it.
            self.entering = self.waiting = True
            self._idle_since = now
        else:
            self._next_boundary()

    def enter(self) -> None:
        """Nobody is left who could close the round: begin one."""
        self.entering = self.waiting = False
        self._end_idle()
        self._next_boundary()

    def stop(self, *, left: bool = False) -> None:
        """The process ends. What is in flight is on its disk; the pass is lost."""
        now = self._lab.clock.now
        self._end_idle()
        self._lab.links.died(self.index, now)
        self.up = self.waiting = self.entering = False
        self.life += 1
        self.heard_at = now
        if self.trainer is not None:
            self.trainer.expert_tokens()  # of the pass that is lost
        for part in self.parts:
            part.begin()
            part.newer = None
            part.on_its_way.clear()
        if left:
            self.member = False
            self.member_s += now - self.joined_at
        else:
            self._down_since = now

    def end(self) -> None:
        """The run is over."""
        now = self._lab.clock.now
        self._end_idle()
        if self._down_since is not None:
            self.down_s += now - self._down_since
        if self.member:
            self.member_s += now - self.joined_at

    @property
    def unfinished_steps(self) -> float:
        """Inner steps of the current pass and of deltas that no entry has settled, a mean over fragments."""
        steps = len(self.parts) * self._strided() if self.up and not self.waiting else 0
        for part in self.parts:
            settled = last_sequence(self._lab.ledgers[part.number].state, self.peer)
            own = (f.held.candidate for f in part.flights.values() if not f.lost)
            steps += part.current.steps + sum(c.steps for c in own if c.sequence > settled)
        return steps / len(self.parts)

    # Inner steps

    def _next_boundary(self) -> None:
        """The next step begins; without arrays, as many at once as the pass still has."""
        steps = 1
        if self.trainer is None and not self.waiting:
            steps = min(self._steps_left(part) for part in self.parts)
        self._stride_began = self._lab.clock.now
        self._stride(steps, steps * self._pace_s)

    def _stride(self, steps: int, seconds: float) -> None:
        self._strides += 1
        life, stride = self.life, self._strides

        def ended() -> None:
            if self.life == life and self._strides == stride:
                self._boundary(steps)

        self._lab.clock.at(seconds, ended)

    def _strided(self) -> int:
        """Whole steps of the present stride that are not counted yet."""
        return int((self._lab.clock.now - self._stride_began) / self._pace_s + EPSILON_S)

    def _cut_stride(self) -> None:
        """Without arrays: a state arrived in the middle of a stride, and is adopted at the next boundary."""
        done = self._strided()
        if done:
            self._count(done, 0.0)
        self._stride_began += done * self._pace_s
        self._stride(1, self._stride_began + self._pace_s - self._lab.clock.now)

    def _draw_pace(self) -> None:
        jitter = self._lab.e.swarm.jitter
        self._pace_s = self.step_s * (self._lab.chance.uniform(1 - jitter, 1 + jitter) if jitter else 1.0)

    def _steps_left(self, part: Part) -> int:
        return steps_left(
            part.current, inner_steps=self._inner_steps(part), pass_s=self._pass_s(part) - EPSILON_S,
            step_s=self._pace_s,
        )  # fmt: skip

    def _inner_steps(self, part: Part) -> int:
        return max(1, math.ceil(self._lab.e.inner.inner_steps * part.share - EPSILON_S))

    def _pass_s(self, part: Part) -> float:
        if not self._lab.e.outer.dylu:
            return math.inf
        return self._lab.e.pass_s * part.share

    def _boundary(self, steps: int) -> None:
        lab = self._lab
        loss = 0.0
        if self.trainer is not None:
            loss = self.trainer.step(self._learning_rate())
            if not math.isfinite(loss):
                self._roll_back()
                return
            lab.step_done(loss)
        self._count(steps, loss)
        self._adopt()
        self._turn()

    def _count(self, steps: int, loss: float) -> None:
        self.steps += steps
        for part in self.parts:
            part.current.add_step(loss, steps * self._pace_s)
            part.current.steps += steps - 1

    def _roll_back(self) -> None:
        """Not finite (algorithm.md 2, 6): theta <- anchor <- G, feedback and pending cleared, no delta."""
        assert self.trainer is not None
        for part in self.parts:
            assert part.feedback is not None
            assert part.params is not None
            part.feedback.clear()
            part.anchor = part.params.copy()
            scatter(self.trainer.theta, part.fragment, part.anchor)
            part.begin()
        self.trainer.zero_moments()
        self.rolled_back += 1
        self._adopt()
        self._next_boundary()

    def _turn(self) -> None:
        """At a boundary: end the passes that are due; then the next step, or wait."""
        waits = False
        for part in self.parts:
            move = self._move(part)
            if move is Next.FINISH:
                if not self._finish(part):
                    self._roll_back()
                    return
                waits |= self._lab.e.outer.policy == "barrier"
            waits |= move is Next.WAIT
        if waits:
            self.waiting = True
            self._idle_since = self._lab.clock.now
        else:
            self._next_boundary()

    def _move(self, part: Part) -> Next:
        lab = self._lab
        return next_move(
            part.current, inner_steps=self._inner_steps(part), pass_s=self._pass_s(part) - EPSILON_S,
            allowed=len(part.flights) < lab.e.outer.in_flight_max,
        )  # fmt: skip

    def _learning_rate(self) -> float:
        """By the token clock: merged at the adopted version, and the node's own unmerged ones."""
        lab = self._lab
        clock = 0
        for part in self.parts:
            own = part.current.steps + sum(f.held.candidate.steps for f in part.flights.values())
            clock += lab.ledgers[part.number].clocks[part.version] + own * lab.e.tokens_per_step
        return learning_rate(
            lab.terms.inner, clock // len(self.parts), target_tokens=lab.e.target_tokens,
            step_tokens=lab.e.tokens_per_step,
        )  # fmt: skip

    def _end_idle(self) -> None:
        if self._idle_since is not None:
            self.waited_s += self._lab.clock.now - self._idle_since
            self._idle_since = None

    # Deltas

    def _finish(self, part: Part) -> bool:
        """Cut the delta, go on from it, offer what is not settled. False: nobody would take it."""
        lab = self._lab
        part.sequence += 1
        steps = part.current.steps
        origin = Origin(self.peer, part.sequence)
        codec = lab.codec_now(part.number)
        norm, decoded = math.sqrt(steps), None
        if self.trainer is None:
            digest = Digest(tagged_digest("lab", self.peer, b"%d/%d" % (part.number, part.sequence)))
        else:
            assert part.anchor is not None
            assert part.feedback is not None
            theta = gather(self.trainer.theta, part.fragment)
            try:
                sent = part.feedback.send(part.anchor - theta, codec, part.fragment.tensors, origin)
            except PeerError:
                return False
            part.anchor = theta.copy()
            digest = sent.digest
            decoded = decode(codec, sent.blob, part.fragment.tensors)
            norm = l2_norm(decoded)
        experts: tuple[float, ...] = ()
        if self.trainer is not None and lab.e.outer.expert_weights:
            experts = tuple(self.trainer.expert_tokens())
        candidate = Candidate(
            digest, self.peer, part.current.base_version, part.sequence, steps, norm, b"", b""
        )
        lost = lab.chance.happens(lab.e.swarm.delta_lost_for_good)
        held = Held(candidate, 0.0, decoded, experts)
        part.flights[digest] = Flight(held, lab.delta_bytes(part.number, codec), lost)
        self.deltas += 1
        part.begin()
        self._draw_pace()
        self._offer_all(part)
        return True

    def _offer_all(self, part: Part) -> None:
        """Now, and again after a pass in which this node has finished none: it may be waiting."""
        for flight in part.flights.values():
            self._offer(part, flight)
        part.offers += 1
        offers, life = part.offers, self.life

        def again() -> None:
            if self.life == life and part.offers == offers and part.flights:
                self._offer_all(part)

        self._lab.clock.at(self._lab.e.pass_s, again)

    def _offer(self, part: Part, flight: Flight) -> None:
        """Each pass again, until it is settled: an upload that got lost holds no slot for sixteen rounds."""
        lab, swarm = self._lab, self._lab.e.swarm
        digest = flight.held.candidate.delta
        uploading = part.on_its_way.get(digest, -1.0) > lab.clock.now
        if uploading or lab.ledgers[part.number].knows(flight.held.candidate):
            return  # a voter answers the header, and no blob travels
        arrival = lab.upload(self, flight.size)
        part.on_its_way = {d: t for d, t in part.on_its_way.items() if d in part.flights}
        part.on_its_way[digest] = arrival + swarm.delta_delay_passes * lab.e.pass_s
        if not flight.lost and lab.chance.happens(swarm.delta_loss):
            return
        delay = arrival - lab.clock.now + swarm.delta_delay_passes * lab.e.pass_s
        life = self.life

        def arrived() -> None:
            # An upload dies with its sender; the delta is on its disk and is offered again.
            if self.life != life or digest not in part.flights:
                return
            if flight.lost:
                self._drop(part, digest)
                if self.waiting:
                    self._resume()
            else:
                lab.delta_arrived(part.number, flight.held._replace(at=lab.clock.now))

        lab.clock.at(delay, arrived)

    # Adoptions

    def state_arrived(self, number: int, version: int, params: Array | None) -> None:
        """A newer state of a fragment is on this node's disk."""
        part = self.parts[number]
        if version <= part.version or (part.newer is not None and version <= part.newer.version):
            return
        part.newer = Newer(version, params)
        if self.waiting:
            self._adopt()
            self._resume()
        elif self.trainer is None:
            self._cut_stride()

    def _resume(self) -> None:
        """Go on if there is nothing to wait for any more."""
        barrier = self._lab.e.outer.policy == "barrier"
        if barrier and not self.entering and any(p.flights for p in self.parts):
            return  # its own round is not closed yet
        moves = [self._move(p) for p in self.parts]
        if Next.WAIT in moves:
            return
        self.waiting = self.entering = False
        self._end_idle()
        if Next.FINISH in moves:
            self._turn()
        else:
            self._next_boundary()

    def _adopt(self) -> None:
        for part in self.parts:
            newer, part.newer = part.newer, None
            if newer is not None:
                afresh = self._lab.ledgers[part.number].is_too_late(part.version)
                self._take_over(part, newer.version, newer.params, afresh=afresh)
                if afresh and self.trainer is not None:
                    self.trainer.zero_moments()

    def _take_over(self, part: Part, version: int, params: Array | None, *, afresh: bool) -> None:
        """algorithm.md 3 and 6: settle, then rebase; `afresh` gives up everything own."""
        lab = self._lab
        ledger, outer = lab.ledgers[part.number], lab.e.outer
        for step in ledger.entries[part.version : version]:
            self._settle(part, step)
        part.version, part.params = version, params
        if outer.align:
            part.current.adopted()
        for digest, flight in list(part.flights.items()):
            if ledger.is_too_late(flight.held.candidate.base_version):
                self._drop(part, digest)
        if afresh:
            part.flights.clear()
            if part.feedback is not None:
                e = part.feedback.e
                part.feedback.clear()
                if outer.feedback_after_absence == "kept":
                    part.feedback.e = e
            part.begin()
        if params is None or self.trainer is None:
            return
        assert part.feedback is not None
        own = part.feedback.in_flight() if part.flights else np.zeros_like(params)
        if outer.carry != 1.0:
            own *= np.float32(outer.carry)
        anchor = params - own
        theta = anchor
        if not afresh and part.anchor is not None and self.up and part.current.steps:
            progress = gather(self.trainer.theta, part.fragment) - part.anchor
            theta = anchor + (progress if outer.carry == 1.0 else progress * np.float32(outer.carry))
        scatter(self.trainer.theta, part.fragment, theta)
        part.anchor = anchor

    def _settle(self, part: Part, step: OuterStep) -> None:
        mine = [c for c in step.contributions if c.peer == self.peer]
        refused = [r for r in step.refused if r.peer == self.peer]
        for r in refused:
            self._drop(part, Digest(r.delta))
        for c in mine:
            flight = part.flights.pop(Digest(c.delta), None)
            if flight is not None:
                self.listed += 1
                if part.feedback is not None:
                    part.feedback.listed(Digest(c.delta))
            for digest, other in list(part.flights.items()):
                if other.held.candidate.sequence < c.sequence:
                    del part.flights[digest]
                    self.passed_over += 1
                    if part.feedback is not None:
                        part.feedback.passed_over(digest)

    def _drop(self, part: Part, digest: Digest) -> None:
        """Too late, or lost for good: its content is gone (a late one must not return disguised as fresh)."""
        if part.flights.pop(digest, None) is not None:
            self.late += 1
            if part.feedback is not None:
                part.feedback.dropped(digest)
