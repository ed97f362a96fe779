"""What becomes of a delta's header at the door (protocol.md 5, 8). Being late or early is no offence."""

from __future__ import annotations

from p2pdiloco.ids import PeerId
from p2pdiloco.rules.delta_layout import encoded_size
from p2pdiloco.rules.outer_step import steps_max
from p2pdiloco.rules.staleness import too_late
from p2pdiloco.rules.state import RulesState, last_sequence, targets_reached
from p2pdiloco.run_spec import RunSpec
from p2pdiloco.wire.messages import DeltaHeader, Outcome


def check_header(state: RulesState, spec: RunSpec, header: DeltaHeader, peer: PeerId) -> Outcome:
    """NOTED where `peer` may send the blob, or why not. Its signature was checked when it was opened."""
    if state.finished or targets_reached(state, spec):
        return Outcome.RUN_OVER
    if peer in state.revoked:
        return Outcome.NOT_ADMITTED
    size = encoded_size(spec.outer.codec, spec.model.tensors)
    if header.size > size:
        return Outcome.TOO_BIG
    if (
        header.size < size
        or header.codec != spec.outer.codec
        or header.fragment >= spec.outer.fragments
        or header.steps > steps_max(spec)
    ):
        return Outcome.BAD_SHAPE
    if header.sequence <= last_sequence(state, peer):
        return Outcome.DUPLICATE
    if header.base_version > state.version:
        return Outcome.TOO_EARLY
    if too_late(state, spec, header):
        return Outcome.TOO_LATE
    return Outcome.NOTED
