"""Directed schedules: one test each, so that a failure has the name of its scenario."""

from __future__ import annotations

import pytest

from p2pdiloco.protocol.node import Node
from p2pdiloco.sim.schedules import SCHEDULES, run_schedule
from p2pdiloco_node.lab.seeds import generator

# Schedules with the seeds that once found a bug in them.
KEPT = [
    ("goodbye_shrinks_to_the_witness", 0),  # a voter's goodbye was the first that was heard of it
    ("goodbye_shrinks_to_the_witness", 4),
    ("rolled_back_voter_does_not_vote", 0),
]


@pytest.mark.parametrize(("name", "seed"), KEPT)
def test_schedule_that_once_found_a_bug(name: str, seed: int) -> None:
    report = run_schedule(name, generator(seed), Node)
    assert report.violation == "", "\n".join(report.trace[-30:])


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule(name: str) -> None:
    report = run_schedule(name, generator(1), Node)
    assert report.violation == "", "\n".join(report.trace[-30:])
