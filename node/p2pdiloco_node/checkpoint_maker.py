"""Which versions a tracker offers, and when: every snapshot's, not too often, and the run's last one.

It looks once a second and does the work in a thread. Arrays are never copied: a snapshot's chunks are on the
disk, and the last version's params are the witness's own, which no later install writes into.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from p2pdiloco import limits
from p2pdiloco.diloco.global_state import chunk_digests, chunks_of
from p2pdiloco.errors import OperatorError, PeerError, TransportError
from p2pdiloco.ids import Digest, RunId, merkle_root, short
from p2pdiloco.rules.state import RulesState
from p2pdiloco.status import StatusBuilder
from p2pdiloco.status.checkpoints import with_losses
from p2pdiloco.wire.codec import decode
from p2pdiloco.wire.log import Content as EntryContent
from p2pdiloco.wire.log import OuterStep
from p2pdiloco.wire.messages import SnapshotOffer
from p2pdiloco_node.checkpoint_shelf import DTYPE, CheckpointShelf, Job
from p2pdiloco_node.export.certified import snapshot_chunks, tokenizer_bytes
from p2pdiloco_node.export.chain import Tally
from p2pdiloco_node.export.facts import Evaluation, Heard, Origin
from p2pdiloco_node.export.hf_folder import Content
from p2pdiloco_node.export.weights import Chunk
from p2pdiloco_node.participant import Participant
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
    tally: Tally
    when_unix: float


class CheckpointMaker:
    """`entry` for each entry of the log in order; `run` as a task."""

    def __init__(
        self,
        participant: Participant,
        shelf: CheckpointShelf,
        *,
        heard: Callable[[int], Heard],
        say: Callable[[str, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`heard(version)`: what the page knows of it. `say(kind, text)`: for page and log."""
        self._participant = participant
        self._shelf = shelf
        self._heard = heard
        self._say = say
        self._clock = clock
        self._tally = Tally()
        self._marks: OrderedDict[int, Mark] = OrderedDict()  # by version
        self._tried: set[int] = set()  # versions
        self._seen_at: dict[int, float] = {}  # versions that wait for their evaluation
        self._made_at = float("-inf")
        self._took_s = 0.0
        self._dropped_after: int | None = None

    def entry(self, index: int, content: EntryContent, when_unix: float) -> None:
        """A certified entry, once each; from the first on again where entries were dropped."""
        if index == 1:
            self._tally = Tally()
            self._marks.clear()
        self._tally.add(content)
        if not isinstance(content, OuterStep):
            return
        newest = next(reversed(self._marks), None)
        if newest is not None and newest % limits.snapshot_every_versions:
            del self._marks[newest]  # the last version needs a mark, and there may always be another
        self._marks[content.version] = Mark(index, self._tally.copy(), when_unix)
        while len(self._marks) > MARKS:
            self._marks.popitem(last=False)

    def went_back(self, version: int) -> None:
        """Versions after this one were dropped: those on the shelf go before anything else is made."""
        self._dropped_after = version if self._dropped_after is None else min(self._dropped_after, version)

    async def run(self) -> None:
        """Until cancelled."""
        try:
            await asyncio.to_thread(self._shelf.load)
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
        """Make the checkpoint that is due, if one is."""
        if self._dropped_after is not None:
            after, self._dropped_after = self._dropped_after, None
            self._tried = {version for version in self._tried if version <= after}
            await asyncio.to_thread(self._shelf.forget_after, after)
        participant = self._participant
        node = participant.node
        if node is None:
            return
        keeper = participant.keeper
        if node.state.finished and keeper.index == node.index:
            version = node.version
            if self._is_new(version) and self._is_evaluated(version):
                params = keeper.params()
                await self._make(version, lambda: _of_array(params))
            return
        if not keeper.snapshots or self._clock() < self._next_at:
            return
        offer = keeper.snapshots[-1]
        version = await asyncio.to_thread(_version_of, offer)
        if self._is_new(version) and self._is_evaluated(version):
            await self._make(version, lambda: self._of_snapshot(offer))

    @property
    def _next_at(self) -> float:
        pause_s = max(limits.checkpoint_interval_s_min, self._took_s / limits.checkpoint_share)
        return self._made_at + pause_s

    def _is_new(self, version: int) -> bool:
        offered = any(checkpoint.version == version for checkpoint in self._shelf.offered)
        return version in self._marks and version not in self._tried and not offered

    def _is_evaluated(self, version: int) -> bool:
        """Or was waited for long enough; a version that nobody evaluates is not waited for."""
        spec = self._participant.setting.spec
        evaluation = self._heard(version).evaluation
        if evaluation is not None and evaluation.version == version:
            return True
        node = self._participant.node
        last = node is not None and node.state.finished
        since = self._seen_at.setdefault(version, self._clock())
        waited = self._clock() - since >= limits.checkpoint_evaluation_s
        return waited or not (last or version % spec.eval_every == 0)

    def _of_snapshot(self, offer: SnapshotOffer) -> Parts:
        spec, blobs = self._participant.setting.spec, self._participant.blobs
        root = merkle_root([Digest(c) for c in offer.params])
        return Parts(root, lambda: snapshot_chunks(spec, offer.params, blobs.read))

    async def _make(self, version: int, parts: Callable[[], Parts]) -> None:
        self._tried.add(version)
        self._seen_at.clear()
        mark, heard = self._marks[version], self._heard(version)
        setting, node = self._participant.setting, self._participant.node
        assert node is not None, "looked at"
        head = node.log.head_at(mark.index)

        def work() -> int:
            params_root, chunks = parts()  # hashes the model where it is an array
            origin = Origin(setting.run, setting.spec, version, mark.index, head, params_root, mark.tally)
            tokenizer_json = tokenizer_bytes(setting.spec, self._participant.blobs.read)
            content = Content(origin, heard, tokenizer_json, DTYPE)
            return self._shelf.make(Job(content, chunks, mark.when_unix)).bytes

        began = self._clock()
        try:
            size = await asyncio.to_thread(work)
        except (OperatorError, TransportError, PeerError) as error:
            log.warning(
                "Version %d is not offered for download: %s", version, error
            )  # paths: not for the page
        else:
            self._say("checkpoint", f"version {version} can be downloaded ({size / 1e6:,.1f} MB)")
        self._made_at = self._clock()
        self._took_s = self._made_at - began


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
    return Heard(Evaluation(evaluated, point.loss, point.tokens), names)


def listing(run: RunId, shelf: CheckpointShelf, builder: StatusBuilder) -> bytes:
    """What `GET /v1/checkpoints` says: JSON, the newest first."""
    shown = with_losses(shelf.offered, builder.evaluations)
    return msgspec.json.encode({"run": run.hex(), "checkpoints": shown})
