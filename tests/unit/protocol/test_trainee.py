"""What the trainer is told: adopt, how many passes, evaluate (algorithm.md 3, 6)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from p2pdiloco.ids import NO_DIGEST, PeerId
from p2pdiloco.protocol.actions import Action, AdoptState, AllowPasses, EvaluateState, SettleDelta
from p2pdiloco.protocol.context import Restored
from p2pdiloco.protocol.trainee import Trainee
from p2pdiloco.rules.state import after_owner, last_sequence
from p2pdiloco.wire.codec import encode
from p2pdiloco.wire.log import OwnerEntry

from .builders import NODES, WITNESS, Chain, Parts, header, make_run, owner_word, roots, said, take

A, B, C, D = NODES[:4]
RUN = make_run(A, B, eval_every=4)
# Nobody is trusted but for a seat.
STRANGERS = make_run(A, B, eval_every=4, admission="open", bootstrap_tokens=0, trust_tokens=10**12)


def at(
    version: int,
    adopted: int,
    *,
    who: Any = A,
    senders: Any = (A,),
    run: Any = RUN,
    evaluated: int = -1,
    **restored: Any,
) -> tuple[Parts, Trainee]:
    """A node whose state is `version`, its trainer's work standing on `adopted`."""
    chain = Chain(run)
    for v in range(version):
        chain.steps(1, senders[v % len(senders)])
    p = Parts(
        run, who,
        Restored(
            entries=tuple(chain.entries), state_index=version, rules=encode(chain.state) if version else b"",
            params_root=roots(version)[0], momentum_root=roots(version)[1], **restored,
        ),
    )  # fmt: skip
    return p, Trainee(p.ctx, p.log, p.applied, p.delivery, adopted, evaluated)


def adopt(p: Parts, t: Trainee) -> list[Action]:
    t.adopt_if_current()
    return p.drain()


def adoption(p: Parts, *, reset: bool = False) -> AdoptState:
    """Of the state that stands, as the rules say."""
    rules = p.applied.rules
    known = last_sequence(rules, p.ctx.me)
    return AdoptState(rules.version, rules.clock, rules.target_tokens, known, reset)


def test_each_newer_state_is_adopted_once() -> None:
    p, t = at(3, 2)
    t.started()
    assert take(p.drain(), AllowPasses) == [AllowPasses(2, "")]
    assert take(adopt(p, t), AdoptState) == [adoption(p)]
    assert adopt(p, t) == []


def test_nothing_is_adopted_while_certified_entries_wait() -> None:
    p, t = at(3, 2)
    p.applied.index = 2
    assert adopt(p, t) == []
    p.applied.index = 3
    p.applied.diverged = True
    assert adopt(p, t) == []


def test_a_witness_trains_nothing() -> None:
    p, t = at(3, 0, who=WITNESS)
    t.started()
    t.installed(p.log.content(3))
    assert adopt(p, t) == []
    assert p.drain() == []


def test_absence_beyond_staleness_max_starts_afresh() -> None:
    """In flight and progress are discarded, moments warmed up; nothing is settled one by one."""
    own = header(RUN, A, 1)
    rounds = RUN.spec.outer.staleness_max
    # One sender: each entry is a full round, the first one included.
    p, t = at(rounds + 1, 0, senders=(C,), in_flight=(own,))
    assert not take(adopt(p, t), AdoptState)[0].reset  # k = 16 exactly
    p, t = at(rounds + 2, 0, senders=(C,), in_flight=(own,))
    actions = adopt(p, t)
    assert take(actions, AdoptState) == [adoption(p, reset=True)]
    assert p.delivery.in_flight == ()
    assert take(actions, SettleDelta) == []
    assert take(actions, AllowPasses)[-1].allowed == 2
    assert said(actions) == ["absence"]


def test_a_newcomer_was_not_away() -> None:
    """It was told that it had been away since version 0."""
    p, t = at(RUN.spec.outer.staleness_max + 2, 0, senders=(C,))
    actions = adopt(p, t)
    assert take(actions, AdoptState) == [adoption(p, reset=True)]
    assert said(actions) == []


def test_a_short_absence_carries_the_work_over() -> None:
    p, t = at(10, 7)
    assert take(adopt(p, t), AdoptState) == [adoption(p)]


def test_after_a_snapshot_the_state_is_given_again() -> None:
    p, t = at(3, 3)
    adopt(p, t)
    t.jumped()
    assert len(take(adopt(p, t), AdoptState)) == 1


