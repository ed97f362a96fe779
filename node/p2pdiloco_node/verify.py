"""`p2pdiloco verify DIR`: replay a kept run and check every signature, certificate, scalar and state root.

Nothing in DIR is changed, and nothing in it is believed: bytes are named by their digests, entries by their
certificates, and each state is computed again from the one before (protocol.md 3). Where deltas were
dropped, the replay starts at the oldest snapshot whose deltas are complete, and says so; the entries before
it are still checked for signatures, chain and committee. What the RunSpec itself names (data shards, the
evaluation shard, version 0) is read first: a damaged file is named.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from p2pdiloco.diloco.global_state import GlobalState, put_chunk, roots_of
from p2pdiloco.diloco.merge import merge_listed
from p2pdiloco.diloco.norms import l2_norm
from p2pdiloco.diloco.outer_step import apply_outer_step
from p2pdiloco.errors import OperatorError, PeerError, TransportError
from p2pdiloco.exit_codes import NO as FAILED
from p2pdiloco.ids import Digest, RunId, digest_of, merkle_root, short
from p2pdiloco.protocol.run_log import RunLog
from p2pdiloco.rules.outer_step import check_outer_step
from p2pdiloco.rules.state import (
    RulesState,
    after_entry,
    genesis_state,
    rules_digest,
)
from p2pdiloco.run_spec import RunSpec, open_run_spec
from p2pdiloco.wire.envelope import verify_entry
from p2pdiloco.wire.log import Content, Entry, OuterStep, state_root
from p2pdiloco.wire.messages import SnapshotOffer
from p2pdiloco.wire.signing import verify_ed25519
from p2pdiloco.words import count_of
from p2pdiloco_node.export.chain import entries_in
from p2pdiloco_node.export.kept import Kept, blob_paths, has_blob, locate, offers, read_blob
from p2pdiloco_node.ports import Array
from p2pdiloco_node.progress import Watch, shown
from p2pdiloco_node.storage.files import guarded

RELATIVE = 1e-3  # tolerance for declared figures, as for a re-proposal (algorithm.md 5)

BLOBS_READ = "Reading data and version 0"
ENTRIES_REPLAYED = "Replaying entries"


class Verified(NamedTuple):
    run: RunId
    name: str
    first_version: int  # the replay of states began here
    version: int
    entries: int
    deltas: int
    state_root: Digest
    blobs: int  # named by the RunSpec, kept here and whole: shards, the evaluation shard, version 0


def verify_run(folder: Path, progress: Watch | None = None) -> Verified:
    """Replay the run in `folder`: a run's DIR, what `demo --keep` kept, or a node's data folder.

    Raises: OperatorError; exit code 1 and the index where the run does not verify, 3 where there is none.
    """
    kept = locate(folder)
    run, spec = _open_spec(kept.spec)
    blobs = _check_named_blobs(kept, spec, progress)
    entries = read_log(kept.log)
    log = _check_chain(run, spec, entries)
    contents = [log.content(index) for index in range(1, log.index + 1)]
    rules = _rules_after_each(spec, contents)
    start, state = _starting_state(kept, spec, contents, rules)
    replay = _Replay(kept, log, spec, state)
    for place, content in enumerate(contents):
        if place >= start:
            replay.step(place + 1, rules[place], rules[place + 1], content)
        if progress is not None:
            progress(ENTRIES_REPLAYED, place + 1, len(contents), "entries")
    return Verified(
        run=run, name=spec.name, first_version=rules[start].version, version=rules[-1].version,
        entries=len(entries), deltas=replay.deltas, state_root=replay.root(rules[-1]), blobs=blobs,
    )  # fmt: skip


def print_verified(folder: Path, *, as_json: bool) -> int:
    """The command: progress on a terminal, then what was verified. Raises: OperatorError."""
    with shown(on_stderr=True) as told:
        verified = verify_run(folder, told.progress)
    if as_json:
        plain = {k: v.hex() if isinstance(v, bytes) else v for k, v in verified._asdict().items()}
        print(json.dumps(plain))
        return 0
    if verified.first_version:
        print(f"Older deltas were dropped: states are replayed from version {verified.first_version} on.")
    print(
        f"Run {verified.name!r} ({verified.run.hex()[:16]}) verifies: "
        f"{count_of(verified.entries, 'entry', 'entries')}, versions "
        f"{verified.first_version} to {verified.version}, {count_of(verified.deltas, 'delta')}, "
        f"{count_of(verified.blobs, 'blob')} of data and version 0; state {verified.state_root.hex()[:16]}."
    )
    return 0


def _failed(index: int, why: str) -> OperatorError:
    return OperatorError(f"This run does not verify: entry {index}: {why}.", FAILED)


def _open_spec(path: Path) -> tuple[RunId, RunSpec]:
    try:
        return open_run_spec(path.read_bytes(), verify_ed25519)
    except PeerError as error:
        raise OperatorError(f"This run does not verify: the RunSpec {path}: {error}.", FAILED) from None
    except OSError as error:
        raise OperatorError(f"The RunSpec {path} cannot be read: {error.strerror}.") from None


def _named_blobs(spec: RunSpec) -> dict[Digest, str]:
    """What the RunSpec names, in words, by digest; chunks that are alike are one blob."""
    data, genesis = spec.data, spec.genesis
    names = {
        **{Digest(c): f"chunk {i} of version 0's momentum" for i, c in enumerate(genesis.momentum)},
        **{Digest(c): f"chunk {i} of version 0's params" for i, c in enumerate(genesis.params)},
        **{Digest(p.digest): "a piece of the tokenizer" for p in data.tokenizer.pieces},
        **{Digest(e.shard.digest): f"the evaluation shard {e.name!r}" for e in data.evaluations[1:]},
        Digest(data.evaluation.digest): "the evaluation shard",
    }
    count = len(data.shards)
    return names | {
        Digest(s.digest): f"data shard {i} of {count}" for i, s in enumerate(data.shards, start=1)
    }


def _check_named_blobs(kept: Kept, spec: RunSpec, progress: Watch | None) -> int:
    """Read every copy of what the RunSpec names; how many blobs are here and whole.

    Raises: OperatorError (exit code 1): a copy is damaged; or one is missing in a run's own folder. A node
    keeps what it needs, so there it may be missing.
    """
    named = _named_blobs(spec)
    found = 0
    for place, (digest, what) in enumerate(named.items(), start=1):
        paths = list(blob_paths(kept, digest))
        for path in paths:
            data = guarded(path.read_bytes, path)
            if digest_of(data) != digest:
                raise OperatorError(
                    f"This run does not verify: {what} is damaged: {path} ({len(data)} bytes) has another "
                    "digest than the RunSpec names. Put the file back from a backup or another copy of the "
                    "run.",
                    FAILED,
                )
        if not paths and kept.is_served:
            raise OperatorError(
                f"This run does not verify: {what} is missing: {kept.blobs[-1] / digest.hex()} is not "
                "there. Put the file back from a backup or another copy of the run.",
                FAILED,
            )
        found += bool(paths)
        if progress is not None:
            progress(BLOBS_READ, place, len(named), "blobs")
    return found


def read_log(path: Path) -> list[Entry]:
    """All entries of a log file, which stays as it is.

    Raises: OperatorError (exit code 1) with the index of the first damaged one.
    """
    with guarded(lambda: path.open("rb"), path) as file:
        size = path.stat().st_size
        try:
            found = entries_in(file.read, where=str(path))
        except OperatorError as error:
            raise OperatorError(f"This run does not verify: {error}", FAILED) from None
    if found.bytes < size:
        raise _failed(len(found.whole) + 1, f"the log is damaged at byte {found.bytes} of {size}")
    return found.whole


def _check_chain(run: RunId, spec: RunSpec, entries: Sequence[Entry]) -> RunLog:
    """Signatures, certificates, chain, epochs and committees of every entry."""
    log = RunLog(run, spec)
    for place, entry in enumerate(entries):
        try:
            verify_entry(entry, run, verify_ed25519)
            log.append(entry)
        except PeerError as error:
            raise _failed(place + 1, str(error)) from None
    return log


def _rules_after_each(spec: RunSpec, contents: Sequence[Content]) -> list[RulesState]:
    """The rules state before the first entry and after each: a pure function of the log."""
    states = [genesis_state(spec)]
    for place, content in enumerate(contents):
        try:
            states.append(after_entry(states[-1], content, spec))
        except AssertionError as error:
            raise _failed(place + 1, str(error)) from None
    return states


def _starting_state(
    kept: Kept, spec: RunSpec, contents: Sequence[Content], rules: Sequence[RulesState]
) -> tuple[int, GlobalState]:
    """(entries to skip, arrays there): version 0, or the oldest snapshot whose deltas are complete."""
    genesis = SnapshotOffer(0, spec.genesis.params, spec.genesis.momentum, b"")
    for offer in (genesis, *offers(kept)):
        if offer.index > len(contents) or not _deltas_complete(kept, contents[offer.index :]):
            continue
        state = _read_snapshot(kept, spec, offer)
        if state is None:
            continue
        params, momentum = roots_of(state)
        here = state_root(params, momentum, rules_digest(rules[offer.index]))
        if offer.index and here != contents[offer.index - 1].state_root:
            raise _failed(offer.index, "the snapshot kept there is of another state")
        return offer.index, state
    raise OperatorError(
        "This run cannot be replayed: neither version 0 nor a snapshot with all later deltas is kept here; "
        "verify the folder of the tracker's witness instead.",
        FAILED,
    )


def _deltas_complete(kept: Kept, contents: Sequence[Content]) -> bool:
    return all(
        has_blob(kept, Digest(c.delta))
        for content in contents
        if isinstance(content, OuterStep)
        for c in content.contributions
    )


def _read_snapshot(kept: Kept, spec: RunSpec, offer: SnapshotOffer) -> GlobalState | None:
    """None where a chunk is missing. A chunk without a whole copy counts as missing.

    Raises: OperatorError: a chunk of version 0 is not what the model makes.
    """
    size = spec.model.params
    state = GlobalState(np.empty(size, np.float32), np.empty(size, np.float32))
    for array, chunks in ((state.params, offer.params), (state.momentum, offer.momentum)):
        for place, digest in enumerate(chunks):
            try:
                put_chunk(array, place, read_blob(kept, Digest(digest)))
            except TransportError:
                return None
            except PeerError as error:
                if offer.index:
                    return None
                # Its bytes are those that the owner signed.
                raise OperatorError(
                    f"This run does not verify: a chunk of version 0 is not one of its model ({error}).",
                    FAILED,
                ) from None
    whole = roots_of(state)
    listed = (
        merkle_root([Digest(c) for c in offer.params]),
        merkle_root([Digest(c) for c in offer.momentum]),
    )
    return state if (whole.params, whole.momentum) == listed else None


class _Replay:
    """Computes each state again from the one before."""

    def __init__(self, kept: Kept, log: RunLog, spec: RunSpec, state: GlobalState) -> None:
        self._kept = kept
        self._log = log
        self._spec = spec
        self._state = state
        self.deltas = 0

    def root(self, rules: RulesState) -> Digest:
        params, momentum = roots_of(self._state)
        return state_root(params, momentum, rules_digest(rules))

    def step(self, index: int, before: RulesState, after: RulesState, content: Content) -> None:
        """Raises: OperatorError naming `index`."""
        try:
            if isinstance(content, OuterStep):
                self._outer_step(index, before, content)
        except PeerError as error:
            raise _failed(index, str(error)) from None
        if self.root(after) != content.state_root:
            raise _failed(index, "its state root is not the state that it makes")

    def _outer_step(self, index: int, before: RulesState, step: OuterStep) -> None:
        spec = self._spec
        norms: dict[Digest, float] = {}

        def read(digest: Digest) -> bytes:
            try:
                return read_blob(self._kept, digest)
            except TransportError:
                raise PeerError("BAD_DIGEST", f"the delta {short(digest)} kept here is damaged") from None

        def see(digest: Digest, delta: Array) -> None:
            norms[digest] = l2_norm(delta)

        mean = merge_listed(spec, step, read, see)
        self.deltas += len(step.contributions)
        reason = check_outer_step(before, spec, step, norms, relative=RELATIVE)
        if reason is not None:
            raise _failed(index, reason)
        apply_outer_step(self._state, mean, step.scalars, spec.outer.mu)
