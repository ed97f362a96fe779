"""Who is there, and who should sit in the committee (protocol.md 3).

Standing and lease are the aggregator's judgement on its own monotonic clock. A voter checks only what it
can: size, that one seat changes or the size goes to the next one, revocation, and that the witness is not
dropped unless it was silent for the voter's own lease.
"""

from __future__ import annotations

from p2pdiloco import limits
from p2pdiloco.ids import NO_DIGEST, PeerId
from p2pdiloco.protocol.context import Context
from p2pdiloco.protocol.run_log import RunLog
from p2pdiloco.rules.state import RulesState, is_trusted
from p2pdiloco.wire.log import Committee
from p2pdiloco.wire.messages import Heartbeat


class _Presence:
    __slots__ = ("ack_index", "boot", "heard_at", "index", "since", "term", "willing")

    def __init__(self, now: float) -> None:
        self.heard_at = now
        self.since = now  # heard without a gap since then
        self.index = 0
        self.boot = 0
        self.term = 0  # highest own term shown, and
        self.ack_index = 0  # highest index acked
        self.willing = False


class Membership:
    """Presence of peers, and the committee that should follow."""

    def __init__(self, ctx: Context, log: RunLog) -> None:
        self._ctx = ctx
        self._log = log
        self._peers: dict[PeerId, _Presence] = {}
        self._leaving: set[PeerId] = set()
        self._started_at = ctx.now

    def started(self) -> None:
        """Leases count from here: nobody is blamed for the time in which this node was not there."""
        self._started_at = self._ctx.now

    @property
    def _witness(self) -> PeerId:
        return PeerId(self._ctx.spec.committee.genesis.witness)

    def heard(self, peer: PeerId, boot: int, m: Heartbeat) -> bool:
        """A heartbeat came. True if it is from a new life of that peer."""
        now = self._ctx.now
        seen = self._peers.get(peer)
        if seen is None:
            if len(self._peers) >= limits.peers_max:
                self._forget_oldest()
            seen = self._peers[peer] = _Presence(now)
        fresh = boot > seen.boot
        if fresh or now - seen.heard_at > self._gap_s:
            seen.since = now
        if fresh:
            self._leaving.discard(peer)
        seen.heard_at = now
        seen.index = m.index
        seen.boot = max(seen.boot, boot)
        seen.willing = m.willing
        seen.term = max(seen.term, m.term)
        return fresh

    def promised(self, voter: PeerId, term: int, ack_index: int) -> None:
        """A voter said something that its disk must remember."""
        seen = self._peers.get(voter)
        if seen is not None:
            seen.term = max(seen.term, term)
            seen.ack_index = max(seen.ack_index, ack_index)

    def promises_seen(self, voter: PeerId) -> tuple[int, int]:
        """Highest own term and acked index that `voter` has shown to this node."""
        seen = self._peers.get(voter)
        return (seen.term, seen.ack_index) if seen is not None else (0, 0)

    def said_goodbye(self, peer: PeerId, boot: int, *, seated: bool = False) -> None:
        """Of strangers nothing is remembered: keys cost nothing. One of an earlier life says nothing.

        `seated`: a voter is no stranger, even where its goodbye is the first that is heard of it.
        """
        if seated and peer not in self._peers and peer != self._ctx.me:
            seen = self._peers[peer] = _Presence(self._ctx.now)
            seen.boot = boot
        if peer in self._peers:
            if boot < self._peers[peer].boot:
                return
            self._peers[peer].willing = False
        elif peer != self._ctx.me:
            return
        self._leaving.add(peer)

    def epoch_began(self) -> None:
        """How far peers were, and what they acked, was said of a log that the owner has left behind."""
        for seen in self._peers.values():
            seen.index = seen.ack_index = 0

    def boot_seen(self, peer: PeerId) -> int:
        seen = self._peers.get(peer)
        return seen.boot if seen is not None else 0

    def index_of(self, peer: PeerId) -> int:
        seen = self._peers.get(peer)
        return seen.index if seen is not None else 0

    def is_leaving(self, peer: PeerId) -> bool:
        return peer in self._leaving

    def silent_s(self, peer: PeerId) -> float:
        """Seconds since `peer` was heard; for one never heard, since this node started."""
        if peer == self._ctx.me:
            return 0.0
        seen = self._peers.get(peer)
        return self._ctx.now - (seen.heard_at if seen is not None else self._started_at)

    def heard_within(self, seconds: float) -> list[PeerId]:
        """Peers heard from lately, sorted; this node is not among them."""
        return sorted(p for p in self._peers if self.silent_s(p) <= seconds)

    @property
    def _gap_s(self) -> float:
        """A longer silence interrupts standing."""
        return max(3 * self._ctx.spec.committee.heartbeat_s, self._ctx.spec.committee.timeout_s_max)

    # The aggregator's judgement

    def wanted(self, committee: Committee, rules: RulesState, index: int) -> Committee | None:
        """The committee that should follow, or None while this one is right.

        Never one whose majority is not there and caught up to `index`: it could not certify anything, the
        way back included, and who leaves would take the only copies of the deltas along.
        """
        new = self._judged(committee, rules, index)
        if new is None or sum(1 for m in new.members if self._is_ready(m, index)) < new.quorum:
            return None
        return new

    def _is_ready(self, voter: PeerId, index: int) -> bool:
        return self._is_present(voter) and (voter == self._ctx.me or self.index_of(voter) >= index)

    def _is_present(self, voter: PeerId) -> bool:
        lately = self.silent_s(voter) < 3 * self._ctx.spec.committee.heartbeat_s
        return lately and voter not in self._leaving

    def _judged(self, committee: Committee, rules: RulesState, index: int) -> Committee | None:
        spec = self._ctx.spec.committee
        steady = self._steady(committee, rules, index)
        gone = [v for v in committee.members if self._is_gone(v, rules)]
        leaving = [v for v in gone if v in self._leaving or v in rules.revoked]
        for seat in [*leaving, *(v for v in gone if v not in leaving)]:
            if steady:
                return self._replaced(committee, seat, steady[0])
        if leaving:
            return self._shrunk(committee, leaving)
        return self._with_witness(committee) or self._grown(committee, steady, spec.size_max)

    def _is_gone(self, voter: PeerId, rules: RulesState) -> bool:
        seen = self._peers.get(voter)
        unwilling = voter != self._ctx.me and seen is not None and not seen.willing
        silent = self.silent_s(voter) > self._ctx.spec.committee.voter_lease_s
        return voter in self._leaving or voter in rules.revoked or silent or unwilling

    def _steady(self, committee: Committee, rules: RulesState, index: int) -> list[PeerId]:
        """Nodes that may take a seat, longest standing first: willing, caught up, heard without a gap."""
        now = self._ctx.now
        spec = self._ctx.spec.committee
        fit = [
            (seen.since, peer)
            for peer, seen in self._peers.items()
            if peer not in committee.members
            and peer != self._witness
            and peer not in rules.revoked
            and peer not in self._leaving
            and seen.willing
            and is_trusted(rules, self._ctx.spec, peer)  # in open runs: it has contributed
            and seen.index >= index
            and now - seen.since >= spec.voter_standing_s
            and now - seen.heard_at <= 2 * spec.heartbeat_s + spec.timeout_s_min
        ]
        me = self._ctx.me
        mine = me not in committee.members and me != self._witness and me not in self._leaving
        if mine and is_trusted(rules, self._ctx.spec, me):
            fit.append((self._started_at, me))
        return [peer for _, peer in sorted(fit)]

    def _replaced(self, committee: Committee, seat: PeerId, by: PeerId) -> Committee:
        if seat == committee.witness:
            return Committee(NO_DIGEST, (*committee.voters, by))
        return Committee(committee.witness, (*(v for v in committee.voters if v != seat), by))

    def _shrunk(self, committee: Committee, leaving: list[PeerId]) -> Committee | None:
        smaller = [s for s in limits.committee_sizes if s < committee.size]
        if not smaller:
            return None
        # Who leaves goes first, then who is away, then the newest; the witness stays unless it is away.
        witness_away = committee.witness != NO_DIGEST and self.silent_s(self._witness) > (
            self._ctx.spec.committee.voter_lease_s
        )
        witness = NO_DIGEST if witness_away or PeerId(committee.witness) in leaving else committee.witness
        stay = [PeerId(v) for v in committee.voters if v not in leaving]
        seats = smaller[-1] - (witness != NO_DIGEST)
        if len(stay) < seats:
            return None
        kept = sorted(stay, key=lambda v: not self._is_present(v))[:seats]
        return Committee(witness, tuple(v for v in stay if v in kept))

    def _with_witness(self, committee: Committee) -> Committee | None:
        """The witness has a seat while it is there."""
        seen = self._peers.get(self._witness)
        if committee.witness != NO_DIGEST or seen is None or not committee.voters:
            return None
        spec = self._ctx.spec.committee
        steady = self._ctx.now - seen.since >= spec.voter_standing_s and seen.willing
        if not steady or self.silent_s(self._witness) > spec.timeout_s_min:
            return None
        return Committee(self._witness, committee.voters[:-1])

    def _grown(self, committee: Committee, steady: list[PeerId], size_max: int) -> Committee | None:
        larger = [s for s in limits.committee_sizes if committee.size < s <= size_max]
        if not larger:
            return None
        seats = larger[0] - committee.size
        if len(steady) < seats:
            return None
        return Committee(committee.witness, (*committee.voters, *steady[:seats]))

    # The voter's check

    def refuses(self, old: Committee, new: Committee, rules: RulesState) -> str | None:
        """Why this voter gives no ack for `new` after `old`; None if it may."""
        spec = self._ctx.spec.committee
        before, after = set(old.members), set(new.members)
        if new.size not in limits.committee_sizes or new.size > max(spec.size_max, old.size):
            return f"a committee of {new.size}"
        if len(after) != new.size or new.witness not in (NO_DIGEST, self._witness):
            return "seats are named twice or the witness is another one"
        if self._witness in new.voters:
            return "the witness does not train"
        incoming, outgoing = after - before, before - after
        if incoming & set(rules.revoked):
            return "a revoked node"
        one_seat = new.size == old.size and len(incoming) == 1
        sizes = limits.committee_sizes
        step = new.size != old.size and abs(sizes.index(new.size) - sizes.index(old.size)) == 1
        pure = not incoming or not outgoing
        if not one_seat and not (step and pure):
            return "more than one seat changes"
        kept = [v for v in old.voters if v in after]
        if list(new.voters[: len(kept)]) != kept:
            return "the order of admission is changed"
        if self._witness in outgoing and self._ctx.me != self._witness:
            silent = self.silent_s(self._witness)
            if silent <= spec.voter_lease_s and self._witness not in self._leaving:
                return f"the witness was heard {silent:.0f} s ago"
        return None

    def _forget_oldest(self) -> None:
        kept = {*self._log.committee.members, self._witness}
        oldest = min(self._peers.keys() - kept, key=lambda p: (self._peers[p].heard_at, p))
        del self._peers[oldest]
        self._leaving.discard(oldest)
