"""The run's owner in a simulated world: says words, and rescues a run from what some machines still have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from p2pdiloco.protocol import events as fact
from p2pdiloco.protocol.node import Node
from p2pdiloco.rules.rescue import recovery_entry, rescue_committee
from p2pdiloco.rules.state import RulesState, genesis_state
from p2pdiloco.sim.keys import signer_named
from p2pdiloco.wire.codec import decode
from p2pdiloco.wire.log import Entry, OwnerWord, open_body
from p2pdiloco.wire.messages import Entries, OwnerWordMessage
from p2pdiloco.wire.signing import Signer

if TYPE_CHECKING:
    from p2pdiloco.sim.machine import Machine
    from p2pdiloco.sim.world import World


class Owner:
    """One key, used in one place: it remembers which epochs it began."""

    def __init__(self, world: World, signer: Signer | None = None) -> None:
        """`signer`: a liar's."""
        self._world = world
        self._signer = signer or signer_named("owner", real=world.real_keys)
        self.epoch = 0
        self.said = 0  # words

    def rescue(self, among: Sequence[Machine], seats: Sequence[Machine] | None = None) -> Entry | None:
        """Begin the next epoch from the newest state among these machines, and tell them.

        `seats`: who may have one; left out: those of `among` that have that state. None where nobody has one.
        """
        entry = self.entry(among, seats)
        if entry is not None:
            self._world.checkers.recovered(entry)
            self.show(entry, among)
        return entry

    def entry(self, among: Sequence[Machine], seats: Sequence[Machine] | None = None) -> Entry | None:
        """The recovery, said to nobody."""
        world = self._world
        nodes = [(m, m.brain) for m in among if m.up and isinstance(m.brain, Node) and m.brain.roots]
        # The newest epoch first: an entry of an older one may be left behind already.
        best = max(nodes, key=lambda n: (n[1].epoch, n[0].state.index), default=None)
        if best is None:
            return None
        state, node = best[0].state, best[1]
        rules = decode(state.rules, RulesState) if state.rules else genesis_state(world.run.spec)
        there = [m for m, n in nodes if n.votes and n.epoch == node.epoch and m.state.index == state.index]
        committee = rescue_committee(world.run.spec, rules, [m.id for m in seats or there])
        if committee is None:
            return None
        self.epoch = max(self.epoch, node.epoch) + 1
        root_of = world.arithmetic.root_of
        world.trace.append(f"{world.now:9.3f}    owner recovers from {state.index}, epoch {self.epoch}")
        return recovery_entry(
            world.run.run, self._signer, epoch=self.epoch, base_index=state.index,
            base=node.log.head_at(state.index), state=rules,
            roots=(root_of(state.params), root_of(state.momentum)), committee=committee,
            owner_sequence=rules.owner_sequence + 1, term=max(n.term for _, n in nodes) + 1,
        )  # fmt: skip

    def say(self, kind: str, to: Sequence[Machine]) -> None:
        """The owner's next word, to whoever carries it to the committee."""
        self.said += 1
        word = OwnerWord(kind, self.said, 0, b"", b"")
        statement = word.statement(self._world.run.run, self.epoch)
        message = OwnerWordMessage(msgspec.structs.replace(word, signature=self._signer.sign(statement)))
        for machine in to:
            me = self._signer
            machine.post(fact.MessageReceived(me.peer_id, me.public_key, 1, message, b"", self.epoch))

    def show(self, entry: Entry | None, to: Sequence[Machine]) -> None:
        """A message as anybody might send it."""
        assert entry is not None, "nothing to show"
        body = open_body(entry.body)
        message, me = Entries((entry,), body.index), self._signer
        for machine in to:
            machine.post(fact.MessageReceived(me.peer_id, me.public_key, 1, message, b"", body.epoch))
