"""The global state on this machine: G and M in memory, candidate outer steps beside them, files behind them.

Implements ports.StateKeeper. Arrays in memory run ahead of the files: what a restart finds is a whole state
at some earlier index, and the rules apply the log's entries on top of it again, whose deltas are kept at
least that long (protocol.md 3, 7). So no crash loses more than time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from p2pdiloco import limits
from p2pdiloco.diloco.compress import decode, origin_of
from p2pdiloco.diloco.global_state import GlobalState, chunks_of, put_chunk, roots_of
from p2pdiloco.diloco.merge import merge_listed
from p2pdiloco.diloco.norms import l2_norm
from p2pdiloco.diloco.outer_step import apply_outer_step
from p2pdiloco.errors import OperatorError, P2PDiLoCoError, PeerError, TransportError
from p2pdiloco.exit_codes import NETWORK, RUN
from p2pdiloco.ids import Digest, PeerId, digest_of, short
from p2pdiloco.rules.state import RulesState, genesis_state
from p2pdiloco.run_spec import RunSpec, chunk_sizes
from p2pdiloco.wire import codec
from p2pdiloco.wire.log import OuterStep
from p2pdiloco.wire.messages import DeltaHeader, Outcome, SnapshotOffer
from p2pdiloco_node.ports import Array, BlobStore, CheckedDelta, Purpose, Roots
from p2pdiloco_node.storage.files import Files
from p2pdiloco_node.storage.run_folder import SNAPSHOTS, STATE
from p2pdiloco_node.storage.state_files import (
    KeptSnapshot,
    KeptState,
    SnapshotList,
    StateFiles,
    snapshot_chunks,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RestoredState:
    """Where a start begins; `rules` is empty at genesis."""

    index: int
    version: int
    clock: int  # tokens
    target_tokens: int  # of the run, as the log says
    roots: Roots
    rules: bytes


class DiskStateKeeper:
    """Thread-safe; one thread at a time prepares, installs and takes snapshots, any may check deltas."""

    def __init__(
        self,
        folder: Path,
        spec: RunSpec,
        blobs: BlobStore,
        files: Files | None = None,
        *,
        index_max: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Loads the newest whole state that is not after `index_max` (the log's last entry).

        Raises: OperatorError if there is none and version 0 is not in the blob store, or is no such model's.
        """
        self._spec = spec
        self._params = spec.model.params
        self._blobs = blobs
        self._clock = clock
        self._lock = threading.Lock()
        self._state_files = StateFiles(folder / STATE, files)
        self._snapshot_list = SnapshotList(folder / SNAPSHOTS, files)
        self._prepared: OrderedDict[Digest, GlobalState] = OrderedDict()
        self._steps: OrderedDict[Digest, OuterStep] = OrderedDict()  # of tickets whose arrays were let go
        self._snapshots = [s for s in self._snapshot_list.load() if self._is_whole(s.offer)]
        kept = self._newest(index_max)
        self._state = GlobalState(kept.params, kept.momentum)
        self._index = kept.index
        self._rules = kept.rules
        self._saved_version = kept.version
        self._saved_at = clock()
        self._save_s = 0.0
        roots = roots_of(self._state)
        rules = codec.decode(kept.rules, RulesState) if kept.rules else genesis_state(spec)
        self.restored = RestoredState(
            kept.index,
            kept.version,
            rules.clock,
            rules.target_tokens,
            Roots(roots.params, roots.momentum),
            kept.rules,
        )

    @property
    def index(self) -> int:
        return self._index

    @property
    def snapshots(self) -> tuple[SnapshotOffer, ...]:
        """Those that are complete here, oldest first."""
        return tuple(kept.offer for kept in self._snapshots)

    def params(self) -> Array:
        """The certified params now, float32 [params]; a later install makes new arrays."""
        return self._state.params

    def momentum(self) -> Array:
        """The outer momentum now, float32 [params]."""
        return self._state.momentum

    def check_delta(
        self, header: DeltaHeader | None, delta: Digest, sender: PeerId | None = None
    ) -> CheckedDelta:
        """Decode a delta and measure its L2 norm. HELD, or BAD_SHAPE, NOT_FINITE, TOO_BIG with norm 0.

        Raises:
            TransportError: the blob is not here any more.
        """
        data = self._blobs.read(delta)
        try:
            origin = origin_of(data)
            if header is not None and origin.sequence != header.sequence:
                raise PeerError("BAD_SHAPE", f"sequence {origin.sequence}, not {header.sequence}")
            if sender is not None and origin.peer != sender:
                raise PeerError("BAD_SHAPE", "a copy of another peer's delta")
            values = decode(self._spec.outer.codec, data, self._spec.model.tensors)
        except PeerError as error:
            log.info("delta %s is refused: %s", short(delta), error)
            return CheckedDelta(Outcome(error.reason), 0.0)
        return CheckedDelta(Outcome.HELD, l2_norm(values))

    def prepare(self, ticket: Digest, step: OuterStep) -> Roots:
        """The state after `step` on top of the certified one, kept under `ticket`; its roots.

        Only the declared figures are used, contributions in the entry's order (algorithm.md 5).

        Raises:
            TransportError: a delta is not here.
            PeerError: a delta does not decode, or is another peer's.
        """
        state = self._after(step)
        roots = roots_of(state)
        with self._lock:
            self._prepared[ticket] = state
            self._prepared.move_to_end(ticket)
            self._steps[ticket] = step
            while len(self._prepared) > limits.prepared_steps_max:
                self._prepared.popitem(last=False)
            while len(self._steps) > limits.contributions_max:
                self._steps.popitem(last=False)
        return Roots(roots.params, roots.momentum)

    def install(self, index: int, version: int, ticket: Digest | None, rules: bytes) -> None:
        """Make the state at `index` the certified one. The swap is at once; files follow when due."""
        assert index == self._index + 1, f"entry {index} on the state at {self._index}"
        if ticket is not None:
            state = self._prepared.get(ticket)
            if state is None:
                state = self._after(self._steps[ticket])  # let go meanwhile for others' candidates
            with self._lock:
                self._state = state
                self._prepared.clear()  # candidates on the old state
                self._steps.clear()
        self._index = index
        self._rules = rules
        if ticket is not None and self._is_due(version):
            self._save(KeptState(index, version, self._state.params, self._state.momentum, rules))

    def take_snapshot(self, index: int, version: int) -> SnapshotOffer:
        """Put the chunks of the state at `index` into the blob store; the newest two snapshots stay.

        Raises: OperatorError; then the snapshots before are all there.
        """
        assert index == self._index, f"a snapshot of entry {index} at {self._index}"
        params = [self._put_chunk(chunk) for chunk in chunks_of(self._state.params)]
        momentum = [self._put_chunk(chunk) for chunk in chunks_of(self._state.momentum)]
        offer = SnapshotOffer(index, tuple(params), tuple(momentum), self._rules)
        self._keep_snapshot(KeptSnapshot(version, offer))
        return offer

    def install_snapshot(self, offer: SnapshotOffer, version: int) -> None:
        """Make a snapshot, whose chunks are in the blob store and whose roots the rules have checked, the
        certified state.

        Raises:
            TransportError: a chunk is not here.
            PeerError: a chunk has another size than the model implies, or is not finite.
            OperatorError: it cannot be kept.
        """
        kept = self._read_snapshot(KeptSnapshot(version, offer))
        self._keep_snapshot(KeptSnapshot(version, offer))
        with self._lock:
            self._state = GlobalState(kept.params, kept.momentum)
            self._prepared.clear()
            self._steps.clear()
        self._index = offer.index
        self._rules = offer.rules
        self._saved_version = version

    def cut(self, index: int) -> None:
        """Remove what is on disk of states after `index`; the arrays in memory stay until others come.

        Raises: OperatorError.
        """
        self._state_files.cut(index)
        self._forget_snapshots([s for s in self._snapshots if s.offer.index > index])

    def save(self, version: int) -> None:
        """Write the state now (a node that leaves starts faster next time). Raises: OperatorError."""
        if self._rules:
            state = KeptState(self._index, version, self._state.params, self._state.momentum, self._rules)
            self._state_files.save(state)

    def _after(self, step: OuterStep) -> GlobalState:
        mean = merge_listed(self._spec, step, self._blobs.read)
        state = self._state.copy()
        apply_outer_step(state, mean, step.scalars, self._spec.outer.mu)
        return state

    def _is_due(self, version: int) -> bool:
        """Files take at most a share of the time, and at least so often that a replay is short."""
        waited = self._clock() - self._saved_at
        often = version - self._saved_version >= limits.state_write_versions_max
        return often or waited * limits.state_write_share >= self._save_s

    def _save(self, state: KeptState) -> None:
        """A state that cannot be written now costs nothing: the one before is there, and the log."""
        started = self._clock()
        try:
            self._state_files.save(state)
        except OperatorError as error:
            log.warning("the state of version %d is not saved: %s", state.version, error)
        else:
            self._saved_version = state.version
        self._saved_at = self._clock()
        self._save_s = self._saved_at - started

    def _put_chunk(self, chunk: memoryview) -> Digest:
        data = bytes(chunk)
        digest = digest_of(data)
        self._blobs.put(digest, data, Purpose.SNAPSHOT)
        return digest

    def _keep_snapshot(self, kept: KeptSnapshot) -> None:
        self._snapshot_list.save(kept)
        self._snapshots = [s for s in self._snapshots if s.offer.index != kept.offer.index] + [kept]
        self._snapshots.sort(key=lambda s: s.offer.index)
        self._forget_snapshots(self._snapshots[: -limits.snapshots_kept])

    def _forget_snapshots(self, old: list[KeptSnapshot]) -> None:
        self._snapshots = [s for s in self._snapshots if s not in old]
        needed = {*self._spec.genesis.params, *self._spec.genesis.momentum}
        for snapshot in self._snapshots:
            needed.update(snapshot_chunks(snapshot.offer))
        for snapshot in old:
            self._snapshot_list.remove(snapshot.offer.index)
            for chunk in snapshot_chunks(snapshot.offer):
                if chunk not in needed:
                    self._blobs.delete(chunk)

    def _newest(self, index_max: int | None) -> KeptState:
        """Files or snapshot, whichever is newer, or version 0. Damaged ones are skipped with a log line."""
        kept = self._state_files.load(self._params, index_max=index_max)
        for snapshot in reversed(self._snapshots):
            index = snapshot.offer.index
            if (index_max is not None and index > index_max) or (kept is not None and index <= kept.index):
                continue
            try:
                return self._read_snapshot(snapshot)
            except P2PDiLoCoError as error:
                log.warning("the snapshot at index %d is skipped: %s", index, error)
        return kept or self._genesis()

    def _read_snapshot(self, kept: KeptSnapshot) -> KeptState:
        offer = kept.offer
        params = self._read_array([Digest(c) for c in offer.params])
        momentum = self._read_array([Digest(c) for c in offer.momentum])
        return KeptState(offer.index, kept.version, params, momentum, offer.rules)

    def _genesis(self) -> KeptState:
        genesis = self._spec.genesis
        try:
            params = self._read_array([Digest(c) for c in genesis.params])
            momentum = self._read_array([Digest(c) for c in genesis.momentum])
        except PeerError as error:  # its digests are those that the owner signed
            raise OperatorError(
                f"Version 0 of run {self._spec.name!r} is not one of its model ({error}): the run's owner "
                "has to make the run anew; nothing can be mended here.",
                exit_code=RUN,
            ) from None
        except TransportError as error:
            raise OperatorError(
                f"Version 0 of run {self._spec.name!r} is not whole on this machine ({error}): start again "
                "while the tracker or another node is reachable, and it is fetched.",
                exit_code=NETWORK,
            ) from None
        return KeptState(0, 0, params, momentum, b"")

    def _read_array(self, chunks: list[Digest]) -> Array:
        sizes = len(chunk_sizes(self._params))
        if len(chunks) != sizes:
            raise PeerError("BAD_SHAPE", f"{len(chunks)} chunks where the model has {sizes}")
        array = np.empty(self._params, np.float32)
        for place, chunk in enumerate(chunks):
            put_chunk(array, place, self._blobs.read(chunk))
        return array

    def _is_whole(self, offer: SnapshotOffer) -> bool:
        return all(self._blobs.has(chunk) for chunk in snapshot_chunks(offer))
