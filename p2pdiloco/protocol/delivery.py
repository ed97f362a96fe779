"""Own deltas: offered to every voter, delivered, and settled by the log alone (algorithm.md 6)."""

from __future__ import annotations

from collections.abc import Iterable

from p2pdiloco import limits
from p2pdiloco.ids import Digest, PeerId
from p2pdiloco.protocol.actions import AllowPasses, RevealDelta, Settled, SettleDelta, UploadDelta
from p2pdiloco.protocol.context import Context
from p2pdiloco.rules.outer_step import too_late
from p2pdiloco.rules.state import RulesState, last_sequence
from p2pdiloco.wire.log import Committee, OuterStep
from p2pdiloco.wire.messages import DeltaHeader, DeltaReceipt, Outcome

_FINAL = frozenset(
    {Outcome.NOT_FINITE, Outcome.BAD_SHAPE, Outcome.BAD_SIGNATURE, Outcome.TOO_BIG, Outcome.NOT_ADMITTED}
)
REVOKED = "the run's owner revoked this node: what it trains is not taken any more; it only follows"


class _Own:
    __slots__ = ("header", "held", "noted", "refused", "retry_at", "revealed", "uploading")

    def __init__(self, header: DeltaHeader) -> None:
        self.header = header
        self.noted: set[PeerId] = set()
        self.held: set[PeerId] = set()
        self.uploading: set[PeerId] = set()
        self.refused: dict[PeerId, Outcome] = {}
        self.retry_at: dict[PeerId, float] = {}
        self.revealed = False