def test_an_adoption_tells_where_the_run_ends_and_what_the_log_knows_of_this_node() -> None:
    """After `extend` the learning rate leaves its floor; own numbers go on after the log's."""
    p, t = at(3, 0)
    (order,) = take(adopt(p, t), AdoptState)
    assert (order.target_tokens, order.last_sequence) == (RUN.spec.target_tokens, 3)
    p, t = at(3, 0, who=B)
    word = owner_word(RUN, "extend", value=10 * RUN.spec.target_tokens)
    p.applied.rules = after_owner(p.applied.rules, word)
    (order,) = take(adopt(p, t), AdoptState)
    assert (order.target_tokens, order.last_sequence) == (10 * RUN.spec.target_tokens, 0)


def test_a_revoked_node_goes_on_following_and_trains_no_more_in_this_life_and_the_next() -> None:
    word = owner_word(RUN, "revoke", peer=A.peer_id)
    p, t = at(3, 3)
    t.started()
    p.drain()
    p.applied.rules = after_owner(p.applied.rules, word)
    t.installed(OwnerEntry(word, NO_DIGEST))
    actions = p.drain()
    assert said(actions) == ["revoked"]
    assert [(a.allowed, a.prolong) for a in take(actions, AllowPasses)] == [(0, False)]
    assert len(take(adopt(p, t), AdoptState)) == 1
    p, t = at(3, 3)
    p.applied.rules = after_owner(p.applied.rules, word)
    t.started()
    actions = p.drain()
    assert said(actions) == ["revoked"]
    assert [a.allowed for a in take(actions, AllowPasses)] == [0]


# Evaluation


def acting(
    version: int, senders: Any, *, run: Any = RUN, finish: bool = False
) -> tuple[list[Any], list[Any]]:
    """Who of all nodes evaluates that version at once, and who does after two passes."""
    at_once: list[Any] = []
    later: list[Any] = []
    for who in NODES[:6]:
        p, t = at(version, version, who=who, senders=senders, run=run)
        content = p.log.content(version)
        if finish:
            word = owner_word(run, "finish")
            p.applied.rules = after_owner(p.applied.rules, word)
            content = OwnerEntry(word, NO_DIGEST)
        t.installed(content)
        orders = take(p.drain(), EvaluateState)
        assert all(o == EvaluateState(version, version, p.applied.root) for o in orders)
        at_once += [who] * len(orders)
        p.ctx.now += 2 * run.spec.inner.pass_s - 0.1
        assert take(adopt(p, t), EvaluateState) == []
        p.ctx.now += 0.2
        later += [who] * len(take(adopt(p, t), EvaluateState))
        assert take(adopt(p, t), EvaluateState) == []
    return at_once, later


def test_the_training_voters_evaluate_at_the_cadence_and_the_next_one_stands_in() -> None:
    assert acting(4, (A, B, C), run=STRANGERS) == ([A, B], [C])
    assert acting(5, (A, B, C), run=STRANGERS) == ([], [])


def test_trusted_contributors_make_three_of_two_voters_by_turns() -> None:
    """A committee of three has two that train: of two losses the mean is shown, and either may move it."""
    assert acting(4, (A, B, C)) == ([A, B, C], [])
    third: list[Any] = []
    for version in (8, 12, 16, 20):
        at_once, later = acting(version, (A, B, C, D))
        assert {*at_once} > {A, B}
        assert {*at_once, *later} == {A, B, C, D}
        third += {*at_once} - {A, B}
    assert third in ([C, D, C, D], [D, C, D, C])


def test_who_is_trusted_too_little_fills_no_place() -> None:
    run = make_run(A, B, eval_every=4, admission="open", bootstrap_tokens=0, trust_tokens=64)
    # Of sixteen steps C made one: it is known, and not trusted.
    assert acting(16, (*(A, B, D, D) * 3, A, C, B, D), run=run) == ([A, B, D], [C])


def test_of_more_voters_three_evaluate_by_turns() -> None:
    run = make_run(*NODES[:5], witness=False, eval_every=4)
    chosen = []
    for version in (8, 12, 16, 20, 24):
        at_once, later = acting(version, NODES[:5], run=run)
        assert (len(at_once), len(later)) == (3, 1)
        assert not {*at_once} & {*later}
        chosen += at_once
    assert {chosen.count(who) for who in NODES[:5]} == {3}


def test_the_run_may_ask_for_fewer_evaluators() -> None:
    run = make_run(*NODES[:5], witness=False, eval_every=4, evaluators_max=1)
    assert [len(who) for who in acting(8, NODES[:5], run=run)] == [1, 1]


def test_where_no_voter_trains_and_nobody_is_trusted_one_contributor_evaluates() -> None:
    run = make_run(eval_every=4, admission="open", bootstrap_tokens=0, trust_tokens=10**12)
    chosen = [acting(v, (A, B, C), run=run) for v in (4, 8, 12)]
    assert [(len(at_once), len(later)) for at_once, later in chosen] == [(1, 1)] * 3
    assert len({at_once[0].peer_id for at_once, _ in chosen}) == 3, "they take turns"


