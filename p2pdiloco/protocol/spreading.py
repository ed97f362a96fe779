"""How certified entries reach everybody (protocol.md 5): pushed by voters to their share of the peers,
forwarded a little, and mended by heartbeats. Small messages only; blobs have their own way.
"""

from __future__ import annotations

from p2pdiloco import limits
from p2pdiloco.ids import PeerId
from p2pdiloco.protocol.context import Context
from p2pdiloco.protocol.membership import Membership
from p2pdiloco.protocol.run_log import RunLog
from p2pdiloco.wire.log import Entry, OuterStep
from p2pdiloco.wire.messages import Entries


class Spreading:
    """Who gets which entries from this node."""

    def __init__(self, ctx: Context, log: RunLog, membership: Membership) -> None:
        self._ctx = ctx
        self._log = log
        self._membership = membership
        self._forwarded = 0

    def bring_up_to_date(self, peer: PeerId, first: int) -> None:
        """Send what `peer` lacks from index `first` on, a message at a time; it asks again for more."""
        entries = self._log.entries_from(max(1, first), limits.entries_per_message_max)
        room = limits.message_bytes_max // 2
        fitting: list[Entry] = []
        for entry in entries:
            room -= len(entry.body) + 1024
            if fitting and room < 0:
                break
            fitting.append(entry)
        if fitting:
            self._ctx.send(peer, Entries(tuple(fitting), self._log.index))

    def appended(self, before: int, old_members: tuple[PeerId, ...]) -> None:
        """The log grew beyond `before`: pass it on."""
        entries = self._log.entries_from(before + 1, limits.entries_per_message_max)
        if not entries or len(entries) != self._log.index - before:
            return  # catching up in bulk: others are ahead
        message = Entries(entries, self._log.index)
        me = self._ctx.me
        members = {*old_members, *self._log.committee.members}
        lease = self._ctx.spec.committee.voter_lease_s
        others = [
            p
            for p in self._membership.heard_within(lease)
            if p not in members and self._membership.index_of(p) < self._log.index
        ]
        if me in members:
            for member in sorted(members):
                self._ctx.send(member, message)
            seats = sorted(members)
            mine = [p for p in others if p[-1] % len(seats) == seats.index(me)]
        else:
            mine = sorted(others, key=lambda _: self._ctx.rng())[: limits.fanout]
        for peer in mine:
            self._ctx.send(peer, message)

    def donors(self, step: OuterStep) -> list[PeerId]:
        """Who should have the deltas of a certified step: voters, their senders, whoever applied it."""
        applied = [
            p
            for p in self._membership.heard_within(self._ctx.spec.committee.voter_lease_s)
            if self._membership.index_of(p) >= self._log.index
        ]
        senders = [PeerId(c.peer) for c in step.contributions]
        return list(dict.fromkeys([*self._log.committee.members, *senders, *applied]))[:16]
