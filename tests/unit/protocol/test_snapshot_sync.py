"""Joining far behind, or with a damaged state (protocol.md 7; scenarios L1, L4)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from p2pdiloco import limits
from p2pdiloco.errors import PeerError
from p2pdiloco.ids import NO_DIGEST, digest_of, merkle_root
from p2pdiloco.protocol.actions import FetchSnapshot
from p2pdiloco.protocol.context import Restored
from p2pdiloco.protocol.snapshot_sync import SnapshotSync
from p2pdiloco.rules.state import RulesState, after_outer_step, rules_digest
from p2pdiloco.wire.codec import decode, encode
from p2pdiloco.wire.log import state_root
from p2pdiloco.wire.messages import SnapshotOffer, SnapshotWanted

from .builders import NODES, WITNESS, Chain, Parts, header, held, make_run, plan, sent, take

A, B, C = NODES[:3]
RUN = make_run(A, B)
BEAT = RUN.spec.committee.heartbeat_s
PATIENCE = limits.snapshot_patience_heartbeats * BEAT
DONORS = [WITNESS.peer_id, A.peer_id, B.peer_id]


def chunks(version: int) -> tuple[Any, Any]:
    return (digest_of(b"p%d" % version),), (digest_of(b"m%d" % version),)


class World:
    """A certified log of `count` outer steps whose snapshots have one chunk each, and who lags behind it."""

    def __init__(self, count: int, **restored: Any) -> None:
        chain = Chain(RUN)
        self.offers: dict[int, SnapshotOffer] = {}
        for version in range(1, count + 1):
            step = plan(RUN, chain.state, [held(header(RUN, A, version, base=version - 1), A)])
            params, momentum = chunks(version)
            state = after_outer_step(chain.state, step, RUN.spec)
            root = state_root(merkle_root(list(params)), merkle_root(list(momentum)), rules_digest(state))
            chain.add(msgspec.structs.replace(step, state_root=root))
            chain.state = state
            self.offers[version] = SnapshotOffer(version, params, momentum, encode(state))
        self.chain = chain
        self.p = Parts(RUN, C, Restored(entries=tuple(chain.entries), **restored))
        self.sync = SnapshotSync(self.p.ctx, self.p.log, self.p.applied, ())

    def tick(self, seconds: float = 0.0, *, needed: bool = True) -> bool:
        self.p.ctx.now += seconds
        return self.sync.tick(DONORS, needed=needed)


@pytest.fixture(scope="module")
def long() -> World:
    return World(40)


@pytest.fixture
def world(long: World) -> World:
    """The same log each time; only who lags is new."""
    fresh = World(0)
    fresh.chain, fresh.offers = long.chain, long.offers
    fresh.p = Parts(RUN, C, Restored(entries=tuple(long.chain.entries)))
    fresh.sync = SnapshotSync(fresh.p.ctx, fresh.p.log, fresh.p.applied, ())
    return fresh


def fetches(world: World) -> list[FetchSnapshot]:
    return take(world.p.drain(), FetchSnapshot)


def test_it_asks_waits_for_those_it_asked_and_fetches_the_newest_offer(world: World) -> None:
    assert world.tick()
    assert [sent(world.p.ctx.out, SnapshotWanted, d) for d in DONORS] == [[SnapshotWanted()]] * 3
    world.p.drain()
    world.sync.on_offer(A.peer_id, world.offers[16])
    world.sync.on_offer(B.peer_id, world.offers[32])
    assert world.tick()
    assert fetches(world) == []
    world.sync.on_offer(WITNESS.peer_id, world.offers[32])
    assert world.tick()
    (fetch,) = fetches(world)
    assert (fetch.offer, fetch.version) == (world.offers[32], 32)
    assert set(fetch.donors) == {B.peer_id, WITNESS.peer_id}


def test_the_snapshot_becomes_the_state_and_is_served(world: World) -> None:
    world.tick()
    world.sync.on_offer(A.peer_id, world.offers[32])
    world.tick(BEAT)
    assert world.sync.fetching
    assert not world.sync.fetched(16)  # not the one asked for
    assert world.sync.fetched(32)
    assert world.p.applied.index == 32
    assert world.p.applied.root == world.chain.log.content(32).state_root
    world.p.drain()
    world.sync.on_wanted(B.peer_id)
    assert sent(world.p.drain(), SnapshotOffer, B.peer_id) == [world.offers[32]]


@pytest.mark.parametrize("what", ["params", "momentum", "rules", "index"])
def test_an_offer_that_is_not_the_certified_state_is_refused(world: World, what: str) -> None:
    """L4: before a byte of it is fetched."""
    changes: dict[str, Any] = {
        "params": (digest_of(b"x"),),
        "momentum": (digest_of(b"x"),),
        "rules": world.offers[16].rules,
        "index": 31,
    }
    world.tick()
    bad = msgspec.structs.replace(world.offers[32], **{what: changes[what]})
    with pytest.raises(PeerError, match="BAD_SNAPSHOT"):
        world.sync.on_offer(A.peer_id, bad)
    with pytest.raises(PeerError, match="MALFORMED"):
        world.sync.on_offer(A.peer_id, msgspec.structs.replace(world.offers[32], rules=b"\xc1"))
    world.p.drain()
    world.tick(BEAT)
    assert fetches(world) == []


def test_offers_that_nobody_asked_for_or_can_use(world: World) -> None:
    world.sync.on_offer(A.peer_id, world.offers[32])  # before asking
    world.tick()
    world.sync.on_offer(A.peer_id, msgspec.structs.replace(world.offers[32], index=41))  # not certified here
    world.sync.on_offer(A.peer_id, msgspec.structs.replace(world.offers[32], index=0))
    world.p.drain()
    world.tick(BEAT)
    assert fetches(world) == []


def test_an_offer_that_was_newer_than_the_log_is_asked_for_again(long: World) -> None:
    """A joiner's log comes in pieces; all offers that came before its end were for nothing."""
    world = World(0)
    entries = long.chain.entries
    world.p = Parts(RUN, C, Restored(entries=tuple(entries[:20])))
    world.sync = SnapshotSync(world.p.ctx, world.p.log, world.p.applied, ())
    world.tick()
    world.sync.on_offer(A.peer_id, long.offers[32])
    for entry in entries[20:]:
        world.p.log.append(entry)
    world.p.drain()
    again = limits.snapshot_ask_s_min
    assert world.sync.wake_at == world.p.ctx.now + again
    for seconds, asked in ((again / 2, []), (again / 2, [SnapshotWanted()]), (again / 2, [])):
        assert world.tick(seconds)
        assert sent(world.p.drain(), SnapshotWanted, A.peer_id) == asked
    assert world.sync.wake_at is None
    world.sync.on_offer(A.peer_id, long.offers[32])
    assert world.tick()
    (fetch,) = fetches(world)
    assert fetch.version == 32


