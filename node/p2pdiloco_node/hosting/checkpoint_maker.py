"""Which versions a tracker offers, and when: every snapshot's, not too often, and the run's last one.

It looks once a second and does the work in a thread. Arrays are never copied: a snapshot's chunks are on the
disk, and the last version's params are the witness's own, which no later install writes into. Nobody needs
what it makes to go on, so nothing that fails here ends the witness.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from p2pdiloco import limits
from p2pdiloco.diloco.global_state import chunk_digests, chunks_of
from p2pdiloco.errors import OperatorError, PeerError, TransportError
from p2pdiloco.ids import Digest, RunId, merkle_root, short
from p2pdiloco.protocol.run_log import RunLog
from p2pdiloco.rules.state import RulesState
from p2pdiloco.run_spec import RunSpec
from p2pdiloco.status import StatusBuilder
from p2pdiloco.status.checkpoints import with_losses
from p2pdiloco.wire.codec import decode
from p2pdiloco.wire.log import Content as EntryContent
from p2pdiloco.wire.log import OuterStep
from p2pdiloco.wire.messages import SnapshotOffer
from p2pdiloco_node.export.certified import Read, snapshot_chunks, tokenizer_bytes
from p2pdiloco_node.export.chain import Tally
from p2pdiloco_node.export.facts import Evaluation, Heard, Origin
from p2pdiloco_node.export.hf_folder import Content
from p2pdiloco_node.export.weights import Chunk
from p2pdiloco_node.hosting.checkpoint_shelf import DTYPE, CheckpointShelf, Job
from p2pdiloco_node.ports import Array

log = logging.getLogger("p2pdiloco.tracker")
LOOK_S = 1.0
MARKS = limits.snapshots_kept + 2  # versions whose tallies are remembered


class Parts(NamedTuple):
    """Params as bytes in order, and the root that names them."""

    root: Digest
    chunks: Callable[[], Iterator[Chunk]]


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a version was made."""

    index: int
    head: Digest
    tally: Tally
    when_unix: float


@dataclass(frozen=True, slots=True)
class Seen:
    """The witness as it is now: the log of its rules, and what has come to its disk since."""

    log: RunLog
    finished: bool
    last: Callable[[], Array] | None  # params of the run's last version; None: not there yet
    snapshots: Sequence[SnapshotOffer]  # whole ones, oldest first


