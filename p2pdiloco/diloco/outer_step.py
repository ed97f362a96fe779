"""The outer step: Nesterov, scaled by the share of a full round that was merged (algorithm.md 4).

    M <- mu_r * M + ((1 - mu_r) / (1 - mu)) * g
    G <- G - eta * rho * (g + mu * M)

At rho = 1 this is DiLoCo's outer optimizer (arXiv 2311.08105, algorithm 1). rho is what makes asynchrony
safe: full steps for every arriving delta would compound momentum (arXiv 2401.09135, section 4). All scalars
are the float32 values that the log entry declares; every operation is rounded by itself, so every replica
gets the same bits.
"""

from __future__ import annotations

import numpy as np

from p2pdiloco.diloco.global_state import GlobalState
from p2pdiloco.diloco.layout import Array
from p2pdiloco.wire.log import Scalars

CHUNK = 1 << 16  # values at a time: 256 KiB each of three arrays stay in the cache


def apply_outer_step(state: GlobalState, mean: Array, scalars: Scalars, mu: float) -> None:
    """Move `state` by the merged pseudo-gradient `mean` (float32 [params], overwritten), in place.

    `mu` is the RunSpec's momentum. eta * rho is rounded to float32 once, before it meets an array.
    """
    assert mean.shape == state.params.shape, "a mean of another model"
    mu_r, gain = np.float32(scalars.mu_r), np.float32(scalars.momentum_gain)
    rate = np.float32(scalars.eta) * np.float32(scalars.rho)
    momentum_factor = np.float32(mu)
    room: Array = np.empty(min(CHUNK, len(mean)), np.float32)
    for first in range(0, len(mean), CHUNK):
        here = slice(first, first + CHUNK)
        g, m, p = mean[here], state.momentum[here], state.params[here]
        r = room[: len(g)]
        np.multiply(g, gain, out=r)
        m *= mu_r
        m += r
        np.multiply(m, momentum_factor, out=r)
        r += g
        r *= rate
        p -= r
