"""When bytes arrive, worked out by hand: 8 Mbit/s is a megabyte a second."""

import pytest

from p2pdiloco.sim.lab.experiment import Swarm
from p2pdiloco.sim.lab.links import Links

MB = 1_000_000


@pytest.fixture
def links():
    """One MB/s up, four MB/s down, a tenth of a second of latency."""
    return Links(Swarm(up_mbit=8, down_mbit=32, latency_s=0.1))


def test_a_dead_node_sends_nothing_of_its_past_life() -> None:
    links = Links(Swarm(up_mbit=8.0, down_mbit=8.0, latency_s=0.0))
    assert links.upload(0, 0.0, 10**7) == 10.0
    links.died(0, 2.0)
    assert links.upload(0, 3.0, 10**6) == 4.0
    assert links.bytes_up[0] == 3 * 10**6  # two seconds of the first at 8 Mbit/s, and the second


def test_uploads_of_one_node_wait_for_each_other_and_not_for_other_nodes(links):
    assert links.upload(0, 10.0, 2 * MB) == pytest.approx(12.1)
    assert links.upload(0, 11.0, MB) == pytest.approx(13.1)
    assert links.upload(1, 11.0, MB) == pytest.approx(12.1)
    assert links.upload(0, 20.0, MB) == pytest.approx(21.1)  # the queue was empty by then


def test_up_and_down_are_separate_queues(links):
    links.upload(0, 0.0, 100 * MB)
    assert links.download(0, 0.0, 4 * MB) == pytest.approx(1.1)
    assert links.download(0, 0.0, 4 * MB) == pytest.approx(2.1)


def test_bytes_are_counted_where_they_pass(links):
    links.upload(0, 0.0, 5)
    links.upload(0, 0.0, 7)
    links.download(1, 0.0, 5)
    links.download(1, 0.0, 9)
    assert dict(links.bytes_up) == {0: 12}
    assert dict(links.bytes_down) == {1: 14}


def test_links_without_a_rate_have_only_latency():
    links = Links(Swarm(up_mbit=0, down_mbit=0, latency_s=0.1))
    assert links.upload(0, 3.0, 10**12) == pytest.approx(3.1)
    assert links.download(1, 3.0, 10**12) == pytest.approx(3.1)
    assert links.spread(3.0, {1: 10**12, 2: 10**12}, [0]) == pytest.approx({1: 3.1, 2: 3.1})
    assert links.bytes_up[0] == 3 * 10**12


def test_spreading_is_as_fast_as_the_servers_uplinks_together(links):
    # 8 followers take 1 MB each from 2 servers of 1 MB/s: 4 s for all, since all are served at one rate.
    arrivals = links.spread(0.0, dict.fromkeys(range(2, 10), MB), [0, 1])
    assert arrivals == pytest.approx(dict.fromkeys(range(2, 10), 4.1))
    assert (links.bytes_up[0], links.bytes_up[1]) == (4 * MB, 4 * MB)
    assert links.bytes_down[9] == MB
    assert links.upload(0, 0.0, MB) == pytest.approx(5.1)  # the server's queue holds what it served


def test_who_lacks_less_is_through_sooner(links):
    # 1 MB and 3 MB from one server: both at half a MB/s until 2 s, then the rest alone until 4 s.
    assert links.spread(0.0, {1: MB, 2: 3 * MB, 3: 0}, [0]) == pytest.approx({1: 2.1, 2: 4.1, 3: 0.0})


def test_spreading_waits_for_a_followers_own_downlink(links):
    links.download(1, 0.0, 40 * MB)
    arrivals = links.spread(0.0, {1: MB, 2: MB}, [0, 3])
    assert arrivals == pytest.approx({1: 10.35, 2: 1.1})


def test_spreading_waits_for_the_servers_queues(links):
    links.upload(0, 0.0, 5 * MB)
    assert links.spread(1.0, {1: MB}, [0, 3]) == pytest.approx({1: 5.6})


def test_odd_bytes_are_counted_once(links):
    links.spread(0.0, {5: 11}, [2, 0, 1])
    assert [links.bytes_up[n] for n in range(3)] == [4, 4, 3]


def test_somebody_has_to_serve(links):
    assert links.spread(1.0, {1: 0}, []) == {1: 1.0}
    with pytest.raises(AssertionError, match="nobody serves"):
        links.spread(1.0, {1: 5}, [])
