"""The state behind the log: entries in order, each with the root that it names (algorithm.md 5)."""

from __future__ import annotations

from typing import Any

import msgspec

from p2pdiloco import limits
from p2pdiloco.ids import NO_DIGEST, Digest, digest_of
from p2pdiloco.protocol.actions import FetchDelta, InstallEntry, PrepareOuterStep
from p2pdiloco.protocol.context import Restored
from p2pdiloco.rules.state import RulesState
from p2pdiloco.wire.codec import decode, encode
from p2pdiloco.wire.log import Committee, Membership, OwnerEntry

from .builders import (
    NODES,
    WITNESS,
    Chain,
    Parts,
    header,
    held,
    make_run,
    owner_word,
    plan,
    roots,
    said,
    take,
)

A, B, C = NODES[:3]
RUN = make_run(A, B)
X = held(header(RUN, C), C)


def advance(p: Parts) -> Any:
    return p.applied.advance(lambda step: [A.peer_id])


def chain_of_two() -> tuple[Chain, Parts]:
    chain = Chain(RUN)
    chain.step(X)
    p = Parts(RUN, WITNESS, Restored(entries=tuple(chain.entries)))
    return chain, p


def test_an_outer_step_waits_for_its_deltas_and_its_arrays() -> None:
    chain, p = chain_of_two()
    assert advance(p) is None
    (fetch,) = take(p.drain(), FetchDelta)
    assert (fetch.delta, fetch.donors) == (X.header.delta, (A.peer_id,))
    p.hold(X)
    p.drain()
    assert advance(p) is None
    assert advance(p) is None
    (prepare,) = take(p.drain(), PrepareOuterStep)  # asked once
    assert prepare.base_index == 0
    p.applied.prepared(prepare.ticket, *roots(1))
    assert advance(p) == chain.log.content(1)
    (install,) = take(p.drain(), InstallEntry)
    assert (install.index, install.version, install.ticket) == (1, 1, prepare.ticket)
    assert decode(install.rules, RulesState) == chain.state == p.applied.rules
    assert p.applied.root == chain.log.content(1).state_root
    assert p.applied.current
    assert advance(p) is None


def test_a_step_that_could_not_be_computed_is_asked_for_again() -> None:
    _, p = chain_of_two()
    p.hold(X)
    advance(p)
    (first,) = take(p.drain(), PrepareOuterStep)
    p.applied.not_prepared(first.ticket)
    advance(p)
    out = p.drain()
    assert take(out, PrepareOuterStep) == []  # a full disk must not spin
    assert [f.delta for f in take(out, FetchDelta)] == [X.header.delta]  # its blob may be gone
    p.pool.arrived(Digest(X.header.delta), X.norm)
    p.ctx.now += p.ctx.spec.committee.heartbeat_s
    advance(p)
    assert [a.ticket for a in take(p.drain(), PrepareOuterStep)] == [first.ticket]


def test_results_that_nobody_waits_for_are_ignored() -> None:
    _, p = chain_of_two()
    p.hold(X)
    advance(p)
    (prepare,) = take(p.drain(), PrepareOuterStep)
    p.applied.prepared(digest_of(b"another"), *roots(1))
    assert advance(p) is None
    p.applied.prepared(prepare.ticket, *roots(1))
    p.applied.prepared(prepare.ticket, *roots(2))  # a second result changes nothing
    assert advance(p) is not None


def test_another_root_than_the_certified_one_means_that_this_state_is_damaged() -> None:
    _, p = chain_of_two()
    p.hold(X)
    advance(p)
    (prepare,) = take(p.drain(), PrepareOuterStep)
    p.applied.prepared(prepare.ticket, digest_of(b"a flipped bit"), roots(1)[1])
    assert advance(p) is None
    assert p.applied.diverged
    actions = p.drain()
    assert said(actions) == ["diverged"]
    assert take(actions, InstallEntry) == []
    assert advance(p) is None
    assert p.drain() == []  # said once
    assert p.applied.index == 0


def test_a_snapshot_heals_it() -> None:
    chain, p = chain_of_two()
    p.hold(X)
    advance(p)
    (prepare,) = take(p.drain(), PrepareOuterStep)
    p.applied.prepared(prepare.ticket, digest_of(b"a flipped bit"), roots(1)[1])
    advance(p)
    p.applied.snapshot_installed(1, chain.state, *roots(1))
    assert not p.applied.diverged
    assert p.applied.current
    assert p.applied.root == chain.log.content(1).state_root


def test_membership_and_owner_entries_leave_the_arrays_alone() -> None:
    chain = Chain(RUN)
    blank = Parts(RUN, WITNESS)
    membership = Membership(Committee(WITNESS.peer_id, (A.peer_id, C.peer_id)), NO_DIGEST)
    root = blank.applied.root_after(membership)
    assert root is not None
    entry = chain.add(msgspec.structs.replace(membership, state_root=root))
    p = Parts(RUN, WITNESS, Restored(entries=(entry,)))
    assert advance(p) is not None
    (install,) = take(p.drain(), InstallEntry)
    assert (install.ticket, install.version, install.step) == (None, 0, None)
    assert p.applied.rules.committee == membership.committee
    assert p.applied.root == root
    pause = OwnerEntry(owner_word(RUN, "pause"), NO_DIGEST)
    assert p.applied.root_after(pause) not in (None, root)


def test_a_restart_stands_where_the_disk_does() -> None:
    chain, _ = chain_of_two()
    restored = Restored(
        entries=tuple(chain.entries), state_index=1, rules=encode(chain.state), held=(X,),
        params_root=roots(1)[0], momentum_root=roots(1)[1],
    )  # fmt: skip
    p = Parts(RUN, WITNESS, restored)
    assert p.applied.current
    assert p.applied.root == chain.log.content(1).state_root
    # Its deltas are still there for those who follow, but never listed again.
    assert p.pool.norms() == {Digest(X.header.delta): 1.0}
    assert p.pool.mine(p.applied.rules) == ()


def test_candidates_computed_at_once_are_bounded() -> None:
    p = Parts(RUN, WITNESS)
    deltas = [held(header(RUN, C, name=b"%d" % n), C) for n in range(limits.prepared_max + 1)]
    for d in deltas:
        assert p.applied.root_after(plan(RUN, p.applied.rules, [d])) is None
    asked = take(p.drain(), PrepareOuterStep)
    assert len(asked) == limits.prepared_max + 1
    p.applied.prepared(asked[0].ticket, *roots(1))  # given up meanwhile: its result is ignored
    assert p.applied.root_after(plan(RUN, p.applied.rules, deltas[:1])) is None
    p.applied.prepared(asked[-1].ticket, *roots(1))
    step = plan(RUN, p.applied.rules, deltas[-1:])
    assert p.applied.root_after(step) == step.state_root
