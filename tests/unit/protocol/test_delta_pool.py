"""Deltas known here: who HAS them, how many of one sender, when they may be listed (protocol.md 3, 5)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from p2pdiloco import limits
from p2pdiloco.ids import Digest, PeerId, digest_of
from p2pdiloco.protocol.actions import AllowDelta, DropDelta, FetchDelta, RevealDelta
from p2pdiloco.protocol.context import HeldDelta, Restored
from p2pdiloco.rules.state import PeerState
from p2pdiloco.wire.messages import Outcome

from .builders import NODES, WITNESS, Chain, Parts, header, held, make_run, plan, take

A, B, C = NODES[:3]
RUN = make_run(A, B)
X = held(header(RUN, C), C)  # C's first delta
DELTA = Digest(X.header.delta)


def parts(who: Any = WITNESS, **restored: Any) -> Parts:
    return Parts(RUN, who, Restored(**restored))


def note(p: Parts, d: HeldDelta) -> Outcome:
    return p.pool.note(d.header, d.sender, d.key, p.applied.rules)


def ready(p: Parts) -> list[bytes]:
    return [a.header.delta for a in p.pool.ready(p.applied.rules, p.log.committee)]


def arrive(p: Parts, d: HeldDelta) -> None:
    assert note(p, d) is Outcome.NOTED
    p.pool.arrived(Digest(d.header.delta), d.norm)


# Noting


def test_a_header_is_noted_and_its_sender_may_put_the_blob() -> None:
    p = parts()
    assert note(p, X) is Outcome.NOTED
    assert p.drain() == [AllowDelta(X.header, X.sender, X.key)]


def test_the_same_header_again_changes_nothing() -> None:
    """T3, S9."""
    p = parts()
    assert [note(p, X), note(p, X)] == [Outcome.NOTED, Outcome.NOTED]
    p.pool.arrived(DELTA, 1.0)
    p.drain()
    assert note(p, X) is Outcome.HELD
    assert p.drain() == []
    assert p.pool.mine(p.applied.rules) == (DELTA,)


def test_anothers_delta_under_an_own_name_is_counted_once() -> None:
    """X8: the copy is a duplicate, whether the blob came or not."""
    for came in (False, True):
        p = parts()
        note(p, X)
        if came:
            p.pool.arrived(DELTA, 1.0)
        copy = HeldDelta(header(RUN, A, delta=DELTA), A.peer_id, A.public_key, 1.0)
        assert note(p, copy) is Outcome.DUPLICATE
        assert p.pool.header_of(DELTA) == X.header


def test_two_deltas_with_one_sequence() -> None:
    p = parts()
    note(p, X)
    assert note(p, held(header(RUN, C, name=b"other"), C)) is Outcome.DUPLICATE


def test_a_sender_has_a_bounded_number_unlisted() -> None:
    p = parts()
    most = limits.held_deltas_per_peer_max
    noted = [note(p, held(header(RUN, C, n), C)) for n in range(1, most + 2)]
    assert noted == [Outcome.NOTED] * most + [Outcome.RATE_LIMITED]
    assert note(p, held(header(RUN, A), A)) is Outcome.NOTED  # another sender has its own room


def test_settled_deltas_take_no_room() -> None:
    chain = Chain(RUN)
    most = limits.held_deltas_per_peer_max
    p = parts()
    mine = [held(header(RUN, C, n), C) for n in range(1, most + 1)]
    for d in mine:
        note(p, d)
    p.applied.rules = chain.state
    assert note(p, held(header(RUN, C, most + 1), C)) is Outcome.RATE_LIMITED
    chain.step(mine[1])  # number 2 is listed, 1 passed over
    p.applied.rules = chain.state
    assert note(p, held(header(RUN, C, most + 1), C)) is Outcome.NOTED
    assert note(p, held(header(RUN, C, most + 2), C)) is Outcome.NOTED
    assert note(p, held(header(RUN, C, most + 3), C)) is Outcome.RATE_LIMITED


def test_fresh_keys_cannot_fill_the_memory() -> None:
    p = parts()
    p.pool.heard_have(A.peer_id, [digest_of(b"%d" % n) for n in range(20_000)])
    room = 2 * limits.held_deltas_per_peer_max * limits.peers_max
    for n in range(room):
        h = msgspec.structs.replace(X.header, delta=digest_of(b"fresh %d" % n))
        sender = PeerId(digest_of(b"peer %d" % n))
        # A promise without a blob bars nobody: the newest pushes out the oldest.
        assert note(p, HeldDelta(h, sender, bytes(32), 1.0)) is Outcome.NOTED
    assert len(p.pool._known) == room // 2 + room // 4  # gossip, and a quarter for newcomers


def test_newcomers_with_blobs_take_a_quarter_and_no_more() -> None:
    p = parts()
    room = 2 * limits.held_deltas_per_peer_max * limits.peers_max
    outcomes = []
    for n in range(room // 4 + 1):
        h = msgspec.structs.replace(X.header, delta=digest_of(b"fresh %d" % n))
        outcomes.append(note(p, HeldDelta(h, PeerId(digest_of(b"peer %d" % n)), bytes(32), 1.0)))
        p.pool.arrived(Digest(h.delta), 1.0)
    assert outcomes == [Outcome.NOTED] * (room // 4) + [Outcome.RATE_LIMITED]
    listed = msgspec.structs.replace(
        p.applied.rules, peers=(PeerState(peer=X.sender, sequence=1, trust=1, version=0),)
    )
    known = msgspec.structs.replace(X.header, sequence=2)
    assert p.pool.note(known, X.sender, X.key, listed) is Outcome.NOTED


def test_a_header_whose_blob_does_not_come_is_forgotten() -> None:
    p = parts()
    assert note(p, X) is Outcome.NOTED
    p.ctx.now += 2 * RUN.spec.outer.deadline_passes * RUN.spec.inner.pass_s
    p.pool.expire()
    assert DELTA in p.pool._known
    p.ctx.now += 1.0
    p.pool.expire()
    assert DELTA not in p.pool._known
    assert note(p, X) is Outcome.NOTED  # and may be offered again


# Who HAS it


def test_only_what_a_majority_of_the_committee_has_may_be_listed() -> None:
    p = parts()
    arrive(p, X)
    assert ready(p) == []
    p.pool.heard_have(C.peer_id, [DELTA])  # no seat
    assert ready(p) == []
    p.pool.heard_have(A.peer_id, [DELTA])
    assert ready(p) == [DELTA]


def test_what_is_not_here_may_not_be_listed_by_this_node() -> None:
    p = parts()
    note(p, X)
    p.pool.heard_have(A.peer_id, [DELTA])
    p.pool.heard_have(B.peer_id, [DELTA])
    assert ready(p) == []


def test_a_have_that_comes_before_the_header_counts() -> None:
    p = parts()
    p.pool.heard_have(A.peer_id, [DELTA])
    arrive(p, X)
    assert ready(p) == [DELTA]


def test_oldest_first_by_when_a_majority_had_them() -> None:
    p = parts()
    second = held(header(RUN, A), A)
    arrive(p, X)
    arrive(p, second)
    p.pool.heard_have(A.peer_id, [second.header.delta])
    assert ready(p) == [second.header.delta]
    p.ctx.now = 5.0
    p.pool.heard_have(A.peer_id, [DELTA])
    assert ready(p) == [second.header.delta, DELTA]
    assert [a.complete_at for a in p.pool.ready(p.applied.rules, p.log.committee)] == [0.0, 5.0]


def test_what_the_log_settled_is_not_ready_nor_in_heartbeats() -> None:
    p = parts()
    chain = Chain(RUN)
    old = held(header(RUN, C, 1), C)
    new = held(header(RUN, C, 2), C)
    for d in (old, new):
        arrive(p, d)
        p.pool.heard_have(A.peer_id, [d.header.delta])
    assert set(p.pool.mine(p.applied.rules)) == {old.header.delta, new.header.delta}
    step = plan(RUN, chain.state, [new])
    chain.step(new)
    p.applied.rules = chain.state
    p.drain()
    p.pool.installed(step)
    assert ready(p) == []
    assert p.pool.mine(chain.state) == ()
    # The passed-over one goes, the listed one stays for those who follow.
    assert take(p.drain(), DropDelta) == [DropDelta(Digest(old.header.delta))]
    assert p.pool.norms() == {Digest(new.header.delta): 1.0}


def test_a_base_to_come_waits() -> None:
    p = parts(held=(held(header(RUN, C, base=3), C),))
    p.pool.heard_have(A.peer_id, [DELTA])
    assert ready(p) == []


def test_a_restart_still_has_what_is_on_disk() -> None:
    p = parts(held=(X,))
    assert p.pool.mine(p.applied.rules) == (DELTA,)
    p.pool.heard_have(A.peer_id, [DELTA])
    assert ready(p) == [DELTA]
    assert note(p, X) is Outcome.HELD


# Blobs


def test_a_failed_check_is_forgotten_and_its_sender_may_try_again() -> None:
    p = parts()
    note(p, X)
    known = p.pool.forget(DELTA)
    assert known is not None
    assert known.sender == C.peer_id
    assert p.pool.forget(DELTA) is None
    assert note(p, X) is Outcome.NOTED


def test_a_blob_that_nobody_asked_for_is_nothing() -> None:
    p = parts()
    assert p.pool.arrived(DELTA, 1.0) is None
    assert p.pool.norms() == {}


def test_a_fetch_goes_on_once_and_may_be_tried_again() -> None:
    p = parts()
    p.pool.heard_have(A.peer_id, [DELTA])
    p.pool.fetch(DELTA, [B.peer_id, WITNESS.peer_id])
    p.pool.fetch(DELTA, [B.peer_id])
    (fetch,) = take(p.drain(), FetchDelta)
    assert set(fetch.donors) == {A.peer_id, B.peer_id}  # never itself
    assert fetch.size_max >= X.header.size
    p.pool.not_fetched(DELTA)
    p.pool.fetch(DELTA, [B.peer_id])
    assert take(p.drain(), FetchDelta) == []  # not at once: a full disk or a dead donor must not spin
    p.ctx.now += RUN.spec.committee.heartbeat_s
    p.pool.fetch(DELTA, [B.peer_id])
    assert len(take(p.drain(), FetchDelta)) == 1
    p.pool.arrived(DELTA, 1.0)
    p.pool.fetch(DELTA, [B.peer_id])
    assert take(p.drain(), FetchDelta) == []


def test_what_a_step_lists_and_is_not_here() -> None:
    p = parts()
    other = held(header(RUN, A), A)
    step = plan(RUN, p.applied.rules, [X, other])
    arrive(p, X)
    assert p.pool.missing(step) == [Digest(other.header.delta)]


def test_a_listed_delta_is_revealed_once_and_only_if_it_is_here() -> None:
    p = parts()
    step = plan(RUN, p.applied.rules, [X, held(header(RUN, A), A)])
    arrive(p, X)
    p.drain()
    p.pool.reveal(step)
    p.pool.reveal(step)
    assert p.drain() == [RevealDelta(DELTA)]


def test_a_delta_fetched_for_the_log_before_its_header_is_held_when_that_comes() -> None:
    p = parts()
    p.pool.fetch(DELTA, [A.peer_id])
    p.pool.arrived(DELTA, 1.0)
    assert p.pool.mine(p.applied.rules) == ()  # whose it is is not known yet
    assert note(p, X) is Outcome.HELD
    assert p.pool.mine(p.applied.rules) == (DELTA,)


def test_listed_deltas_are_kept_until_a_snapshot_covers_them() -> None:
    p = parts()
    chain = Chain(RUN)
    for d in chain.steps(3, C):
        p.applied.rules = chain.state
        p.pool.note_own(d.header, d.key)
        p.pool.arrived(Digest(d.header.delta), 1.0)
        p.pool.installed(plan_of(chain, d))
    p.drain()
    p.pool.covered(2)
    assert len(take(p.drain(), DropDelta)) == 2
    assert len(p.pool.norms()) == 1


def test_gossip_without_a_header_is_forgotten_in_time() -> None:
    p = parts()
    p.pool.heard_have(A.peer_id, [DELTA])
    p.ctx.now = limits.headerless_s_max + 1
    chain = Chain(RUN)
    other = held(header(RUN, A), A)
    p.pool.installed(plan(RUN, chain.state, [other]))
    arrive(p, X)
    assert ready(p) == []  # A's HAVE is forgotten with it


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        ({"size": 1}, Outcome.BAD_SHAPE),
        ({"size": 10**6}, Outcome.TOO_BIG),
        ({"codec": "int4"}, Outcome.BAD_SHAPE),
        ({"fragment": 1}, Outcome.BAD_SHAPE),
        ({"steps": 17}, Outcome.BAD_SHAPE),
        ({"base_version": 1}, Outcome.TOO_EARLY),
    ],
)
def test_what_is_wrong_with_a_header_is_said_and_not_kept(change: dict[str, Any], outcome: Outcome) -> None:
    p = parts()
    assert note(p, held(header(RUN, C, **change), C)) is outcome
    assert p.drain() == []
    assert p.pool.header_of(DELTA) is None


def plan_of(chain: Chain, d: HeldDelta) -> Any:
    """The outer step of `chain` that listed `d`."""
    for index in range(1, chain.log.index + 1):
        content: Any = chain.log.content(index)
        if content.contributions[0].delta == d.header.delta:
            return content
    raise AssertionError("not listed")
