"""Links of home connections: one queue up and one down for each node, in virtual seconds. No events.

A transfer takes its whole link, in order of asking; sharing a link among several would end the last of them
at the same instant. Mbit are 10**6 bit. A link of 0 Mbit/s takes no time: only latency remains.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping

from p2pdiloco.sim.lab.experiment import Swarm


class _Queue:
    """One direction of one node's link: until when it is taken, and what is still on its way."""

    def __init__(self) -> None:
        self.free = 0.0  # seconds: when the queue is empty
        self._transfers: deque[tuple[float, float, int]] = deque()  # begin, end, bytes; those with a duration

    def add(self, begin: float, end: float, size: int, now: float) -> None:
        while self._transfers and self._transfers[0][1] <= now:
            self._transfers.popleft()
        if end > begin:
            self._transfers.append((begin, end, size))

    def cut(self, now: float) -> int:
        """Nothing more is sent. Returns: bytes that are not."""
        unsent = sum(
            size if begin >= now else round(size * (end - now) / (end - begin))
            for begin, end, size in self._transfers
            if end > now
        )
        self._transfers.clear()
        self.free = min(now, self.free)
        return unsent


class Links:
    """When bytes arrive, and how many each node sent and received. Nodes appear when first named.

    Bytes count when they are queued; those that a death or the end of the run keeps back are taken off again.
    """

    def __init__(self, swarm: Swarm) -> None:
        self.latency_s = swarm.latency_s
        self.bytes_up: defaultdict[int, int] = defaultdict(int)
        self.bytes_down: defaultdict[int, int] = defaultdict(int)
        self._up = swarm.up_mbit * 1e6 / 8  # bytes a second; 0: infinite
        self._down = swarm.down_mbit * 1e6 / 8
        self._up_queue: defaultdict[int, _Queue] = defaultdict(_Queue)
        self._down_queue: defaultdict[int, _Queue] = defaultdict(_Queue)

    def upload(self, node: int, now: float, size: int) -> float:
        """Queue `size` bytes on the node's uplink at `now`. Returns: when the last one leaves, and travels.

        The receiver's downlink is not asked: at home it is the wider side.
        """
        self.bytes_up[node] += size
        queue = self._up_queue[node]
        begin = max(now, queue.free)
        queue.free = begin + _seconds(size, self._up)
        queue.add(begin, queue.free, size, now)
        return queue.free + self.latency_s

    def download(self, node: int, now: float, size: int, *, sent_at: float = 0.0) -> float:
        """Queue `size` bytes on the node's downlink at `now`; the last one leaves its sender at `sent_at`.

        Returns: when the last one is there.
        """
        self.bytes_down[node] += size
        queue = self._down_queue[node]
        begin = max(now, queue.free)
        queue.free = begin + _seconds(size, self._down)
        queue.add(begin, max(queue.free, sent_at), size, now)
        return max(queue.free, sent_at) + self.latency_s

    def died(self, node: int, now: float) -> None:
        """What waits in the node's queues is neither sent nor received any more."""
        self.bytes_up[node] -= self._up_queue[node].cut(now)
        self.bytes_down[node] -= self._down_queue[node].cut(now)

    def ended(self, now: float) -> None:
        """The run is over for everybody."""
        for node in {*self._up_queue, *self._down_queue}:
            self.died(node, now)

    def spread(
        self, now: float, bytes_per_node: Mapping[int, int], servers: Collection[int]
    ) -> dict[int, float]:
        """One entry's deltas go from `servers` to everybody who lacks some. Returns: when each has them.

        All followers are served at one rate, by every server with an equal part of their bytes: who needs
        b_i bytes is through when sum_j min(b_j, b_i) bytes have left, each server's part after what is in
        its queue. So nobody gets the bytes faster than the servers' uplinks together carry them, whoever
        is named first. Each follower's own downlink queues too. Sent bytes are counted on the servers in
        equal shares, odd ones on the lowest numbers.

        Raises:
            AssertionError: there are bytes to send and nobody to serve them.
        """
        total = sum(bytes_per_node.values())
        if total == 0:
            return dict.fromkeys(bytes_per_node, now)
        assert servers, f"{total} bytes to spread and nobody serves them"
        begin = max(now, *(self._up_queue[s].free for s in servers))
        left = _left_before(bytes_per_node.values())
        arrivals = {}
        for node, size in bytes_per_node.items():
            if size == 0:
                arrivals[node] = now
                continue
            sent = begin + _seconds(left[size] / len(servers), self._up)
            arrivals[node] = self.download(node, now, size, sent_at=sent)
        for place, server in enumerate(sorted(servers)):
            self.upload(server, now, total // len(servers) + (place < total % len(servers)))
        return arrivals


def _left_before(sizes: Iterable[int]) -> dict[int, int]:
    """For each size b: sum of min(b_j, b), the bytes that have left when all b are through at equal rates."""
    ordered = sorted(sizes)
    left, smaller = {}, 0
    for place, size in enumerate(ordered):
        left[size] = smaller + size * (len(ordered) - place)
        smaller += size
    return left


def _seconds(size: float, rate: float) -> float:
    """Seconds of `size` bytes at `rate` bytes a second; rate 0 takes no time."""
    return size / rate if rate else 0.0
