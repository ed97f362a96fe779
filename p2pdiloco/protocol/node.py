"""A node's brain: one door in (`handle`), one door out (the actions). It composes; the parts decide.

The same machine runs in a volunteer's daemon, in the tracker's witness and in the simulator.
"""

from __future__ import annotations

from collections.abc import Callable

from p2pdiloco import limits
from p2pdiloco.errors import PeerError
from p2pdiloco.ids import Digest, PeerId, digest_of
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol.actions import (
    Action,
    RememberPeer,
    RunEnded,
    SaveEntries,
    Settled,
    SettleDelta,
    TakeSnapshot,
)
from p2pdiloco.protocol.aggregation import Aggregation
from p2pdiloco.protocol.applied import Applied
from p2pdiloco.protocol.ballot import Ballot
from p2pdiloco.protocol.context import Context, Identity, Restored
from p2pdiloco.protocol.delivery import Delivery
from p2pdiloco.protocol.delta_pool import DeltaPool
from p2pdiloco.protocol.election import Election
from p2pdiloco.protocol.leaving import Leaving
from p2pdiloco.protocol.membership import Membership
from p2pdiloco.protocol.proposals import Proposals
from p2pdiloco.protocol.recovery import Recovery
from p2pdiloco.protocol.run_log import RunLog
from p2pdiloco.protocol.snapshot_sync import SnapshotSync
from p2pdiloco.protocol.spreading import Spreading
from p2pdiloco.protocol.trainee import Trainee
from p2pdiloco.rules.state import RulesState
from p2pdiloco.wire import messages as msg
from p2pdiloco.wire.log import Committee, Content, Entry, OuterStep, OwnerEntry, changes_committee
from p2pdiloco.wire.log import Membership as MembershipEntry
from p2pdiloco.words import count_of

__all__ = ["Identity", "Node", "Restored"]


