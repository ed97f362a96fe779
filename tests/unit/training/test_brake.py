"""A trainer that crashes is started again, soon at first, then rarely (scenario S18)."""

from __future__ import annotations

from p2pdiloco_node.training.brake import RestartBrake


def test_one_second_two_seconds_ten_minutes_doubling() -> None:
    brake = RestartBrake()
    now = 0.0
    pauses = []
    for _ in range(6):
        pause = brake.crashed(now, now + 5.0)
        pauses.append((pause.seconds, pause.braked))
        now += 5.0 + pause.seconds
    assert pauses == [(1, False), (2, False), (600, True), (1200, True), (2400, True), (4800, True)]


def test_values_that_are_not_finite_brake_at_once_and_longer_each_time() -> None:
    brake = RestartBrake()
    assert brake.astray(passed=False) == (600, True)
    assert brake.astray(passed=False) == (1200, True)
    assert brake.astray(passed=True) == (600, True)


def test_the_brake_has_an_end() -> None:
    brake = RestartBrake()
    pauses = [brake.crashed(0.0, 0.0).seconds for _ in range(40)]
    assert max(pauses) == 4 * 3600.0


def test_who_worked_for_a_while_begins_anew() -> None:
    brake = RestartBrake()
    assert brake.crashed(0.0, 1.0).seconds == 1
    assert brake.crashed(2.0, 3.0).seconds == 2
    assert brake.crashed(5.0, 400.0).seconds == 1  # ran for more than five minutes
    for at in (401.0, 402.0):
        last = brake.crashed(at, at)
    assert last.braked
    assert brake.crashed(1000.0, 1301.0) == (1.0, False)  # mended after the brake
