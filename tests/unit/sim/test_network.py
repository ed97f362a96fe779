"""What the simulated network loses, delays, repeats and keeps back."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

import numpy as np

from p2pdiloco.ids import PeerId
from p2pdiloco.sim.chance import Chance
from p2pdiloco.sim.network import CALM, Network

A, B, C = PeerId(b"a" * 32), PeerId(b"b" * 32), PeerId(b"c" * 32)


class Time:
    """A clock and what is to come."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = count()

    def at(self, delay_s: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + delay_s, next(self._count), happen))

    def pass_by(self) -> None:
        while self._heap:
            self.now, _, happen = heapq.heappop(self._heap)
            happen()


def network(seed: int = 1) -> tuple[Time, Network]:
    time = Time()
    return time, Network(Chance(np.random.default_rng(seed)), time.at)


def send_all(net: Network, numbers: range, got: list[int], source: PeerId = A, target: PeerId = B) -> None:
    for n in numbers:
        net.send(source, target, lambda n=n: got.append(n))  # type: ignore[misc]


def test_calm_weather_delivers_each_message_once_and_soon() -> None:
    time, net = network()
    got: list[int] = []
    send_all(net, range(50), got)
    time.pass_by()
    assert sorted(got) == list(range(50))
    assert time.now <= CALM.delay_s_max


def test_weather_loses_repeats_and_reorders() -> None:
    time, net = network()
    net.weather = CALM._replace(loss=0.3, duplicate=0.3)
    got: list[int] = []
    send_all(net, range(400), got)
    time.pass_by()
    assert 200 < len(set(got)) < 350
    assert len(got) > len(set(got))
    assert got != sorted(got)


def test_a_split_cuts_both_ways_or_one() -> None:
    time, net = network()
    net.split([A], [B])
    got: list[int] = []
    send_all(net, range(3), got, A, B)
    send_all(net, range(3), got, B, A)
    send_all(net, range(100, 103), got, A, C)
    time.pass_by()
    assert sorted(got) == [100, 101, 102]
    net.mend()
    net.split([A], [B], one_way=True)
    assert not net.works(A, B)
    assert net.works(B, A)


def test_a_clogged_link_keeps_all_and_releases_it_in_another_order() -> None:
    time, net = network()
    net.clog((A, B))
    got: list[int] = []
    send_all(net, range(40), got)
    time.pass_by()
    assert got == []
    net.release()
    time.pass_by()
    assert sorted(got) == list(range(40))
    assert got != list(range(40))


def test_a_transfer_always_ends() -> None:
    time, net = network()
    net.cut([(A, B)])
    ends: list[bool] = []
    net.transfer(A, B, ends.append)
    net.transfer(A, C, ends.append)
    time.pass_by()
    assert sorted(ends) == [False, True]
