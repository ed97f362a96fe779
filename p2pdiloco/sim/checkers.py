"""Checkers: they look at all machines from outside and stop the world at the first broken promise.

R1 of targets.md and the safety part of protocol.md 4. A body counts as certified once a majority of the
committee that governs its index has durably acked it in one term, whether or not anybody has noticed yet:
that is the moment from which no other body may ever be certified at that index.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from p2pdiloco.ids import Digest, PeerId, peer_id_of, short, tagged_digest
from p2pdiloco.protocol.actions import Settled, VoterRecord
from p2pdiloco.wire.log import (
    Body,
    Committee,
    Contribution,
    Entry,
    Membership,
    OuterStep,
    Refused,
    body_digest,
    committee_digest,
    genesis_digest,
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


class Violation(Exception):
    """A promise was broken."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule = rule


class Certified:
    """One index of the only chain there may be."""

    __slots__ = ("at", "body", "committee", "content_root", "digest", "term")

    def __init__(self, body: Body, digest: Digest, committee: Committee, term: int, at: float) -> None:
        self.body = body
        self.digest = digest
        self.committee = committee  # governs the next index
        self.term = term
        self.at = at  # seconds


class _Voter:
    """What one voter has said and saved, over all its lives."""

    __slots__ = ("acks", "term_said", "term_seen")

    def __init__(self) -> None:
        self.acks: dict[tuple[int, int], tuple[Digest, bool]] = {}  # (index, term) -> (body, last)
        self.term_said = 0  # in votes and acks
        self.term_seen = 0  # of this life


