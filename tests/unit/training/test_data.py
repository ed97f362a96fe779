"""The order of a node's data (algorithm.md 8, scenarios F4 and S12)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdiloco.errors import OperatorError
from p2pdiloco.ids import PeerId, RunId, tagged_digest
from p2pdiloco_node.training.data import DataOrder, Place, ShardReader, evaluation_places

RUN = RunId(tagged_digest("test-run"))


def peer(name: str) -> PeerId:
    return PeerId(tagged_digest("test-peer", name.encode()))


def order(
    shard_tokens: list[int], *, seq_len: int = 8, window: int = 2, who: str = "a", run: RunId = RUN
) -> DataOrder:
    return DataOrder(run, peer(who), shard_tokens, seq_len=seq_len, window_shards=window)


shards = st.lists(st.integers(0, 70), min_size=1, max_size=9).filter(lambda s: max(s) > 8)


@given(shards, st.integers(1, 4), st.integers(0, 2))
def test_an_epoch_is_every_sequence_once(tokens: list[int], window: int, epoch: int) -> None:
    data = order(tokens, window=window)
    n = data.sequences_per_epoch
    places = data.places(epoch * n, n)
    expected = {Place(s, o) for s, t in enumerate(tokens) for o in range(0, t - 8, 8)}
    assert len(places) == n == len(expected)
    assert set(places) == expected


@given(shards, st.data())
def test_any_cursor_resumes_where_the_order_was(tokens: list[int], data: st.DataObject) -> None:
    whole = order(tokens).places(0, 3 * order(tokens).sequences_per_epoch)
    first = data.draw(st.integers(0, len(whole)))
    count = data.draw(st.integers(0, len(whole) - first))
    assert order(tokens).places(first, count) == whole[first : first + count]
    # The same object, asked for something else before: caches change nothing.
    used = order(tokens)
    used.places(len(whole) - 1, 1)
    assert used.places(first, count) == whole[first : first + count]


@given(st.lists(st.integers(1, 40), min_size=3, max_size=12), st.integers(1, 4))
def test_only_a_window_of_shards_is_in_use(blocks: list[int], window: int) -> None:
    data = order([b * 8 + 1 for b in blocks], window=window)
    visited = [place.shard for place in data.places(0, data.sequences_per_epoch)]
    position = 0
    seen: set[int] = set()
    while position < len(visited):
        # A window ends where the sequences of all its shards are used up.
        members = set(visited[position:][:1])
        size = 0
        while size < sum(blocks[m] for m in members):
            members.add(visited[position + size])
            size += 1
        assert not members & seen
        seen |= members
        position += size
        assert len(members) <= window


def test_nodes_runs_and_epochs_have_orders_of_their_own() -> None:
    tokens = [801, 801, 801]
    n = order(tokens).sequences_per_epoch
    orders = [
        order(tokens).places(0, n),
        order(tokens).places(n, n),
        order(tokens, who="b").places(0, n),
        order(tokens, run=RunId(tagged_digest("other"))).places(0, n),
    ]
    assert len({tuple(o) for o in orders}) == 4


def test_overlap_between_nodes_is_that_of_independent_samples() -> None:
    tokens = [8 * 100 + 1] * 10
    mine = set(order(tokens, window=10).places(0, 200))
    overlaps = [len(mine & set(order(tokens, window=10, who=str(i)).places(0, 200))) for i in range(40)]
    # Hypergeometric: 200 of 1000, mean 40, sigma 5.06; the mean of 40 draws has sigma 0.8.
    assert abs(float(np.mean(overlaps)) - 40) < 4


def test_the_order_never_changes_between_versions() -> None:
    """A node that upgrades must not repeat or skip: this is what the first version read."""
    places = order([100, 57, 8, 30]).places(5, 4)
    assert places == [Place(0, 8), Place(0, 72), Place(0, 32), Place(0, 48)]


def test_no_shard_holds_a_sequence() -> None:
    with pytest.raises(OperatorError, match="longer than a sequence"):
        order([8, 3])


def test_a_shard_that_is_no_multiple_of_the_sequence_gives_whole_batches(tmp_path: Path) -> None:
    text = np.arange(29, dtype=np.uint8)
    path = tmp_path / "shard"
    path.write_bytes(text.tobytes())
    reader = ShardReader([path], [29], seq_len=8)
    data = order([29])
    batch = reader.read(data.places(0, 7))
    assert batch.shape == (7, 9)
    assert sorted(row[0] for row in batch[:3].tolist()) == [0, 8, 16]
    assert all(row == list(range(row[0], row[0] + 9)) for row in batch.tolist())


@given(st.integers(0, 200), st.integers(1, 30), st.sets(st.integers(0, 3), max_size=3))
def test_missing_shards_are_passed_over_and_nothing_else(cursor: int, count: int, missing: set[int]) -> None:
    data = order([100, 57, 80, 30])
    places, behind = data.places_but(cursor, count, missing)
    passed = data.places(cursor, behind - cursor)
    assert places == [p for p in passed if p.shard not in missing]
    assert len(places) == count
    assert passed[-1] == places[-1]


def test_without_any_shard_there_is_one_sentence() -> None:
    with pytest.raises(OperatorError, match="no data shard can be read"):
        order([100, 57, 5]).places_but(0, 1, {0, 1})


def test_a_missing_or_cut_shard_is_named(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    reader = ShardReader([path], [29], seq_len=8)
    with pytest.raises(OperatorError, match="shard 0 cannot be read"):
        reader.read([Place(0, 0)])
    path.write_bytes(bytes(20))
    with pytest.raises(OperatorError, match="20 bytes instead of 29"):
        reader.read([Place(0, 0)])


@given(st.integers(0, 5000), st.integers(1, 40))
def test_evaluation_is_spread_over_the_shard(tokens: int, most: int) -> None:
    places = evaluation_places(tokens, seq_len=8, tokens_max=8 * most)
    assert len(places) == min(most, max(0, tokens - 1) // 8)
    assert len(set(places)) == len(places)
    assert all(0 <= p.offset <= tokens - 9 and p.offset % 8 == 0 for p in places)
    if len(places) > 1:
        assert places[-1].offset >= tokens * (1 - 2 / len(places)) - 16
