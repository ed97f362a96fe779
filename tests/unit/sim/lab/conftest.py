"""Outer steps written out by hand."""

import pytest

from p2pdiloco.rules.float32 import f32
from p2pdiloco.wire.log import Contribution, OuterStep, Scalars


def contribution(place: int, *, tokens: int, weight: float, staleness: float, clip: float) -> Contribution:
    name = bytes([place]) * 32
    return Contribution(
        delta=name,
        peer=name,
        base_version=0,
        sequence=1,
        steps=1,
        tokens=tokens,
        norm=1.0,
        staleness=staleness,
        weight=f32(weight),
        clip=clip,
        key=name,
        signature=bytes(64),
    )


@pytest.fixture
def planned():
    """An outer step of deltas given as tokens, weights (default: tokens), staleness and clips."""

    def build(tokens=(10,), weights=None, *, staleness=None, clips=None, rho=1.0, mu=0.9, eta=0.5):
        weights = weights or tokens
        rows = zip(
            tokens, weights, staleness or [0.0] * len(tokens), clips or [1.0] * len(tokens), strict=True
        )
        mu_r = mu**rho
        return OuterStep(
            version=1,
            fragment=0,
            contributions=tuple(
                contribution(place, tokens=n, weight=w, staleness=k, clip=clip)
                for place, (n, w, k, clip) in enumerate(rows)
            ),
            refused=(),
            left=(),
            scalars=Scalars(
                weight_sum=f32(sum(weights)),
                rho=f32(rho),
                mu_r=f32(mu_r),
                momentum_gain=f32((1 - mu_r) / (1 - mu)),
                eta=f32(eta),
            ),
            clock=sum(tokens),
            t_full=sum(tokens),
            state_root=bytes(32),
        )

    return build
