"""T_full follows a swarm that shrinks or grows at once (algorithm.md 1)."""

import pytest

from p2pdiloco.rules.full_round import effective_nodes, latest_tokens
from p2pdiloco.rules.state import after_owner
from p2pdiloco.wire.log import OwnerWord


def rounds(log, nodes, count, per_entry):
    """`count` full rounds of `nodes`, in entries of `per_entry` deltas; the highest rho seen."""
    highest = 0.0
    for _ in range(count):
        for first in range(0, len(nodes), per_entry):
            step = log.deliver(*nodes[first : first + per_entry])
            highest = max(highest, step.scalars.rho)
            assert step.t_full >= sum(c.tokens for c in step.contributions)
    return highest


@pytest.mark.parametrize(
    ("before", "after"),
    [(range(8), range(4)), (range(8), range(4, 8)), (range(8), range(64)), (range(1), range(8))],
)
@pytest.mark.parametrize("share", [1, 2, 4])  # entries to a full round
def test_right_again_within_four_full_rounds(log, before, after, share):
    def per_entry(nodes):
        return min(32, max(1, len(nodes) // share))

    assert rounds(log, before, 6, per_entry(before)) <= 1
    assert log.state.t_full == 10 * len(before)
    assert rounds(log, after, 4, per_entry(after)) <= 1
    # Four full rounds have gone by, and the next entry looks back on nothing but them.
    assert sum(latest_tokens(log.state).values()) == 10 * len(after)
    assert log.deliver(after[0]).t_full == 10 * len(after)


def test_the_first_entry_counts_its_own_tokens(log):
    assert log.deliver(1, 2, 3).t_full == 30


def test_who_said_goodbye_is_out_at_once_and_in_again_with_the_next_delta(log, name_peer):
    rounds(log, range(4), 3, 4)
    assert log.deliver(0, 1, left=(3,)).t_full == 30
    assert name_peer(3) not in latest_tokens(log.state)
    assert log.deliver(0, 1).t_full == 30
    assert log.deliver(3).t_full == 40
    assert log.deliver(0).t_full == 40


def test_a_revoked_peer_is_out_at_once(log, name_peer):
    rounds(log, range(4), 3, 4)
    log.state = after_owner(log.state, OwnerWord("revoke", 1, 0, name_peer(3), bytes(64)))
    assert log.deliver(0).t_full == 30


def test_a_node_that_leaves_out_a_round_still_counts(log):
    rounds(log, range(8), 4, 1)
    for number in (*range(7), 0):
        log.deliver(number)
    assert log.deliver(1).t_full == 80


def test_a_goodbye_in_the_entry_that_lists_the_last_delta_counts_from_the_next_one(log):
    rounds(log, range(4), 3, 4)
    assert log.deliver(0, 3, left=(3,)).t_full == 40
    assert log.deliver(0).t_full == 30


def test_a_slow_node_counts_with_what_it_delivers(log):
    for _ in range(5):
        log.apply([log.next_candidate(0, steps=10), log.next_candidate(1, steps=3)])
    assert log.state.t_full == 13


def test_effective_nodes_counts_by_tokens(name_peer):
    even = {name_peer(i): 7 for i in range(5)}
    assert effective_nodes(even) == 5
    assert effective_nodes({name_peer(0): 1000, name_peer(1): 1}) == pytest.approx(1.002, abs=1e-3)
    assert effective_nodes({}) == 0