def test_without_any_offer_it_goes_through_the_entries_and_still_asks(world: World) -> None:
    assert world.tick()
    assert world.tick(PATIENCE)
    world.p.drain()
    assert not world.tick(0.1)
    assert sent(world.p.drain(), SnapshotWanted, A.peer_id) == [SnapshotWanted()]
    world.sync.on_offer(A.peer_id, world.offers[32])
    assert world.tick(BEAT)
    assert len(fetches(world)) == 1


def test_alone_nobody_is_waited_for(world: World) -> None:
    assert not world.sync.tick([], needed=True)


def test_a_failed_snapshot_is_not_tried_at_once_again(world: World) -> None:
    world.tick()
    world.sync.on_offer(A.peer_id, world.offers[32])
    world.tick(BEAT)
    world.p.drain()
    world.sync.not_fetched(32)
    assert not world.sync.fetching
    assert world.tick()
    world.sync.on_offer(A.peer_id, world.offers[32])
    world.sync.on_offer(B.peer_id, world.offers[16])
    world.tick(BEAT)
    (fetch,) = fetches(world)
    assert fetch.offer == world.offers[16]


def test_one_snapshot_whatever_happens_meanwhile(world: World) -> None:
    """L1: 24 versions were made while it came; the entries are applied, no second one is fetched."""
    assert world.p.log.index == 40
    assert not world.sync.is_far(limits.catch_up_versions_max)
    assert world.sync.is_far(limits.catch_up_versions_max + 1)
    world.tick()
    world.sync.on_offer(A.peer_id, world.offers[16])
    world.tick(BEAT)
    assert world.sync.fetched(16)
    assert not world.sync.is_far(24)
    assert not world.sync.is_far(0)  # current
    assert world.sync.is_far(limits.catch_up_versions_max + 1)  # a new absence