class CheckpointMaker:
    """`entry` for each entry of the log in order; `run` as a task."""

    def __init__(
        self,
        run: RunId,
        spec: RunSpec,
        shelf: CheckpointShelf,
        *,
        seen: Callable[[], Seen],
        read: Read,
        heard: Callable[[int], Heard],
        say: Callable[[str, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`seen()`: the witness, on the event loop. `read(digest)`: a blob, in a thread. `heard(version)`:
        what the page knows of it. `say(kind, text)`: for page and log."""
        self._run = run
        self._spec = spec
        self._shelf = shelf
        self._seen = seen
        self._read = read
        self._heard = heard
        self._say = say
        self._clock = clock
        self._tally = Tally()
        self._marks: OrderedDict[int, Mark] = OrderedDict()  # by version
        self._tried: set[int] = set()  # versions
        self._waits_since: dict[int, float] = {}  # versions that wait for their evaluation
        self._made_at = float("-inf")
        self._took_s = 0.0
        self._dropped_after: int | None = None
        self._said = ""  # of what failed: said once, not once a second

    def entry(self, index: int, content: EntryContent, when_unix: float) -> None:
        """A certified entry, once each; from the first on again where entries were dropped."""
        if index == 1:
            self._tally = Tally()
            self._marks.clear()
        self._tally.add(content)
        newest = next(reversed(self._marks), None)
        if not isinstance(content, OuterStep):
            if newest is not None:  # what the owner says until the next version is told with this one
                self._marks[newest] = replace(self._marks[newest], tally=self._tally.copy())
            return
        if newest is not None and newest % limits.snapshot_every_versions:
            del self._marks[newest]  # the last version needs a mark, and there may always be another
        head = self._seen().log.head_at(index)
        self._marks[content.version] = Mark(index, head, self._tally.copy(), when_unix)
        while len(self._marks) > MARKS:
            self._marks.popitem(last=False)

    def went_back(self, version: int) -> None:
        """Versions after this one were dropped: those on the shelf go before anything else is made."""
        self._dropped_after = version if self._dropped_after is None else min(self._dropped_after, version)

    async def run(self) -> None:
        """Until cancelled."""
        own = self._seen().log
        try:
            await asyncio.to_thread(self._shelf.load, lambda index, head: _holds(own, index, head))
        except OperatorError as error:
            log.warning("No checkpoints are offered: %s", error)
            return
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                await self.look()
        finally:
            self._shelf.stop()

    async def look(self) -> None:
        """Make the checkpoint that is due, if one is. What fails is said, and the version left out."""
        try:
            await self._look()
        except Exception as error:  # noqa: BLE001 - a checkpoint is nothing that the witness has to end for
            self._failed("Checkpoints are not looked after", error)

    async def _look(self) -> None:
        if self._dropped_after is not None:
            after, self._dropped_after = self._dropped_after, None
            self._tried = {version for version in self._tried if version <= after}
            await asyncio.to_thread(self._shelf.forget_after, after)
        seen = self._seen()
        if seen.finished:
            version = seen.log.version_at(seen.log.index)
            if seen.last is not None and self._is_due(version, seen):
                params = seen.last()
                await self._make(version, lambda: _of_array(params))
            return
        if not seen.snapshots or self._clock() < self._next_at:
            return
        offer = seen.snapshots[-1]
        version = await asyncio.to_thread(_version_of, offer)
        if self._is_due(version, self._seen()):
            await self._make(version, lambda: self._of_snapshot(offer))

    @property
    def _next_at(self) -> float:
        pause_s = max(limits.checkpoint_interval_s_min, self._took_s / limits.checkpoint_share)
        return self._made_at + pause_s

    def _is_due(self, version: int, seen: Seen) -> bool:
        if version in self._tried or any(c.version == version for c in self._shelf.offered):
            return False
        # A recovery cuts the log before anybody here hears of it: the mark may be of what was dropped.
        mark = self._marks.get(version)
        if mark is None or not _holds(seen.log, mark.index, mark.head):
            return False
        return self._is_evaluated(version, last=seen.finished)

    def _is_evaluated(self, version: int, *, last: bool) -> bool:
        """Or was waited for long enough; a version that nobody evaluates is not waited for."""
        evaluation = self._heard(version).evaluation
        if evaluation is not None and evaluation.version == version:
            return True
        since = self._waits_since.setdefault(version, self._clock())
        waited = self._clock() - since >= limits.checkpoint_evaluation_s
        return waited or not (last or version % self._spec.eval_every == 0)

    def _of_snapshot(self, offer: SnapshotOffer) -> Parts:
        root = merkle_root([Digest(c) for c in offer.params])
        return Parts(root, lambda: snapshot_chunks(self._spec, offer.params, self._read))

    async def _make(self, version: int, parts: Callable[[], Parts]) -> None:
        self._tried.add(version)
        self._waits_since.clear()
        mark, heard = self._marks[version], self._heard(version)

        def work() -> int:
            params_root, chunks = parts()  # hashes the model where it is an array
            origin = Origin(self._run, self._spec, version, mark.index, mark.head, params_root, mark.tally)
            tokenizer_json = tokenizer_bytes(self._spec, self._read)
            content = Content(origin, heard, tokenizer_json, DTYPE)
            return self._shelf.make(Job(content, chunks, mark.when_unix)).bytes

        began = self._clock()
        try:
            size = await asyncio.to_thread(work)
        except Exception as error:  # noqa: BLE001 - as in `look`
            self._failed(f"Version {version} is not offered for download", error)
        else:
            self._said = ""
            self._say("checkpoint", f"version {version} can be downloaded ({size / 1e6:,.1f} MB)")
        self._made_at = self._clock()
        self._took_s = self._made_at - began

    def _failed(self, what: str, error: Exception) -> None:
        """In the log alone: paths are nothing for the page."""
        known = isinstance(error, OperatorError | TransportError | PeerError)
        said = f"{what}: {error if known else repr(error)}"
        if said != self._said:
            self._said = said
            log.warning("%s", said, exc_info=None if known else error)


def _holds(log_: RunLog, index: int, head: Digest) -> bool:
    return 0 < index <= log_.index and log_.head_at(index) == head


def _of_array(params: Array) -> Parts:
    """`params`: float32 [params]."""
    return Parts(merkle_root(chunk_digests(params)), lambda: iter(chunks_of(params)))


def _version_of(offer: SnapshotOffer) -> int:
    return decode(offer.rules, RulesState).version


def heard_of(builder: StatusBuilder, version: int) -> Heard:
    """What the page knows of `version`: the evaluation of it or of the nearest before, and nodes' names."""
    evaluated = max((v for v in builder.evaluations if v <= version), default=None)
    names = {short(peer): account.name for peer, account in builder.accounts.items()}
    if evaluated is None:
        return Heard(None, names)
    point = builder.evaluations[evaluated]
    return Heard(Evaluation(evaluated, point.loss, point.tokens, point.losses), names)


def listing(run: RunId, shelf: CheckpointShelf, builder: StatusBuilder) -> bytes:
    """What `GET /v1/checkpoints` says: JSON, the newest first."""
    shown = with_losses(shelf.offered, builder.evaluations)
    return msgspec.json.encode({"run": run.hex(), "checkpoints": shown})
