"""How far the swarm is, as far as this node should believe what it hears (protocol.md 3).

Anybody may say any index. What a node waits for before it trains is what a quorum of its committee has, so no
minority holds it up; and it waits no longer than a limit.
"""

from __future__ import annotations

from collections.abc import Callable

from p2pdiloco import limits
from p2pdiloco.ids import PeerId
from p2pdiloco.wire.log import Committee

ALONE_S = 10.0  # so long after the start a quorum is waited for: then whoever was heard must do


class Heads:
    """Certified indices that others said, and whether this node has caught up with them."""

    def __init__(self, me: PeerId, clock: Callable[[], float]) -> None:
        self._me = me
        self._clock = clock
        self._said: dict[PeerId, int] = {}
        self._began: float | None = None
        self._index = -1
        self._index_at = 0.0

    def heard(self, peer: PeerId, index: int, committee: Committee) -> None:
        """`peer` says to have applied the entries up to `index`."""
        self._said.pop(peer, None)
        self._said[peer] = index
        if len(self._said) > limits.peers_max:
            members = committee.members
            del self._said[next(p for p in self._said if p not in members)]

    def said_by_quorum(self, committee: Committee) -> int | None:
        """The highest index that a quorum of the others' seats has reached; None while too few were heard."""
        others = self._others(committee)
        needed = min(committee.quorum, len(others))
        said = self._said_by(others)
        if len(said) < needed:
            return None
        return said[needed - 1] if needed else 0

    def caught_up(self, index: int, committee: Committee) -> bool:
        """Whether a node with the entries up to `index` may begin to train; asked again and again.

        The committee is the one of its own log. True, too, when nobody of it was heard within `ALONE_S`, and
        when `index` has not moved for `limits.catch_up_s_max`: training on an older state is no harm.
        """
        now = self._clock()
        if self._began is None:
            self._began = now
        if index != self._index:
            self._index, self._index_at = index, now
        if now - self._index_at > limits.catch_up_s_max:
            return True
        target = self.said_by_quorum(committee)
        if target is None:
            if now - self._began <= ALONE_S:
                return False
            target = min(self._said_by(self._others(committee)), default=0)
        return index >= target

    def _others(self, committee: Committee) -> list[PeerId]:
        return [m for m in committee.members if m != self._me]

    def _said_by(self, peers: list[PeerId]) -> list[int]:
        """Highest first."""
        return sorted((self._said[p] for p in peers if p in self._said), reverse=True)
