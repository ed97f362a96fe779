"""The real arithmetic of the run, remembered: each merge and outer step is computed once per world.

What several replicas compute from equal inputs is equal (algorithm.md 5), so a world keeps each result by
all of its inputs: the arrays before, contributions with weight and clip, scalars.
"""

from __future__ import annotations

from msgspec.structs import replace

from p2pdiloco.diloco.compress import decode
from p2pdiloco.diloco.global_state import GlobalState, chunk_digests
from p2pdiloco.diloco.layout import Array
from p2pdiloco.diloco.merge import merge_listed
from p2pdiloco.diloco.norms import l2_norm
from p2pdiloco.diloco.outer_step import apply_outer_step
from p2pdiloco.errors import PeerError
from p2pdiloco.ids import Digest, merkle_root
from p2pdiloco.sim.disk import StateFiles
from p2pdiloco.sim.tiny_run import TinyRun
from p2pdiloco.wire.log import OuterStep
from p2pdiloco.wire.messages import Outcome, SnapshotOffer

_Inputs = tuple[object, ...]


class Arithmetic:
    """Of one world. Arrays in it are never written to."""

    def __init__(self, run: TinyRun) -> None:
        self._spec = run.spec
        self._checked: dict[Digest, tuple[Outcome, float]] = {}
        self._steps: dict[_Inputs, tuple[Array, Array]] = {}
        self._chunks: dict[bytes, tuple[tuple[Digest, ...], Digest]] = {}

    def check(self, delta: Digest, blob: bytes) -> tuple[Outcome, float]:
        """HELD and the L2 norm, or what is wrong with the blob."""
        known = self._checked.get(delta)
        if known is None:
            try:
                decoded = decode(self._spec.outer.codec, blob, self._spec.model.tensors)
                known = Outcome.HELD, l2_norm(decoded)
            except PeerError as error:
                known = Outcome(error.reason), 0.0
            self._checked[delta] = known
        return known

    def step(self, state: StateFiles, step: OuterStep, blobs: dict[Digest, bytes]) -> StateFiles | None:
        """The arrays after `step` on `state` (index, version and rules are left as they were).

        None if a delta is not among `blobs`.
        """
        if any(c.delta not in blobs for c in step.contributions):
            return None
        inputs: _Inputs = (
            self.root_of(state.params), self.root_of(state.momentum), step.scalars,
            tuple((c.delta, c.weight, c.clip) for c in step.contributions),
        )  # fmt: skip
        made = self._steps.get(inputs)
        if made is None:
            after = GlobalState(state.params, state.momentum).copy()
            mean = merge_listed(self._spec, step, blobs.__getitem__)
            apply_outer_step(after, mean, step.scalars, self._spec.outer.mu)
            made = self._steps[inputs] = (after.params, after.momentum)
        return replace(state, params=made[0], momentum=made[1])

    def root_of(self, array: Array) -> Digest:
        return self._named(array)[1]

    def offer(self, state: StateFiles) -> SnapshotOffer:
        """What a node says that it serves once the snapshot of `state` is written."""
        return SnapshotOffer(
            state.index, self._named(state.params)[0], self._named(state.momentum)[0], state.rules
        )

    def _named(self, array: Array) -> tuple[tuple[Digest, ...], Digest]:
        key = array.tobytes()
        named = self._chunks.get(key)
        if named is None:
            chunks = chunk_digests(array)
            named = self._chunks[key] = (tuple(chunks), merkle_root(chunks))
        return named
