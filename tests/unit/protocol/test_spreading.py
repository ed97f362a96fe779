"""How certified entries reach everybody (protocol.md 5)."""

from __future__ import annotations

from p2pdiloco import limits
from p2pdiloco.protocol.context import Restored
from p2pdiloco.protocol.spreading import Spreading
from p2pdiloco.wire.messages import Entries

from .builders import NODES, WITNESS, Chain, Parts, header, heartbeat, held, make_run, sent

A, B, C = NODES[:3]
FOLLOWERS = NODES[2:]
RUN = make_run(A, B)


def at(who: object, count: int, *, behind: bool = True) -> tuple[Parts, Spreading, Chain]:
    """A node with `count` certified entries that heard all followers a moment ago."""
    chain = Chain(RUN)
    chain.steps(count)
    p = Parts(RUN, who, Restored(entries=tuple(chain.entries)))  # type: ignore[arg-type]
    for f in [f for f in FOLLOWERS if f is not who]:
        p.membership.heard(f.peer_id, 1, heartbeat(count - 1 if behind else count))
    return p, Spreading(p.ctx, p.log, p.membership), chain


def test_a_peer_gets_what_it_lacks_a_message_at_a_time() -> None:
    p, spreading, chain = at(WITNESS, 20)
    spreading.bring_up_to_date(C.peer_id, 3)
    (m,) = sent(p.drain(), Entries, C.peer_id)
    assert m == Entries(tuple(chain.entries[2 : 2 + limits.entries_per_message_max]), 20)
    spreading.bring_up_to_date(C.peer_id, 19)
    (m,) = sent(p.drain(), Entries, C.peer_id)
    assert m == Entries(tuple(chain.entries[18:]), 20)


def test_who_lacks_nothing_gets_nothing_and_a_strange_index_is_harmless() -> None:
    p, spreading, chain = at(WITNESS, 2)
    spreading.bring_up_to_date(C.peer_id, 3)
    spreading.bring_up_to_date(C.peer_id, 2**62)
    assert p.drain() == []
    spreading.bring_up_to_date(C.peer_id, 0)
    assert sent(p.drain(), Entries, C.peer_id) == [Entries(tuple(chain.entries), 2)]


def test_the_voters_share_the_followers_and_tell_each_other() -> None:
    reached: list[bytes] = []
    for voter in (WITNESS, A, B):
        p, spreading, chain = at(voter, 1)
        spreading.appended(0, RUN.committee.members)
        actions = p.drain()
        to_voters = {m for m in RUN.committee.members if sent(actions, Entries, m)}
        assert to_voters == set(RUN.committee.members) - {voter.peer_id}
        reached += [f.peer_id for f in FOLLOWERS if sent(actions, Entries, f.peer_id)]
        assert set(sent(actions, Entries)) == {Entries(tuple(chain.entries), 1)}
    assert sorted(reached) == sorted(f.peer_id for f in FOLLOWERS)  # each by exactly one


def test_a_follower_forwards_to_a_few() -> None:
    p, spreading, _ = at(C, 1)
    spreading.appended(0, RUN.committee.members)
    assert len(sent(p.drain(), Entries)) == limits.fanout


def test_nothing_is_forwarded_to_those_who_have_it_or_while_catching_up_in_bulk() -> None:
    p, spreading, _ = at(C, 1, behind=False)
    spreading.appended(0, RUN.committee.members)
    assert p.drain() == []
    p, spreading, _ = at(C, limits.entries_per_message_max + 1)
    spreading.appended(0, RUN.committee.members)
    assert p.drain() == []


def test_donors_are_voters_senders_and_those_who_applied_it() -> None:
    p, spreading, chain = at(WITNESS, 1)
    p.membership.heard(NODES[5].peer_id, 1, heartbeat(1))
    step = chain.log.content(1)
    donors = spreading.donors(step)  # type: ignore[arg-type]
    assert donors == [WITNESS.peer_id, A.peer_id, B.peer_id, NODES[5].peer_id]
    other = Chain(RUN)
    other.step(held(header(RUN, C), C))
    assert C.peer_id in spreading.donors(other.log.content(1))  # type: ignore[arg-type]
