"""Joining far behind, or with a damaged state: one snapshot, then the entries since (protocol.md 7).

A snapshot is believed because it hashes to the state root of an entry that a majority certified.
"""

from __future__ import annotations

from p2pdiloco import limits
from p2pdiloco.errors import PeerError
from p2pdiloco.ids import Digest, PeerId, merkle_root, tagged_digest
from p2pdiloco.protocol.actions import FetchSnapshot
from p2pdiloco.protocol.applied import Applied
from p2pdiloco.protocol.context import Context
from p2pdiloco.protocol.run_log import RunLog
from p2pdiloco.rules.state import RulesState, genesis_state
from p2pdiloco.wire.codec import decode, encode
from p2pdiloco.wire.log import state_root
from p2pdiloco.wire.messages import SnapshotOffer, SnapshotWanted


class SnapshotSync:
    """Asks for offers, checks them against the log, has the newest fetched."""

    def __init__(self, ctx: Context, log: RunLog, applied: Applied, own: tuple[SnapshotOffer, ...]) -> None:
        self._ctx = ctx
        self._log = log
        self._applied = applied
        self._own = [offer for offer in own if self._is_certified(offer)]
        self._asked_at: float | None = None
        self._asked_last = 0.0
        self._asked: tuple[PeerId, ...] = ()
        self._early: int | None = None  # the lowest index on offer that the log has not come to
        self._patient = False
        self._fetching: tuple[SnapshotOffer, RulesState] | None = None
        self._offers: dict[int, tuple[SnapshotOffer, RulesState, set[PeerId]]] = {}
        self._failed: set[int] = set()
        self._abandoned: int | None = None  # still being fetched, though the log left its index behind
        self._jumped = False  # over one snapshot, and not current since

    @property
    def fetching(self) -> bool:
        return self._fetching is not None or self._abandoned is not None

    @property
    def wake_at(self) -> float | None:
        """When `tick` has something to do though nothing was heard."""
        at = self._asked_last + limits.snapshot_ask_s_min
        return at if self._came_early and not self.fetching and at > self._ctx.now else None

    @property
    def _came_early(self) -> bool:
        """Whether the log has come to what was on offer before."""
        return self._early is not None and self._early <= self._log.index

    @property
    def newest_own(self) -> int:
        return self._own[-1].index if self._own else 0

    def taken(self, offer: SnapshotOffer) -> int | None:
        """A snapshot of our own is served from now on. The version up to which deltas may go, if any."""
        self._own.append(offer)
        dropped = self._own[: -limits.snapshots_kept]
        del self._own[: -limits.snapshots_kept]
        if not dropped:
            return None
        return decode(self._own[0].rules, RulesState).version

    def cut(self, index: int) -> None:
        """The log was cut off after `index`: snapshots of what is gone are no snapshots of this run."""
        self._own = [offer for offer in self._own if offer.index <= index]
        self._offers.clear()
        self._asked_at = None
        if self._fetching is not None and self._fetching[0].index > index:
            self._abandoned, self._fetching = self._fetching[0].index, None

    def go_back(self) -> None:
        """The state here was cut off: to the newest own snapshot, or to version 0."""
        if self._own:
            offer, rules = self._own[-1], decode(self._own[-1].rules, RulesState)
        else:
            offer, rules = self._version_0()
        self._applied.went_back(offer.index, rules, *_roots_of(offer))
        self._fetching = (offer, rules)
        if self._abandoned is None:  # two at once would overtake each other
            self._fetch()

    def _fetch(self) -> None:
        """What is here already is fetched from nobody."""
        assert self._fetching is not None
        offer, rules = self._fetching
        donors = tuple(p for p in self._log.committee.members if p != self._ctx.me)
        self._ctx.emit(FetchSnapshot(offer, rules.version, donors))

    def was_abandoned(self, index: int, *, installed: bool) -> bool:
        """Whether what ended is a snapshot that the log left behind. `installed`: its arrays are here now."""
        if self._abandoned is None or self._abandoned != index:
            return False
        self._abandoned = None
        if self._fetching is not None:
            self._fetch()
        elif installed:
            self.go_back()
        return True

    def on_wanted(self, peer: PeerId) -> None:
        if self._own:
            self._ctx.send(peer, self._own[-1])

    def is_far(self, behind: int) -> bool:
        """Whether `behind` entries are better jumped over than applied.

        Who has a snapshot goes on from it, however long that took: a joiner on a slow link would otherwise
        chase the newest one for ever (scenario L1). Donors keep the deltas since their older snapshot: who
        stands before that one finds none.
        """
        if behind == 0:
            self._jumped = False
        if not self._jumped:
            return behind > limits.catch_up_versions_max
        newest = self._log.version_at(self._log.index) // limits.snapshot_every_versions
        older = (newest - limits.snapshots_kept + 1) * limits.snapshot_every_versions
        return self._applied.rules.version < older

    def tick(self, peers: list[PeerId], *, needed: bool) -> bool:
        """Ask, choose, fetch. True while the log should wait for a snapshot instead of being applied."""
        if self.fetching:
            return True
        if not needed:
            self._asked_at = None
            return False
        if self._asked_at is None:
            self._asked_at = self._ctx.now
            self._patient = bool(peers)
            self._offers.clear()
            self._ask(peers)
            return self._patient
        patience = self._ctx.now - self._asked_at
        best = max((i for i in self._offers if i not in self._failed), default=None)
        if best is not None and (patience >= self._ctx.spec.committee.heartbeat_s or self._all_said):
            offer, rules, donors = self._offers[best]
            self._fetching = (offer, rules)
            self._ctx.say("syncing", f"fetching the snapshot of version {rules.version}")
            self._ctx.emit(FetchSnapshot(offer, rules.version, tuple(sorted(donors))))
            return True
        if self._came_early and self._ctx.now - self._asked_last >= limits.snapshot_ask_s_min:
            self._ask(peers)  # the entries up to what was offered were still on their way
        if patience > limits.snapshot_patience_heartbeats * self._ctx.spec.committee.heartbeat_s:
            self._ask(peers)
            self._asked_at = self._ctx.now
            self._failed.clear()
            if self._applied.diverged and not self._offers:
                self._start_over(peers)
                return True
            self._patient = False  # nobody has one: go through the entries
        return self._patient or self._applied.diverged

    def _start_over(self, peers: list[PeerId]) -> None:
        """Nobody serves a snapshot yet: version 0, which the RunSpec names, and all entries since."""
        self._fetching = (offer, _) = self._version_0()
        self._ctx.say("syncing", "nobody offers a snapshot: starting over from version 0")
        self._ctx.emit(FetchSnapshot(offer, 0, tuple(peers)))

    def _version_0(self) -> tuple[SnapshotOffer, RulesState]:
        genesis, rules = self._ctx.spec.genesis, genesis_state(self._ctx.spec)
        return SnapshotOffer(0, genesis.params, genesis.momentum, encode(rules)), rules

    def _ask(self, peers: list[PeerId]) -> None:
        self._asked_last, self._early = self._ctx.now, None
        self._asked = tuple(peers[: limits.snapshot_donors_max])
        for peer in self._asked:
            self._ctx.send(peer, SnapshotWanted())

    @property
    def _all_said(self) -> bool:
        """Whether whoever was asked has offered something that can be used."""
        said = {p for i, (_, _, donors) in self._offers.items() if i not in self._failed for p in donors}
        return said.issuperset(self._asked)

    def on_offer(self, peer: PeerId, offer: SnapshotOffer) -> None:
        """Raises: PeerError BAD_SNAPSHOT if it does not hash to what was certified."""
        # A damaged state is replaced by an older one too: without it there may be no newer one ever.
        useful = self._applied.diverged or offer.index > self._applied.index
        if self._asked_at is None or not useful or offer.index <= 0:
            return
        if offer.index > self._log.index:
            self._early = offer.index if self._early is None else min(self._early, offer.index)
            return
        known = self._offers.get(offer.index)
        if known is not None and known[0] == offer:
            known[2].add(peer)
            return
        rules = decode(offer.rules, RulesState)
        if not self._is_certified(offer):
            raise PeerError("BAD_SNAPSHOT", f"index {offer.index} is not the state that was certified")
        if len(self._offers) < limits.snapshot_donors_max:
            self._offers[offer.index] = (offer, rules, {peer})

    def _is_certified(self, offer: SnapshotOffer) -> bool:
        """Whether it hashes to the root of the entry at its index. One on disk may be of an ended epoch."""
        if not 0 < offer.index <= self._log.index:
            return False
        root = state_root(*_roots_of(offer), tagged_digest("rules", offer.rules))
        return root == self._log.content(offer.index).state_root

    def fetched(self, index: int) -> bool:
        """The chunks are verified and installed. True if that was the one asked for."""
        if self._fetching is None or self._fetching[0].index != index:
            return False
        offer, rules = self._fetching
        self._fetching = None
        self._asked_at = None
        self._jumped = True
        self._applied.snapshot_installed(index, rules, *_roots_of(offer))
        if index > 0:
            self._own = [kept for kept in self._own if kept.index != index] + [offer]
            self._own.sort(key=lambda kept: kept.index)
            del self._own[: -limits.snapshots_kept]
        return True

    def not_fetched(self, index: int) -> None:
        self._failed.add(index)
        self._fetching = None
        self._asked_at = None


def _roots_of(offer: SnapshotOffer) -> tuple[Digest, Digest]:
    """Of params and momentum."""
    return merkle_root([Digest(c) for c in offer.params]), merkle_root([Digest(c) for c in offer.momentum])
