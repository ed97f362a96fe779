"""What a node sends and receives, against data parallel training (targets.md P3).

Counts come from the nodes' own reports, so one liar must not move the figures: they are medians.
"""

from __future__ import annotations

from statistics import median

from p2pdiloco.ids import PeerId

BF16_BYTES = 2


class _Counts:
    """Since a node's first report here: the counters of a node are of its process, ours of this run."""

    __slots__ = ("bytes", "seen", "since", "steps", "tokens", "version")

    def __init__(self, seen: int, version: int) -> None:
        self.seen = seen
        self.since = self.version = version
        self.bytes = self.steps = self.tokens = 0


class Traffic:
    def __init__(self, params: int) -> None:
        """`params`: number of parameters of the model."""
        self._params = params
        self._by_peer: dict[PeerId, _Counts] = {}

    def reported(self, peer: PeerId, counted: int, version: int) -> None:
        """`counted`: bytes sent and received, cumulative; starts again at 0 with the node's process."""
        c = self._by_peer.setdefault(peer, _Counts(counted, version))
        c.bytes += counted - c.seen if counted >= c.seen else counted
        c.seen = counted
        c.version = max(c.version, version)

    def contributed(self, peer: PeerId, steps: int, tokens: int) -> None:
        c = self._by_peer.get(peer)
        if c is not None:
            c.steps += steps
            c.tokens += tokens

    def keep(self, peers: set[PeerId]) -> None:
        """Forget everybody else."""
        self._by_peer = {p: c for p, c in self._by_peer.items() if p in peers}

    @property
    def contributors(self) -> int:
        return sum(c.steps > 0 for c in self._counted())

    def per_step(self) -> float | None:
        """Bytes per node per outer step."""
        return _median([c.bytes / (c.version - c.since) for c in self._counted() if c.version > c.since])

    def per_token(self) -> float | None:
        """Bytes per node per token that it contributed."""
        return _median([c.bytes / c.tokens for c in self._counted() if c.tokens])

    def times_less(self, nodes: int) -> float | None:
        """How many times less than a bf16 ring all-reduce of the gradient at each inner step.

        That sends 2 (N - 1) / N x 2 bytes per parameter, and receives as much.
        """
        if nodes < 2:
            return None
        each_step = 2 * (2 * (nodes - 1) / nodes * BF16_BYTES * self._params)
        return _median([c.steps * each_step / c.bytes for c in self._counted() if c.steps])

    def _counted(self) -> list[_Counts]:
        return [c for c in self._by_peer.values() if c.bytes > 0]


def _median(values: list[float]) -> float | None:
    return float(median(values)) if values else None