def test_a_voter_that_trains_no_longer_is_not_waited_for() -> None:
    assert acting(4, (B, C), run=STRANGERS) == ([B], [C])
    assert acting(4, (B, C)) == ([B, C], [])


def test_version_0_is_evaluated_by_the_lowest_name_and_by_somebody_always() -> None:
    """Two that had met each other both left it to the other, and nobody knew the loss before training."""
    p, t = at(0, 0)
    assert take(adopt(p, t), EvaluateState) == [EvaluateState(0, 0, p.applied.root)]
    for other, evaluates in ((bytes(32), False), (b"\xff" * 32, True)):
        p, t = at(0, 0)
        t.met(PeerId(other))
        assert bool(take(adopt(p, t), EvaluateState)) is evaluates


def test_the_last_state_is_evaluated_once() -> None:
    assert acting(5, (A, B, C), finish=True) == ([A, B, C], [])
    p, t = at(5, 5)
    word = owner_word(RUN, "finish")
    p.applied.rules = after_owner(p.applied.rules, word)
    t.installed(OwnerEntry(word, NO_DIGEST))
    t.installed(OwnerEntry(word, NO_DIGEST))
    assert [e.version for e in take(p.drain(), EvaluateState)] == [5]


@pytest.mark.parametrize(("evaluated", "again"), [(-1, True), (3, True), (4, False)])
def test_what_an_earlier_life_evaluated_is_not_evaluated_again(evaluated: int, again: bool) -> None:
    """The newest entries are applied again after a restart: minutes of work, and a report that is no news."""
    p, t = at(4, 3, evaluated=evaluated)
    t.installed(p.log.content(4))
    assert bool(take(p.drain(), EvaluateState)) is again
    p, t = at(0, 0, evaluated=0)
    assert take(adopt(p, t), EvaluateState) == []


@pytest.mark.parametrize(("last", "again"), [(3, True), (4, False)])
def test_of_another_epoch_a_version_is_another_one(last: int, again: bool) -> None:
    p, t = at(4, 4, evaluated=4)
    t.cut(last)
    t.went_back()
    t.installed(p.log.content(4))
    assert bool(take(p.drain(), EvaluateState)) is again


def test_a_crash_after_a_cut_does_not_bring_back_what_was_evaluated_of_the_branch_that_is_gone() -> None:
    p, t = at(3, 3, evaluated=4)
    later, _ = at(4, 4)
    p.log.append(later.log.entry(4))
    p.applied.rules, p.applied.index = later.applied.rules, 4
    t.installed(p.log.content(4))
    assert [e.version for e in take(p.drain(), EvaluateState)] == [4]


def test_what_the_owner_says_of_an_evaluated_version_chooses_nobody_else() -> None:
    """The page counts those whom the version chose first."""
    p, t = at(4, 4, who=C, senders=(A, B, C), run=STRANGERS)
    t.installed(p.log.content(4))
    p.applied.rules = msgspec.structs.replace(p.applied.rules, finished=True, committee=make_run(C).committee)
    t.installed(OwnerEntry(owner_word(RUN, "finish"), NO_DIGEST))
    assert take(p.drain(), EvaluateState) == []


def test_of_a_version_that_is_gone_nobody_stands_in() -> None:
    p, t = at(4, 4, who=C, senders=(A, B, C), run=STRANGERS)
    t.installed(p.log.content(4))
    p.ctx.now += 3 * RUN.spec.inner.pass_s
    p.applied.rules = msgspec.structs.replace(p.applied.rules, version=5)
    assert take(adopt(p, t), EvaluateState) == []


# The owner's pause


def owner_says(p: Parts, t: Trainee, kind: str) -> list[AllowPasses]:
    word = owner_word(RUN, kind)
    p.applied.rules = after_owner(p.applied.rules, word)
    t.installed(OwnerEntry(word, NO_DIGEST))
    return take(p.drain(), AllowPasses)


def test_pause_and_resume() -> None:
    p, t = at(3, 3)
    adopt(p, t)
    (order,) = owner_says(p, t, "pause")
    assert (order.prolong, "paused" in order.why) == (False, True)
    p.delivery.allow()  # whatever else happens
    assert not take(p.drain(), AllowPasses)[0].prolong
    assert owner_says(p, t, "resume") == [AllowPasses(2, "")]


def test_a_pause_is_seen_while_catching_up_and_holds_over_a_restart() -> None:
    p, t = at(3, 3)
    p.applied.index = 2  # more entries are certified than applied
    (order,) = owner_says(p, t, "pause")
    assert not order.prolong
    again = Trainee(p.ctx, p.log, p.applied, p.delivery, 3)
    p.delivery.paused = False  # a new life
    again.started()
    assert not take(p.drain(), AllowPasses)[0].prolong
