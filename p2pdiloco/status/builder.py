"""StatusBuilder: takes facts as they come, gives a RunStatus whenever one is wanted.

The tracker process feeds it: certified entries from its witness, the directory's rows once a second,
evaluations it accepted, and what else is worth a line. Everything that counts (tokens, deltas, staleness,
terms) comes from certified entries; what nodes say of themselves decorates their own row only.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from p2pdiloco import limits
from p2pdiloco.errors import PeerError
from p2pdiloco.ids import PeerId, RunId, short
from p2pdiloco.protocol.tracker import Listed
from p2pdiloco.rules.evaluation import report_fault
from p2pdiloco.run_spec import RunSpec
from p2pdiloco.status.curve import DAY_S, LATE_ROUNDS, History, weighted_loss
from p2pdiloco.status.evaluators import Evaluators
from p2pdiloco.status.names import clean_name, clean_text, finite
from p2pdiloco.status.read_model import (
    Checkpoint,
    Credit,
    EvalPoint,
    EventLine,
    JoinHint,
    PeerName,
    RunStatus,
    Samples,
    VersionPoint,
)
from p2pdiloco.status.traffic import Traffic
from p2pdiloco.status.view import render_status
from p2pdiloco.status.words import owner_words
from p2pdiloco.wire.log import (
    Committee,
    Entry,
    Membership,
    OuterStep,
    OwnerEntry,
    OwnerWord,
    changes_committee,
    open_body,
)
from p2pdiloco.wire.messages import EvalReport
from p2pdiloco.words import count_of

HOUR_S = 3600.0


class _Unexplained(NamedTuple):
    """A term that the witness follows and no entry has explained yet: a hand-over, or a silence?"""

    before: int  # the term before it
    seen_unix: float


class Unsaved(NamedTuple):
    """What came since the last call: for the tracker's database."""

    versions: tuple[VersionPoint, ...]
    credits: tuple[Credit, ...]
    evaluations: tuple[EvalPoint, ...]
    samples: tuple[Samples, ...]
    events: tuple[EventLine, ...]


class _Pending:
    """Facts on their way to the database; bounded, since a database may be away for a while."""

    def __init__(self) -> None:
        rows = limits.history_rows_max
        self.versions: deque[VersionPoint] = deque(maxlen=rows)
        self.credits: deque[Credit] = deque(maxlen=rows)
        self.evaluations: deque[EvalPoint] = deque(maxlen=rows)
        self.samples: deque[Samples] = deque(maxlen=limits.samples_kept)
        self.events: deque[EventLine] = deque(maxlen=limits.events_kept)


