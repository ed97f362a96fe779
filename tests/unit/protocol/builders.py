"""Signers, a tiny run, signed headers, certified entries, and a voter's parts, for tests of the protocol.

Arrays are played: the roots after version v are `roots(v)`, and whoever asks for an outer step is told so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from p2pdiloco.ids import NO_DIGEST, Digest, PeerId, RunId, digest_of
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol.actions import Action, InstallEntry, PrepareOuterStep, Say, Send
from p2pdiloco.protocol.applied import Applied
from p2pdiloco.protocol.ballot import Ballot
from p2pdiloco.protocol.context import Context, HeldDelta, Identity, Restored
from p2pdiloco.protocol.delivery import Delivery
from p2pdiloco.protocol.delta_pool import DeltaPool
from p2pdiloco.protocol.election import Election
from p2pdiloco.protocol.membership import Membership
from p2pdiloco.protocol.node import Node
from p2pdiloco.protocol.proposals import Proposals
from p2pdiloco.protocol.run_log import RunLog
from p2pdiloco.rules.delta_layout import encoded_size
from p2pdiloco.rules.outer_step import Candidate, plan_outer_step
from p2pdiloco.rules.rescue import recovery_entry
from p2pdiloco.rules.state import RulesState, after_outer_step, genesis_state, rules_digest
from p2pdiloco.run_spec import RunSpec, run_id_of
from p2pdiloco.sim.tiny_run import tiny_run
from p2pdiloco.wire import messages as msg
from p2pdiloco.wire.codec import encode
from p2pdiloco.wire.log import (
    AckSignature,
    Body,
    Certificate,
    Committee,
    Content,
    Entry,
    Left,
    OuterStep,
    OwnerWord,
    body_digest,
    open_body,
    state_root,
)
from p2pdiloco.wire.signing import Ed25519Signer, ack_statement, delta_statement, proposal_statement

M = TypeVar("M")
A = TypeVar("A")

OWNER = Ed25519Signer(bytes([99]) * 32)
WITNESS = Ed25519Signer(bytes([1]) * 32)
NODES = tuple(Ed25519Signer(bytes([2 + i]) * 32) for i in range(9))  # NODES[0] trains, and so on
SIGNERS = {s.peer_id: s for s in (WITNESS, *NODES)}


class Run(NamedTuple):
    """A run, its genesis committee already as large as the test needs."""

    id: RunId
    spec: RunSpec

    @property
    def committee(self) -> Committee:
        return self.spec.committee.genesis


def make_run(*voters: Ed25519Signer, witness: bool = True, **changes: Any) -> Run:
    """`changes` are fields of the RunSpec, or of its committee part."""
    spec = tiny_run(OWNER, WITNESS.peer_id).spec
    seats = Committee(WITNESS.peer_id if witness else NO_DIGEST, tuple(v.peer_id for v in voters))
    inside = {k: changes.pop(k) for k in list(changes) if hasattr(spec.committee, k)}
    committee = msgspec.structs.replace(spec.committee, genesis=seats, **inside)
    spec = msgspec.structs.replace(spec, committee=committee, **changes)
    return Run(run_id_of(encode(spec)), spec)


def roots(version: int) -> tuple[Digest, Digest]:
    """Played arrays: what params and momentum hash to after `version` outer steps (from 1 on)."""
    return digest_of(b"params %d" % version), digest_of(b"momentum %d" % version)


def header(
    run: Run, sender: Ed25519Signer, sequence: int = 1, *, base: int = 0, steps: int = 4, name: bytes = b"",
    **changes: Any,
) -> msg.DeltaHeader:  # fmt: skip
    delta = digest_of(b"delta" + sender.public_key + b"%d" % sequence + name)
    made = msg.DeltaHeader(
        delta=delta, size=encoded_size(run.spec.outer.codec, run.spec.model.tensors),
        codec=run.spec.outer.codec, fragment=0, base_version=base, sequence=sequence, steps=steps,
        data_first=0, data_count=steps, loss=1.0,
        signature=sender.sign(delta_statement(run.id, delta, 0, base, sequence, steps)),
    )  # fmt: skip
    return msgspec.structs.replace(made, **changes)


def held(h: msg.DeltaHeader, sender: Ed25519Signer, norm: float = 1.0) -> HeldDelta:
    return HeldDelta(h, sender.peer_id, sender.public_key, norm)


def plan(run: Run, state: RulesState, deltas: Sequence[HeldDelta], left: Sequence[Left] = ()) -> OuterStep:
    """The next outer step, its root over the played arrays."""
    step = plan_outer_step(
        state, run.spec,
        [
            Candidate(
                Digest(d.header.delta), d.sender, d.header.base_version, d.header.sequence, d.header.steps,
                d.norm, d.key, d.header.signature,
            )
            for d in deltas
        ],
        left,
    )  # fmt: skip
    assert step is not None
    return rooted(run, state, step)


def rooted(run: Run, state: RulesState, step: OuterStep) -> OuterStep:
    root = state_root(*roots(step.version), rules_digest(after_outer_step(state, step, run.spec)))
    return msgspec.structs.replace(step, state_root=root)


def body_of(log: RunLog, content: Content, **changes: Any) -> bytes:
    body = Body(log.run, log.epoch, log.index + 1, log.head, log.committee_digest, content)
    return encode(msgspec.structs.replace(body, **changes))


def sign_ack(log: RunLog, voter: Ed25519Signer, body: bytes, term: int, *, last: bool = False) -> msg.Ack:
    digest = body_digest(body)
    statement = ack_statement(
        log.run, log.epoch, log.committee_digest, term, log.index + 1, digest, last=last
    )
    return msg.Ack(log.committee_digest, term, log.index + 1, digest, last, voter.sign(statement))


def sign_proposal(
    log: RunLog, aggregator: Ed25519Signer, body: bytes, term: int, *, last: bool = False
) -> msg.Proposal:
    statement = proposal_statement(
        log.run, log.epoch, log.committee_digest, term, log.index + 1, body_digest(body), last=last
    )
    return msg.Proposal(term, body, last, aggregator.sign(statement))


def last_ack(
    log: RunLog, aggregator: Ed25519Signer, body: bytes, term: int, *, last: bool = False
) -> msg.LastAck:
    proposal = sign_proposal(log, aggregator, body, term, last=last)
    return msg.LastAck(term, body, last, aggregator.public_key, proposal.signature)


def certify(
    log: RunLog, content: Content, voters: Iterable[Ed25519Signer], *, term: int = 1, last: bool = False
) -> Entry:
    """The next entry of `log`, with a true certificate by `voters`."""
    body = body_of(log, content)
    acks = tuple(
        AckSignature(v.public_key, sign_ack(log, v, body, term, last=last).signature)
        for v in sorted(voters, key=lambda v: v.public_key)
    )
    return Entry(body, Certificate(log.committee_digest, term, last, acks))


def recover(
    log: RunLog, state: RulesState, base: int, committee: Committee, *, epoch: int = 1, term: int = 9,
    owner: Ed25519Signer = OWNER, at: tuple[Digest, Digest] | None = None,
) -> Entry:  # fmt: skip
    """The owner's recovery behind entry `base` of `log`, whose rules state is `state`."""
    return recovery_entry(
        log.run, owner, epoch=epoch, base_index=base, base=log.head_at(base), state=state,
        roots=at or roots(state.version), committee=committee, owner_sequence=state.owner_sequence + 1,
        term=term,
    )  # fmt: skip


