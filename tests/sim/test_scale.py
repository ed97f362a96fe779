"""Target R7, short: a hundred nodes; what a follower sends does not grow with the swarm."""

from __future__ import annotations

from p2pdiloco import limits
from p2pdiloco.protocol.node import Node
from p2pdiloco.sim.stage import Stage
from p2pdiloco.sim.tiny_run import Timings
from p2pdiloco.wire.log import OuterStep
from p2pdiloco_node.lab.seeds import generator


def messages_per_follower_and_second(nodes: int) -> float:
    # Home links: a pass of half a minute, a heartbeat every five seconds.
    timings = Timings(30.0, 5.0, 15.0, 30.0, voter_standing_s=10.0, voter_lease_s=60.0)
    stage = Stage(generator(7), Node, timings=timings)
    stage.start(nodes)
    stage.expect(60.0, "a committee of three", lambda: stage.checkers.committee.size == 3)
    stage.run(10.0)
    followers = [m for m in stage.world.nodes() if m.id not in stage.checkers.committee.members]
    before = sum(m.sent for m in followers)
    began, version = stage.world.now, stage.checkers.version
    stage.run(60.0)
    assert stage.checkers.version > version
    for certified in stage.checkers.chain:
        if isinstance(certified.body.content, OuterStep):
            assert len(certified.body.content.contributions) <= limits.contributions_max
    return (sum(m.sent for m in followers) - before) / len(followers) / (stage.world.now - began)


def test_a_follower_says_no_more_in_a_large_swarm() -> None:
    small, large = messages_per_follower_and_second(10), messages_per_follower_and_second(100)
    assert large <= 1.5 * small