class Checkers:
    """One per world; the machines call it at the moments it names."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.chain: list[Certified] = []
        self.listed: dict[Digest, int] = {}  # delta -> index
        self.refused: dict[Digest, int] = {}
        self.sequences: dict[PeerId, int] = {}  # highest settled by the log
        self.headers: dict[Digest, tuple[PeerId, DeltaHeader]] = {}  # every delta ever made
        self.held: dict[Digest, set[PeerId]] = {}  # who said HAVE or HELD
        self._settled: dict[PeerId, set[Digest]] = {}
        self._voters: dict[PeerId, _Voter] = {}
        self._bodies: dict[Digest, Body] = {}
        self._tallies: dict[tuple[int, int, Digest, bool, bytes], set[PeerId]] = {}
        self.version = 0  # outer steps certified

    # What is true

    @property
    def index(self) -> int:
        """The certified index."""
        return len(self.chain)

    @property
    def committee(self) -> Committee:
        """The newest one: it governs the next index."""
        return self.chain[-1].committee if self.chain else self._world.run.spec.committee.genesis

    def head(self, index: int) -> Digest:
        return self.chain[index - 1].digest if index else genesis_digest(self._world.run.run)

    def _voter(self, machine: Machine) -> _Voter:
        return self._voters.setdefault(machine.id, _Voter())

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
        before = voter.acks.setdefault((index, term), (digest, last))
        if before != (digest, last):
            raise Violation(
                "one ack for each index and term",
                f"{machine.name} acked {short(before[0])} and {short(digest)} at {index} in term {term}",
            )
        self._bodies[digest] = body
        tally = self._tallies.setdefault((index, term, digest, last, body.committee), set())
        if machine.id in tally:
            return
        tally.add(machine.id)
        if index <= self.index:
            governing = (
                self.chain[index - 2].committee if index > 1 else self._world.run.spec.committee.genesis
            )
        elif index == self.index + 1:
            governing = self.committee
        else:
            return  # its predecessor has no majority: found when it would count
        if body.committee == committee_digest(governing) and self._majority(tally, governing):
            self._certified(index, digest, body, term)

    @staticmethod
    def _majority(tally: set[PeerId], committee: Committee) -> bool:
        return sum(1 for member in committee.members if member in tally) >= committee.quorum

    def _certified(self, index: int, digest: Digest, body: Body, term: int) -> None:
        if index <= self.index:
            if self.chain[index - 1].digest != digest:
                raise Violation(
                    "one certified body for each index",
                    f"{short(self.chain[index - 1].digest)} and {short(digest)} at {index} (term {term})",
                )
            return
        if body.index != index or body.previous != self.head(index - 1):
            raise Violation("chain", f"the body certified at {index} does not follow {index - 1}")
        content = body.content
        committee = content.committee if isinstance(content, Membership) else self.committee
        if isinstance(content, OuterStep):
            self._counted(content, index)
        self.chain.append(Certified(body, digest, committee, term, self._world.now))
        world = self._world
        world.trace.append(
            f"{world.now:9.3f} certified {index} {short(digest)} {type(content).__name__} in term {term}, "
            f"committee of {committee.size}"
        )

    def _counted(self, step: OuterStep, index: int) -> None:
        """No delta counts twice, none out of order, none of what was refused."""
        if step.version != self.version + 1:
            raise Violation("versions count outer steps", f"{step.version} after {self.version}")
        self.version = step.version
        for c in step.contributions:
            delta, peer = Digest(c.delta), PeerId(c.peer)
            if delta in self.listed or delta in self.refused:
                raise Violation("a delta counts once", f"{short(delta)} again at {index}")
            if c.sequence <= self.sequences.get(peer, 0):
                raise Violation("sequences rise", f"{c.sequence} of {short(peer)} at {index}")
            made = self.headers.get(delta)
            if made is None or made[0] != peer or made[1].base_version != c.base_version:
                raise Violation("credit follows the delta", f"{short(delta)} at {index}")
            self.listed[delta] = index
        for r in step.refused:
            self.refused[Digest(r.delta)] = index
        everything: list[Contribution | Refused] = [*step.contributions, *step.refused]
        for named in everything:
            peer = PeerId(named.peer)
            self.sequences[peer] = max(self.sequences.get(peer, 0), named.sequence)

    # Certificates and states on disks

    def entries_saved(self, machine: Machine, entries: tuple[Entry, ...]) -> None:
        for entry in entries:
            body, digest = open_body(entry.body), body_digest(entry.body)
            if body.index > self.index or self.chain[body.index - 1].digest != digest:
                raise Violation(
                    "only what is certified is kept", f"{machine.name} keeps {short(digest)} at {body.index}"
                )
            certificate = entry.certificate
            tally = self._tallies.get(
                (body.index, certificate.term, digest, certificate.last, certificate.committee), set()
            )
            signers = {peer_id_of(ack.key) for ack in certificate.acks}
            if not signers <= tally:
                raise Violation("a certificate holds acks that were given", f"{machine.name} at {body.index}")
            governing = (
                self.chain[body.index - 2].committee
                if body.index > 1
                else self._world.run.spec.committee.genesis
            )
            if not self._majority(signers, governing):
                raise Violation("a certificate is a majority", f"{machine.name} at {body.index}")

    def installed(self, machine: Machine, before: int) -> None:
        """The state on this machine is that of the certified entry, to the bit."""
        state = machine.state
        if state.index != before + 1:
            raise Violation("entries are applied in order", f"{machine.name} {state.index} after {before}")
        self._same_root(machine)

    def snapshot_installed(self, machine: Machine, before: int) -> None:
        if machine.state.index < before:
            raise Violation(
                "a snapshot never goes back", f"{machine.name} {machine.state.index} after {before}"
            )
        self._same_root(machine)

    def _same_root(self, machine: Machine) -> None:
        state, root_of = machine.state, self._world.arithmetic.root_of
        if state.index > self.index:
            raise Violation("only certified entries are applied", f"{machine.name} at {state.index}")
        root = state_root(root_of(state.params), root_of(state.momentum), tagged_digest("rules", state.rules))
        if root != self.chain[state.index - 1].body.content.state_root:
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
        given = voter.acks.get((ack.index, ack.term))
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
        for certified in self.chain[: record.ack_index - 1][::-1]:
            if isinstance(certified.body.content, Membership):
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
        last = self.sequences.get(peer, 0)
        fits = {
            Settled.LISTED: delta in self.listed,
            # Not above: after a disk was put back, another delta may have had the same number.
            Settled.PASSED_OVER: delta not in self.listed and header.sequence <= last,
        }.get(how, delta not in self.listed)
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