def aggregator_of(committee: Committee, term: int) -> Ed25519Signer:
    return SIGNERS[committee.aggregator_of(term)]


def owner_word(run: Run, kind: str, sequence: int = 1, value: int = 0, peer: bytes = b"") -> OwnerWord:
    word = OwnerWord(kind, sequence, value, peer, b"")
    return msgspec.structs.replace(word, signature=OWNER.sign(word.statement(run.id, 0)))


def heartbeat(index: int = 0, **changes: Any) -> msg.Heartbeat:
    beat = msg.Heartbeat(
        index=index,
        head=NO_DIGEST,
        term=0,
        leads=False,
        boot_seen=0,
        term_seen=0,
        ack_seen=0,
        have=(),
        willing=True,
    )
    return msgspec.structs.replace(beat, **changes)


class Chain:
    """A run's certified log made by hand: what others would have certified."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.log = RunLog(run.id, run.spec)
        self.state = genesis_state(run.spec)
        self.entries: list[Entry] = []

    def add(self, content: Content, *, term: int = 1, last: bool = False) -> Entry:
        voters = [SIGNERS[m] for m in self.log.committee.members][: self.log.committee.quorum]
        entry = certify(self.log, content, voters, term=term, last=last)
        self.log.append(entry)
        self.entries.append(entry)
        return entry

    def step(self, *deltas: HeldDelta, term: int = 1, last: bool = False) -> Entry:
        content = plan(self.run, self.state, deltas)
        entry = self.add(content, term=term, last=last)
        self.state = after_outer_step(self.state, content, self.run.spec)
        return entry

    def steps(self, count: int, sender: Ed25519Signer = NODES[0]) -> list[HeldDelta]:
        """`count` outer steps with one delta each."""
        made = []
        for _ in range(count):
            version = self.state.version
            made.append(held(header(self.run, sender, version + 1, base=version), sender))
            self.step(made[-1])
        return made


class Parts:
    """A voter's parts as `protocol.node` puts them together, open to the test."""

    def __init__(
        self, run: Run, who: Ed25519Signer, restored: Restored | None = None, *, boot: int = 1,
        told: bool = True,
    ) -> None:  # fmt: skip
        """`told`: every voter has told this one that its boot counter is right."""
        restored = restored or Restored()
        self.run, self.who = run, who
        role = "witness" if who is WITNESS else "node"
        self.ctx = ctx = Context(Identity(run.id, run.spec, who, boot, role), lambda: 0.5)
        self.bodies: dict[Digest, bytes] = {}
        self.log = RunLog(run.id, run.spec, restored.entries)
        self.pool = DeltaPool(ctx, restored.held)
        self.applied = Applied(ctx, self.log, self.pool, restored)
        self.ballot = Ballot(ctx, restored.record)
        self.election = Election(ctx, self.log, self.ballot, self.bodies)
        self.membership = Membership(ctx, self.log)
        self.other_verdict: str | None = None
        self.proposals = Proposals(
            ctx, self.log, self.ballot, self.election, self.applied, self.pool, self.bodies,
            lambda content: self.other_verdict,
        )  # fmt: skip
        self.delivery = Delivery(ctx, restored.in_flight)
        if told:
            for member in run.committee.members:
                self.ballot.told_seen(member, boot=0, term=0, ack_index=0)

    def lead(self, term: int) -> None:
        """Win `term` with everybody's votes."""
        digest = self.log.committee_digest
        for member in self.log.committee.members:
            if member != self.ctx.me:
                self.election.on_vote(member, msg.Vote(digest, term, self.log.index, None), current=True)
        assert self.election.leading == term

    def hold(self, *deltas: HeldDelta) -> None:
        """Noted, arrived, and HAVE'd by the whole committee."""
        for d in deltas:
            self.pool.note(d.header, d.sender, d.key, self.applied.rules)
            self.pool.arrived(Digest(d.header.delta), d.norm)
            for member in self.log.committee.members:
                self.pool.heard_have(member, [d.header.delta])

    def prepare(self) -> None:
        """Answer what was asked to be computed."""
        for action in take(self.ctx.out, PrepareOuterStep):
            self.applied.prepared(action.ticket, *roots(action.step.version))

    def drain(self) -> list[Action]:
        out = list(self.ctx.out)
        self.ctx.out.clear()
        return out


