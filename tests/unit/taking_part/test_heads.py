"""What a starting node waits for before it trains: no minority and no stranger holds it up."""

from __future__ import annotations

from p2pdiloco import limits
from p2pdiloco.ids import NO_DIGEST, PeerId
from p2pdiloco.wire.log import Committee
from p2pdiloco_node.taking_part.heads import ALONE_S, Heads

W, A, B, C, ME, STRANGER = (PeerId(bytes([n]) * 32) for n in range(1, 7))
ALONE = Committee(W, ())
THREE = Committee(W, (A, B))
FAR = 2**62  # what a liar says


class Start:
    """A node that starts at second 0, on a clock of the test."""

    def __init__(self) -> None:
        self.now = 0.0
        self.heads = Heads(ME, lambda: self.now)

    def said(self, committee: Committee, **indices: int) -> Start:
        for name, index in indices.items():
            self.heads.heard(globals()[name], index, committee)
        return self

    def trains(self, index: int, committee: Committee) -> bool:
        return self.heads.caught_up(index, committee)


def test_it_waits_for_what_a_quorum_of_the_committee_has() -> None:
    start = Start().said(THREE, W=10, A=12, B=11)
    assert start.heads.said_by_quorum(THREE) == 11
    assert [start.trains(i, THREE) for i in (9, 10, 11, 12)] == [False, False, True, True]


def test_no_stranger_and_no_minority_can_make_it_wait() -> None:
    """One heartbeat with a huge index kept a node that started waiting for ever."""
    start = Start().said(THREE, STRANGER=FAR, C=FAR, W=10, A=FAR, B=10)
    assert start.trains(10, THREE)
    start.said(THREE, A=0)
    assert start.trains(10, THREE)


def test_a_quorum_is_waited_for_and_then_whoever_was_heard_must_do() -> None:
    start = Start().said(THREE, W=10, STRANGER=3)
    assert not start.trains(10, THREE)
    start.now += ALONE_S + 1
    assert not start.trains(9, THREE)
    assert start.trains(10, THREE)


def test_who_hears_nobody_of_its_committee_trains_with_what_it_has() -> None:
    start = Start().said(ALONE, STRANGER=FAR)
    assert not start.trains(0, ALONE)
    start.now += ALONE_S + 1
    assert start.trains(0, ALONE)


def test_a_majority_of_liars_is_waited_for_within_the_limit_alone() -> None:
    start = Start().said(ALONE, W=FAR)
    for index in range(3):
        assert not start.trains(index, ALONE)
        start.now += limits.catch_up_s_max - 1  # it grows: the wait is worth it
    start.now += 2
    assert start.trains(2, ALONE)


def test_a_voter_asks_the_other_seats() -> None:
    mine = Committee(NO_DIGEST, (ME, A, B))
    start = Start().said(mine, A=7, B=5)
    assert start.heads.said_by_quorum(mine) == 5
    assert Start().heads.said_by_quorum(Committee(NO_DIGEST, (ME,))) == 0


def test_a_crowd_pushes_no_seat_s_word_out() -> None:
    start = Start().said(ALONE, W=10)
    for n in range(limits.peers_max + 10):
        start.heads.heard(PeerId(n.to_bytes(32, "big")), FAR, ALONE)
    assert start.heads.said_by_quorum(ALONE) == 10
