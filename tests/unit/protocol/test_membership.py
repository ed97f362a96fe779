"""Who is there, and who should sit in the committee (protocol.md 3)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from p2pdiloco import limits
from p2pdiloco.ids import NO_DIGEST, PeerId
from p2pdiloco.rules.state import RulesState, genesis_state
from p2pdiloco.wire.log import Committee

from .builders import NODES, WITNESS, Parts, Run, heartbeat, make_run

A, B, C, D, E, F = NODES[:6]
W = WITNESS.peer_id
SPEC = make_run().spec.committee
BEAT, LEASE, STANDING = SPEC.heartbeat_s, SPEC.voter_lease_s, SPEC.voter_standing_s


def seats(*voters: Any, witness: bool = True) -> Committee:
    return Committee(W if witness else NO_DIGEST, tuple(v.peer_id for v in voters))


class View:
    """What `who` knows of its peers; `present` are heard every heartbeat from the start."""

    def __init__(self, run: Run, who: Any, *present: Any, index: int = 5) -> None:
        self.parts = Parts(run, who)
        self.members = self.parts.membership
        self.run, self.index, self.present = run, index, list(present)
        self.rules: RulesState = genesis_state(run.spec)
        self.boots: dict[PeerId, int] = {}
        self.members.started()
        self.beat()

    def beat(self, **changes: Any) -> None:
        for p in self.present:
            beat = heartbeat(self.index, **changes)
            self.members.heard(p.peer_id, self.boots.get(p.peer_id, 1), beat)

    def wait(self, seconds: float) -> View:
        until = self.parts.ctx.now + seconds
        while self.parts.ctx.now < until:
            self.parts.ctx.now = min(until, self.parts.ctx.now + BEAT)
            self.beat()
        return self

    def join(self, *peers: Any) -> View:
        """Heard from now on."""
        self.present += peers
        self.beat()
        return self

    def without(self, *gone: Any) -> View:
        self.present = [p for p in self.present if p not in gone]
        return self

    def wanted(self, committee: Committee | None = None) -> Committee | None:
        return self.members.wanted(committee or self.run.committee, self.rules, self.index)

    def refuses(self, old: Committee, new: Committee) -> str | None:
        return self.members.refuses(old, new, self.rules)


# Growth


def test_it_grows_from_the_witness_alone_to_three_and_to_five() -> None:
    run = make_run(size_max=5)
    view = View(run, WITNESS, A)
    assert view.wait(STANDING).wanted() is None  # never two
    view.join(B)
    assert view.wait(STANDING - BEAT).wanted() is None
    assert view.wait(BEAT).wanted() == seats(A, B)  # longest standing first
    assert view.wanted(seats(A, B)) is None
    view.join(C)
    assert view.wait(STANDING).wanted(seats(A, B)) is None  # never four
    view.join(D)
    assert view.wait(STANDING).wanted(seats(A, B)) == seats(A, B, C, D)


def test_it_does_not_grow_beyond_size_max() -> None:
    view = View(make_run(A, B), WITNESS, A, B, C, D).wait(2 * STANDING)
    assert view.wanted() is None


@pytest.mark.parametrize("why", ["not willing", "behind", "revoked", "leaving", "a gap", "a new life"])
def test_who_is_not_steady_gets_no_seat(why: str) -> None:
    view = View(make_run(), WITNESS, A, B).wait(2 * STANDING)
    beat = heartbeat(view.index)
    match why:
        case "not willing":
            view.members.heard(B.peer_id, 1, msgspec.structs.replace(beat, willing=False))
        case "behind":
            view.members.heard(B.peer_id, 1, heartbeat(view.index - 1))
        case "revoked":
            view.rules = msgspec.structs.replace(view.rules, revoked=(B.peer_id,))
        case "leaving":
            view.members.said_goodbye(B.peer_id, 9)
        case "a gap":
            view.without(B).wait(SPEC.timeout_s_max + BEAT)
            view.join(B)
        case "a new life":
            view.boots[B.peer_id] = 2
            view.beat()
    assert view.wanted() is None
    if why in ("a gap", "a new life"):
        assert view.wait(STANDING).wanted() == seats(A, B)


# Replacement, absence, leaving


def test_a_silent_voter_loses_its_seat_to_somebody_steady() -> None:
    view = View(make_run(A, B), A, WITNESS, B, C).wait(STANDING)
    view.without(B).wait(LEASE)
    assert view.wanted() is None  # the lease has not run out
    assert view.wait(BEAT).wanted() == seats(A, C)


def test_an_absent_voter_whom_nobody_can_replace_keeps_seat_and_standing() -> None:
    view = View(make_run(A, B), A, WITNESS, B).wait(STANDING)
    view.without(B).wait(10 * LEASE)
    assert view.wanted() is None
    assert view.refuses(seats(A, B), Committee(W, ())) is None  # may be done, but is not wanted
    view.join(B)
    assert view.wait(BEAT).wanted() is None


def test_a_leaving_voter_is_replaced_first_and_at_once() -> None:
    view = View(make_run(A, B), A, WITNESS, B, C).wait(2 * STANDING)
    view.members.said_goodbye(B.peer_id, 9)
    assert view.wanted() == seats(A, C)


def test_the_aggregator_hands_its_own_seat_over() -> None:
    view = View(make_run(A, B), A, WITNESS, B, C).wait(2 * STANDING)
    view.members.said_goodbye(A.peer_id, 9)
    assert view.wanted() == seats(B, C)


def test_it_shrinks_only_for_a_goodbye_that_nobody_replaces_and_the_witness_stays() -> None:
    view = View(make_run(A, B), A, WITNESS, B).wait(2 * STANDING)
    view.members.said_goodbye(B.peer_id, 9)
    assert view.wanted() == Committee(W, ())
    assert view.refuses(seats(A, B), Committee(W, ())) is None


def test_while_the_witness_is_away_the_longest_standing_voter_stays() -> None:
    view = View(make_run(A, B), A, WITNESS, B).wait(2 * STANDING)
    view.without(WITNESS).wait(LEASE + BEAT)
    view.members.said_goodbye(B.peer_id, 9)
    assert view.wanted() == seats(A, witness=False)
    assert view.refuses(seats(A, B), seats(A, witness=False)) is None


def test_from_five_to_three_whoever_is_there_stays() -> None:
    run = make_run(A, B, C, D, size_max=5)
    view = View(run, A, WITNESS, B, C, D).wait(2 * STANDING)
    view.without(B).wait(4 * BEAT)
    view.members.said_goodbye(D.peer_id, 9)
    assert view.wanted() == seats(A, C)
    assert view.refuses(run.committee, seats(A, C)) is None


def test_a_revoked_voter_loses_its_seat() -> None:
    view = View(make_run(A, B), A, WITNESS, B, C).wait(2 * STANDING)
    view.rules = msgspec.structs.replace(view.rules, revoked=(B.peer_id,))
    assert view.wanted() == seats(A, C)


def test_the_witness_comes_back_to_its_seat() -> None:
    away = make_run(A, B, C, witness=False)
    run = Run(away.id, make_run(A, B, C).spec)  # its RunSpec names the witness
    view = View(run, A, B, C).wait(2 * STANDING)
    assert view.wanted(seats(A, B, C, witness=False)) is None
    view.join(WITNESS)
    assert view.wait(STANDING).wanted(seats(A, B, C, witness=False)) == seats(A, B)
    assert view.refuses(seats(A, B, C, witness=False), seats(A, B)) is None


def test_never_a_committee_whose_majority_is_not_there() -> None:
    view = View(make_run(A, B), A, WITNESS, B, C).wait(2 * STANDING)
    view.without(WITNESS, B).wait(4 * BEAT)
    view.members.said_goodbye(B.peer_id, 9)
    assert view.wanted() == seats(A, C)  # A and C are there
    view.without(C).wait(4 * BEAT)
    assert view.wanted() is None


def test_who_comes_back_from_a_goodbye_in_a_new_life_may_sit_again() -> None:
    view = View(make_run(A, B), A, WITNESS, B, C).wait(2 * STANDING)
    view.members.said_goodbye(B.peer_id, 9)
    view.beat()
    assert view.wanted() == seats(A, C)
    view.boots[B.peer_id] = 2
    view.beat()
    assert not view.members.is_leaving(B.peer_id)
    assert view.wanted() is None


# The voter's check

FIVE = seats(A, B, C, D)
REFUSED = {
    "two seats at once": (seats(A, B), seats(C, D)),
    "growth and a change": (seats(A, B), seats(A, C, D, E)),
    "an even size": (seats(A, B), seats(A, B, C)),
    "one to five": (seats(), FIVE),
    "five to one": (FIVE, seats()),
    "beyond size_max": (FIVE, seats(A, B, C, D, E, F)),
    "nobody": (seats(A, B), Committee(NO_DIGEST, ())),
    "a seat named twice": (seats(A, B), seats(A, A)),
    "the witness as a training voter": (seats(A, B), Committee(NO_DIGEST, (A.peer_id, B.peer_id, W))),
    "another witness": (seats(A, B), Committee(C.peer_id, (A.peer_id, B.peer_id))),
    "the order of admission": (seats(A, B), seats(B, A)),
    "a newcomer before the others": (seats(A, B), seats(C, A)),
    "no change": (seats(A, B), seats(A, B)),
    "the witness dropped while it is there": (seats(A, B), seats(A, B, C, witness=False)),
    "down to a voter while the witness is there": (seats(A, B), seats(A, witness=False)),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_voter_refuses(what: str) -> None:
    view = View(make_run(A, B, C, D, size_max=5), A, WITNESS).wait(STANDING)
    assert view.refuses(*REFUSED[what]) is not None


ALLOWED = {
    "one to three": (seats(), seats(A, B)),
    "three to five": (seats(A, B), FIVE),
    "one seat": (seats(A, B), seats(B, C)),
    "five to three": (FIVE, seats(A, D)),
    "three to one": (seats(A, B), seats()),
    "the witness back": (seats(A, B, C, witness=False), seats(A, B)),
}


@pytest.mark.parametrize("what", ALLOWED)
def test_a_voter_allows(what: str) -> None:
    view = View(make_run(A, B, C, D, size_max=5), A, WITNESS).wait(STANDING)
    assert view.refuses(*ALLOWED[what]) is None


def test_the_witness_may_be_dropped_after_a_lease_of_silence_here() -> None:
    view = View(make_run(A, B), B, WITNESS, A, C).wait(STANDING)
    view.without(WITNESS).wait(LEASE)
    without = seats(A, B, C, witness=False)
    assert "the witness was heard" in (view.refuses(seats(A, B), without) or "")
    assert view.wait(BEAT).refuses(seats(A, B), without) is None


def test_a_voter_that_just_started_blames_nobody_for_the_time_before() -> None:
    parts = Parts(make_run(A, B), B)
    parts.ctx.now = 10 * LEASE
    parts.membership.started()
    rules = genesis_state(parts.run.spec)
    assert parts.membership.refuses(seats(A, B), seats(A, B, C, witness=False), rules) is not None


def test_a_revoked_node_gets_no_ack() -> None:
    view = View(make_run(A, B), B, WITNESS, A, C).wait(STANDING)
    view.rules = msgspec.structs.replace(view.rules, revoked=(C.peer_id,))
    assert view.refuses(seats(A, B), seats(A, C)) == "a revoked node"


def test_what_the_aggregator_wants_voters_allow() -> None:
    for run, present, gone in (
        (make_run(), (A, B), None),
        (make_run(A, B), (A, B, C), B),
        (make_run(A, B), (A, B), B),
        (make_run(A, B, C, D, size_max=5), (A, B, C, D), C),
    ):
        view = View(run, WITNESS, *present).wait(2 * STANDING)
        if gone is not None:
            view.members.said_goodbye(gone.peer_id, 9)
        wanted = view.wanted()
        assert wanted is not None
        assert view.refuses(run.committee, wanted) is None


# Bounds


def test_strangers_and_their_goodbyes_take_no_memory() -> None:
    view = View(make_run(A, B), A, WITNESS, B)
    strangers = [PeerId(n.to_bytes(32, "big")) for n in range(limits.peers_max + 100)]
    for stranger in strangers:
        view.members.said_goodbye(stranger, 1)
    assert not any(view.members.is_leaving(s) for s in strangers)
    view.parts.ctx.now += 1.0
    for stranger in strangers:
        view.members.heard(stranger, 1, heartbeat())
    assert len(view.members.heard_within(1e9)) == limits.peers_max
    for voter in (WITNESS, B):  # who has a seat is never pushed out by strangers
        assert view.members.boot_seen(voter.peer_id) == 1


def test_a_goodbye_of_an_earlier_life_says_nothing() -> None:
    view = View(make_run(A, B), A, WITNESS, B)
    view.members.heard(B.peer_id, 6, heartbeat())
    view.members.said_goodbye(B.peer_id, 5)
    assert not view.members.is_leaving(B.peer_id)
    view.members.said_goodbye(B.peer_id, 6)
    assert view.members.is_leaving(B.peer_id)


def test_boot_counters_are_remembered_and_never_go_back() -> None:
    view = View(make_run(A, B), A, WITNESS)
    assert view.members.heard(B.peer_id, 3, heartbeat())  # a new life
    assert not view.members.heard(B.peer_id, 3, heartbeat())
    assert not view.members.heard(B.peer_id, 2, heartbeat())
    assert view.members.boot_seen(B.peer_id) == 3
    assert view.members.boot_seen(C.peer_id) == 0
