"""Outer steps with made-up figures, for tests of the arrays alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from p2pdiloco.ids import NO_DIGEST
from p2pdiloco.wire.log import Contribution, OuterStep, Scalars


def _outer_step(figures: Sequence[tuple[float, float]], scalars: Scalars | None = None) -> OuterStep:
    """One contribution for each (weight, clip); the delta at place i is named bytes([i] * 32)."""
    contributions = tuple(
        Contribution(
            delta=bytes([i] * 32), peer=bytes([i] * 32), base_version=0, sequence=1, steps=1, tokens=1,
            norm=1.0, staleness=0.0, weight=weight, clip=clip, key=bytes(32), signature=bytes(64),
        )
        for i, (weight, clip) in enumerate(figures)
    )  # fmt: skip
    total = sum(weight for weight, _ in figures)
    return OuterStep(
        version=1, fragment=0, contributions=contributions, refused=(), left=(),
        scalars=scalars or Scalars(total, 1.0, 0.9, 1.0, 0.5), clock=1, t_full=1, state_root=NO_DIGEST,
    )  # fmt: skip


@pytest.fixture
def make_step() -> Callable[..., OuterStep]:
    return _outer_step