class Node:
    """`handle(event, now=...)` returns the actions to perform in order; `deadline()` says when to tick."""

    def __init__(self, identity: Identity, restored: Restored, rng: Callable[[], float]) -> None:
        """`rng` gives uniform numbers in [0, 1); everything durable comes in `restored`."""
        self._ctx = ctx = Context(identity, rng)
        self._bodies: dict[Digest, bytes] = {}
        self._log = RunLog(identity.run, identity.spec, restored.entries, verify=identity.verify)
        self._pool = DeltaPool(ctx, restored.held)
        self._applied = Applied(ctx, self._log, self._pool, restored)
        self._ballot = Ballot(ctx, restored.record, self._log.epoch)
        self._election = Election(ctx, self._log, self._ballot, self._bodies)
        self._membership = Membership(ctx, self._log)
        self._proposals = Proposals(
            ctx, self._log, self._ballot, self._election, self._applied, self._pool, self._bodies,
            self._refuses_content,
        )  # fmt: skip
        self._aggregation = Aggregation(
            ctx, self._log, self._election, self._applied, self._pool, self._membership, self._proposals
        )
        self._delivery = Delivery(ctx, restored.in_flight)
        self._trainee = Trainee(
            ctx, self._log, self._applied, self._delivery, restored.adopted_version,
            restored.evaluated_version,
        )  # fmt: skip
        self._spreading = Spreading(ctx, self._log, self._membership)
        self._sync = SnapshotSync(ctx, self._log, self._applied, restored.snapshots)
        self._recovery = Recovery(
            ctx, self._log, self._ballot, self._spreading, self._applied, self._pool, self._sync,
            self._trainee, append=self._append,
            of_an_epoch=(self._proposals, self._election, self._membership, self._aggregation),
        )  # fmt: skip
        self._leaving = Leaving(ctx, self._log, self._election, self._membership)
        self._beat_at = float("-inf")  # clocks may start below zero

    # What others look at

    @property
    def index(self) -> int:
        """Certified and applied."""
        return self._applied.index

    @property
    def certified_index(self) -> int:
        return self._log.index

    @property
    def version(self) -> int:
        return self._applied.rules.version

    @property
    def term(self) -> int:
        return self._ballot.term

    @property
    def epoch(self) -> int:
        return self._log.epoch

    @property
    def committee(self) -> Committee:
        return self._log.committee

    @property
    def leading(self) -> bool:
        return self._election.leading is not None

    @property
    def state(self) -> RulesState:
        return self._applied.rules

    @property
    def root(self) -> Digest:
        return self._applied.root

    @property
    def roots(self) -> tuple[Digest, Digest] | None:
        """Of params and momentum; None while they are not those of `index`."""
        return None if self._applied.diverged else self._applied.roots

    @property
    def votes(self) -> bool:
        """False: its disk was restored from a copy, so that a seat is no use to it."""
        return not self._ballot.rolled_back

    @property
    def log(self) -> RunLog:
        return self._log

    @property
    def in_flight(self) -> tuple[msg.DeltaHeader, ...]:
        return self._delivery.in_flight

    @property
    def last_outcome(self) -> str:
        """Of this node's newest delta that anybody answered; empty while there is none."""
        return self._delivery.last_outcome or ""

    # The door

    def deadline(self) -> float:
        """Monotonic seconds at which `Ticked` is due at the latest."""
        due = [self._beat_at]
        if self._aggregation.wake_at is not None:
            due.append(self._aggregation.wake_at)
        if self._election.may_vote() and self._log.committee.size > 1:
            due.append(self._election.due)
        due += [at for at in (self._leaving.wake_at, self._sync.wake_at) if at is not None]
        return min(due)

    def handle(self, event: ev.Event, now: float) -> list[Action]:
        """One fact in, orders out."""
        ctx = self._ctx
        ctx.now = now
        ctx.out = []
        match event:
            case ev.MessageReceived():
                try:
                    self._on_message(event)
                except PeerError as error:
                    ctx.say("peer_error", f"{event.sender.hex()[:8]}: {error}")
            case ev.Ticked() | ev.MessageNotSent():
                pass  # heartbeats and offers say everything again
            case ev.Started():
                self._on_started()
            case ev.DeltaArrived():
                self._on_delta_arrived(event)
            case ev.DeltaNotFetched():
                self._pool.not_fetched(event.delta)
            case ev.DeltaUploaded():
                self._delivery.uploaded(event.delta, event.peer)
            case ev.DeltaNotUploaded():
                self._delivery.not_uploaded(event.delta, event.peer, event.retry_after_s)
            case ev.OuterStepPrepared():
                self._applied.prepared(event.ticket, event.params_root, event.momentum_root)
            case ev.OuterStepNotPrepared():
                self._applied.not_prepared(event.ticket)
            case ev.SnapshotTaken():
                covered = self._sync.taken(event.offer)
                if covered is not None:
                    self._pool.covered(covered)
            case ev.SnapshotFetched():
                self._on_snapshot_fetched(event)
            case ev.SnapshotNotFetched():
                if not self._sync.was_abandoned(event.index, installed=False):
                    self._sync.not_fetched(event.index)
                    ctx.say("syncing", f"the snapshot did not come: {event.why}")
            case ev.PassFinished():
                self._on_pass_finished(event)
            case ev.TrainerNotFinite():
                ctx.say("not_finite", "a loss or gradient was not finite: back to the last adopted state")
            case ev.GoodbyeWanted():
                self._leaving.want(event.reason, finished=self._applied.rules.finished)
            case ev.PeerMet():
                self._spreading.met(event.peer)
        if now >= self._beat_at:
            self._beat()
        self._settle_down()
        return ctx.out

    def _settle_down(self) -> None:
        """After each event: certify, apply, lead, propose, until nothing more follows from what is known."""
        while True:
            before = (self._log.index, self._applied.index, self._election.leading)
            entry = self._proposals.certified()
            if entry is not None:
                self._append((entry,))
            self._apply()
            self._election.tick(current=self._applied.current, stalled=self._is_stalled())
            self._election.try_all(current=self._applied.current)
            self._proposals.resume()
            self._aggregation.consider()
            after = (self._log.index, self._applied.index, self._election.leading)
            if before == after and self._proposals.certified() is None:
                break
        self._leaving.consider()

    def _is_stalled(self) -> bool:
        return self._election.is_voter and self._log.committee.size > 1 and self._aggregation.stalled()

    # Time

    def _on_started(self) -> None:
        self._membership.started()
        self._aggregation.started()
        self._election.arm()
        for index in range(1, self._applied.index + 1):
            # The process may have ended between an entry's installation and what it settles.
            content = self._log.content(index)
            if isinstance(content, OuterStep):
                self._delivery.settle_by(content)
        for header in self._delivery.in_flight:
            self._pool.note_own(header, self._ctx.identity.signer.public_key)
            self._pool.check_own(header)
        self._trainee.started()

    def _beat(self) -> None:
        """Heartbeats to the committee; everything that mends a lost message rides on the same clock."""
        ctx, log = self._ctx, self._log
        self._beat_at = ctx.now + ctx.spec.committee.heartbeat_s
        for member in (*log.committee.members, *self._recovery.dismissed):
            ctx.send(member, self._heartbeat(member))
        for word in self._aggregation.words:
            self._spreading.pass_on(word)
        self._spreading.ask_around()
        self._pool.expire()
        self._delivery.offer(log.committee, held_here=self._pool.mine(self._applied.rules))
        self._proposals.say_again()

    def _heartbeat(self, to: PeerId) -> msg.Heartbeat:
        voter = self._election.is_voter
        promises = self._membership.promises_seen(to)
        return msg.Heartbeat(
            index=self._applied.index,
            head=self._log.head_at(self._applied.index),
            term=self._ballot.term if voter else 0,
            leads=self._election.leading is not None,
            boot_seen=self._membership.boot_seen(to),
            term_seen=promises[0],
            ack_seen=promises[1],
            have=self._pool.mine(self._applied.rules) if voter else (),
            willing=not self._leaving.wanted and self.votes,
        )

    # The log

    def _append(self, entries: tuple[Entry, ...]) -> None:
        """Certified entries that follow: durable, then passed on."""
        before, members = self._log.index, self._log.committee.members
        added = []
        try:
            for entry in entries:
                epoch, committee = self._log.epoch, self._log.committee
                body = self._log.append(entry)
                added.append(entry)
                self._proposals.appended(body.content)
                if self._log.epoch > epoch:
                    self._recovery.epoch_began(committee)
        finally:
            if added:
                self._ctx.emit(SaveEntries(tuple(added)))
                self._election.certified_in(added[-1].certificate.term)
                self._spreading.appended(before, members)

    def _apply(self) -> None:
        far = self._sync.is_far(self._log.index - self._applied.index)
        if far or self._applied.diverged or self._sync.fetching:
            donors = [p for p in self._log.committee.members if p != self._ctx.me]
            if self._sync.tick(donors, needed=far or self._applied.diverged):
                return
        while True:
            content = self._applied.advance(self._spreading.donors)
            if content is None:
                break
            self._installed(content)
        self._trainee.adopt_if_current()

    def _installed(self, content: Content) -> None:
        index = self._applied.index
        certificate = self._log.entry(index).certificate
        if isinstance(content, OuterStep):
            self._pool.installed(content)
            self._delivery.settle_by(content)
            self._delivery.settle_late(self._applied.rules)
            if content.version % limits.snapshot_every_versions == 0:
                self._ctx.emit(TakeSnapshot(index, content.version))
        self._aggregation.installed(content, certificate.term)
        self._trainee.installed(content)
        current = self._applied.current
        self._election.installed(content, certificate.term, last=certificate.last, current=current)
        if changes_committee(content):
            size = self._log.committee_at(index).size
            self._ctx.say("committee", f"{count_of(size, 'voter')} from index {index + 1} on")
            self._delivery.offer(self._log.committee, held_here=self._pool.mine(self._applied.rules))
        if isinstance(content, OwnerEntry):
            if content.word.owner_sequence:
                self._ctx.say("owner", f"{content.word.kind} at index {index}")
            else:  # warranted by the RunSpec's targets; the owner did nothing
                self._ctx.say("run", f"the target is reached: {content.word.kind} at index {index}")
            if content.word.kind == "finish":
                self._ctx.emit(RunEnded(self._applied.rules.version))

    def _on_snapshot_fetched(self, event: ev.SnapshotFetched) -> None:
        """The state jumped over entries: they settle own deltas all the same."""
        before = self._applied.index
        if self._sync.was_abandoned(event.index, installed=True) or not self._sync.fetched(event.index):
            return
        for index in range(before + 1, self._applied.index + 1):
            content = self._log.content(index)
            if isinstance(content, OuterStep):
                self._pool.installed(content)
                self._delivery.settle_by(content)
        self._delivery.settle_late(self._applied.rules)
        self._trainee.jumped()

    def _refuses_content(self, content: Content) -> str | None:
        if isinstance(content, MembershipEntry):
            return self._membership.refuses(self._log.committee, content.committee, self._applied.rules)
        assert isinstance(content, OwnerEntry)
        return self._aggregation.refuses_word(content.word)

    # Messages

    def _on_message(self, event: ev.MessageReceived) -> None:
        sender, m = event.sender, event.message
        current, members = self._applied.current, self._log.committee.members
        if type(m) in msg.OF_AN_EPOCH:
            if event.epoch != self._log.epoch:
                self._recovery.elsewhere(sender, event.epoch, m)
                return
            self._recovery.heard(sender)
        match m:
            case msg.Heartbeat():
                self._on_heartbeat(event, m)
            case msg.DeltaHeader():
                self._on_header(event, m)
            case msg.DeltaReceipt():
                self._delivery.on_receipt(sender, m, self._log.committee)
            case msg.Have():
                if sender in members:
                    self._pool.heard_have(sender, m.deltas)
            case msg.Proposal():
                self._proposals.on_proposal(sender, event.key, m)
            case msg.Ack():
                self._membership.promised(sender, m.term, m.index)
                self._proposals.on_ack(sender, event.key, m)
            case msg.PreVote():
                self._mend(sender, m.index)
                self._election.on_pre_vote(sender, m, stalled=self._is_stalled())
            case msg.PreVoteAnswer():
                self._mend(sender, m.index)
                self._election.on_pre_vote_answer(sender, m, current=current)
            case msg.RequestVotes():
                self._mend(sender, m.index)
                self._election.on_request_votes(sender, m)
            case msg.Vote():
                self._mend(sender, m.index)
                self._membership.promised(sender, m.term, 0)
                self._election.on_vote(sender, m, current=current)
            case msg.NewerTerm():
                self._election.on_newer_term(sender, m, current=current)
            case msg.EntriesWanted():
                self._spreading.bring_up_to_date(sender, m.first, event.epoch)
            case msg.Entries():
                self._recovery.on_entries(sender, event.epoch, m)
            case msg.SnapshotWanted():
                self._sync.on_wanted(sender)
            case msg.SnapshotOffer():
                self._sync.on_offer(sender, m)
            case msg.Goodbye():
                self._membership.said_goodbye(sender, event.boot, seated=sender in members)
                self._aggregation.heard_goodbye(sender, digest_of(event.sealed))
            case msg.PeerRecord():
                self._spreading.met(sender)
                if m.role == "node":
                    self._trainee.met(sender)
                self._ctx.emit(RememberPeer(sender, event.sealed))
            case msg.OwnerWordMessage():
                if self._aggregation.refuses_word(m.word) is None and self._aggregation.heard_word(m.word):
                    self._spreading.pass_on(m.word)
            case _:
                pass  # announcements and reports are the tracker's

    def _mend(self, peer: PeerId, index: int) -> None:
        """A voter of this committee lags: give it what it lacks."""
        if index < self._log.index and peer in self._log.committee.members:
            self._spreading.bring_up_to_date(peer, index + 1)

    def _on_heartbeat(self, event: ev.MessageReceived, m: msg.Heartbeat) -> None:
        sender, members = event.sender, self._log.committee.members
        if event.boot < self._membership.boot_seen(sender):
            return  # of an earlier life, late or played back
        stuck = self._membership.index_of(sender) == m.index
        reborn = self._membership.heard(sender, event.boot, m)
        if reborn:
            self._aggregation.is_back(sender)
            self._delivery.reborn(sender)
            self._ctx.send(sender, self._heartbeat(sender))  # tells it the boot counter seen
        if sender in members:
            # Only voters are believed: a stranger could silence anybody's vote with one lie.
            self._ballot.told_seen(
                sender, epoch=event.epoch, boot=m.boot_seen, term=m.term_seen, ack_index=m.ack_seen
            )
            self._pool.heard_have(sender, m.have)
            if m.leads:
                self._election.heard_aggregator(sender, m.term)
        if m.index > self._log.index:
            self._ctx.send(sender, msg.EntriesWanted(self._log.index + 1))
        elif m.index < self._log.index and self._ctx.me in members:
            seats = sorted(members)
            mine = sender[-1] % len(seats) == seats.index(self._ctx.me)
            # `stuck` since its last heartbeat: whose share it is may be gone.
            if sender in members or mine or stuck or self._log.index - m.index > 1:
                self._spreading.bring_up_to_date(sender, m.index + 1)

    def _on_header(self, event: ev.MessageReceived, m: msg.DeltaHeader) -> None:
        if self._ctx.me not in self._log.committee.members:
            return
        outcome = self._pool.note(m, event.sender, event.key, self._applied.rules)
        self._ctx.send(event.sender, msg.DeltaReceipt(m.delta, outcome, "", 0.0))

    # Deltas

    def _on_delta_arrived(self, event: ev.DeltaArrived) -> None:
        if event.outcome is not msg.Outcome.HELD:
            known = self._pool.forget(event.delta)
            if known is not None and known.sender is not None:
                receipt = msg.DeltaReceipt(event.delta, event.outcome, "", 0.0)
                self._ctx.send(known.sender, receipt)
                if known.sender == self._ctx.me:  # a voter's judgement of its own delta counts as well
                    self._delivery.on_receipt(self._ctx.me, receipt, self._log.committee)
                self._ctx.say("refused", f"a delta of {known.sender.hex()[:8]} was refused: {event.outcome}")
            return
        known = self._pool.arrived(event.delta, event.norm)
        if known is None or known.header is None or known.sender is None:
            return
        if self._ctx.me in self._log.committee.members:
            self._ctx.send(known.sender, msg.DeltaReceipt(event.delta, msg.Outcome.HELD, "", 0.0))
            for member in self._log.committee.members:
                self._ctx.send(member, msg.Have((event.delta,)))

    def _on_pass_finished(self, event: ev.PassFinished) -> None:
        rules = self._applied.rules
        if event.header.base_version > rules.version or self._ctx.me in rules.revoked:
            # Meanwhile the owner revoked this node, or dropped what the pass stands on by a recovery.
            self._ctx.emit(SettleDelta(Digest(event.header.delta), Settled.REFUSED))
            return
        self._pool.note_own(event.header, self._ctx.identity.signer.public_key)
        self._pool.check_own(event.header)
        self._delivery.finished(event.header)
        self._delivery.allow()
        self._delivery.offer(self._log.committee, held_here=())
