"""Directed schedules: one test each, so that a failure has the name of its scenario."""

from __future__ import annotations

import pytest

from p2pdiloco.protocol.node import Node
from p2pdiloco.sim.schedules import SCHEDULES, run_schedule
from p2pdiloco_node.simulate import generator


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule(name: str) -> None:
    report = run_schedule(name, generator(1), Node)
    assert report.violation == "", "\n".join(report.trace[-30:])