@pytest.mark.parametrize(("made", "gone"), [(47, False), (48, True)])
def test_another_one_once_the_deltas_behind_the_first_are_gone(made: int, gone: bool) -> None:
    """Donors hold snapshots 32 and 48, and what was listed since 32; 20 stands between 16 and 32."""
    world = World(made)
    world.tick()
    world.sync.on_offer(A.peer_id, world.offers[16])
    world.tick(BEAT)
    assert world.sync.fetched(16)
    world.p.applied.snapshot_installed(20, decode(world.offers[20].rules, RulesState), NO_DIGEST, NO_DIGEST)
    assert world.sync.is_far(made - 20) is gone


def test_while_one_is_fetched_no_other_is(world: World) -> None:
    world.tick()
    world.sync.on_offer(A.peer_id, world.offers[16])
    world.tick(BEAT)
    world.sync.on_offer(A.peer_id, world.offers[32])
    world.p.drain()
    assert world.tick(100.0)
    assert world.p.drain() == []


def test_a_damaged_state_is_replaced_even_by_an_older_one() -> None:
    world = World(20)
    world.p.applied.snapshot_installed(18, world.chain.state, digest_of(b"x"), digest_of(b"y"))
    world.p.applied.diverged = True
    assert world.tick()
    assert world.tick(PATIENCE / 2)  # there is no way through the entries
    world.sync.on_offer(A.peer_id, world.offers[16])
    world.tick(BEAT)
    (fetch,) = fetches(world)
    assert fetch.offer.index == 16
    world.sync.fetched(16)
    assert not world.p.applied.diverged
    assert world.p.applied.root == world.chain.log.content(16).state_root


def test_a_damaged_state_that_nobody_can_replace_starts_over() -> None:
    """Before the first snapshot: version 0, which the RunSpec names, and all entries since."""
    world = World(3)
    world.p.applied.snapshot_installed(3, world.chain.state, digest_of(b"x"), digest_of(b"y"))
    world.p.applied.diverged = True
    assert world.tick()
    assert world.tick(2 * PATIENCE)
    (fetch,) = fetches(world)
    assert (fetch.offer.index, fetch.version) == (0, 0)
    assert fetch.offer.params == RUN.spec.genesis.params
    world.sync.fetched(0)
    assert (world.p.applied.index, world.p.applied.diverged) == (0, False)


def test_own_snapshots_are_kept_and_what_the_older_one_covers_may_go(world: World) -> None:
    assert world.sync.newest_own == 0
    world.sync.on_wanted(A.peer_id)
    assert world.p.drain() == []
    assert world.sync.taken(world.offers[8]) is None
    assert world.sync.taken(world.offers[16]) is None
    assert world.sync.taken(world.offers[32]) == 16  # deltas back to the second-newest snapshot are kept
    assert world.sync.newest_own == 32
    world.sync.on_wanted(A.peer_id)
    assert sent(world.p.drain(), SnapshotOffer, A.peer_id) == [world.offers[32]]
