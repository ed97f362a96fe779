"""The ranks of one trainer: what an inner loop asks of them, and the answer of one that is alone.

A rank is one process with one device. Several are one node: they share each inner step's batch, and rank 0
alone speaks with the daemon (process_group.py joins them; led_loop.py makes the others follow).
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


class Group(Protocol):
    """Every rank calls the same methods in the same order; each returns when the others came, too."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def add_up(self, values: Any) -> None:
        """The sum over all ranks takes the tensor's place, the same bits on each."""
        ...

    def spread(self, values: Any) -> None:
        """Rank 0's values take the tensor's place."""
        ...

    def give(self, values: Floats) -> None:
        """To rank 0, which takes as many."""
        ...

    def take(self, count: int, rank: int) -> Floats:
        """What that rank gives, on rank 0."""
        ...


class Alone:
    """One rank: nobody to wait for."""

    rank, size = 0, 1

    def add_up(self, values: Any) -> None: ...

    def spread(self, values: Any) -> None: ...

    def give(self, values: Floats) -> None:
        raise AssertionError(f"{len(values)} values, and no other rank to give them to")

    def take(self, count: int, rank: int) -> Floats:
        raise AssertionError(f"{count} values of rank {rank}, which is not there")
