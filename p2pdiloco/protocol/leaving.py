"""Saying goodbye (protocol.md 7): a node hands its seat over first; the witness keeps its seat, for it comes
back where it was."""

from __future__ import annotations

from p2pdiloco import limits
from p2pdiloco.protocol.actions import LeaveDone
from p2pdiloco.protocol.context import Context
from p2pdiloco.protocol.election import Election
from p2pdiloco.protocol.membership import Membership
from p2pdiloco.protocol.run_log import RunLog
from p2pdiloco.wire.messages import Goodbye


class Leaving:
    """From the wish to leave to the moment at which the process may end."""

    def __init__(self, ctx: Context, log: RunLog, election: Election, membership: Membership) -> None:
        self._ctx = ctx
        self._log = log
        self._election = election
        self._membership = membership
        self._leave_by: float | None = None
        self._left = False

    @property
    def wanted(self) -> bool:
        return self._leave_by is not None

    @property
    def wake_at(self) -> float | None:
        """When `consider` is due at the latest; None where nobody leaves, or has left."""
        return None if self._left else self._leave_by

    def want(self, reason: str, *, finished: bool) -> None:
        """`finished`: the run is over, and no seat matters any more."""
        ctx = self._ctx
        if self._leave_by is not None:
            return
        self._leave_by = ctx.now
        if ctx.identity.role == "witness" or finished:
            return
        if self._election.is_voter and self._log.committee.size > 1:
            self._leave_by = ctx.now + limits.leave_s_max
        self._membership.said_goodbye(ctx.me, ctx.identity.boot)
        for peer in dict.fromkeys([*self._log.committee.members, *self._membership.heard_within(60.0)]):
            ctx.send(peer, Goodbye(reason))

    def consider(self) -> None:
        """The seat is handed over, or the patience is over: the process may end."""
        if self._leave_by is None or self._left:
            return
        members = self._log.committee.members
        stored = sum(1 for m in members if self._membership.index_of(m) >= self._log.index)
        handed_over = self._ctx.me not in members and stored >= self._log.committee.quorum
        if handed_over or self._ctx.now >= self._leave_by:
            self._left = True
            self._ctx.emit(LeaveDone())
