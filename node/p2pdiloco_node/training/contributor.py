"""A node's own deltas on the daemon's side: numpy and files, no torch (protocol.md 7, algorithm.md 3, 6, 7).

Sequence, cursor, error feedback and in flight are one durable record, written before a header leaves. On
disk it is two generations of `record.N` (a digest, then MessagePack), each naming the file with its `e`;
what is in flight is decoded from the delta's own blob, because dense codecs send what they keep. A sparse one
does not: there the raw pseudo-gradient of each delta in flight lies beside it, as `raw.SEQUENCE`. The record
is written last: until it is there, the one before holds, and nothing of a pass has happened. A blob or a raw
file that is damaged costs its own delta alone, for the record before lists the same ones.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Annotated, NamedTuple, Protocol

import numpy as np
from msgspec import Meta

from p2pdiloco import limits
from p2pdiloco.diloco.compress import Origin, is_sparse
from p2pdiloco.diloco.compress import decode as decode_delta
from p2pdiloco.diloco.error_feedback import ErrorFeedback
from p2pdiloco.errors import PeerError, TransportError
from p2pdiloco.ids import Digest, RunId, digest_of, short
from p2pdiloco.protocol.actions import Settled
from p2pdiloco.run_spec import RunSpec
from p2pdiloco.wire.codec import Struct, decode, encode
from p2pdiloco.wire.log import Bytes32, Count
from p2pdiloco.wire.messages import DeltaHeader
from p2pdiloco.wire.signing import Signer, delta_statement
from p2pdiloco_node.ports import Array, BlobStore
from p2pdiloco_node.training.frames import PassDone

log = logging.getLogger(__name__)

# After a damaged record, numbers that its lost successors may have used are left out.
SEQUENCE_SKIP = 16


class WriteDurably(Protocol):
    """Replace or create a file with these bytes, durable when it returns. Raises: OperatorError."""

    def __call__(self, path: Path, data: bytes | memoryview, /) -> None: ...


class Record(Struct, frozen=True):
    """What must not be forgotten between two passes."""

    generation: Count
    sequence: Count  # of the last delta made
    cursor: Count  # first sequence of the data order not trained on
    feedback: Count  # generation whose file holds e; 0: e is zero
    feedback_digest: Bytes32
    in_flight: Annotated[tuple[DeltaHeader, ...], Meta(max_length=limits.in_flight_max)]
    emptied: Count = 0  # what is in flight up to this sequence has lost its content here (NOT_FINITE)
    raw: Annotated[tuple[Bytes32, ...], Meta(max_length=limits.in_flight_max)] = ()
    # ^ digests of the raw pseudo-gradients, one for each of `in_flight`; none where the codec is dense
    evaluated_version: Annotated[int, Meta(ge=-1)] = -1  # newest that this node has evaluated and reported


class AnchorView(NamedTuple):
    """What the trainer adopts, and which own deltas it takes into account."""

    anchor: Array  # (params,) G - sum(in_flight)
    sequence: int  # own deltas up to this one are settled or subtracted
    unmerged_tokens: int  # of the deltas in flight: the anchor has seen them, the token clock has not


class DiskContributor:
    """Implements ports.Contributor. Thread-safe; every call that changes something is durable on return."""

    def __init__(
        self,
        folder: Path,
        run: RunId,
        spec: RunSpec,
        signer: Signer,
        blobs: BlobStore,
        write_durably: WriteDurably,
    ) -> None:
        """Load the newest whole record. `folder` exists and belongs to this run and identity alone."""
        self._folder = folder
        self._run = run
        self._spec = spec
        self._signer = signer
        self._blobs = blobs
        self._write = write_durably
        self._lock = threading.Lock()
        self._feedback = ErrorFeedback(spec.model.params, beta=spec.outer.error_feedback_beta)
        self._headers: dict[Digest, DeltaHeader] = {}
        self._raw: dict[Digest, Digest] = {}  # of what is in flight: its raw file's digest
        self._record = Record(0, 0, 0, 0, bytes(32), ())
        self._emptied = 0  # as in the record
        self._evaluated_version = -1  # as in the record
        self._overtaken = 0  # numbers that a pass on its way may carry although the log has used them
        self._load()

    @property
    def next_sequence(self) -> int:
        """The number of the next delta."""
        with self._lock:
            return self._record.sequence + 1

    @property
    def cursor(self) -> int:
        """The first sequence of the node's data order that no delta of this node has used (scenario F4)."""
        with self._lock:
            return self._record.cursor

    @property
    def evaluated_version(self) -> int:
        """The newest version whose evaluation by this node has reached the tracker; -1: none."""
        with self._lock:
            return self._evaluated_version

    def evaluated(self, version: int) -> None:
        """A next life does not begin again with what took minutes. Raises: OperatorError."""
        with self._lock:
            self._evaluated_version = max(self._evaluated_version, version)  # a report may have waited
            self._save(self._record.sequence, self._record.cursor, e_changed=False)

    def go_on_after(self, sequence: int) -> None:
        """The log knows own deltas up to `sequence`: later ones are numbered above it, durably.

        This changes something only where this record was lost while the identity was kept, or the key moved
        to a new folder. Every voter would answer DUPLICATE for as long as the old numbers are too low.

        Raises: OperatorError.
        """
        with self._lock:
            if sequence <= self._record.sequence:
                return
            log.warning(
                "the log knows this node's deltas up to %d, its own record in %s only up to %d: it goes on "
                "after the log's.", sequence, self._folder, self._record.sequence,
            )  # fmt: skip
            self._save(sequence, self._record.cursor, e_changed=False)
            self._overtaken = sequence

    def finish_pass(self, delta: Array, done: PassDone) -> DeltaHeader | None:
        """Encode a pseudo-gradient (params,) with error feedback; blob and record are durable on return.

        None: the log overtook the number of this pass (`go_on_after`) while it was on its way; it is lost.

        Raises:
            PeerError: NOT_FINITE: the trainer went astray. The pass is lost, and nothing changed.
            OperatorError: the disk; the same.
        """
        spec = self._spec
        with self._lock:
            if done.sequence <= self._overtaken:
                return None
            assert done.sequence > self._record.sequence, f"delta {done.sequence} was made already"
            assert len(self._headers) < limits.in_flight_max, "two deltas are in flight already"
            before = self._feedback.e
            sent = self._feedback.send(
                delta, spec.outer.codec, spec.model.tensors, Origin(self._signer.peer_id, done.sequence)
            )
            statement = delta_statement(
                self._run, sent.digest, 0, done.base_version, done.sequence, done.steps
            )
            header = DeltaHeader(
                delta=sent.digest,
                size=len(sent.blob),
                codec=spec.outer.codec,
                fragment=0,
                base_version=done.base_version,
                sequence=done.sequence,
                steps=done.steps,
                data_first=done.data_first,
                data_count=done.data_count,
                loss=done.loss,
                signature=self._signer.sign(statement),
            )
            self._headers[sent.digest] = header
            try:
                if sent.digest in self._feedback.raw:
                    raw = _bytes_of(self._feedback.raw[sent.digest])
                    self._write(self._raw_file(header), raw)
                    self._raw[sent.digest] = digest_of(raw)
                self._blobs.put(sent.digest, sent.blob)
                self._save(done.sequence, done.data_first + done.data_count, e_changed=True)
            except BaseException:
                # Not durable, so it never was: the record on disk does not know it either.
                self._feedback.e = before
                self._feedback.dropped(sent.digest)
                self._forget(sent.digest)
                raise
            return header

    def settle(self, delta: Digest, how: Settled) -> None:
        """The table of algorithm.md 6; a delta that is not in flight (any more) changes nothing."""
        with self._lock:
            if delta not in self._headers:
                return
            e_changed = False
            match how:
                case Settled.LISTED:
                    self._feedback.listed(delta)
                case Settled.PASSED_OVER:
                    self._feedback.passed_over(delta)
                    e_changed = True
                case Settled.REFUSED | Settled.TOO_LATE:
                    self._feedback.dropped(delta)
                case Settled.NOT_FINITE:
                    self._empty()
                    e_changed = True
            self._forget(delta)
            self._save(self._record.sequence, self._record.cursor, e_changed=e_changed)

    def go_back(self) -> None:
        """After values that are not finite, theta <- anchor <- G: e and pending are cleared (algorithm.md 6).

        What else is in flight stays there, is offered again and settled by the log as before; only its
        content is no longer part of the anchor and never comes back into e.
        """
        with self._lock:
            self._empty()
            self._save(self._record.sequence, self._record.cursor, e_changed=True)

    def _forget(self, delta: Digest) -> None:
        del self._headers[delta]
        self._raw.pop(delta, None)

    def _empty(self) -> None:
        self._feedback.clear()
        self._emptied = self._record.sequence

    def reset(self) -> None:
        """Absent beyond staleness_max: in flight, error feedback and pending cleared (algorithm.md 6).

        Or the owner dropped what the work stands on: another state may have the evaluated version's number.
        """
        with self._lock:
            self._evaluated_version = -1
            self._feedback.clear()
            self._headers.clear()
            self._raw.clear()
            self._save(self._record.sequence, self._record.cursor, e_changed=True)

    def in_flight(self) -> list[DeltaHeader]:
        """Unsettled deltas, oldest first."""
        with self._lock:
            return list(self._headers.values())

    def anchor(self, params: Array) -> Array:
        """G - sum(in_flight), a new array: raw or decoded, as the codec is sparse or dense."""
        return self.view(params).anchor

    def view(self, params: Array) -> AnchorView:
        """The anchor for `params` (params,), together with what it accounts for, at one moment."""
        with self._lock:
            parts = self._feedback.parts_in_flight()
            sequence = self._record.sequence
            steps = sum(self._headers[delta].steps for delta in self._feedback.pending)
        # Outside the lock: arrays in flight are never written to.
        anchor = params.copy()
        for part in parts:
            anchor -= part
        return AnchorView(anchor, sequence, steps * self._spec.tokens_per_inner_step)

    # Disk.

    def _save(self, sequence: int, cursor: int, *, e_changed: bool) -> None:
        generation = self._record.generation + 1
        feedback, digest = self._record.feedback, self._record.feedback_digest
        if e_changed:
            e = _bytes_of(self._feedback.e)
            self._write(self._folder / f"e.{generation}", e)
            feedback, digest = generation, digest_of(e)
        headers = tuple(self._headers.values())
        raw = tuple(self._raw[delta] for delta in self._headers if delta in self._raw)
        record = Record(
            generation, sequence, cursor, feedback, digest, headers, self._emptied, raw,
            self._evaluated_version,
        )  # fmt: skip
        data = encode(record)
        self._write(self._folder / f"record.{generation}", digest_of(data) + data)
        previous, self._record = self._record, record
        self._remove_but(
            {
                "record": {record.generation, previous.generation},
                "e": {record.feedback, previous.feedback},
                "raw": {header.sequence for r in (record, previous) for header in r.in_flight},
            }
        )

    def _remove_but(self, files: dict[str, set[int]]) -> None:
        for path in self._folder.iterdir():
            kind, _, number = path.name.partition(".")
            kept = files.get(kind)
            if kept is not None and number.isdecimal() and int(number) not in kept:
                path.unlink(missing_ok=True)

    def _load(self) -> None:
        found = sorted(
            (
                int(p.name.partition(".")[2])
                for p in self._folder.glob("record.*")
                if p.suffix[1:].isdecimal()
            ),
            reverse=True,
        )
        for place, generation in enumerate(found):
            record = self._read(generation)
            if record is None:
                log.warning("the training record %s/record.%d is damaged and is skipped for the one before.",
                            self._folder, generation)  # fmt: skip
                continue
            skipped = SEQUENCE_SKIP if place else 0
            # Generations never go back, or an old file could be taken for a new one.
            self._record = Record(
                found[0], record.sequence + skipped, record.cursor, record.feedback, record.feedback_digest,
                record.in_flight, record.emptied, record.raw, record.evaluated_version,
            )  # fmt: skip
            return
        if found:
            log.warning(
                "no training record in %s is whole: own deltas in flight are forgotten.", self._folder
            )
            self._record = Record(found[0], SEQUENCE_SKIP * len(found), 0, 0, bytes(32), ())

    def _read(self, generation: int) -> Record | None:
        """A whole record with its arrays loaded, or None: itself or its e is damaged."""
        try:
            with (self._folder / f"record.{generation}").open("rb") as file:
                data = file.read(limits.message_bytes_max)
            if digest_of(data[32:]) != data[:32]:
                return None
            record = decode(data[32:], Record)
            e = np.zeros(self._spec.model.params, np.float32)
            if record.feedback:
                e = self._read_array(self._folder / f"e.{record.feedback}", record.feedback_digest)
            if len(record.raw) != (len(record.in_flight) if is_sparse(self._spec.outer.codec) else 0):
                raise PeerError("BAD_SHAPE", f"{len(record.raw)} raw deltas of {len(record.in_flight)}")
        except (OSError, PeerError):
            return None
        self._feedback.clear()
        self._feedback.e = e
        self._headers.clear()
        self._raw.clear()
        raw = {
            Digest(header.delta): Digest(digest)
            for header, digest in zip(record.in_flight, record.raw, strict=False)
        }
        for header in record.in_flight:
            delta = Digest(header.delta)
            try:
                decoded = decode_delta(header.codec, self._blobs.read(delta), self._spec.model.tensors)
            except (TransportError, PeerError) as error:
                log.warning("the own delta %s is gone (%s); it is no longer in flight.", short(delta), error)
                continue
            if header.sequence > record.emptied:
                self._feedback.pending[delta] = decoded
                if delta in raw:
                    self._read_raw(header, raw[delta])
            self._headers[delta] = header
            if delta in raw:
                self._raw[delta] = raw[delta]  # damaged or not: a record names one for each in flight
        self._emptied = record.emptied
        self._evaluated_version = record.evaluated_version
        return record

    def _read_raw(self, header: DeltaHeader, digest: Digest) -> None:
        """Without it the anchor lacks only what was sent; e is right: what was not sent is in there."""
        path = self._raw_file(header)
        try:
            self._feedback.raw[Digest(header.delta)] = self._read_array(path, digest)
        except (OSError, PeerError) as error:
            log.warning(
                "%s is damaged or gone (%s): until the delta %s is settled, this node's own view has only "
                "the part of it that was sent.", path, error, short(header.delta),
            )  # fmt: skip

    def _raw_file(self, header: DeltaHeader) -> Path:
        return self._folder / f"raw.{header.sequence}"

    def _read_array(self, path: Path, digest: bytes) -> Array:
        """Float32 [params]. Raises: OSError; PeerError: BAD_DIGEST where it is not what was written."""
        params = self._spec.model.params
        array = np.fromfile(path, "<f4", params + 1)
        if array.size != params or digest_of(array.data.cast("B")) != digest:
            raise PeerError("BAD_DIGEST", path.name)
        return array.astype(np.float32, copy=False)


def _bytes_of(array: Array) -> memoryview:
    """Float32 little-endian, without a copy where the machine is."""
    return np.ascontiguousarray(array, dtype="<f4").data.cast("B")
