"""The order of a node's data (algorithm.md 8, scenarios F4 and S12)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.ids import PeerId, RunId, tagged_digest
from p2pdiloco_node.training.data import (
    DataFeed,
    DataOrder,
    NothingHere,
    Place,
    ShardMissing,
    ShardReader,
    evaluation_places,
)

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
    with pytest.raises(NothingHere, match="no data shard is here"):
        order([100, 57, 5]).places_but(0, 1, {0, 1})


def test_thousands_of_absent_windows_are_passed_over_without_being_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One shard of a large corpus is here: the way to it must not hold up an inner step."""
    data = order([8 * 100 + 1] * 4000)
    made = []
    make = data._make_window

    def watched(epoch: int, number: int) -> Any:
        made.append(number)
        return make(epoch, number)

    monkeypatch.setattr(data, "_make_window", watched)
    last = data.places(data.sequences_per_epoch - 1, 1)[0].shard
    made.clear()
    places, behind = order([8 * 100 + 1] * 4000).places_but(0, 3, set(range(4000)) - {last})
    assert data.places_but(0, 3, set(range(4000)) - {last}) == (places, behind)
    assert {p.shard for p in places} == {last}
    assert len(made) <= 1


@settings(deadline=None)
@given(shards, st.integers(1, 4), st.data())
def test_windows_are_named_in_the_order_in_which_they_are_read(
    tokens: list[int], window: int, draw: st.DataObject
) -> None:
    data = order(tokens, window=window)
    n = data.sequences_per_epoch
    cursor = draw.draw(st.integers(0, 3 * n))
    named = list(order(tokens, window=window).windows(cursor))
    assert sorted(s for w in named for s in w) == [s for s, t in enumerate(tokens) if t > 8]
    assert data.window(cursor) == named[0]
    assert data.places(cursor, 1)[0].shard in named[0]
    # A shard of a later window is first read after all windows before it were.
    read = [place.shard for place in data.places(cursor, 2 * n)]
    first = {s: read.index(s) for s in set(read) - set(named[0])}
    later = [min(first[s] for s in w) for w in named[1:]]
    assert later == sorted(later)


@settings(deadline=None)
@given(shards, st.integers(1, 4), st.data())
def test_when_a_shard_was_used_last(tokens: list[int], window: int, draw: st.DataObject) -> None:
    data = order(tokens, window=window)
    cursor = draw.draw(st.integers(0, 2 * data.sequences_per_epoch))
    used = data.last_used(cursor)
    in_use = data.window(cursor)
    read = [place.shard for place in data.places(0, cursor)]
    ends = {s: len(read) - read[::-1].index(s) for s in set(read) - set(in_use)}
    for one, at in ends.items():
        assert used[one] >= 0
        for other, then in ends.items():
            if used[one] < used[other]:  # windows, not shards, follow one another
                assert at < then or abs(int(used[one]) - int(used[other])) < window
    if cursor < data.sequences_per_epoch:
        assert all(
            used[s] == -1 for s in set(range(len(tokens))) - set(read) if tokens[s] > 8 and s not in in_use
        )


class Feed:
    """A feed over shards of 8 sequences each, whose files come and go."""

    def __init__(self, folder: Path, count: int, *, window: int) -> None:
        self.now = 0.0
        self.said: list[tuple[list[int], str]] = []
        self.texts = [np.full(8 * 8 + 1, i, np.uint8).tobytes() for i in range(count)]
        self.paths = [folder / str(i) for i in range(count)]
        sizes = [len(t) for t in self.texts]
        self.order = order(sizes, window=window)
        self.reader = ShardReader(self.paths, sizes, seq_len=8)
        self.feed = DataFeed(
            self.order, self.reader, lambda: self.now, lambda which, why: self.said.append((list(which), why))
        )

    def come(self, *shards: int) -> None:
        for number in shards:
            self.paths[number].write_bytes(self.texts[number])


def test_only_what_the_window_lacks_is_said(tmp_path: Path) -> None:
    """The corpus is larger than the disk: what is not needed yet is no news."""
    kit = Feed(tmp_path, 6, window=2)
    first, second = list(kit.order.windows(0))[:2]
    kit.come(*first)
    _, cursor = kit.feed.next_batch(0, 15)
    assert kit.said == []
    kit.come(second[0])
    _, cursor = kit.feed.next_batch(cursor, 4)
    assert [which for which, _ in kit.said] == [[second[1]]]
    kit.come(second[1])
    kit.feed.look_again(())
    batch, cursor = kit.feed.next_batch(cursor, 4)
    assert kit.said[1:] == [([], "")]
    assert cursor < 32
    assert set(batch[:, 0].tolist()) <= set(second)