class Driven:
    """A whole node behind its one door; outer steps are computed at once."""

    def __init__(
        self, run: Run, who: Ed25519Signer, restored: Restored | None = None, *, boot: int = 1,
        told: bool = True, now: float = 100.0, role: str = "",
    ) -> None:  # fmt: skip
        role = role or ("witness" if who is WITNESS else "node")
        self.run, self.who, self.now = run, who, now
        self.node = Node(Identity(run.id, run.spec, who, boot, role), restored or Restored(), lambda: 0.5)
        self.began = self.do(ev.Started())
        if told:
            for member in self.node.committee.members:
                if member != who.peer_id:
                    self.hear(SIGNERS[member], heartbeat(boot_seen=0))

    def do(self, event: ev.Event) -> list[Action]:
        actions = list(self.node.handle(event, self.now))
        for action in take(actions, PrepareOuterStep):
            done = ev.OuterStepPrepared(action.ticket, *roots(action.step.version))
            actions += self.do(done)
        return actions

    def hear(
        self, sender: Ed25519Signer, message: msg.Message, *, boot: int = 1, epoch: int | None = None
    ) -> list[Action]:
        """`epoch`: of the envelope; None: the node's own."""
        epoch = self.node.epoch if epoch is None else epoch
        return self.do(ev.MessageReceived(sender.peer_id, sender.public_key, boot, message, b"", epoch))

    def wait(self, seconds: float) -> list[Action]:
        self.now += seconds
        return self.do(ev.Ticked())

    def deliver(self, d: HeldDelta) -> list[Action]:
        """A header, then its blob, then everybody HAS it."""
        sender = SIGNERS[d.sender]
        actions = self.hear(sender, d.header)
        actions += self.do(ev.DeltaArrived(Digest(d.header.delta), msg.Outcome.HELD, d.norm))
        for member in self.node.committee.members:
            if member != self.who.peer_id:
                actions += self.hear(SIGNERS[member], msg.Have((d.header.delta,)))
        return actions


def take(actions: Sequence[Action], kind: type[A]) -> list[A]:
    return [a for a in actions if isinstance(a, kind)]


def sent(actions: Sequence[Action], kind: type[M], to: PeerId | None = None) -> list[M]:
    """Messages of one kind that were sent (to one peer)."""
    return [a.message for a in take(actions, Send) if isinstance(a.message, kind) and to in (None, a.peer)]


def said(actions: Sequence[Action]) -> list[str]:
    return [a.kind for a in take(actions, Say)]


def installed(actions: Sequence[Action]) -> list[int]:
    return [a.index for a in take(actions, InstallEntry)]


def open_proposal(proposal: msg.Proposal) -> Content:
    return open_body(proposal.body).content
