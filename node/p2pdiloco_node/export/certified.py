"""From a checked log and blobs to the params of one certified version, and the proof that they are.

Nearest state at or before the version (a snapshot, a state file, version 0), then the outer steps since, then
the root that the log names. Where a snapshot is of that very version, its chunks are passed on one by one
and the model is never in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from p2pdiloco import limits
from p2pdiloco.diloco.global_state import GlobalState, chunks_of, put_chunk, roots_of
from p2pdiloco.diloco.merge import merge_listed
from p2pdiloco.diloco.outer_step import apply_outer_step
from p2pdiloco.errors import OperatorError, PeerError
from p2pdiloco.exit_codes import RUN, USAGE
from p2pdiloco.ids import Digest, merkle_root
from p2pdiloco.rules.state import RulesState, genesis_state
from p2pdiloco.run_spec import RunSpec, chunk_sizes
from p2pdiloco.wire.codec import decode, encode
from p2pdiloco.wire.frames import open_frame
from p2pdiloco.wire.log import OuterStep
from p2pdiloco.wire.messages import SnapshotOffer
from p2pdiloco_node.export.chain import Chain
from p2pdiloco_node.export.weights import Chunk
from p2pdiloco_node.ports import Array
from p2pdiloco_node.progress import Watch

STEPS = "Computing outer steps"


class Read(Protocol):
    """A blob's bytes, which hash to its digest. Raises: TransportError: it is not here, or damaged."""

    def __call__(self, digest: Digest, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class KeptArrays:
    """A state file: arrays at an index of the log."""

    index: int
    params: Array  # float32 [params]
    momentum: Array
    rules: bytes  # encoded


@dataclass(frozen=True, slots=True)
class Plan:
    """How a version is made from what there is."""

    version: int
    index: int  # of the entry that made it
    start: SnapshotOffer  # of version 0 as well
    steps: tuple[OuterStep, ...]  # since then

    @property
    def blobs(self) -> list[Digest]:
        """What has to be at hand; the momentum only where there are steps to compute."""
        chunks = (*self.start.params, *(self.start.momentum if self.steps else ()))
        deltas = (c.delta for step in self.steps for c in step.contributions)
        return [Digest(d) for d in dict.fromkeys((*chunks, *deltas))]


@dataclass(frozen=True, slots=True)
class Certified:
    """The params of a certified version. `chunks()` gives their bytes in order, again at each call."""

    version: int
    index: int
    params_root: Digest
    chunks: Callable[[], Iterator[Chunk]]


def wanted_version(chain: Chain, asked: str) -> int:
    """`newest` or a number. Raises: OperatorError."""
    damaged = (
        f"The log of {chain.where} is damaged behind version {chain.version}, and what follows cannot be "
        f"read: use another copy of the run, or name a version up to {chain.version} with --version."
    )
    if asked == "newest":
        if chain.damaged:
            raise OperatorError(damaged, RUN)
        return chain.version
    if not asked.isdecimal() or len(asked) > 15:
        raise OperatorError(f"--version is newest or a number, not {asked!r}.", USAGE)
    if int(asked) > chain.version:
        if chain.damaged:
            raise OperatorError(damaged, RUN)
        raise OperatorError(
            f"version {asked} is not certified in {chain.where}: the newest there is {chain.version}.", RUN
        )
    return int(asked)


def plans(chain: Chain, version: int, offers: Sequence[SnapshotOffer]) -> list[Plan]:
    """Ways to `version`, the one with the fewest outer steps first.

    Snapshots that no entry certifies are left out.
    """
    spec = chain.spec
    genesis = SnapshotOffer(0, spec.genesis.params, spec.genesis.momentum, encode(genesis_state(spec)))
    index = chain.made_at(version)
    found = [genesis]
    for offer in offers:
        # Behind the entry that made the version there may be others, which change no array.
        near = 0 < offer.index <= chain.index and chain.version_at(offer.index) <= version
        if near and chain.certifies_offer(offer):
            found.append(offer)
    found.sort(key=lambda offer: -offer.index)
    return [Plan(version, index, offer, tuple(chain.steps(offer.index, index))) for offer in found]


def follow(chain: Chain, plan: Plan, read: Read, watch: Watch) -> Certified:
    """Carry out a plan.

    Raises: OperatorError: a blob is not what the run's entries say; TransportError: one is not here.
    """
    spec, start = chain.spec, plan.start
    if not plan.steps:
        root = merkle_root([Digest(c) for c in start.params])
        return Certified(plan.version, plan.index, root, lambda: snapshot_chunks(spec, start.params, read))
    state = GlobalState(_array(spec, start.params, read), _array(spec, start.momentum, read))
    rules = decode(start.rules, RulesState)
    return _advance(chain, state, rules, start.index, plan.steps, plan.version, read, watch)


def follow_arrays(chain: Chain, kept: KeptArrays, version: int, read: Read, watch: Watch) -> Certified | None:
    """From a state file, where it is a state that the log certifies at or before `version`; else None.

    Raises: as `follow`.
    """
    index = chain.made_at(version)
    if kept.index > chain.index or chain.version_at(kept.index) > version:
        return None
    state = GlobalState(kept.params, kept.momentum)
    try:
        rules = decode(kept.rules, RulesState)
    except PeerError:
        return None
    roots = roots_of(state)
    if kept.index == 0 or not chain.certifies(kept.index, roots.params, roots.momentum, rules):
        return None
    steps = chain.steps(kept.index, index)
    if not steps:
        return Certified(version, index, roots.params, lambda: iter(chunks_of(state.params)))
    return _advance(chain, state, rules, kept.index, steps, version, read, watch)


def _advance(
    chain: Chain,
    state: GlobalState,
    rules: RulesState,
    start: int,
    steps: Sequence[OuterStep],
    version: int,
    read: Read,
    watch: Watch,
) -> Certified:
    """Raises: OperatorError where the state that comes out is not the certified one."""
    for done, step in enumerate(steps):
        watch(STEPS, done, len(steps), "steps")
        _apply(chain.spec, state, step, read)
    watch(STEPS, len(steps), len(steps), "steps")
    index = chain.made_at(version)
    roots = roots_of(state)
    if not chain.certifies(index, roots.params, roots.momentum, chain.rules_at(index, rules, start)):
        raise OperatorError(
            f"version {version} comes out otherwise here than a majority certified it: this machine's "
            "arithmetic or memory is at fault; try another one, or --version of a snapshot.",
            RUN,
        )
    return Certified(version, index, roots.params, lambda: iter(chunks_of(state.params)))


def _apply(spec: RunSpec, state: GlobalState, step: OuterStep, read: Read) -> None:
    """Raises: OperatorError: a delta is not the one that the entry lists; TransportError: one is not here."""
    try:
        mean = merge_listed(spec, step, read)
    except PeerError as error:
        raise OperatorError(f"version {step.version} cannot be computed: {error}.", RUN) from None
    apply_outer_step(state, mean, step.scalars, spec.outer.mu)


def snapshot_chunks(spec: RunSpec, digests: Sequence[bytes], read: Read) -> Iterator[Chunk]:
    """The bytes of a snapshot's params in order, a chunk in memory at a time.

    Raises: OperatorError: a chunk has another size than the model implies, or is not finite;
        TransportError: it is not here.
    """
    sizes = chunk_sizes(spec.model.params)
    _check_count(len(digests), len(sizes))
    for place, (digest, size) in enumerate(zip(digests, sizes, strict=True)):
        data = read(Digest(digest))
        if len(data) != size or not bool(np.isfinite(np.frombuffer(data[: size - size % 4], "<f4")).all()):
            raise _bad_chunk(place)
        yield data


def _array(spec: RunSpec, digests: Sequence[bytes], read: Read) -> Array:
    params = spec.model.params
    _check_count(len(digests), len(chunk_sizes(params)))
    array = np.empty(params, np.float32)
    for place, digest in enumerate(digests):
        try:
            put_chunk(array, place, read(Digest(digest)))
        except PeerError:
            raise _bad_chunk(place) from None
    return array


def _check_count(here: int, wanted: int) -> None:
    if here != wanted:
        raise OperatorError(f"the snapshot has {here} chunks where the model has {wanted}.", RUN)


def _bad_chunk(place: int) -> OperatorError:
    return OperatorError(f"chunk {place} of the snapshot is not of this model, or not finite.", RUN)


def tokenizer_bytes(spec: RunSpec, read: Read) -> bytes:
    """The run's tokenizer.json; empty where tokens are bytes.

    Raises: OperatorError: its pieces are not what the RunSpec says; TransportError: one is not here.
    """
    pieces = spec.data.tokenizer.pieces
    if sum(piece.tokens for piece in pieces) > limits.tokenizer_bytes_max:
        raise OperatorError(
            f"the run's tokenizer has more than {limits.tokenizer_bytes_max // limits.MIB} MiB: it is none.",
            RUN,
        )
    try:
        return b"".join(open_frame(read(Digest(piece.digest)), piece.tokens) for piece in pieces)
    except PeerError as error:
        raise OperatorError(
            f"the run's tokenizer cannot be opened ({error}): tell the owner of the run.", RUN
        ) from None