class Account:
    """What the log says of one peer, and what is remembered of its name."""

    __slots__ = ("deltas", "last_outcome", "last_version", "left", "name", "tokens", "tokens_by_hour")

    def __init__(self, name: str) -> None:
        self.name = name
        self.tokens = 0
        self.deltas = 0
        self.last_version: int | None = None
        self.last_outcome = ""
        self.left = False
        self.tokens_by_hour: Counter[int] = Counter()

    def tokens_day(self, now: float) -> int:
        """In the last 24 h, to the hour."""
        first = int((now - DAY_S) // HOUR_S)
        for hour in [h for h in self.tokens_by_hour if h < first]:
            del self.tokens_by_hour[hour]
        return self.tokens_by_hour.total()


class StatusBuilder:
    """All times are Unix seconds. Not thread-safe: the event loop owns it."""

    def __init__(self, run: RunId, spec: RunSpec, *, join: JoinHint, build: str, started_unix: float) -> None:
        self.run = run
        self.spec = spec
        self.join = join
        self.build_name = build
        self.started_unix = started_unix
        self.fed_unix: float | None = None
        self.history = History()
        self.evaluations: dict[int, EvalPoint] = {}
        self.checkpoints: tuple[Checkpoint, ...] = ()  # offered for download; the tracker says which
        self.samples: dict[int, Samples] = {}  # of the newest versions
        self.events: deque[EventLine] = deque(maxlen=limits.events_kept)
        self.membership_changes: deque[int] = deque(maxlen=limits.events_kept)
        self.accounts: dict[PeerId, Account] = {}
        self.listed: dict[PeerId, Listed] = {}
        self.heard_unix: dict[PeerId, float] = {}
        self.traffic = Traffic(spec.model.params)
        # Of the log, from genesis on.
        self.index = 0
        self.version = 0
        self.clock = 0
        self.t_full = 0
        self.committee: Committee = spec.committee.genesis
        self.term: int | None = None
        self._unexplained: _Unexplained | None = None
        self._entry_unix = started_unix  # when the newest entry came, as far as this process saw
        self.steps_in_term = 0
        self.target_tokens = spec.target_tokens
        self.finished = False
        self.paused = False
        self.revoked: dict[PeerId, int] = {}  # at which version
        self.refused: Counter[str] = Counter()
        self.staleness: Counter[int] = Counter()
        self.stale = 0
        self.terms: set[int] = set()
        self.aggregators: dict[PeerId, None] = {}
        self.evaluators = Evaluators(spec, started_unix)
        self._restored: dict[int, VersionPoint] = {}
        self._new = _Pending()

    # Facts

    def restore(
        self,
        *,
        versions: Sequence[VersionPoint],
        earned: Sequence[Credit],
        evaluations: Sequence[EvalPoint],
        events: Sequence[EventLine],
        samples: Sequence[Samples] = (),
    ) -> None:
        """History from the database, each in order. Call first; then feed the log from its beginning."""
        assert self.index == 0, "restore comes before the log"
        self._restored = {p.version: p for p in versions}
        for c in earned:
            account = self._account(PeerId(bytes.fromhex(c.peer)))
            account.name = clean_name(c.name)
            if c.when_unix is not None:
                account.tokens_by_hour[int(c.when_unix // HOUR_S)] += c.tokens
        self.evaluations = {e.version: e for e in evaluations[-limits.points_kept :]}
        self.evaluators.restore(evaluations)
        self.samples = {s.version: s for s in samples[-limits.samples_kept :]}
        self.events.extend(events)
        self.membership_changes.extend(e.version for e in events if e.kind in ("joined", "left", "back"))

    def entry_applied(
        self, entry: Entry, *, when_unix: float | None, losses: Mapping[bytes, float] | None = None
    ) -> None:
        """A certified entry, in order of index; a repeated one is ignored.

        Args:
            when_unix: None when it is replayed from the journal: its time is what the database says.
            losses: mean loss of the pass (nats per token) by delta digest, from the headers at hand.
        """
        body = open_body(entry.body)
        if body.index <= self.index:
            return
        self.index = body.index
        term, committee = entry.certificate.term, self.committee
        self._term_certified(term, committee, when_unix)
        self._entry_unix = self._entry_unix if when_unix is None else when_unix
        match body.content:
            case OuterStep() as step:
                self._outer_step(step, term, committee, when_unix, dict(losses or {}))
            case Membership(committee=new):
                self._committee_changed(new, when_unix)
            case OwnerEntry(word=word):
                self._owner_said(word, when_unix)
                if word.committee is not None:
                    self._committee_changed(word.committee, when_unix)
        if self.evaluators.entry_applied(body.content, when_unix):
            self._take_evaluation(0)
        if entry.certificate.last or changes_committee(body.content):
            # Handing over is everyday life and would fill the list of events: only who fell silent is news.
            self._handed_over(term + 1)

    def term_seen(self, term: int, *, when_unix: float) -> None:
        """The witness follows an aggregator of a newer term, before that has certified anything.

        Call it once a second. At a hand-over the witness acks, and so moves on, before the entry that
        explains it is certified: what the new term means is said only when an entry of it comes, or none
        of the old term does for as long as a voter waits.
        """
        if self.term is None:
            self._elected(term, self.committee, when_unix, "the first")
            return
        if term > self.term:
            self._unexplained = self._unexplained or _Unexplained(self.term, when_unix)
            self.term, self.steps_in_term = term, 0
        waiting = self._unexplained
        if waiting and when_unix - max(waiting.seen_unix, self._entry_unix) > self._silence_s:
            self._explain(waiting.before, waiting.seen_unix, when_unix)

    def heard(self, peer: PeerId, *, when_unix: float) -> None:
        """The witness received a message from this peer, whatever the directory knows."""
        self.heard_unix[peer] = when_unix
        if len(self.heard_unix) > 2 * limits.peers_max:
            del self.heard_unix[min(self.heard_unix, key=self.heard_unix.__getitem__)]

    def directory(self, rows: Iterable[Listed], *, when_unix: float) -> None:
        """All rows of the directory: call it once a second. This is also the page's proof of life."""
        self.fed_unix = when_unix
        before, self.listed = self.listed, {r.peer: r for r in rows}
        for peer, row in self.listed.items():
            if row.role != "node":
                continue
            account = self._account(peer)
            account.name = clean_name(row.name)
            self._presence(before.get(peer), row, account, when_unix)
            if row.report is not None:
                self.traffic.reported(peer, row.report.bytes_up + row.report.bytes_down, row.report.version)
        if before.keys() - self.listed.keys():
            self.traffic.keep(set(self.listed))
            self._forget_strangers()

    def evaluated(self, by: PeerId, report: EvalReport, *, when_unix: float) -> None:
        """An evaluation that the directory accepted: it counts if the log chose its sender.

        Of version 0, where nobody is chosen, it waits until the log lists its sender.

        Raises: PeerError: BAD_REPORT, NOT_CHOSEN, TOO_EARLY.
        """
        if fault := report_fault(report, self.spec):
            raise PeerError("BAD_REPORT", f"an evaluation with {fault}")
        if self.evaluators.take(by, self.name_of(by), report, when_unix):
            self._take_evaluation(report.version)

    def _take_evaluation(self, version: int) -> None:
        """What is shown of `version` has changed: one more says what its losses are."""
        self._take_samples(version)
        point = self.evaluators.point(version)
        if point is None:
            return
        self.evaluations[version] = point
        if len(self.evaluations) > limits.points_kept:
            for version in sorted(self.evaluations)[1 : limits.points_kept // 2 : 2]:
                del self.evaluations[version]
        self._new.evaluations.append(point)

    def _take_samples(self, version: int) -> None:
        samples = self.evaluators.samples(version)
        kept = self.samples.get(version)
        # After a restart what one more evaluator wrote does not replace what three did.
        if samples is None or (kept is not None and kept.evaluators > samples.evaluators):
            return
        self.samples[version] = samples
        while len(self.samples) > limits.samples_kept:
            del self.samples[min(self.samples)]
        if version in self.samples:
            self._new.samples.append(samples)

    def event(self, kind: str, text: str, *, when_unix: float) -> None:
        """A line for the page. `text` may hold what strangers wrote."""
        line = EventLine(
            when_unix=when_unix, kind=clean_text(kind, 16), text=clean_text(text), version=self.version
        )
        self.events.append(line)
        self._new.events.append(line)

    # Answers

    def said(self, kind: str, text: str, *, when_unix: float) -> None:
        """By the witness's node, but for what entries tell in better words: names, and once."""
        if kind not in ("elected", "committee", "owner", "run", "finished"):
            self.event(kind, text, when_unix=when_unix)

    def take_unsaved(self) -> Unsaved:
        """What the database does not have yet; the next call gives what comes after this one."""
        new, self._new = self._new, _Pending()
        return Unsaved(
            tuple(new.versions),
            tuple(new.credits),
            tuple(new.evaluations),
            tuple(new.samples),
            tuple(new.events),
        )

    def build(self, now_unix: float) -> RunStatus:
        """The page's whole content at `now_unix`."""
        return render_status(self, now_unix)

    def name_of(self, peer: PeerId) -> PeerName:
        account = self.accounts.get(peer)
        row = self.listed.get(peer)
        name = account.name if account else clean_name(row.name) if row else ""
        if not name and peer in (self.committee.witness, self.spec.committee.genesis.witness):
            name = "witness"
        return PeerName(name=name or short(peer), fingerprint=short(peer))

    def tokens_at(self, version: int) -> int:
        """The token clock when `version` was made, or the version kept before it."""
        point = self.history.at(version)
        return point.tokens if point else 0

    def answers(self, peer: PeerId, now_unix: float) -> bool:
        """Heard lately, by directory or witness. The witness itself runs beside this builder."""
        if peer == self.committee.witness:
            return True
        row = self.listed.get(peer)
        lease_s = self.spec.committee.timeout_s_max
        return bool(row and row.live) or now_unix - self.heard_unix.get(peer, 0.0) <= lease_s

    # How facts change the view

    def _outer_step(
        self, step: OuterStep, term: int, committee: Committee, when: float | None, losses: dict[bytes, float]
    ) -> None:
        self.version, self.clock, self.t_full = step.version, step.clock, step.t_full
        self.steps_in_term += term == self.term
        self.terms.add(term)
        aggregator = committee.aggregator_of(term)
        self.aggregators.setdefault(aggregator)
        self._count(step)
        point = self._restored.pop(step.version, None)
        if point is None:
            point = VersionPoint(
                version=step.version,
                when_unix=when,
                tokens=step.clock,
                t_full=step.t_full,
                loss=weighted_loss(step.contributions, losses),
                deltas=len(step.contributions),
                stale=sum(c.staleness >= LATE_ROUNDS for c in step.contributions),
                refused=len(step.refused),
                staleness_max=max(c.staleness for c in step.contributions),
                term=term,
                aggregator=self.name_of(aggregator),
            )
            self._save_step(point, step, losses)
        self.history.add(point)
        for refusal in step.refused if when is not None else ():
            who = self.name_of(PeerId(refusal.peer)).name
            self.event("refused", f"a delta of {who}: {refusal.reason}", when_unix=when or 0.0)

    def _count(self, step: OuterStep) -> None:
        for c in step.contributions:
            account = self._account(PeerId(c.peer))
            account.tokens += c.tokens
            account.deltas += 1
            account.left = False
            account.last_version = step.version
            late = c.staleness >= LATE_ROUNDS
            account.last_outcome = f"STALE by {c.staleness:.1f} rounds" if late else "ACCEPTED"
            self.stale += late
            self.staleness[round(c.staleness)] += 1
            self.traffic.contributed(PeerId(c.peer), c.steps, c.tokens)
        for refusal in step.refused:
            reason = clean_text(refusal.reason, 32)
            self._account(PeerId(refusal.peer)).last_outcome = reason
            self.refused[reason] += 1
        for gone in step.left:
            self._account(PeerId(gone.peer)).left = True

    def _save_step(self, point: VersionPoint, step: OuterStep, losses: dict[bytes, float]) -> None:
        self._new.versions.append(point)
        for c in step.contributions:
            account = self._account(PeerId(c.peer))
            if point.when_unix is not None:
                account.tokens_by_hour[int(point.when_unix // HOUR_S)] += c.tokens
            self._new.credits.append(
                Credit(
                    version=step.version,
                    when_unix=point.when_unix,
                    peer=c.peer.hex(),
                    name=account.name,
                    tokens=c.tokens,
                    steps=c.steps,
                    staleness=c.staleness,
                    weight=c.weight,
                    loss=finite(losses.get(c.delta)),
                )
            )

    @property
    def _silence_s(self) -> float:
        """A voter waits at least so long before it takes an aggregator for dead (protocol.md 4)."""
        return self.spec.committee.timeout_s_min

    def _elected(self, term: int, committee: Committee, when: float | None, why: str) -> None:
        self.term, self.steps_in_term, self._unexplained = term, 0, None
        if when is not None:
            who = self.name_of(committee.aggregator_of(term)).name
            self.event("elected", f"{who} aggregates, term {term:,}: {why}", when_unix=when)

    def _term_certified(self, term: int, committee: Committee, when: float | None) -> None:
        """An entry of `term` came. One of an older term than the witness follows changes no aggregator."""
        waiting = self._unexplained
        if self.term is None:
            self._elected(term, committee, when, "the first")
        elif term > self.term:
            before, seen = waiting or _Unexplained(self.term, when or 0.0)
            self.term, self.steps_in_term = term, 0
            self._explain(before, seen, when)
        elif term == self.term and waiting:
            self._explain(waiting.before, waiting.seen_unix, when)

    def _explain(self, before: int, seen_unix: float, when: float | None) -> None:
        """Say why the present term follows `before`, which did not hand over."""
        assert self.term is not None
        silent = seen_unix - self._entry_unix > self._silence_s
        why = f"term {before:,} fell silent" if silent else f"it follows term {before:,}"
        self._elected(self.term, self.committee, when, why)

    def _handed_over(self, term: int) -> None:
        if self.term is None or term > self.term:
            self.term, self.steps_in_term = term, 0
        if term == self.term:
            self._unexplained = None
        elif self._unexplained:  # the term after the hand-over fell silent at once
            self._unexplained = self._unexplained._replace(before=term)

    def _committee_changed(self, new: Committee, when: float | None) -> None:
        before, after = set(self.committee.members), set(new.members)
        self.committee = new
        if when is None:
            return
        changes = [f"{self.name_of(p).name} takes a seat" for p in new.members if p not in before]
        changes += [f"{self.name_of(p).name} gives up a seat" for p in sorted(before - after)]
        self.event("committee", f"{'; '.join(changes)} ({count_of(new.size, 'seat')})", when_unix=when)

    def _owner_said(self, word: OwnerWord, when: float | None) -> None:
        kind = word.kind
        self.paused = kind == "pause" or (self.paused and kind != "resume")
        self.finished = self.finished or kind == "finish"
        if kind == "extend":
            self.target_tokens = word.value
        who = ""
        if kind == "revoke":
            peer = PeerId(word.peer)
            self.revoked.setdefault(peer, self.version)
            named = self.name_of(peer)
            mark = "" if named.name == named.fingerprint else f" ({named.fingerprint})"
            who = named.name + mark  # two may have one name
        if when is not None:
            by = "owner" if word.owner_sequence else "finished"
            self.event(by, owner_words(word, who, self.version), when_unix=when)

    def _presence(self, was: Listed | None, row: Listed, account: Account, when: float) -> None:
        kind, text = "", ""
        if was is None or (not was.live and row.live):
            known = was is not None or account.deltas > 0
            kind, text = (
                ("back", f"{account.name} is back") if known else ("joined", f"{account.name} joined")
            )
        elif was.live and not row.live:
            if row.left is not None:
                kind, text = "left", f"{account.name} left" + (f": {row.left}" if row.left else "")
            else:
                kind, text = "offline", f"{account.name} is offline, silent for {row.silent_s:.0f} s"
        if kind:
            self.membership_changes.append(self.version)
            self.event(kind, text, when_unix=when)
        if row.bad_report and (was is None or not was.bad_report):
            self.event("refused", f"a report of {account.name}: {row.bad_report}", when_unix=when)

    def _account(self, peer: PeerId) -> Account:
        account = self.accounts.get(peer)
        if account is None:
            row = self.listed.get(peer)
            account = self.accounts[peer] = Account(clean_name(row.name) if row else short(peer))
        return account

    def _forget_strangers(self) -> None:
        """Names that came and went without a delta; contributors stay, the log bounds them."""
        for peer in [p for p, a in self.accounts.items() if not a.deltas and p not in self.listed]:
            del self.accounts[peer]
