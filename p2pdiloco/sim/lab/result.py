"""What a lab run showed. Plain figures, for JSON, tables and plots."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec


class Point(msgspec.Struct, frozen=True):
    """One evaluation of the global state."""

    tokens: int  # merged, on the token clock
    hours: float  # virtual
    version: int
    loss: float  # held out, nats per token


class NodeFigures(msgspec.Struct, frozen=True):
    """One node's life."""

    speed: float
    steps: int  # inner steps taken
    merged_steps: int  # of them, in deltas that were listed
    bytes_up: int
    bytes_down: int
    waited_s: float  # alive, without taking a step
    down_s: float
    deltas: int
    listed: int
    too_late: int
    passed_over: int
    failures: int
    rolled_back: int  # steps that were not finite


class Result(msgspec.Struct, frozen=True):
    """One arm with one seed."""

    arm: str
    seed: int
    curve: tuple[Point, ...]  # empty without a model
    final_loss: float | None  # nats per token; infinite: it diverged
    train_loss: float | None  # mean of the last twentieth of inner steps
    tokens: int  # on the token clock, after caps
    trained_tokens: int  # in all merged deltas, before caps
    versions: int  # outer steps, of all fragments
    hours: float  # virtual
    goodput: float  # merged tokens over what all nodes would have made without a pause, a death or a wait,
    # less what is in a pass or on its way at the end
    staleness_mean: float  # rounds, weighted by tokens
    staleness_max: float
    rho_mean: float
    bytes_up: float  # mean of a node
    bytes_down: float
    data_parallel_bytes: float  # a node's ring all-reduce of bf16 gradients at each global step, same tokens
    nodes: tuple[NodeFigures, ...]
    expert_entropy: float | None  # mean over layers, of the experts' load, as a share of log(experts)
    wall_s: float


def entropy_of(load: Sequence[Sequence[float]]) -> float | None:
    """Mean over layers of the entropy of the experts' shares, over log(experts): 1 is even. None if dense."""
    shares = [
        -sum(p * math.log(p) for p in row if p > 0) / math.log(len(row)) for row in load if len(row) > 1
    ]
    return sum(shares) / len(shares) if shares else None
