"""A small swarm in lockstep: messages arrive at once, each as often as the test says (T3, S9)."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from p2pdiloco.ids import Digest, PeerId
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol.actions import (
    Action,
    FetchDelta,
    SaveEntries,
    Send,
    Settled,
    SettleDelta,
    UploadDelta,
)
from p2pdiloco.wire import messages as msg
from p2pdiloco.wire.log import OuterStep

from .builders import (
    NODES,
    SIGNERS,
    WITNESS,
    Driven,
    Run,
    header,
    make_run,
    take,
)

A, B = NODES[:2]
RUN = make_run(A, B)
BEAT = RUN.spec.committee.heartbeat_s


def settled(actions: list[Action]) -> list[tuple[bytes, Settled]]:
    return [(a.delta, a.how) for a in take(actions, SettleDelta)]


class Swarm:
    """Nodes whose messages arrive at once, each as often as `copies` says; their blobs always come."""

    def __init__(self, run: Run, *who: Any, copies: int = 1) -> None:
        self.run, self.copies = run, copies
        self.queue: deque[tuple[PeerId, Any, msg.Message]] = deque()
        self.nodes = {s.peer_id: Driven(run, s, told=False) for s in who}
        self.norms: dict[bytes, float] = {}
        self.done: dict[PeerId, list[Action]] = {p: [] for p in self.nodes}
        self.now = 100.0
        for peer, n in self.nodes.items():
            self.perform(peer, n.began)
        self.settle()

    def perform(self, peer: PeerId, actions: list[Action]) -> None:
        self.done[peer] += actions
        node = self.nodes[peer]
        for a in actions:
            match a:
                case Send():
                    self.queue += [(a.peer, node.who, a.message)] * self.copies
                case UploadDelta() if a.peer in self.nodes:
                    self.perform(a.peer, self.nodes[a.peer].do(arrived(a.delta)))
                    self.perform(peer, node.do(ev.DeltaUploaded(a.delta, a.peer)))
                case FetchDelta():
                    self.perform(peer, node.do(arrived(a.delta)))

    def settle(self) -> None:
        while self.queue:
            to, sender, m = self.queue.popleft()
            if to in self.nodes:
                self.perform(to, self.nodes[to].hear(sender, m))

    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += BEAT / 2
            for peer, node in self.nodes.items():
                self.perform(peer, node.wait(BEAT / 2))
                self.settle()

    def train(self, *who: Any) -> None:
        """Each of them finishes a pass on its newest state."""
        for s in who:
            node = self.nodes[s.peer_id]
            made = [h for h in take(self.done[s.peer_id], Send) if isinstance(h.message, msg.DeltaHeader)]
            sequence = 1 + max((h.message.sequence for h in made), default=0)  # type: ignore[union-attr]
            h = header(self.run, s, sequence, base=node.node.version)
            self.perform(s.peer_id, node.do(ev.PassFinished(h)))
            self.settle()


def arrived(delta: Digest) -> ev.DeltaArrived:
    return ev.DeltaArrived(delta, msg.Outcome.HELD, 1.0)


def contributions(node: Driven) -> list[bytes]:
    log = node.node.log
    contents = [log.content(i) for i in range(1, log.index + 1)]
    return [c.delta for step in contents if isinstance(step, OuterStep) for c in step.contributions]


@pytest.mark.parametrize("copies", [1, 3], ids=["every message once", "every message three times"])
def test_a_swarm_makes_versions_hands_over_and_counts_each_delta_once(copies: int) -> None:
    """T3, S9: duplicates of any message change nothing."""
    swarm = Swarm(RUN, WITNESS, A, B, copies=copies)
    swarm.wait(5)
    for _ in range(6):
        swarm.train(A, B)
        swarm.wait(2)
    swarm.wait(RUN.spec.outer.deadline_passes * RUN.spec.inner.pass_s)
    nodes = list(swarm.nodes.values())
    assert len({n.node.version for n in nodes}) == 1
    assert nodes[0].node.version >= 6
    assert len({n.node.root for n in nodes}) == 1
    listed = contributions(nodes[0])
    assert len(listed) == len(set(listed)) == 12
    terms = [nodes[0].node.log.term_of(i) for i in range(1, 7)]
    assert terms == [terms[0]] * 3 + [terms[0] + 1] * 3  # rotation 3: a hand-over to the next term
    assert sum(n.node.leading for n in nodes) == 1
    for s in (A, B):
        assert [how for _, how in settled(swarm.done[s.peer_id])] == [Settled.LISTED] * 6
        assert swarm.nodes[s.peer_id].node.in_flight == ()


def test_one_node_beside_its_witness_goes_on_alone() -> None:
    """A2."""
    run = make_run()
    swarm = Swarm(run, WITNESS, A)
    swarm.wait(2)
    for _ in range(3):
        swarm.train(A)
        swarm.wait(1)
    assert [n.node.version for n in swarm.nodes.values()] == [3, 3]
    assert swarm.nodes[WITNESS.peer_id].node.leading


def test_replaying_a_whole_life_of_messages_changes_nothing() -> None:
    """T3: captured deltas, proposals, acks and votes, sent again after the fact."""
    swarm = Swarm(RUN, WITNESS, A, B)
    swarm.wait(10)
    for _ in range(3):
        swarm.train(A, B)
        swarm.wait(1)
    before = {p: (n.node.index, n.node.root, n.node.version) for p, n in swarm.nodes.items()}
    captured = [(p, a) for p, done in swarm.done.items() for a in take(done, Send)]
    for sender, a in captured:
        if a.peer in swarm.nodes:
            actions = swarm.nodes[a.peer].hear(SIGNERS[sender], a.message)
            assert take(actions, SaveEntries) == []
            assert take(actions, SettleDelta) == []
    assert {p: (n.node.index, n.node.root, n.node.version) for p, n in swarm.nodes.items()} == before
