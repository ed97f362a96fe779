"""Versions that a tracker offers for download, as the page and its JSON twin show them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from p2pdiloco.status.read_model import Checkpoint, EvalPoint


def with_losses(
    offered: Iterable[Checkpoint], evaluations: Mapping[int, EvalPoint]
) -> tuple[Checkpoint, ...]:
    """The newest first, each with the held-out loss of its own version where that was measured."""
    newest_first = sorted(offered, key=lambda c: -c.version)
    return tuple(
        msgspec.structs.replace(c, loss=evaluations[c.version].loss if c.version in evaluations else None)
        for c in newest_first
    )
