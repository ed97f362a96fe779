"""What a node wants of the run's data within its quota, and what gives way (scenario S12)."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.ids import PeerId, RunId, digest_of, tagged_digest
from p2pdiloco.run_spec import BlobRef, DataSpec, EvaluationSet, TokenizerSpec
from p2pdiloco_node.config import parse_size
from p2pdiloco_node.training.data import DataOrder
from p2pdiloco_node.training.shard_plan import (
    Costs,
    check_quota,
    costs_of,
    data_bytes,
    gives_way,
    least_bytes,
    make_plan,
    shortfall,
)

WINDOW = 3


def order(tokens: list[int]) -> DataOrder:
    run, peer = RunId(tagged_digest("test-run")), PeerId(tagged_digest("test-peer"))
    return DataOrder(run, peer, tokens, seq_len=8, window_shards=WINDOW)


def data(sizes: list[tuple[int, int]], *, width: int = 1, window: int = WINDOW) -> DataSpec:
    """Shards of (bytes as they travel, tokens)."""
    refs = [BlobRef(digest_of(bytes([i])), size, tokens) for i, (size, tokens) in enumerate(sizes)]
    held_out = EvaluationSet("all", BlobRef(digest_of(b"e"), 10, 40), 40)
    pieces = (BlobRef(digest_of(b"p"), 7, 21),)
    return DataSpec(TokenizerSpec("json", 300, 0, pieces), width, tuple(refs), (held_out,), window)


def test_a_shard_costs_its_blob_and_its_tokens() -> None:
    costs = costs_of(data([(5, 20), (6, 30)], width=2))
    assert costs == Costs((5, 6), (40, 60), (10 + 2 * 40) + (7 + 21))
    assert costs.all == 5 + 6 + 40 + 60 + costs.fixed


def test_a_quota_below_two_windows_is_refused_with_the_figures() -> None:
    spec = data([(1_000_000, 4_000_000)] * 7)
    least = costs_of(spec).fixed + 6 * 5_000_000
    assert least_bytes(spec) == least
    check_quota(spec, least)
    with pytest.raises(
        OperatorError, match=r"allows 29 MB .* at least 30\.1 MB: 6 of its 7 .* 30\.1MB or more"
    ) as no:
        check_quota(spec, 29_000_000)
    assert no.value.exit_code == 3
    # A corpus smaller than two windows is needed whole, and no more than that.
    assert least_bytes(data([(5, 20)])) == costs_of(data([(5, 20)])).all


@given(st.integers(1, 3 * 10**9), st.floats(0, 1))
def test_the_words_about_a_quota_do_not_contradict_themselves(size: int, part: float) -> None:
    """2 MB were allowed and 2 MB needed, and 3 MB asked for where 2.5 were enough."""
    spec = data([(size, 0)])
    least = least_bytes(spec)
    quota = min(int(least * part), least - 1)
    with pytest.raises(OperatorError) as no:
        check_quota(spec, quota)
    allowed, unit, needed, advised = re.findall(
        r"allows ([\d.,]+) ([MK]B) .* at least ([\d.,]+) [MK]B: .* --data-disk (\S+) or more", str(no.value)
    )[0]
    assert float(allowed.replace(",", "")) < float(needed.replace(",", ""))
    enough = parse_size(advised, "--data-disk")
    check_quota(spec, enough)
    assert enough <= least + 1 + {"MB": 10**5, "KB": 100}[unit]


def test_room_on_the_disk_is_never_more_than_is_used() -> None:
    spec = data([(10**6, 4 * 10**6)] * 100)
    every, least = costs_of(spec).all, least_bytes(spec)
    reserve = limits.data_disk_reserve_bytes
    assert data_bytes(spec, quota=2**60, free=2**60) == every
    assert data_bytes(spec, quota=every // 2, free=2**60) == every // 2
    assert data_bytes(spec, quota=2**60, free=reserve + every // 3) == every // 3
    assert data_bytes(spec, quota=2**60, free=0) == least


blocks = st.lists(st.integers(0, 6), min_size=1, max_size=14).filter(any)


@settings(deadline=None)
@given(blocks, st.data())
def test_what_is_wanted_fits_and_comes_in_the_order_of_reading(
    counts: list[int], draw: st.DataObject
) -> None:
    tokens = [8 * n + 1 for n in counts]
    whole = order(tokens)
    n = whole.sequences_per_epoch
    live = draw.draw(st.integers(0, 2 * n))
    durable = draw.draw(st.integers(max(0, live - n), live))
    here = draw.draw(st.sets(st.integers(0, len(tokens) - 1)))
    costs = Costs(tuple(draw.draw(st.integers(1, 9)) for _ in tokens), tuple(tokens), 11)
    each = [a + b for a, b in zip(costs.blobs, costs.tokens, strict=True)]
    least = costs.fixed + sum(sorted(each)[-2 * WINDOW :])
    room = draw.draw(st.integers(least, costs.all + 5))
    plan = make_plan(whole, costs, live=live, durable=durable, here=here, room=room)
    windows = list(order(tokens).windows(live))
    assert plan.in_use == windows[0]
    assert set(plan.in_use) <= set(plan.read)  # two windows have room: the one in use is wanted whole
    wanted = [*plan.read, *plan.ahead]
    assert len(set(wanted)) == len(wanted)
    assert shortfall(costs, read=plan.read, here=wanted, room=room) <= 0
    # What a trainer would read again after a crash stays, if it is here.
    assert set(order(tokens).window(durable)) & here <= set(wanted)
    # Ahead is a beginning of what will be read, and only what has no room is left out.
    named = [s for w in windows for s in w]
    again = [s for s in order(tokens).window(durable) if s in here and s not in plan.read]
    assert list(plan.ahead[: len(again)]) == again
    rest = [s for s in named if s not in plan.read and s not in again]
    ahead = list(plan.ahead[len(again) :])
    assert ahead == rest[: len(ahead)]
    if rest[len(ahead) :]:
        first = rest[len(ahead)]
        read = {*plan.read, first} if first in {s for w in windows[:2] for s in w} else plan.read
        assert shortfall(costs, read=read, here=[*wanted, first], room=room) > 0
    if room >= costs.all:
        assert set(wanted) == set(named)


@settings(deadline=None)
@given(blocks, st.data())
def test_what_gives_way_is_not_wanted_and_the_longest_unused(counts: list[int], draw: st.DataObject) -> None:
    tokens = [8 * n + 1 for n in counts]
    whole = order(tokens)
    live = draw.draw(st.integers(0, 2 * whole.sequences_per_epoch))
    here = draw.draw(st.sets(st.integers(0, len(tokens) - 1)))
    costs = Costs((1,) * len(tokens), tuple(tokens), 0)
    room = draw.draw(st.integers(0, costs.all))
    plan = make_plan(whole, costs, live=live, durable=live, here=here, room=room)
    idle = gives_way(whole, plan, here, live=live)
    assert set(idle) == here - {*plan.read, *plan.ahead}
    assert not set(idle) & set(plan.in_use)  # never one in use, however little room there is
    used = order(tokens).last_used(live)
    assert [used[s] for s in idle] == sorted(used[s] for s in idle)


def test_on_a_full_disk_the_window_in_use_is_wanted_and_nothing_else() -> None:
    tokens = [33] * 9
    whole = order(tokens)
    in_use, following = list(whole.windows(0))[:2]
    costs = Costs((4,) * 9, (33,) * 9, 5)
    here = {in_use[0], in_use[2], following[1]}
    plan = make_plan(whole, costs, live=0, durable=0, here=here, room=0)
    assert (plan.read, plan.ahead) == (in_use, ())
    # With a little room, of the next one what is here.
    more = make_plan(whole, costs, live=0, durable=0, here=here, room=5 + 4 * 37)
    assert more.read == (*in_use, following[1])


def test_a_corpus_larger_than_the_quota_is_read_for_epochs_within_it() -> None:
    """Followed for five epochs: never more on disk than the quota, and every window is there in its turn."""
    tokens = [8 * 4 + 1] * 20
    whole = order(tokens)
    costs = Costs((10,) * 20, (33,) * 20, 7)
    quota = costs.fixed + 2 * WINDOW * 43 + 40
    here: set[int] = set()
    fetched = 0
    for cursor in range(5 * whole.sequences_per_epoch):
        plan = make_plan(whole, costs, live=cursor, durable=max(0, cursor - 2), here=here, room=quota)
        if cursor:
            assert set(plan.in_use) <= here
        idle = gives_way(whole, plan, here, live=cursor)
        lacking = [s for s in (*plan.read, *plan.ahead) if s not in here]
        for arriving in [set(), *({s} for s in lacking)]:
            while shortfall(costs, read=plan.read, here=here | arriving, room=quota) > 0:
                here.remove(idle.pop(0))
            here |= arriving
        fetched += len(lacking)
    assert 5 * 20 - 20 <= fetched <= 5 * 20 + 20
