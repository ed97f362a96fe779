"""Directed schedules: the lives that random seeds meet too rarely, each from a rule or a scenario.

They run before random seeds do (protocol.md 4: random schedules find the membership bug in 0.5 % of seeds
only). Each takes a Stage, returns nothing and raises a Violation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from p2pdiloco.sim import schedules_faults as faults
from p2pdiloco.sim import schedules_membership as membership
from p2pdiloco.sim import schedules_recovery as recovery
from p2pdiloco.sim.brain import MakeBrain
from p2pdiloco.sim.checkers import Violation
from p2pdiloco.sim.stage import Stage
from p2pdiloco.sim.swarm import where_raised
from p2pdiloco.sim.world import World


class Schedule(NamedTuple):
    """A life and the run in which it happens."""

    live: Callable[[Stage], None]
    size_max: int = 3
    rotation: int = 3
    target_version: int = 0


_AT_EVERY_STEP = {
    f"aggregator_{how}_at_{step}": Schedule(partial(faults.aggregator_dies_at, step=step, how=how))
    for how in ("crash", "freeze")
    for step in (0, 1, 2, 4, 6, 9)
}

_WHILE_FOLLOWING = {
    f"crash_while_following_at_{step}": Schedule(partial(recovery.crash_while_following, step=step))
    for step in (0, 1, 2, 3, 5)
}

SCHEDULES: dict[str, Schedule] = {
    "alone": Schedule(faults.alone),
    "alone_with_the_witness_away": Schedule(faults.alone_with_the_witness_away),
    "late_second_node": Schedule(faults.late_second_node),
    "moving_target": Schedule(faults.moving_target),
    "straggler": Schedule(faults.straggler),
    "tracker_and_witness_away": Schedule(faults.tracker_and_witness_away),
    "aggregator_only_beats": Schedule(faults.aggregator_only_beats, rotation=8),
    "old_aggregator_wakes_up": Schedule(faults.old_aggregator_wakes_up),
    "split_in_halves": Schedule(faults.split_in_halves),
    "one_cut_off": Schedule(faults.one_cut_off),
    "partial_partition": Schedule(faults.partial_partition),
    "returning_node_deposes_nobody": Schedule(faults.returning_node_deposes_nobody, rotation=8),
    "acked_body_is_proposed_again": Schedule(faults.acked_body_is_proposed_again),
    "everything_twice": Schedule(faults.everything_twice),
    "replayed_headers": Schedule(faults.replayed_headers),
    "whole_swarm_restarts": Schedule(faults.whole_swarm_restarts),
    "rolled_back_voter_does_not_vote": Schedule(faults.rolled_back_voter_does_not_vote),
    "run_ends": Schedule(faults.run_ends, target_version=6),
    "grows_to_five": Schedule(membership.grows_to_five, size_max=5),
    "two_of_five_die": Schedule(membership.two_of_five_die, size_max=5),
    "absent_voter_is_replaced": Schedule(membership.absent_voter_is_replaced),
    "absent_voter_keeps_its_seat": Schedule(membership.absent_voter_keeps_its_seat),
    "goodbye_shrinks_to_the_witness": Schedule(membership.goodbye_shrinks_to_the_witness),
    "shrinking_waits_for_the_one_left": Schedule(membership.shrinking_waits_for_the_one_left),
    "goodbye_with_the_witness_away": Schedule(membership.goodbye_with_the_witness_away),
    "leaving_voter_hands_its_seat_over": Schedule(membership.leaving_voter_hands_its_seat_over),
    "old_majority_dies_before_the_new_stored": Schedule(membership.old_majority_dies_before_the_new_stored),
    "old_leader_goes_on_alone": Schedule(membership.old_leader_goes_on_alone),
    "new_voters_never_hear_of_it": Schedule(membership.new_voters_never_hear_of_it),
    "handover_costs_nothing": Schedule(membership.handover_costs_nothing),
    "handover_with_lost_acks": Schedule(membership.handover_with_lost_acks),
    "successor_is_dead": Schedule(membership.successor_is_dead),
    "whole_committee_is_replaced": Schedule(membership.whole_committee_is_replaced),
    "witness_returns_to_its_seat": Schedule(membership.witness_returns_to_its_seat),
    "newcomer_is_slow_to_catch_up": Schedule(membership.newcomer_is_slow_to_catch_up),
    "lost_majority_of_three": Schedule(recovery.lost_majority_of_three),
    "lost_majority_of_five": Schedule(recovery.lost_majority_of_five, size_max=5),
    "old_majority_comes_back": Schedule(recovery.old_majority_comes_back),
    "two_epochs_alive": Schedule(recovery.two_epochs_alive),
    "disjoint_committees_meet": Schedule(recovery.disjoint_committees_meet),
    "witness_alone": Schedule(recovery.witness_alone),
    "two_recoveries": Schedule(recovery.two_recoveries),
    "lone_voter_in_between": Schedule(recovery.lone_voter_in_between),
    "newcomer_after_a_recovery": Schedule(recovery.newcomer_after_a_recovery),
    "all_restart_after_a_recovery": Schedule(recovery.all_restart_after_a_recovery),
    "snapshot_on_its_way": Schedule(recovery.snapshot_on_its_way),
    "forged_recovery": Schedule(recovery.forged_recovery),
    "paused_by_its_owner": Schedule(recovery.paused_by_its_owner),
    **_WHILE_FOLLOWING,
    **_AT_EVERY_STEP,
}


class ScheduleReport(NamedTuple):
    name: str
    violation: str  # "" or the broken promise
    trace: tuple[str, ...]
    entries: int
    seconds: float  # simulated


def run_schedule(
    name: str,
    rng: np.random.Generator,
    make_brain: MakeBrain,
    *,
    prepare: Callable[[World], None] | None = None,
) -> ScheduleReport:
    """Live through one schedule. Raises: KeyError if there is none of that name."""
    schedule = SCHEDULES[name]
    stage = Stage(
        rng, make_brain, size_max=schedule.size_max, rotation=schedule.rotation,
        target_version=schedule.target_version, prepare=prepare,
    )  # fmt: skip
    violation = ""
    try:
        schedule.live(stage)
    except Violation as broken:
        violation = str(broken)
    except AssertionError as broken:
        violation = where_raised(broken)
    world = stage.world
    trace = tuple(world.trace) if violation else ()
    return ScheduleReport(name, violation, trace, world.checkers.index, world.now)
