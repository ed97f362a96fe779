"""The inner learning rate: a function of the run's token clock, never of a node's step count."""

from __future__ import annotations

import math

from p2pdiloco.run_spec import InnerSpec


def learning_rate(inner: InnerSpec, clock: int, *, target_tokens: int, step_tokens: int) -> float:
    """Linear warm-up, then a cosine down to `lr_min_share` at `target_tokens` (algorithm.md 2).

    `clock`: tokens before this inner step, merged and the node's own unmerged ones. The step's own tokens
    count in the warm-up, so that the very first step of a run moves something.
    """
    seen = clock + step_tokens
    if seen < inner.warmup_tokens:
        return inner.lr * seen / inner.warmup_tokens
    span = max(1, target_tokens - inner.warmup_tokens)
    through = min(1.0, max(0.0, (clock - inner.warmup_tokens) / span))
    floor = inner.lr * inner.lr_min_share
    return floor + (inner.lr - floor) * 0.5 * (1 + math.cos(math.pi * through))


def moments_warmup(inner: InnerSpec, steps_since_zero: int) -> float:
    """Factor while AdamW's moments fill after joining or a long absence: 1/n, 2/n, ... 1."""
    return min(1.0, (steps_since_zero + 1) / max(1, inner.moments_warmup_steps))
