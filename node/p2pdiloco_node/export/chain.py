"""A run's certified log as a reader checks it: every signature, certificate and link, and what it says.

Who reads a run believes nobody: not the tracker that serves it, not the folder that keeps it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError, PeerError
from p2pdiloco.exit_codes import RUN
from p2pdiloco.ids import Digest, PeerId, RunId, merkle_root
from p2pdiloco.protocol.run_log import RunLog
from p2pdiloco.rules.state import RulesState, after_entry, genesis_state, rules_digest
from p2pdiloco.run_spec import RunSpec
from p2pdiloco.wire.codec import decode
from p2pdiloco.wire.envelope import verify_entry
from p2pdiloco.wire.log import Content, Entry, OuterStep, OwnerEntry, state_root
from p2pdiloco.wire.messages import SnapshotOffer
from p2pdiloco.wire.signing import verify_ed25519
from p2pdiloco_node.progress import Watch
from p2pdiloco_node.storage import journal

Read = Callable[[int], bytes]
CHECKING = "Checking the log"


class Share(NamedTuple):
    """What one peer gave, as certified."""

    tokens: int
    deltas: int


class Tally:
    """Who contributed what, up to an entry. Names come from elsewhere: the log has none."""

    def __init__(self) -> None:
        self.version = 0
        self.tokens = 0  # of the token clock
        self.target_tokens = 0  # as the owner extended it; 0: as in the RunSpec
        self.ended_by_owner = False
        self.shares: dict[PeerId, Share] = {}

    def add(self, content: Content) -> None:
        """The next entry's content."""
        if isinstance(content, OwnerEntry) and content.word.kind == "extend":
            self.target_tokens = max(self.target_tokens, content.word.value)
        if isinstance(content, OwnerEntry) and content.word.kind == "finish":
            self.ended_by_owner = True
        if not isinstance(content, OuterStep):
            return
        self.version, self.tokens = content.version, content.clock
        for c in content.contributions:
            peer = PeerId(c.peer)
            tokens, deltas = self.shares.get(peer, Share(0, 0))
            self.shares[peer] = Share(tokens + c.tokens, deltas + 1)

    def copy(self) -> Tally:
        """As it is now, while this one goes on."""
        other = Tally()
        other.version, other.tokens, other.shares = self.version, self.tokens, dict(self.shares)
        other.target_tokens, other.ended_by_owner = self.target_tokens, self.ended_by_owner
        return other


class Entries(NamedTuple):
    """Of a journal's file, in order."""

    whole: list[Entry]  # up to the first that is not
    bytes: int  # of the file up to there
    damaged: bool  # what follows is not just being written: nobody knows how the log goes on


def entries_in(read: Read, *, where: str) -> Entries:
    """`read(n)`: the next n bytes at most. Raises: OperatorError: it is no log."""
    if read(len(journal.TAG)) != journal.TAG:
        raise OperatorError(f"{where} is not a p2pdiloco log.", RUN)
    entries: list[Entry] = []
    size = len(journal.TAG)
    frames = journal.frames_of(read)
    while True:
        try:
            payload = next(frames)
        except StopIteration as end:
            return Entries(entries, size, bool(end.value))
        try:
            entries.append(decode(payload, Entry, bytes_max=limits.log_frame_bytes_max))
        except PeerError as error:
            raise OperatorError(f"{where}: entry {len(entries) + 1} cannot be read ({error}).", RUN) from None
        size += journal.FRAME_HEAD_BYTES + len(payload)


def checked(run: RunId, spec: RunSpec, found: Entries, watch: Watch, *, where: str) -> Chain:
    """Costs a tenth of a millisecond a signature. Raises: OperatorError naming the entry that fails."""
    log, entries = RunLog(run, spec), found.whole
    for number, entry in enumerate(entries, start=1):
        try:
            verify_entry(entry, run, verify_ed25519)
            log.append(entry)
        except PeerError as error:
            raise OperatorError(
                f"{where} does not verify: entry {number}: {error}. Nothing of it is used; try another "
                "copy of the run.",
                RUN,
            ) from None
        watch(CHECKING, number, len(entries), "entries")
    return Chain(log, damaged=found.damaged, where=where)


class Chain:
    """A checked log, up to an index."""

    def __init__(self, log: RunLog, *, damaged: bool, where: str) -> None:
        """`damaged`: behind its last entry. `where` it was found."""
        self.run, self.spec = log.run, log.spec
        self.where = where
        self.damaged = damaged
        self._log = log
        self._made_at: list[int] = [0]  # by version: the index of the entry that made it
        for index in range(1, self._log.index + 1):
            if isinstance(self._log.content(index), OuterStep):
                self._made_at.append(index)

    @property
    def index(self) -> int:
        return self._log.index

    @property
    def version(self) -> int:
        """The newest that is certified here."""
        return len(self._made_at) - 1

    def made_at(self, version: int) -> int:
        """The index of the entry that made `version`; 0 for version 0."""
        return self._made_at[version]

    def version_at(self, index: int) -> int:
        """The version that the entries up to `index` make."""
        return sum(made <= index for made in self._made_at) - 1

    def head_at(self, index: int) -> Digest:
        return self._log.head_at(index)

    def steps(self, first: int, last: int) -> list[OuterStep]:
        """The outer steps at the indices after `first` up to `last`."""
        contents = (self._log.content(index) for index in range(first + 1, last + 1))
        return [content for content in contents if isinstance(content, OuterStep)]

    def tally(self, version: int) -> Tally:
        """Who contributed to `version`, and what the owner said until the next one."""
        tally = Tally()
        last = self.made_at(version + 1) - 1 if version < self.version else self.index
        for index in range(1, last + 1):
            tally.add(self._log.content(index))
        return tally

    def rules_at(self, index: int, before: RulesState | None = None, start: int = 0) -> RulesState:
        """The rules state after `index`, from `before` (after `start`; None: from genesis on)."""
        rules = before or genesis_state(self.spec)
        for number in range(start + 1, index + 1):
            content = self._log.content(number)
            try:
                rules = after_entry(rules, content, self.spec)
            except AssertionError as error:
                raise OperatorError(f"{self.where} does not verify: entry {number}: {error}.", RUN) from None
        return rules

    def certifies(self, index: int, params_root: Digest, momentum_root: Digest, rules: RulesState) -> bool:
        """Whether these are the three parts of the state that the entry at `index` was certified with; of
        genesis, which no entry certifies, never."""
        root = state_root(params_root, momentum_root, rules_digest(rules))
        return 0 < index <= self.index and root == self._log.content(index).state_root

    def certifies_offer(self, offer: SnapshotOffer) -> bool:
        """Whether a snapshot's lists of chunks are of the certified state at its index."""
        try:
            rules = decode(offer.rules, RulesState)
        except PeerError:
            return False
        params, momentum = (merkle_root([Digest(c) for c in part]) for part in (offer.params, offer.momentum))
        return self.certifies(offer.index, params, momentum, rules)