class Delivery:
    """At most two unsettled at once: the bound on solo work (algorithm.md 3)."""

    def __init__(self, ctx: Context, in_flight: Iterable[DeltaHeader]) -> None:
        self._ctx = ctx
        self._own: dict[Digest, _Own] = {Digest(h.delta): _Own(h) for h in in_flight}
        self.last_outcome: Outcome | None = None
        # By the owner, in the state that is installed: the run, and this node.
        self._paused = self._revoked = False

    @property
    def in_flight(self) -> tuple[DeltaHeader, ...]:
        return tuple(own.header for own in self._own.values())

    def finished(self, header: DeltaHeader) -> None:
        """A pass ended; offer this delta, and once more whatever else is unsettled."""
        self._own[Digest(header.delta)] = _Own(header)
        for own in self._own.values():
            own.held.clear()
            own.noted.clear()
            own.uploading.clear()
            own.refused.clear()

    def offer(self, committee: Committee, *, held_here: Iterable[bytes]) -> None:
        """Say each header to every voter that has not answered; upload where it is noted."""
        here = set(held_here)
        for delta, own in self._own.items():
            if self._ctx.me in committee.members:
                own.noted.add(self._ctx.me)
                if delta in here:
                    own.held.add(self._ctx.me)
            for voter in committee.members:
                if voter in own.held or own.retry_at.get(voter, float("-inf")) > self._ctx.now:
                    continue
                if voter not in own.noted and voter not in own.refused:
                    self._ctx.send(voter, own.header)
            self._upload(delta, own, committee)

    def _upload(self, delta: Digest, own: _Own, committee: Committee) -> None:
        """Commit before reveal: no blob leaves before a majority has the header."""
        if len(own.noted & set(committee.members)) < committee.quorum:
            return
        if not own.revealed:
            own.revealed = True
            self._ctx.emit(RevealDelta(delta))
        for voter in committee.members:
            waiting = own.retry_at.get(voter, float("-inf")) > self._ctx.now
            if voter == self._ctx.me or voter not in own.noted or waiting:
                continue
            if voter not in own.held and voter not in own.uploading:
                own.uploading.add(voter)
                self._ctx.emit(UploadDelta(voter, delta, own.header.size))

    def on_receipt(self, voter: PeerId, m: DeltaReceipt, committee: Committee) -> None:
        """A voter says what became of a delta. Only final refusals by a majority settle anything."""
        delta = Digest(m.delta)
        own = self._own.get(delta)
        if own is None or voter not in committee.members:
            return
        self.last_outcome = m.outcome
        if m.outcome is Outcome.NOTED:
            own.noted.add(voter)
            self._upload(delta, own, committee)
        elif m.outcome is Outcome.HELD:
            own.noted.add(voter)
            own.held.add(voter)
            self._upload(delta, own, committee)
        elif m.outcome in _FINAL:
            own.refused[voter] = m.outcome
            same = [v for v, o in own.refused.items() if v in committee.members and o is m.outcome]
            if len(same) >= committee.quorum:
                bad = m.outcome is Outcome.NOT_FINITE
                self._settle(delta, Settled.NOT_FINITE if bad else Settled.REFUSED)
                self._ctx.say(
                    "refused", f"a majority of voters refused a delta: {m.outcome} {m.detail}".strip()
                )
        else:  # it stays in flight and is offered again
            own.retry_at[voter] = self._ctx.now + self._ctx.spec.committee.heartbeat_s

    def uploaded(self, delta: Digest, voter: PeerId) -> None:
        own = self._own.get(delta)
        if own is not None:
            own.uploading.discard(voter)
            own.held.add(voter)

    def not_uploaded(self, delta: Digest, voter: PeerId, retry_after_s: float) -> None:
        own = self._own.get(delta)
        if own is not None:
            own.uploading.discard(voter)
            own.noted.discard(voter)
            own.retry_at[voter] = self._ctx.now + max(retry_after_s, self._ctx.spec.committee.heartbeat_s)

    def reborn(self, voter: PeerId) -> None:
        """A voter started again: it may have lost what it had noted."""
        for own in self._own.values():
            own.noted.discard(voter)
            own.held.discard(voter)
            own.refused.pop(voter, None)

    def settle_by(self, step: OuterStep) -> None:
        """Settle by a certified entry, in the order of the log: listed, passed over, refused."""
        me = self._ctx.me
        mine = [c for c in step.contributions if c.peer == me]
        for c in mine:
            self.last_outcome = Outcome.ACCEPTED if c.staleness == 0 else Outcome.STALE
            if Digest(c.delta) in self._own:
                self._settle(Digest(c.delta), Settled.LISTED)
        for r in step.refused:
            if r.peer == me and Digest(r.delta) in self._own:
                self.last_outcome = Outcome.TOO_LATE
                self._settle(Digest(r.delta), Settled.TOO_LATE)
        highest = max((c.sequence for c in mine), default=0)
        for delta, own in list(self._own.items()):
            if own.header.sequence < highest:
                self._settle(delta, Settled.PASSED_OVER)

    def settle_late(self, rules: RulesState) -> None:
        """Bases older than staleness_max at the state that stands now can never be listed.

        Nor can a sequence that the log has passed: an identity that lost its own record starts low.
        """
        passed = last_sequence(rules, self._ctx.me)
        for delta, own in list(self._own.items()):
            if own.header.sequence <= passed:
                self._settle(delta, Settled.PASSED_OVER)
            elif too_late(rules, self._ctx.spec, own.header):
                self._settle(delta, Settled.TOO_LATE)

    def clear(self) -> None:
        """Long absence: everything in flight is discarded with the reset that follows."""
        self._own.clear()

    def obey(self, rules: RulesState) -> bool:
        """Heed the owner's words in the state that stands now. Returns: whether they are others than before.

        A revoked node goes on following: it may have a seat that nobody else can take yet.
        """
        paused, revoked = rules.paused, self._ctx.me in rules.revoked
        if (paused, revoked) == (self._paused, self._revoked):
            return False
        if revoked and not self._revoked:
            self._ctx.say("revoked", REVOKED)
        self._paused, self._revoked = paused, revoked
        if revoked:
            for delta in list(self._own):
                self._settle(delta, Settled.REFUSED)
        return True

    def allow(self) -> None:
        """Tell the trainer how many more deltas it may finish."""
        if self._revoked:
            self._ctx.emit(AllowPasses(0, REVOKED, prolong=False))
            return
        allowed = max(0, limits.in_flight_max - len(self._own))
        if self._paused:
            # A delta that is ready waits with the voters: its node may be gone when the run goes on.
            self._ctx.emit(AllowPasses(allowed, "the owner paused the run", prolong=False))
            return
        why = "" if allowed else f"waiting for the swarm: {len(self._own)} deltas are not settled yet"
        self._ctx.emit(AllowPasses(allowed, why))

    def _settle(self, delta: Digest, how: Settled) -> None:
        del self._own[delta]
        self._ctx.emit(SettleDelta(delta, how))
        self.allow()
