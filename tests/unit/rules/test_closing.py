"""When to close: a quorum and a grace window, everybody, or the deadline (algorithm.md 4)."""

import pytest

from p2pdiloco.rules.closing import Arrival, ClosingView, Knobs, after_closing, decide_closing, grace_s


@pytest.fixture
def view(name_peer):
    def build(arrivals, live, *, spreads=(), first_step=False, untrusted=()):
        """`arrivals`: number -> seconds; `live`: number -> tokens. A pass takes 10 s, the deadline 15 s."""
        return ClosingView(
            last_step_at=0.0,
            first_step=first_step,
            arrivals=[Arrival(name_peer(n), 10, at, n not in untrusted) for n, at in arrivals.items()],
            live={name_peer(n): tokens for n, tokens in live.items()},
            trusted=frozenset(name_peer(n) for n in live if n not in untrusted),
            spreads=spreads,
        )

    return build


def test_nobody_delivered(view, spec):
    decision = decide_closing(view({}, {1: 10}), spec, now=100.0)
    assert decision == (False, "no delta yet", None)


def test_everybody_delivered_closes_at_once(view, spec):
    assert decide_closing(view({1: 3.0, 2: 4.0}, {1: 10, 2: 10}), spec, now=4.0).close
    assert decide_closing(view({1: 3.0}, {1: 10}), spec, now=3.0).close


def test_a_quorum_waits_for_the_grace_window_from_when_it_was_complete(view, spec):
    swarm = dict.fromkeys(range(8), 10)
    one = view({0: 3.0}, swarm, spreads=[1.0, 1.0, 1.0])
    assert decide_closing(one, spec, now=3.0) == (False, "10 of 20 tokens that make a quorum", 15.0)
    two = view({0: 3.0, 1: 4.0}, swarm, spreads=[1.0, 1.0, 1.0])
    assert decide_closing(two, spec, now=4.5).wake_at == 5.0
    three = view({0: 3.0, 1: 4.0, 2: 4.9}, swarm, spreads=[1.0, 1.0, 1.0])
    assert not decide_closing(three, spec, now=4.99).close
    assert decide_closing(three, spec, now=5.0).close


def test_large_swarms_need_three_quarters(view, spec):
    swarm = dict.fromkeys(range(16), 10)
    assert not decide_closing(view(dict.fromkeys(range(11), 1.0), swarm), spec, now=14.0).close
    assert decide_closing(view(dict.fromkeys(range(12), 1.0), swarm), spec, now=14.0).close


def test_the_deadline_takes_whoever_is_there(view, spec):
    swarm = dict.fromkeys(range(8), 10)
    assert not decide_closing(view({0: 3.0}, swarm), spec, now=14.9).close
    decision = decide_closing(view({0: 3.0}, swarm), spec, now=15.0)
    assert decision.close
    assert decision.reason == "deadline, 1 of 8 delivered"


def test_the_grace_window_ends_with_the_deadline(view, spec):
    late = view({0: 14.0, 1: 14.0}, dict.fromkeys(range(8), 10), spreads=[4.0] * 5)
    assert decide_closing(late, spec, now=14.0).wake_at == 15.0


def test_untrusted_tokens_make_no_quorum_and_wait_for_the_deadline(view, spec):
    swarm = dict.fromkeys(range(8), 10)
    crowd = view(dict.fromkeys(range(4), 1.0), swarm, untrusted=(0, 1, 2, 3), spreads=[0.0])
    assert decide_closing(crowd, spec, now=14.0) == (False, "no trusted contributor yet", 15.0)
    assert decide_closing(crowd, spec, now=15.0).close


def test_all_trusted_nodes_are_a_quorum_whatever_they_weigh(view, spec):
    few = view({0: 1.0}, {0: 10, 1: 500, 2: 500}, untrusted=(1, 2), spreads=[0.0])
    assert decide_closing(few, spec, now=1.0).close


def test_the_first_step_waits_for_everybody_or_the_deadline(view, spec):
    start = view({0: 1.0, 1: 1.0}, dict.fromkeys(range(3), 0), first_step=True)
    assert decide_closing(start, spec, now=14.0) == (False, "first outer step: 2 of 3 delivered", 15.0)
    assert decide_closing(start, spec, now=15.0).close


def test_32_deltas_close_at_once(view, spec):
    full = view(dict.fromkeys(range(32), 1.0), dict.fromkeys(range(64), 10))
    assert decide_closing(full, spec, now=1.0).close


def test_the_window_follows_how_spread_out_arrivals_are():
    assert grace_s([], 10.0) == 5.0
    assert grace_s([1.0, 1.2, 0.8, 1.0], 10.0) == pytest.approx(1.3)
    assert grace_s([0.0] * 5, 10.0) == 0.0
    assert grace_s([9.0, 1.0, 5.0], 10.0) == 5.0


def test_the_history_takes_listed_and_late_arrivals_and_is_bounded(name_peer):
    listed = [Arrival(name_peer(n), 10, at, trusted=True) for n, at in ((1, 5.0), (2, 6.0), (3, 5.5))]
    assert after_closing([0.25], listed, [7.0, 100.0], pass_s=10.0) == (0.25, 0.5, 1.0, 2.0)
    assert after_closing([0.25], [], [], pass_s=10.0) == (0.25,)
    assert len(after_closing([1.0] * 64, listed, [], pass_s=10.0)) == 64


def test_knobs_move_the_share_and_the_window(view, spec):
    swarm = dict.fromkeys(range(8), 10)
    three = view(dict.fromkeys(range(3), 4.0), swarm, spreads=[1.0, 1.0, 1.0])
    assert decide_closing(three, spec, now=4.0).wake_at == 5.0
    assert decide_closing(three, spec, now=4.0, knobs=Knobs(grace=3.0)).wake_at == 7.0
    assert decide_closing(three, spec, now=4.0, knobs=Knobs(grace=0.0)).close
    assert decide_closing(three, spec, now=14.0, knobs=Knobs(share=0.5)) == (
        False,
        "30 of 40 tokens that make a quorum",
        15.0,
    )
    many = view(dict.fromkeys(range(8), 4.0), dict.fromkeys(range(16), 10), spreads=[0.0])
    assert not decide_closing(many, spec, now=4.0, knobs=Knobs(share=0.1)).close
    assert decide_closing(many, spec, now=4.0, knobs=Knobs(share_many=0.5)).close
