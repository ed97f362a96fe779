"""Checkers: they look at all machines from outside and stop the world at the first broken promise.

R1 of targets.md and the safety part of protocol.md 4. A body counts as certified once a majority of the
committee that governs its index has durably acked it in one term, whether or not anybody has noticed yet:
that is the moment from which no other body may ever be certified at that index.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from p2pdiloco.ids import Digest, PeerId, peer_id_of, short, tagged_digest
from p2pdiloco.protocol.actions import Settled, VoterRecord
from p2pdiloco.sim.lineage import Certified, Headers, Lineage, Violation
from p2pdiloco.wire.log import (
    Body,
    Committee,
    Entry,
    body_digest,
    changes_committee,
    committee_digest,
    is_recovery,
    open_body,
    state_root,
)
from p2pdiloco.wire.messages import (
    Ack,
    DeltaHeader,
    DeltaReceipt,
    Have,
    Heartbeat,
    Message,
    Outcome,
    Proposal,
    Vote,
)

if TYPE_CHECKING:
    from p2pdiloco.sim.machine import Machine
    from p2pdiloco.sim.world import World

__all__ = ["Checkers", "Violation"]


class _Voter:
    """What one voter has said and saved, over all its lives."""

    __slots__ = ("acks", "term_said", "term_seen")

    def __init__(self) -> None:
        self.acks: dict[tuple[int, int, int], tuple[Digest, bool]] = {}  # epoch, index, term -> body, last
        self.term_said = 0  # in votes and acks
        self.term_seen = 0  # of this life


class Checkers:
    """One per world; the machines call it at the moments it names.

    In each epoch there is one chain. The newest is the run's; older ones still must not be broken.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.headers: Headers = {}  # every delta ever made
        spec = world.run.spec
        self.epochs = {0: Lineage(world.run.run, 0, spec.committee.genesis, self.headers)}
        self.held: dict[Digest, set[PeerId]] = {}  # who said HAVE or HELD
        self._settled: dict[PeerId, set[Digest]] = {}
        self._voters: dict[PeerId, _Voter] = {}
        self._bodies: dict[Digest, Body] = {}
        self._tallies: dict[tuple[int, int, int, Digest, bool, bytes], set[PeerId]] = {}
        self._cut: set[PeerId] = set()  # whose state lies on what their log dropped

    # What is true

    @property
    def newest(self) -> Lineage:
        return self.epochs[max(self.epochs)]

    @property
    def chain(self) -> list[Certified]:
        return self.newest.chain

    @property
    def index(self) -> int:
        """The certified index."""
        return self.newest.index

    @property
    def version(self) -> int:
        return self.newest.version

    @property
    def sequences(self) -> dict[PeerId, int]:
        return self.newest.sequences

    @property
    def committee(self) -> Committee:
        """The newest one: it governs the next index."""
        return self.newest.committee

    def _of(self, machine: Machine) -> Lineage:
        """The chain that this machine follows."""
        return self.epochs[machine.epoch]

    def _voter(self, machine: Machine) -> _Voter:
        return self._voters.setdefault(machine.id, _Voter())

    def recovered(self, entry: Entry) -> None:
        """The owner begins an epoch with `entry`."""
        body = open_body(entry.body)
        if body.epoch in self.epochs:
            raise Violation("an owner begins an epoch once", str(body.epoch))
        found = (
            e for _, e in sorted(self.epochs.items(), reverse=True)
            if body.index - 1 <= e.index and e.head(body.index - 1) == body.previous
        )  # fmt: skip
        parent = next(found, None)
        if parent is None:
            raise Violation("a recovery stands on a certified entry", f"epoch {body.epoch}")
        lineage = parent.branch(body.epoch, body.index - 1)
        self.epochs[body.epoch] = lineage
        self._add(lineage, body, body_digest(entry.body), entry.certificate.term)

    # Acks

    def record_saved(self, machine: Machine, record: VoterRecord) -> None:
        """A voter's record is on its disk; an ack in it counts from here on."""
        ack = record.ack
        if ack is not None:
            digest = body_digest(ack.body)
            self._acked(machine, record.ack_index, ack.term, digest, open_body(ack.body), last=ack.last)
            if machine.disk.durable_index < record.ack_index - 1:
                raise Violation(
                    "certificate not durable before the next ack",
                    f"{machine.name} acks {record.ack_index}, its disk holds {machine.disk.durable_index}",
                )

    def _acked(
        self, machine: Machine, index: int, term: int, digest: Digest, body: Body, *, last: bool
    ) -> None:
        voter = self._voter(machine)
        before = voter.acks.setdefault((body.epoch, index, term), (digest, last))
        if before != (digest, last):
            raise Violation(
                "one ack for each index and term",
                f"{machine.name} acked {short(before[0])} and {short(digest)} at {index} in term {term}",
            )
        self._bodies[digest] = body
        tally = self._tallies.setdefault((body.epoch, index, term, digest, last, body.committee), set())
        if machine.id in tally:
            return
        tally.add(machine.id)
        lineage = self.epochs[body.epoch]
        if index > lineage.index + 1:
            return  # its predecessor has no majority: found when it would count
        governing = lineage.governing(index)
        if body.committee == committee_digest(governing) and self._majority(tally, governing):
            self._certified(lineage, index, digest, body, term)

    @staticmethod
    def _majority(tally: set[PeerId], committee: Committee) -> bool:
        return sum(1 for member in committee.members if member in tally) >= committee.quorum

    def _certified(self, lineage: Lineage, index: int, digest: Digest, body: Body, term: int) -> None:
        if index <= lineage.index:
            if lineage.chain[index - 1].digest != digest:
                raise Violation(
                    "one certified body for each index",
                    f"{short(lineage.chain[index - 1].digest)} and {short(digest)} at {index} (term {term})",
                )
            return
        self._add(lineage, body, digest, term)

    def _add(self, lineage: Lineage, body: Body, digest: Digest, term: int) -> None:
        world = self._world
        lineage.add(body, digest, term, world.now)
        world.trace.append(
            f"{world.now:9.3f} certified {body.index} {short(digest)} {type(body.content).__name__} in term "
            f"{term}, epoch {lineage.epoch}, committee of {lineage.committee.size}"
        )

    # Certificates and states on disks

    def entries_saved(self, machine: Machine, entries: tuple[Entry, ...]) -> None:
        for entry in entries:
            body, digest = open_body(entry.body), body_digest(entry.body)
            lineage = self.epochs.get(body.epoch)
            if lineage is None or not lineage.contains(body.index, digest):
                raise Violation(
                    "only what is certified is kept", f"{machine.name} keeps {short(digest)} at {body.index}"
                )
            if is_recovery(entry, self._world.run.spec.owner_key):
                continue
            certificate = entry.certificate
            tally = self._tallies.get(
                (body.epoch, body.index, certificate.term, digest, certificate.last, certificate.committee),
                set(),
            )
            signers = {peer_id_of(ack.key) for ack in certificate.acks}
            if not signers <= tally:
                raise Violation("a certificate holds acks that were given", f"{machine.name} at {body.index}")
            if not self._majority(signers, lineage.governing(body.index)):
                raise Violation("a certificate is a majority", f"{machine.name} at {body.index}")

    def cut(self, machine: Machine, dropped: list[Entry]) -> None:
        """A log drops entries, oldest first, only of epochs that its voter has left for good."""
        record = machine.disk.durable_record
        epochs = {open_body(entry.body).epoch for entry in dropped}
        if record is None or record.epoch <= max(epochs):
            raise Violation("only an ended epoch is dropped", f"{machine.name} drops of {sorted(epochs)}")
        if machine.state.index >= open_body(dropped[0].body).index:
            self._cut.add(machine.id)

    def installed(self, machine: Machine, before: int) -> None:
        """The state on this machine is that of the certified entry, to the bit."""
        state = machine.state
        if state.index != before + 1:
            raise Violation("entries are applied in order", f"{machine.name} {state.index} after {before}")
        self._same_root(machine)

    def snapshot_installed(self, machine: Machine, before: int) -> None:
        """It never goes back, but for a recovery; one that was on its way when that came is gone again."""
        if machine.state.index > len(machine.disk.entries):
            self._cut.add(machine.id)
            return
        if machine.state.index < before and machine.id not in self._cut:
            raise Violation(
                "a snapshot never goes back", f"{machine.name} {machine.state.index} after {before}"
            )
        self._cut.discard(machine.id)
        self._same_root(machine)

    def _same_root(self, machine: Machine) -> None:
        state, root_of, lineage = machine.state, self._world.arithmetic.root_of, self._of(machine)
        if state.index > lineage.index:
            raise Violation("only certified entries are applied", f"{machine.name} at {state.index}")
        if state.index == 0:
            return
        root = state_root(root_of(state.params), root_of(state.momentum), tagged_digest("rules", state.rules))
        if root != lineage.chain[state.index - 1].body.content.state_root:
            raise Violation("every replica has the same bits", f"{machine.name} at {state.index}")

    # What is said

    def sending(self, machine: Machine, message: Message) -> None:
        """Written before said, for everything that binds."""
        kind = type(message)
        if kind is Ack:
            self._sending_ack(machine, message)  # type: ignore[arg-type]
        elif kind is Vote:
            self._sending_vote(machine, message)  # type: ignore[arg-type]
        elif kind is Proposal:
            self._sending_proposal(machine, message)  # type: ignore[arg-type]
        elif kind is Have:
            self._has(machine, message.deltas)  # type: ignore[union-attr]
        elif kind is Heartbeat:
            if message.have:  # type: ignore[union-attr]
                self._has(machine, message.have)  # type: ignore[union-attr]
        elif kind is DeltaReceipt and message.outcome is Outcome.HELD:  # type: ignore[union-attr]
            self._has(machine, (message.delta,))  # type: ignore[union-attr]

    def _sending_ack(self, machine: Machine, ack: Ack) -> None:
        voter = self._voter(machine)
        record = machine.disk.durable_record
        if record is None or record.ack is None or record.term < ack.term:
            raise Violation("a vote is saved before it is said", f"{machine.name} ack at {ack.index}")
        given = voter.acks.get((record.epoch, ack.index, ack.term))
        if given != (ack.body, ack.last):
            raise Violation("a vote is saved before it is said", f"{machine.name} ack at {ack.index}")
        if record.ack_index == ack.index and record.ack.term == ack.term:
            raises = ack.term + 1 if ack.last else ack.term
            if record.term < raises:
                raise Violation("a hand-over ack raises the own term", f"{machine.name} term {record.term}")
        voter.term_said = max(voter.term_said, ack.term)

    def _sending_vote(self, machine: Machine, vote: Vote) -> None:
        record = machine.disk.durable_record
        if record is None or record.term < vote.term or record.ack != vote.last_ack:
            raise Violation("a vote is saved before it is said", f"{machine.name} vote for {vote.term}")
        if vote.index > machine.disk.durable_index:
            raise Violation("certificate not durable before the next vote", machine.name)
        voter = self._voter(machine)
        voter.term_said = max(voter.term_said, vote.term)

    def _sending_proposal(self, machine: Machine, proposal: Proposal) -> None:
        record = machine.disk.durable_record
        if (
            record is None
            or record.ack is None
            or record.ack.term != proposal.term
            or record.ack.body != proposal.body
            or record.ack.last != proposal.last
        ):
            index = open_body(proposal.body).index
            raise Violation("an aggregator acks before it proposes", f"{machine.name} at {index}")
        for certified in self._of(machine).chain[: record.ack_index - 1][::-1]:
            if changes_committee(certified.body.content):
                if proposal.term <= certified.term:
                    raise Violation(
                        "a new committee is led in a later term",
                        f"{machine.name} at {record.ack_index} in term {proposal.term}",
                    )
                break

    def _has(self, machine: Machine, deltas: tuple[bytes, ...]) -> None:
        for raw in deltas:
            delta = Digest(raw)
            holders = self.held.setdefault(delta, set())
            if machine.id not in holders:
                if delta not in machine.disk.blobs:
                    raise Violation("HAVE means on the disk", f"{machine.name} {short(delta)}")
                holders.add(machine.id)

    # Lives

    def started(self, machine: Machine) -> None:
        voter = self._voter(machine)
        voter.term_seen = 0
        record = machine.disk.record
        if record is not None and record.term < voter.term_said:
            raise Violation("a term never goes back", f"{machine.name} {record.term} < {voter.term_said}")

    def forget_said(self, machine: Machine) -> None:
        """The whole disk was put back to an old image: the voter cannot keep its word by itself (R1b)."""
        self._voter(machine).term_said = 0

    def after(self, machine: Machine) -> None:
        """After each event of a machine: cheap, so that it can be."""
        brain = machine.brain
        assert brain is not None
        voter = self._voters[machine.id]
        term = brain.term
        if term < voter.term_seen:
            raise Violation("a term never goes back", f"{machine.name} {term} < {voter.term_seen}")
        voter.term_seen = term

    # Deltas (R3)

    def made(self, machine: Machine, header: DeltaHeader) -> None:
        self.headers[Digest(header.delta)] = (machine.id, header)

    def settled(self, machine: Machine, delta: Digest, how: Settled) -> None:
        """A node settles an own delta once, and as the log says."""
        mine = self._settled.setdefault(machine.id, set())
        if delta in mine and not any(h.delta == delta for h in machine.disk.own.in_flight):
            raise Violation("a delta is settled once", f"{machine.name} {short(delta)} {how}")
        mine.add(delta)
        peer, header = self.headers[delta]
        lineage = self._of(machine)
        listed, last = delta in lineage.listed, lineage.sequences.get(peer, 0)
        fits = {
            Settled.LISTED: listed,
            # Not above: after a disk was put back, another delta may have had the same number.
            Settled.PASSED_OVER: not listed and header.sequence <= last,
        }.get(how, not listed)
        if peer != machine.id or not fits:
            raise Violation("the log settles", f"{machine.name} takes {short(delta)} as {how}")

    def unsettled(self, machines: list[Machine]) -> list[Digest]:
        """The ledger: deltas that a majority of the newest committee, as far as it is among `machines`,
        holds and the log has not settled."""
        quorum, seats = self.committee.quorum, self.committee.members
        there = {m.id: m for m in machines if m.id in seats}
        lost = []
        for delta, holders in self.held.items():
            peer, header = self.headers[delta]
            if header.sequence <= self.sequences.get(peer, 0):
                continue
            if sum(1 for h in holders if h in there and delta in there[h].disk.blobs) >= quorum:
                lost.append(delta)
        return lost
