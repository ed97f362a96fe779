"""The owner's recovery (protocol.md 3): one epoch is over everywhere, the next stands on a certified entry.

A node that is shown a recovery of a newer epoch, certified by the owner's own signature, never votes in an
older one again; that is durable first. Where the recovery stands on an entry of its log, the node drops what
it has behind it and goes on from there under the new committee. Where it stands on a branch that this log
left (an earlier recovery that a later one overruled), the node first follows that branch back and up again.

Nothing here leads, votes or proposes: the first entry of an epoch needs nobody but the owner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from p2pdiloco import limits
from p2pdiloco.ids import PeerId
from p2pdiloco.protocol.actions import CutLog, EnterEpoch
from p2pdiloco.protocol.applied import Applied
from p2pdiloco.protocol.ballot import Ballot
from p2pdiloco.protocol.context import Context
from p2pdiloco.protocol.delta_pool import DeltaPool
from p2pdiloco.protocol.run_log import RunLog
from p2pdiloco.protocol.snapshot_sync import SnapshotSync
from p2pdiloco.protocol.spreading import Spreading
from p2pdiloco.protocol.trainee import Trainee
from p2pdiloco.wire.log import Committee, Entry, open_body
from p2pdiloco.wire.messages import (
    DeltaHeader,
    Entries,
    EntriesWanted,
    Heartbeat,
    Message,
    PreVote,
    Proposal,
    RequestVotes,
    Vote,
)
from p2pdiloco.words import count_of

# Whoever says one of these in an epoch that is over acts in it, and is told.
_ACTS = (DeltaHeader, Heartbeat, PreVote, Proposal, RequestVotes, Vote)


class OfAnEpoch(Protocol):
    """A part of the node that keeps what counts within one epoch only."""

    def epoch_began(self) -> None: ...


class Recovery:
    """Takes entries, tells those who are behind an epoch, asks those who are ahead of one."""

    def __init__(
        self,
        ctx: Context,
        log: RunLog,
        ballot: Ballot,
        spreading: Spreading,
        applied: Applied,
        pool: DeltaPool,
        sync: SnapshotSync,
        trainee: Trainee,
        *,
        append: Callable[[tuple[Entry, ...]], None],
        of_an_epoch: Sequence[OfAnEpoch],
    ) -> None:
        """`append`: entries that follow. `of_an_epoch`: who has to forget what an epoch that is over held."""
        self._ctx = ctx
        self._log = log
        self._ballot = ballot
        self._spreading = spreading
        self._applied = applied
        self._pool = pool
        self._sync = sync
        self._trainee = trainee
        self._append = append
        self._of_an_epoch = of_an_epoch
        self._spoken_at: dict[PeerId, float] = {}  # told or asked about an epoch
        # Voters that a recovery dismissed, not heard of in this epoch yet: perhaps nobody else knows them.
        self._dismissed: set[PeerId] = set()
        for index in range(1, log.index + 1):
            if log.epoch_at(index) > log.epoch_at(index - 1):
                self._dismiss(log.committee_at(index - 1))

    # Entries

    def on_entries(self, sender: PeerId, epoch: int, m: Entries) -> None:
        """Certified entries in a row, of a chain in the sender's `epoch`.

        Raises: PeerError.
        """
        if not m.entries:
            return
        for entry in m.entries:
            begun = self._log.begins(entry)
            if begun is not None:
                self._ballot.begin_epoch(begun)
        if epoch < self._ballot.epoch:
            return  # a chain that the owner ended
        plain: list[Entry] = []
        before = self._log.index
        for entry in m.entries:
            body = open_body(entry.body)
            if self._leads_elsewhere(entry, len(plain)):
                self._append_new(plain)
                plain = []
            if self._log.recovers(entry) or (self._in_between and self._log.replaces(entry)):
                if body.index <= self._log.index:
                    self._cut(body.index - 1)
                self._append((entry,))
            elif self._log.begins(entry) is not None or self._strays(entry):
                self._ask_further_back(sender, open_body(m.entries[0].body).index)
                return
            elif body.epoch > self._log.epoch:
                break  # a newer epoch, without the recovery that begins it: the sender is asked below
            else:
                plain.append(entry)
        self._append_new(plain)
        if self._log.index == before and open_body(m.entries[-1].body).index <= before:
            return  # an answer to a second question: whoever was asked for what follows is asked already
        if m.head > self._log.index:
            self._ctx.send(sender, EntriesWanted(self._log.index + 1))

    @property
    def _in_between(self) -> bool:
        """The epoch of this log is over, and the way to the next one is not here yet."""
        return self._ballot.epoch > self._log.epoch

    def _leads_elsewhere(self, entry: Entry, waiting: int) -> bool:
        """Whether what waits has to be appended before `entry` can be judged."""
        return waiting > 0 and (self._in_between or self._log.begins(entry) is not None)

    def _strays(self, entry: Entry) -> bool:
        """Whether it goes on from where this log is not, on the way to the next epoch."""
        body = open_body(entry.body)
        return self._in_between and body.index > self._log.index and not self._log.follows(body)

    def _append_new(self, entries: list[Entry]) -> None:
        fresh = [e for e in entries if open_body(e.body).index > self._log.index]
        if fresh and open_body(fresh[0].body).index == self._log.index + 1:
            self._append(tuple(fresh))

    def _cut(self, index: int) -> None:
        """The owner's recovery left the entries after `index` behind: so does this node."""
        log = self._log
        self._ctx.say(
            "recovery",
            f"{count_of(log.index - index, 'entry is', 'entries are')} lost, those after {index}: the "
            "owner's recovery goes on without",
        )
        version, epoch = log.version_at(index), log.epoch
        log.cut(index)
        self._ctx.emit(CutLog(index))
        if log.epoch != epoch:
            self._ctx.emit(EnterEpoch(log.epoch))
        self._sync.cut(index)
        self._pool.went_back(version)
        self._trainee.cut(version)
        if self._applied.index > index:
            self._sync.go_back()
            self._trainee.went_back()

    def _ask_further_back(self, sender: PeerId, first: int) -> None:
        """A recovery that stands on nothing here: what the sender has before `first` shows where it parts."""
        wanted = self._log.index + 1
        if first <= wanted:
            wanted = self._log.branch_below(first)
        if wanted < first:
            self._ctx.send(sender, EntriesWanted(wanted))

    # Other epochs

    def elsewhere(self, sender: PeerId, epoch: int, m: Message) -> None:
        """Somebody speaks in another epoch than this log's: it is told of it, or asked about a newer one."""
        if not isinstance(m, _ACTS) or self._spoken_lately(sender):
            return
        if epoch > self._log.epoch:
            self._ctx.send(sender, EntriesWanted(self._log.index + 1))
        else:
            first = m.index + 1 if isinstance(m, Heartbeat | PreVote | Vote) else self._log.index + 1
            self._spreading.bring_up_to_date(sender, first, epoch)

    def _spoken_lately(self, peer: PeerId) -> bool:
        """Once in half a heartbeat is enough."""
        now = self._ctx.now
        if now - self._spoken_at.get(peer, float("-inf")) < self._ctx.spec.committee.heartbeat_s / 2:
            return True
        if len(self._spoken_at) >= limits.peers_max:
            self._spoken_at.clear()
        self._spoken_at[peer] = now
        return False

    @property
    def dismissed(self) -> list[PeerId]:
        """Who gets a heartbeat although it has no seat, so that it learns of the epoch."""
        return sorted(self._dismissed - set(self._log.committee.members))

    def heard(self, peer: PeerId) -> None:
        """`peer` is in this epoch."""
        self._dismissed.discard(peer)

    def epoch_began(self, before: Committee) -> None:
        """A recovery was appended; `before` governed here until then.

        Whatever was won, promised, heard or said to do was so in the epoch before.
        """
        self._ctx.emit(EnterEpoch(self._log.epoch))
        self._dismiss(before)
        for part in self._of_an_epoch:
            part.epoch_began()

    def _dismiss(self, committee: Committee) -> None:
        self._dismissed.update(m for m in committee.members if m != self._ctx.me)
