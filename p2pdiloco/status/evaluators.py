"""Whose evaluations the page believes: of the peers that the log chooses for a version, and of no stranger.

Up to three say what a version's losses are and what it writes (rules/evaluation.py). Shown is the median, and
of each continuation what most of them wrote; a stand-in's word counts only where a chosen peer is silent.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from p2pdiloco import limits
from p2pdiloco.errors import PeerError
from p2pdiloco.ids import PeerId
from p2pdiloco.rules import evaluation as rule
from p2pdiloco.rules.state import after_entry, genesis_state
from p2pdiloco.run_spec import RunSpec
from p2pdiloco.status.names import clean_passage
from p2pdiloco.status.read_model import EvalPoint, EvalWord, PeerName, Sample, Samples
from p2pdiloco.wire.log import Content, Membership, OuterStep
from p2pdiloco.wire.messages import EvalReport


class _Due(NamedTuple):
    who: rule.Evaluators
    since_unix: float


class _Said(NamedTuple):
    word: EvalWord
    samples: tuple[str, ...]  # as they came; empty where they are not known (any more)
    when_unix: float


class Evaluators:
    """Follows the log from genesis on, as every replica does. All times are Unix seconds."""

    def __init__(self, spec: RunSpec, started_unix: float) -> None:
        """`started_unix` stands for the time of entries from before this life."""
        self._spec = spec
        self._started_unix = started_unix
        self._rules = genesis_state(spec)
        self._due: OrderedDict[int, _Due] = OrderedDict()
        self._said: OrderedDict[int, dict[PeerId, _Said]] = OrderedDict()  # by version
        self._of_genesis: dict[PeerId, _Said] = {}  # until the log says who of them takes part

    def restore(self, points: Iterable[EvalPoint]) -> None:
        """What was said before this life: a late report joins the others instead of replacing them."""
        for point in list(points)[-limits.evaluations_due_max :]:
            for word in point.reports:
                self._keep(point.version, PeerId(bytes.fromhex(word.peer)), _Said(word, (), point.when_unix))

    def entry_applied(self, content: Content, when_unix: float | None) -> bool:
        """The next certified entry. Returns: whether version 0 has reports that it had not before."""
        self._rules = after_entry(self._rules, content, self._spec)
        version = self._rules.version
        if not isinstance(content, Membership) and version not in self._due:
            if rule.is_evaluated(self._rules, self._spec):
                since = self._started_unix if when_unix is None else when_unix
                self._due[version] = _Due(rule.evaluators(self._rules, self._spec), since)
            if len(self._due) > limits.evaluations_due_max:
                self._due.popitem(last=False)
        return isinstance(content, OuterStep) and self._admit_of_genesis(content)

    def chosen(self, version: int) -> rule.Evaluators:
        """Who evaluates `version`; nobody where none is waited for."""
        due = self._due.get(version)
        return due.who if due is not None else rule.Evaluators((), None)

    def take(self, by: PeerId, name: PeerName, report: EvalReport, when_unix: float) -> bool:
        """A report that makes sense. Returns: whether it is news that counts now.

        Raises: PeerError: NOT_CHOSEN; TOO_EARLY, of the one who stands in.
        """
        word = EvalWord(
            peer=by.hex(), by=name, losses=tuple(s.loss for s in report.sets), tokens=report.sets[0].tokens
        )
        said = _Said(word, report.samples, when_unix)
        if report.version == 0:
            return self._take_of_genesis(by, said)
        due = self._due.get(report.version)
        if due is None or by not in (*due.who.chosen, due.who.stand_in):
            raise PeerError("NOT_CHOSEN", f"version {report.version} is for others to evaluate")
        if by == due.who.stand_in and when_unix - due.since_unix < rule.stand_in_after_s(self._spec):
            raise PeerError("TOO_EARLY", f"those who evaluate version {report.version} still have time")
        before = self._counted(report.version)
        if by in self._said.get(report.version, {}):
            return False  # each says it once
        self._keep(report.version, by, said)
        return self._counted(report.version) != before

    def point(self, version: int) -> EvalPoint | None:
        """What is shown of `version`; None while nobody's word counts."""
        counted = self._counted(version)
        if not counted:
            return None
        said = [s.word.losses for s in counted]
        losses = tuple(
            rule.shown_loss([one[n] for one in said if len(one) > n]) for n in range(max(map(len, said)))
        )
        return EvalPoint(
            version=version,
            when_unix=counted[0].when_unix,
            loss=losses[0],
            tokens=max(s.word.tokens for s in counted),
            by=counted[0].word.by,
            losses=losses,
            asked=max(len(counted), len(self.chosen(version).chosen)),
            agreeing=rule.agreeing([s.word.losses[0] for s in counted]),
            reports=tuple(s.word for s in counted),
        )

    def samples(self, version: int) -> Samples | None:
        """What `version` writes: of each prompt's continuations the one that most evaluators wrote.

        None where nobody's continuations are known here.
        """
        counted = [s for s in self._counted(version) if s.samples]
        if not counted:
            return None
        shown = rule.shown_loss([s.word.losses[0] for s in counted])
        # Where all differ, that of the evaluator nearest to what is shown.
        nearest = sorted(counted, key=lambda s: abs(s.word.losses[0] - shown))
        samples = []
        for prompt, written in zip(
            self._spec.samples.prompts, zip(*(s.samples for s in nearest), strict=True), strict=True
        ):
            text, wrote = _most_common(written)
            samples.append(
                Sample(
                    prompt=clean_passage(prompt, limits.sample_chars_max),
                    text=clean_passage(text, limits.sample_chars_max),
                    agreeing=wrote,
                )
            )
        return Samples(
            version=version,
            when_unix=counted[0].when_unix,
            samples=tuple(samples),
            evaluators=len(counted),
        )

    def _counted(self, version: int) -> list[_Said]:
        """In the order of the log's choice, or of version 0 as they came."""
        said = self._said.get(version, {})
        if version == 0 or version not in self._due:  # of before this life: as it was kept
            return list(said.values())
        chosen, stand_in = self._due[version].who
        counted = [said[peer] for peer in chosen if peer in said]
        if len(counted) < len(chosen) and stand_in is not None and stand_in in said:
            counted.append(said[stand_in])
        return counted

    def _keep(self, version: int, by: PeerId, said: _Said) -> None:
        self._said.setdefault(version, {})[by] = said
        while len(self._said) > limits.evaluations_due_max:
            self._said.pop(next(v for v in self._said if v != version))

    # Version 0: the reports of those whom the log lists.

    def _take_of_genesis(self, by: PeerId, said: _Said) -> bool:
        if self._rules.version > limits.genesis_reports_version_max:
            raise PeerError("NOT_CHOSEN", "version 0 was evaluated long ago")
        if any(peer == by for entry in self._rules.recent for peer, _ in entry):
            return self._add_of_genesis(by, said)
        if len(self._of_genesis) < limits.peers_max:
            self._of_genesis.setdefault(by, said)
        return False

    def _admit_of_genesis(self, step: OuterStep) -> bool:
        listed = {PeerId(c.peer) for c in step.contributions}
        admitted = [peer for peer in self._of_genesis if peer in listed]  # in the order in which they came
        news = False
        for peer in admitted:
            news = self._add_of_genesis(peer, self._of_genesis.pop(peer)) or news
        if step.version > limits.genesis_reports_version_max:
            self._of_genesis = {}
        return news

    def _add_of_genesis(self, by: PeerId, said: _Said) -> bool:
        kept = self._said.get(0, {})
        if by in kept or len(kept) >= self._spec.evaluators_max:
            return False
        self._keep(0, by, said)
        return True


def _most_common(written: Sequence[str]) -> tuple[str, int]:
    """The text that came most often, of several the first; and how often."""
    counts = Counter(written)
    best = max(counts.values())
    return next(text for text in written if counts[text] == best), best
