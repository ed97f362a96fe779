"""The only chain that there may be in one epoch, as seen from outside (checkers.py)."""

from __future__ import annotations

from p2pdiloco.ids import Digest, PeerId, RunId, short
from p2pdiloco.wire.log import (
    Body,
    Committee,
    Contribution,
    Membership,
    OuterStep,
    OwnerEntry,
    Refused,
    genesis_digest,
)
from p2pdiloco.wire.messages import DeltaHeader


class Violation(Exception):
    """A promise was broken."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule = rule


class Certified:
    """One index of a chain."""

    __slots__ = ("at", "body", "committee", "digest", "term")

    def __init__(self, body: Body, digest: Digest, committee: Committee, term: int, at: float) -> None:
        self.body = body
        self.digest = digest
        self.committee = committee  # governs the next index
        self.term = term
        self.at = at  # seconds


Headers = dict[Digest, tuple[PeerId, DeltaHeader]]


class Lineage:
    """Genesis and every entry certified up to and in `epoch`. No delta counts twice in it."""

    def __init__(self, run: RunId, epoch: int, genesis: Committee, headers: Headers) -> None:
        """`headers`: every delta ever made, by whom; shared."""
        self.epoch = epoch
        self.chain: list[Certified] = []
        self.listed: dict[Digest, int] = {}  # delta -> index
        self.refused: dict[Digest, int] = {}
        self.sequences: dict[PeerId, int] = {}  # highest settled by the log
        self.version = 0  # outer steps certified
        self._run = run
        self._genesis = genesis
        self._headers = headers

    @property
    def index(self) -> int:
        return len(self.chain)

    @property
    def committee(self) -> Committee:
        """The newest one: it governs the next index."""
        return self.governing(self.index + 1)

    def governing(self, index: int) -> Committee:
        """Who certifies `index`; of a recovery, that is the owner alone."""
        return self.chain[index - 2].committee if index > 1 else self._genesis

    def head(self, index: int) -> Digest:
        return self.chain[index - 1].digest if index else genesis_digest(self._run)

    def contains(self, index: int, digest: Digest) -> bool:
        return 0 < index <= self.index and self.chain[index - 1].digest == digest

    def branch(self, epoch: int, index: int) -> Lineage:
        """A chain that goes on from `index` of this one."""
        other = Lineage(self._run, epoch, self._genesis, self._headers)
        for certified in self.chain[:index]:
            other.add(certified.body, certified.digest, certified.term, certified.at)
        return other

    def add(self, body: Body, digest: Digest, term: int, at: float) -> None:
        """Raises: Violation."""
        index = self.index + 1
        if body.index != index or body.previous != self.head(index - 1):
            raise Violation("chain", f"the body certified at {index} does not follow {index - 1}")
        content, committee = body.content, self.committee
        if isinstance(content, Membership):
            committee = content.committee
        elif isinstance(content, OwnerEntry) and content.word.committee is not None:
            committee = content.word.committee
        if isinstance(content, OuterStep):
            self._counted(content, index)
        self.chain.append(Certified(body, digest, committee, term, at))

    def _counted(self, step: OuterStep, index: int) -> None:
        """No delta counts twice, none out of order, none of what was refused."""
        if step.version != self.version + 1:
            raise Violation("versions count outer steps", f"{step.version} after {self.version}")
        self.version = step.version
        for c in step.contributions:
            delta, peer = Digest(c.delta), PeerId(c.peer)
            if delta in self.listed or delta in self.refused:
                raise Violation("a delta counts once", f"{short(delta)} again at {index}")
            if c.sequence <= self.sequences.get(peer, 0):
                raise Violation("sequences rise", f"{c.sequence} of {short(peer)} at {index}")
            made = self._headers.get(delta)
            if made is None or made[0] != peer or made[1].base_version != c.base_version:
                raise Violation("credit follows the delta", f"{short(delta)} at {index}")
            self.listed[delta] = index
        for r in step.refused:
            self.refused[Digest(r.delta)] = index
        everything: list[Contribution | Refused] = [*step.contributions, *step.refused]
        for named in everything:
            peer = PeerId(named.peer)
            self.sequences[peer] = max(self.sequences.get(peer, 0), named.sequence)
