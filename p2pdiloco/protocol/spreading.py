"""How certified entries reach everybody (protocol.md 5): pushed by voters to their share of the peers,
forwarded a little, and mended by heartbeats. Small messages only; blobs have their own way.
"""

from __future__ import annotations

from p2pdiloco import limits
from p2pdiloco.ids import PeerId
from p2pdiloco.protocol.context import Context
from p2pdiloco.protocol.membership import Membership
from p2pdiloco.protocol.run_log import RunLog
from p2pdiloco.wire.log import Entry, OuterStep, OwnerWord
from p2pdiloco.wire.messages import Entries, EntriesWanted, OwnerWordMessage


class Spreading:
    """Who gets which entries from this node."""

    def __init__(self, ctx: Context, log: RunLog, membership: Membership) -> None:
        self._ctx = ctx
        self._log = log
        self._membership = membership
        self._met: dict[PeerId, None] = {}  # the one heard of longest ago first

    def bring_up_to_date(self, peer: PeerId, first: int, epoch: int | None = None) -> None:
        """Send what `peer` lacks from index `first` on, a message at a time; it asks again for more.

        `epoch`: the peer's, where it is known; what it has of later indices, a recovery may have left behind.
        """
        if epoch is not None:
            first = min(first, self._log.recovery_after(epoch) or first)
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

    def pass_on(self, word: OwnerWord) -> None:
        """The owner's word, to whoever leads and whoever leads next; said again with every heartbeat."""
        for member in self._log.committee.members:
            self._ctx.send(member, OwnerWordMessage(word))

    def met(self, peer: PeerId) -> None:
        """An address of `peer` is known."""
        if peer != self._ctx.me:
            self._met.pop(peer, None)
            self._met[peer] = None
            if len(self._met) > limits.peers_max:
                del self._met[next(iter(self._met))]

    def ask_around(self) -> None:
        """Nobody of the committee is heard: it may be another one by now, and somebody else knows.

        A newcomer knows the first committee alone, and the first witness may be gone for good.
        """
        patience_s = self._ctx.spec.committee.timeout_s_max
        members = [m for m in self._log.committee.members if m != self._ctx.me]
        if not members or any(self._membership.silent_s(m) <= patience_s for m in members):
            return
        for peer in sorted(self._met, key=lambda _: self._ctx.rng())[: limits.fanout]:
            self._ctx.send(peer, EntriesWanted(self._log.index + 1))

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
