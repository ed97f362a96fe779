"""What the aggregator of a term proposes next: an owner's word, a committee, or an outer step.

Its own judgement; voters check what is in an entry, not when it came.
"""

from __future__ import annotations

from p2pdiloco import limits
from p2pdiloco.ids import NO_DIGEST, Digest, PeerId
from p2pdiloco.protocol.applied import Applied
from p2pdiloco.protocol.context import Context
from p2pdiloco.protocol.delta_pool import Arrived, DeltaPool, as_candidate
from p2pdiloco.protocol.election import Election
from p2pdiloco.protocol.membership import Membership
from p2pdiloco.protocol.proposals import Proposals
from p2pdiloco.protocol.run_log import RunLog
from p2pdiloco.rules.caps import capped_tokens
from p2pdiloco.rules.closing import Arrival, ClosingView, Decision, Spreads, decide_closing
from p2pdiloco.rules.full_round import latest_tokens
from p2pdiloco.rules.outer_step import plan_outer_step, too_late
from p2pdiloco.rules.state import is_trusted, targets_reached
from p2pdiloco.wire.log import FINISH, Content, Left, OuterStep, OwnerEntry, OwnerWord
from p2pdiloco.wire.log import Membership as MembershipEntry


class Aggregation:
    """Decides when this node leads; keeps what the decision needs also while it does not."""

    def __init__(
        self,
        ctx: Context,
        log: RunLog,
        election: Election,
        applied: Applied,
        pool: DeltaPool,
        membership: Membership,
        proposals: Proposals,
    ) -> None:
        self._ctx = ctx
        self._log = log
        self._election = election
        self._applied = applied
        self._pool = pool
        self._membership = membership
        self._proposals = proposals
        self._term = 0
        self._served = 0  # outer steps certified in the term led
        self._last_step_at = ctx.now
        self._progress_at = ctx.now
        self._stall_factor = 1.0
        self._spreads = Spreads()
        self._arrivals: list[Arrival] = []  # at the last look
        self._watched_term = 0
        self._seen_term = 0
        self._left_out: dict[Digest, int] = {}  # outer steps of the watched term that passed a delta over
        self._words: dict[int, OwnerWord] = {}
        self._goodbyes: dict[PeerId, Digest] = {}
        self.reason = "no delta yet"
        self.wake_at: float | None = None

    def started(self) -> None:
        self._last_step_at = self._progress_at = self._ctx.now

    def heard_word(self, word: OwnerWord) -> bool:
        """An owner's word with a verified signature. True if it is news and kept: then it is passed on.

        What is not kept would be news again each time that another voter passes it on.
        """
        known = self._words.get(word.owner_sequence)
        if known is not None or word.owner_sequence <= self._applied.rules.owner_sequence:
            return False
        if len(self._words) >= limits.words_waiting_max:
            return False
        self._words[word.owner_sequence] = word
        return True

    @property
    def words(self) -> tuple[OwnerWord, ...]:
        """Not followed yet, in the owner's order."""
        done = self._applied.rules.owner_sequence
        for sequence in [s for s in self._words if s <= done]:
            del self._words[sequence]
        return tuple(self._words[s] for s in sorted(self._words))

    def epoch_began(self) -> None:
        """The owner's words were signed for the epoch that is over."""
        self._words.clear()
        self._left_out.clear()
        self._progress_at = self._ctx.now

    def heard_goodbye(self, peer: PeerId, goodbye: Digest) -> None:
        """Only of who is in T_full: nobody else's leaving changes anything."""
        if peer in latest_tokens(self._applied.rules) and len(self._goodbyes) < limits.peers_max:
            self._goodbyes[peer] = goodbye

    def is_back(self, peer: PeerId) -> None:
        self._goodbyes.pop(peer, None)

    @property
    def deadline_s(self) -> float:
        return self._ctx.spec.outer.deadline_passes * self._ctx.spec.inner.pass_s

    def stalled(self) -> bool:
        """No entry for two deadlines although a delta is there that could be listed (protocol.md 4)."""
        # Of the term that goes on: the next aggregator starts with a clean slate.
        if self._election.own_term == self._watched_term and max(self._left_out.values(), default=0) >= 2:
            return True
        if self._election.own_term != self._seen_term:
            # Each term has two deadlines of its own: else every heartbeat would burn another one.
            self._seen_term = self._election.own_term
            self._progress_at = self._ctx.now
        if self._ctx.now - self._progress_at < 2 * self.deadline_s * self._stall_factor:
            return False
        state = self._applied.rules
        if state.finished or (state.paused and not self._words):
            return False
        ready = self._pool.ready(state, self._log.committee)
        return any(self._ctx.now - a.complete_at >= 2 * self.deadline_s for a in ready)

    def consider(self) -> None:
        """Propose the next content if this node leads and has one."""
        self.wake_at = None
        term = self._election.leading
        if term is None:
            self._proposals.drop_mine()
            return
        if not self._applied.current or self._proposals.busy:
            return
        if term != self._term:
            self._term, self._served = term, 0
            self._progress_at = self._ctx.now
        while self._election.again:
            self._proposals.start_again(self._election.again.pop(0))
            if self._proposals.busy or self._election.leading is None:
                return
        content = self._next_content()
        if content is not None:
            self._proposals.start(content, wants_last=self._wants_last(content))

    def _next_content(self) -> Content | None:
        state = self._applied.rules
        if state.finished:
            return None
        if targets_reached(state, self._ctx.spec):
            return OwnerEntry(FINISH, NO_DIGEST)
        for word in self.words:
            if self.refuses_word(word) is None:
                return OwnerEntry(word, NO_DIGEST)
            del self._words[word.owner_sequence]  # what stands between made it senseless
        committee = self._membership.wanted(self._log.committee, state, self._log.index)
        if committee is not None and (
            self._membership.refuses(self._log.committee, committee, state) is None
        ):
            return MembershipEntry(committee, NO_DIGEST)
        return None if state.paused else self._next_outer_step()

    def _next_outer_step(self) -> OuterStep | None:
        state, spec = self._applied.rules, self._ctx.spec
        ready = self._pool.ready(state, self._log.committee)
        decision = self._decide(ready)
        self.reason, self.wake_at = decision.reason, decision.wake_at
        if not decision.close:
            return None
        gone = self._goodbyes.items()
        left = [Left(peer, goodbye) for peer, goodbye in sorted(gone) if peer in latest_tokens(state)]
        return plan_outer_step(state, spec, [as_candidate(a) for a in ready], left[: limits.refused_max])

    def _decide(self, ready: list[Arrived]) -> Decision:
        state, spec, now = self._applied.rules, self._ctx.spec, self._ctx.now
        tokens = latest_tokens(state)
        live = {
            p: tokens.get(p, 0)
            for p in self._membership.heard_within(2 * spec.inner.pass_s)
            if p != spec.committee.genesis.witness and not self._membership.is_leaving(p)
            and p not in state.revoked
        }  # fmt: skip
        if self._ctx.identity.role == "node":
            live[self._ctx.me] = tokens.get(self._ctx.me, 0)
        self._arrivals = []
        first: dict[PeerId, Arrived] = {}
        for a in ready:
            if not too_late(state, spec, a.header):
                first.setdefault(a.sender, a)
        counts = {p: a.header.steps * spec.tokens_per_inner_step for p, a in first.items()}
        capped = capped_tokens(state, spec, counts)
        for p, a in first.items():
            self._arrivals.append(Arrival(p, capped[p], a.complete_at, is_trusted(state, spec, p)))
        trusted = frozenset(p for p in live if is_trusted(state, spec, p))
        view = ClosingView(
            self._last_step_at, state.version == 0, self._arrivals, live, trusted, self._spreads.seconds
        )
        return decide_closing(view, spec, now=now)

    def _wants_last(self, content: Content) -> bool:
        """The term's last outer step hands over, unless the successor is not there to take it."""
        if not isinstance(content, OuterStep) or self._served + 1 < self._ctx.spec.committee.rotation:
            return False
        successor = self._log.committee.aggregator_of(self._term + 1)
        return (
            successor != self._ctx.me
            and not self._membership.is_leaving(successor)
            and self._membership.silent_s(successor) < self._ctx.spec.committee.timeout_s_min
        )

    def installed(self, content: Content, term: int) -> None:
        """An entry became the state."""
        self._progress_at = self._ctx.now
        self._stall_factor = 1.0 + self._ctx.rng() / 4
        if isinstance(content, OwnerEntry) and content.word.kind == "resume":
            # A round begins: by the last step's time its deadline may be over before anybody has trained.
            self._last_step_at = self._ctx.now
        if not isinstance(content, OuterStep):
            return
        self._learn_spread(content)
        self._watch_fairness(content, term)
        self._last_step_at = self._ctx.now
        if term == self._term:
            self._served += 1
        for peer in [PeerId(gone.peer) for gone in content.left]:
            self._goodbyes.pop(peer, None)

    def _watch_fairness(self, step: OuterStep, term: int) -> None:
        """Count how often a term's aggregator, with room, passed over a delta that a majority HAD before.

        HAVE is a local view, so it is no reason to refuse an ack; after two times a voter does not wait for
        the timeout to ask for the next term (protocol.md 3).
        """
        if term != self._watched_term or len(step.contributions) >= limits.contributions_max:
            self._watched_term = term
            self._left_out = {}
            return
        listed = {c.peer for c in step.contributions}
        state, before = self._applied.rules, self._last_step_at
        waiting = [
            Digest(a.header.delta)
            for a in self._pool.ready(state, self._log.committee)
            if a.complete_at < before and a.sender not in listed and a.sender not in state.revoked
            and not too_late(state, self._ctx.spec, a.header)
        ]  # fmt: skip
        self._left_out = {d: self._left_out.get(d, 0) + 1 for d in waiting}

    def _learn_spread(self, step: OuterStep) -> None:
        listed = frozenset(PeerId(c.peer) for c in step.contributions)
        self._spreads = self._spreads.learn(
            self._arrivals, listed, last_step_at=self._last_step_at, pass_s=self._ctx.spec.inner.pass_s
        )
        self._arrivals = []

    def refuses_word(self, word: OwnerWord) -> str | None:
        """Why a voter gives no ack for this owner entry; None if it may."""
        state = self._applied.rules
        if state.finished:
            return "the run is over"
        why = self._log.refuses_word(word)
        if why is not None:
            return why
        if word.kind == "revoke" and (
            len(word.peer) != len(NO_DIGEST) or len(state.revoked) >= limits.revoked_max
        ):
            return "nobody to revoke, or too many"
        if word.kind == "extend" and word.value <= state.target_tokens:
            return f"a target that is no further than {state.target_tokens} tokens"
        return None