def test_a_window_that_was_read_is_let_go(tmp_path: Path) -> None:
    kit = Feed(tmp_path, 6, window=2)
    kit.come(*range(6))
    first, second = list(kit.order.windows(0))[:2]
    kit.feed.next_batch(0, 10)
    assert set(kit.reader._open) == set(first)
    kit.feed.next_batch(10, 10)
    assert set(kit.reader._open) <= set(second)


def test_what_comes_back_is_seen_by_itself_after_a_while(tmp_path: Path) -> None:
    kit = Feed(tmp_path, 2, window=2)
    kit.come(0)
    kit.feed.next_batch(0, 4)
    kit.come(1)
    kit.feed.next_batch(0, 4)
    assert [which for which, _ in kit.said] == [[1]]
    kit.now += limits.shard_retry_s
    kit.feed.next_batch(0, 4)
    assert [which for which, _ in kit.said] == [[1], []]


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


@pytest.mark.parametrize(("width", "words"), [(1, 256), (2, 65536), (4, 2**22)])
def test_tokens_of_every_width(tmp_path: Path, width: int, words: int) -> None:
    tokens = np.arange(29) * (words // 30) + words % 7
    path = tmp_path / "shard"
    path.write_bytes(tokens.astype(f"<u{width}").tobytes())
    reader = ShardReader([path], [29], seq_len=8, token_bytes=width, vocab_size=words)
    assert reader.absent() == set()
    batch = reader.read([Place(0, 0), Place(0, 16)])
    assert batch.dtype == np.int64
    assert batch.tolist() == [tokens[:9].tolist(), tokens[16:25].tolist()]
    path.write_bytes(bytes(29 * width - 1))
    with pytest.raises(ShardMissing, match=f"has {29 * width - 1} bytes instead of {29 * width}"):
        ShardReader([path], [29], seq_len=8, token_bytes=width, vocab_size=words).read([Place(0, 0)])


def test_a_token_that_no_model_knows_is_the_owner_s_fault(tmp_path: Path) -> None:
    paths = [tmp_path / "0", tmp_path / "1"]
    for number, path in enumerate(paths):
        path.write_bytes(np.full(20, 999 + number, "<u2").tobytes())
    reader = ShardReader(paths, [20, 20], seq_len=8, token_bytes=2, vocab_size=1000)
    assert reader.read([Place(0, 0)]).max() == 999
    with pytest.raises(OperatorError, match="shard 1 holds token 1000, and its tokenizer has 1000") as caught:
        reader.read([Place(0, 0), Place(1, 0)])
    assert caught.value.exit_code == 5
    assert not isinstance(caught.value, ShardMissing), "another shard would not help"


def test_looking_for_shards_costs_as_much_as_there_is_on_the_disk(tmp_path: Path) -> None:
    """Not as much as the run has shards: it is done whenever one is opened or let go, between inner steps."""
    looked = 0

    class Counted(type(tmp_path)):  # type: ignore[misc]
        def __str__(self) -> str:
            nonlocal looked
            looked += 1
            return str(super().__str__())

        @property
        def parent(self) -> Any:
            nonlocal looked
            looked += 1
            return super().parent

    names = ["a", "b", "c", "a", "gone/d"]
    reader = ShardReader([Counted(tmp_path / name) for name in names], [9, 9, 9, 9, 9], seq_len=8)
    looked = 0
    assert reader.absent() == {0, 1, 2, 3, 4}
    (tmp_path / "a").write_bytes(bytes(9))
    (tmp_path / "b").write_bytes(bytes(8))
    (tmp_path / "c").mkdir()
    (tmp_path / "another").write_bytes(bytes(9))
    assert reader.absent() == {1, 2, 4}, "the same shard may stand there twice"
    assert looked == 0
    reader.read([Place(0, 0)])
    (tmp_path / "a").unlink()
    assert reader.absent() == {1, 2, 3, 4}, "what is open is here"
