"""How fast this machine merges, steps and hashes, beside a plain copy of the same array.

    python tests/bench/bench_outer_step.py [millions of parameters, default 16]

Figures are ratios measured in one run: a shared machine shifts both sides alike. The best of five is shown,
because other work on the machine can only slow things down.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable

import numpy as np

from p2pdiloco.diloco.global_state import GlobalState, roots_of
from p2pdiloco.diloco.merge import Mean
from p2pdiloco.diloco.outer_step import apply_outer_step
from p2pdiloco.wire.log import Scalars

TRIES = 5
MIB = 1024 * 1024


def best_s(work: Callable[[], object]) -> float:
    """Seconds of the fastest of a few tries; the first one, which fills caches, does not count."""
    work()
    taken = []
    for _ in range(TRIES):
        begin = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begin)
    return min(taken)


def main() -> None:
    """Print a table: MiB of float32 per second, and the share of a plain copy."""
    params = int(float(sys.argv[1] if len(sys.argv) > 1 else "16") * 1e6)
    rng = np.random.default_rng(0)
    values = rng.standard_normal(params, np.float32) * np.float32(1e-3)
    room = np.empty_like(values)
    state = GlobalState(values.copy(), np.zeros_like(values))
    mean = Mean(params)
    scalars = Scalars(1.0, 0.5, 0.94868, 0.5132, 0.6667)

    size = f"{params:,} parameters, {4 * params / MIB:.0f} MiB of float32"
    print(f"{size}; numpy {np.__version__}, {platform.machine()}")
    copy = best_s(lambda: np.copyto(room, values))
    works: list[tuple[str, Callable[[], object]]] = [
        ("plain copy", lambda: np.copyto(room, values)),
        ("merge, per delta", lambda: mean.add(room, weight=1.0, clip=1.0)),
        ("outer step", lambda: apply_outer_step(state, room, scalars, 0.9)),
        ("state roots", lambda: roots_of(state)),
    ]
    print(f"{'':18}{'MiB/s':>8}{'of a copy':>11}")
    for name, work in works:
        room[:] = values
        seconds = best_s(work)
        print(f"{name:18}{4 * params / MIB / seconds:8.0f}{copy / seconds:11.3f}")


if __name__ == "__main__":
    main()
