"""The deltas known here: headers noted, blobs checked, and which voters HAVE them (protocol.md 3, 5)."""

from __future__ import annotations

from collections.abc import Iterable

from p2pdiloco import limits
from p2pdiloco.ids import Digest, PeerId
from p2pdiloco.protocol.actions import AllowDelta, DropDelta, FetchDelta, RevealDelta
from p2pdiloco.protocol.context import Context, HeldDelta
from p2pdiloco.rules.admission import check_header
from p2pdiloco.rules.outer_step import Candidate
from p2pdiloco.rules.state import RulesState, last_sequence
from p2pdiloco.wire.log import Committee, OuterStep
from p2pdiloco.wire.messages import DeltaHeader, Outcome

# Deltas known at once: what 1024 senders may have unlisted, and as much again that is listed and kept. Gossip
# of headerless ones takes half of it at most.
_KNOWN_MAX = 2 * limits.held_deltas_per_peer_max * limits.peers_max
_ROOM_BYTES = 64 * limits.KIB  # header and scales beside the raw size: a cap, not the exact size


class _Known:
    """One delta, as far as it is known."""

    __slots__ = (
        "complete_at",
        "fetching",
        "have",
        "header",
        "key",
        "listed_in",
        "norm",
        "noted_at",
        "retry_at",
        "revealed",
        "sender",
    )

    def __init__(self, header: DeltaHeader | None, sender: PeerId | None, key: bytes, now: float) -> None:
        self.header = header
        self.sender = sender
        self.key = key
        self.noted_at = now
        self.norm: float | None = None  # set when the blob is here and checked
        self.have: set[PeerId] = set()
        self.complete_at: float | None = None  # when a majority had it, by this clock
        self.fetching = False
        self.retry_at = float("-inf")  # not fetched again before then
        self.listed_in = 0  # version that listed it
        self.revealed = False


class Arrived(HeldDelta, frozen=True):
    """A delta that a majority HAVE, ready to be listed."""

    complete_at: float


class DeltaPool:
    """Bounded: a few per sender, and listed ones only until a snapshot covers them."""

    def __init__(self, ctx: Context, held: Iterable[HeldDelta]) -> None:
        self._ctx = ctx
        self._known: dict[Digest, _Known] = {}
        self._of_sender: dict[PeerId, set[Digest]] = {}
        self._newcomers: dict[Digest, None] = {}  # of peers that the log never listed, oldest first
        self._size_max = 4 * ctx.spec.model.params + _ROOM_BYTES
        for delta in held:
            known = _Known(delta.header, delta.sender, delta.key, 0.0)
            known.norm = delta.norm
            known.have.add(ctx.me)
            self._claim(Digest(delta.header.delta), known)

    def _claim(self, delta: Digest, known: _Known) -> None:
        self._known[delta] = known
        if known.sender is not None:
            self._of_sender.setdefault(known.sender, set()).add(delta)

    def _remove(self, delta: Digest) -> _Known | None:
        known = self._known.pop(delta, None)
        self._newcomers.pop(delta, None)
        if known is not None and known.sender is not None:
            mine = self._of_sender[known.sender]
            mine.discard(delta)
            if not mine:
                del self._of_sender[known.sender]
        return known

    def note(self, header: DeltaHeader, sender: PeerId, key: bytes, rules: RulesState) -> Outcome:
        """A header came. NOTED: its blob may come too; HELD: it is here already; else why not."""
        delta = Digest(header.delta)
        outcome = check_header(rules, self._ctx.spec, header, sender)
        if outcome is not Outcome.NOTED:
            return outcome
        known = self._known.get(delta)
        if known is not None and known.header is not None:
            if known.sender != sender:
                return Outcome.DUPLICATE  # somebody else's delta under another name: counted once
            if known.norm is not None:
                return Outcome.HELD
            self._ctx.emit(AllowDelta(header, sender, key))
            return Outcome.NOTED
        settled = last_sequence(rules, sender)
        headers = [self._known[d].header for d in self._of_sender.get(sender, ())]
        of_sender = [h.sequence for h in headers if h is not None and h.sequence > settled]
        if header.sequence in of_sender:
            return Outcome.DUPLICATE
        if len(of_sender) >= limits.held_deltas_per_peer_max:
            return Outcome.RATE_LIMITED
        if known is None:
            if len(self._known) >= _KNOWN_MAX or (settled == 0 and not self._room_for_a_newcomer()):
                return Outcome.RATE_LIMITED  # keys cost nothing, so the bound for each is not enough
            self._claim(delta, _Known(header, sender, key, self._ctx.now))
            if settled == 0:
                self._newcomers[delta] = None
        else:  # fetched for the log before its header came
            known.header, known.sender, known.key = header, sender, key
            self._claim(delta, known)
            if known.norm is not None:
                known.have.add(self._ctx.me)
                return Outcome.HELD
        self._ctx.emit(AllowDelta(header, sender, key))
        return Outcome.NOTED

    def _room_for_a_newcomer(self) -> bool:
        """Peers that the log never listed share a quarter, and push out only each other's empty promises."""
        if len(self._newcomers) < _KNOWN_MAX // 4:
            return True
        empty = next((d for d in self._newcomers if self._known[d].norm is None), None)
        if empty is not None:
            self._drop(empty)
        return empty is not None

    def expire(self) -> None:
        """A header whose blob did not come within two deadlines is forgotten; its sender offers it again."""
        spec = self._ctx.spec
        horizon = self._ctx.now - 2 * spec.outer.deadline_passes * spec.inner.pass_s
        for digest, k in list(self._known.items()):
            idle = k.norm is None and not k.fetching and not k.listed_in and k.sender != self._ctx.me
            if idle and k.header is not None and k.noted_at < horizon:
                self._drop(digest)

    def arrived(self, delta: Digest, norm: float) -> _Known | None:
        """The blob is here and checked. None if nobody asked for it."""
        known = self._known.get(delta)
        if known is None:
            return None
        known.fetching = False
        if known.norm is None:
            known.norm = norm
            known.have.add(self._ctx.me)
        return known

    def forget(self, delta: Digest) -> _Known | None:
        """A blob that failed its check."""
        return self._remove(delta)

    def not_fetched(self, delta: Digest) -> None:
        known = self._known.get(delta)
        if known is not None:
            known.fetching = False
            known.retry_at = self._ctx.now + self._ctx.spec.committee.heartbeat_s

    def check_again(self, step: OuterStep) -> None:
        """Blobs of `step` may be gone or damaged: what is not here any more is fetched once more."""
        for c in step.contributions:
            known = self._known.get(Digest(c.delta))
            if known is not None:
                known.norm = None
                known.have.discard(self._ctx.me)

    def heard_have(self, voter: PeerId, deltas: Iterable[bytes]) -> None:
        for raw in deltas:
            known = self._known.get(Digest(raw))
            if known is not None:
                known.have.add(voter)
            elif len(self._known) < _KNOWN_MAX // 2:
                fresh = self._known[Digest(raw)] = _Known(None, None, b"", self._ctx.now)
                fresh.have.add(voter)

    def mine(self, rules: RulesState) -> tuple[bytes, ...]:
        """What this node HAS and the log has not settled, for heartbeats."""
        return tuple(
            digest
            for digest, k in self._known.items()
            if k.norm is not None
            and k.header is not None
            and k.sender is not None
            and not k.listed_in
            and k.header.sequence > last_sequence(rules, k.sender)
        )[: limits.heartbeat_have_max]

    def ready(self, rules: RulesState, committee: Committee) -> list[Arrived]:
        """Deltas held here that a majority of `committee` HAVE and the log has not settled, oldest first."""
        members = set(committee.members)
        found = []
        for k in self._known.values():
            if k.norm is None or k.header is None or k.sender is None or k.listed_in:
                continue
            if k.header.sequence <= last_sequence(rules, k.sender) or k.header.base_version > rules.version:
                continue
            if len(k.have & members) < committee.quorum:
                continue
            if k.complete_at is None:
                k.complete_at = self._ctx.now
            found.append(Arrived(k.header, k.sender, k.key, k.norm, k.complete_at))
        return sorted(found, key=lambda a: (a.complete_at, a.header.delta))

    def norms(self) -> dict[Digest, float]:
        return {digest: k.norm for digest, k in self._known.items() if k.norm is not None}

    def missing(self, step: OuterStep) -> list[Digest]:
        """Listed deltas that are not here yet."""
        return [
            Digest(c.delta)
            for c in step.contributions
            if (known := self._known.get(Digest(c.delta))) is None or known.norm is None
        ]

    def fetch(self, delta: Digest, donors: Iterable[PeerId]) -> None:
        """Ask for a blob, unless that is going on already."""
        known = self._known.get(delta)
        if known is None:
            known = self._known[delta] = _Known(None, None, b"", self._ctx.now)
        if known.fetching or known.norm is not None or known.retry_at > self._ctx.now:
            return
        known.fetching = True
        # Sorted before it is shuffled: the order of a set of bytes differs from process to process.
        others = sorted(sorted({*known.have, *donors} - {self._ctx.me}), key=lambda _: self._ctx.rng())
        self._ctx.emit(FetchDelta(known.header, delta, self._size_max, tuple(others)))

    def reveal(self, step: OuterStep) -> None:
        """Serve what a proposed or certified step lists: a majority HAVE it, a voter or follower may not."""
        for c in step.contributions:
            known = self._known.get(Digest(c.delta))
            if known is not None and known.norm is not None and not known.revealed:
                known.revealed = True
                self._ctx.emit(RevealDelta(Digest(c.delta)))

    def check_own(self, header: DeltaHeader) -> None:
        """An own delta: its blob is here; have it checked like any other."""
        known = self._known[Digest(header.delta)]
        known.fetching = True
        self._ctx.emit(FetchDelta(header, Digest(header.delta), self._size_max, ()))

    def note_own(self, header: DeltaHeader, key: bytes) -> None:
        if Digest(header.delta) not in self._known:
            self._claim(Digest(header.delta), _Known(header, self._ctx.me, key, self._ctx.now))

    def contains(self, step: OuterStep) -> None:
        """The state here contains `step`: its deltas are kept for those who follow, until covered."""
        for c in step.contributions:
            known = self._known.get(Digest(c.delta))
            if known is not None:
                known.listed_in = step.version
                self._newcomers.pop(Digest(c.delta), None)

    def installed(self, step: OuterStep) -> None:
        """The log settled some: keep listed blobs for those who follow, drop what can never be listed."""
        self.reveal(step)
        settled = {PeerId(r.peer): r.sequence for r in step.refused}
        settled.update({PeerId(c.peer): c.sequence for c in step.contributions})
        self.contains(step)
        for digest, k in list(self._known.items()):
            if k.listed_in or k.header is None or k.sender is None:
                continue
            if k.header.sequence <= settled.get(k.sender, 0):
                self._drop(digest)
        # Gossip about deltas of which no header ever came.
        horizon = self._ctx.now - limits.headerless_s_max
        for digest, k in list(self._known.items()):
            if k.header is None and k.norm is None and not k.fetching and k.noted_at < horizon:
                del self._known[digest]

    def covered(self, version: int) -> None:
        """A snapshot newer than `version` is kept by everybody: deltas listed up to it may go."""
        for digest, k in list(self._known.items()):
            if k.listed_in and k.listed_in <= version:
                self._drop(digest)

    def went_back(self, version: int) -> None:
        """The log was cut off after `version`: what was listed later may be listed again.

        What was made on a state that is gone may not.
        """
        for digest, k in list(self._known.items()):
            if k.listed_in > version:
                k.listed_in = 0
            if k.header is not None and k.header.base_version > version and not k.listed_in:
                self._drop(digest)

    def header_of(self, delta: Digest) -> DeltaHeader | None:
        known = self._known.get(delta)
        return known.header if known is not None else None

    def _drop(self, digest: Digest) -> None:
        self._remove(digest)
        self._ctx.emit(DropDelta(digest))


def as_candidate(delta: HeldDelta) -> Candidate:
    """What the rules need to know of a delta."""
    h = delta.header
    return Candidate(
        Digest(h.delta), delta.sender, h.base_version, h.sequence, h.steps, delta.norm, delta.key, h.signature
    )
