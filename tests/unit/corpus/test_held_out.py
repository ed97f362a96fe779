"""What is held out follows from the documents alone, and stays when others are added."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco_node.corpus.documents import Index, digests_of, index_of, seed_key
from p2pdiloco_node.corpus.held_out import HeldSet, Split, choose_held_out
from p2pdiloco_node.corpus.making import Request, make_data
from p2pdiloco_node.corpus.segments import bucket_of
from p2pdiloco_node.progress import Lines

KEY = seed_key(1)


def documents(count: int, size: int, name: str = "d", source: int = 0) -> Index:
    texts = [(f"{name}{i} ".encode() * (size // 4 + 1))[: size + i % 7] for i in range(count)]
    return index_of(texts, KEY, source=source, tokens=False)


def choose(
    *parts: Index, buckets: int = 5, sources: dict[int, str] | None = None, evaluation: int = 20_000
) -> Split:
    index = np.concatenate(parts)
    bucket = bucket_of(index, buckets)
    groups = [index[bucket == number] for number in range(buckets)]
    return choose_held_out(groups, sources=sources or {}, evaluation_bytes=evaluation)


def size_of(index: Index, held: HeldSet) -> int:
    sizes = dict(zip(digests_of(index), index["size"].tolist(), strict=True))
    return sum(sizes[digest] for digest in held.digests)


def test_enough_for_two_evaluations_at_most_a_tenth() -> None:
    index = documents(1000, 1000)
    (held,) = choose(index).sets
    assert held.name == "all"
    assert held.tail == 0
    assert 39_000 <= size_of(index, held) <= 42_000
    (held,) = choose(index, evaluation=10**9).sets
    assert 98_000 <= size_of(index, held) <= 100_700
    (held,) = choose(documents(9000, 1000), evaluation=1).sets
    assert 88_000 <= 1000 * len(held.digests) <= 92_000


def test_a_large_corpus_holds_out_a_bounded_amount() -> None:
    """A hundredth of 300 MB would be 3 MB."""
    index = np.repeat(documents(3000, 100), 1)
    index["size"] = 100_000
    (held,) = choose(index).sets
    assert limits.held_out_bytes_max * 0.8 <= size_of(index, held) <= limits.held_out_bytes_max


@pytest.mark.parametrize("buckets", [1, 3, 64])
def test_buckets_and_order_do_not_matter(buckets: int) -> None:
    index = documents(500, 900)
    wanted = choose(index)
    found = choose(index[::-1].copy(), buckets=buckets)
    assert found.sets == wanted.sets
    assert (found.documents, found.size, found.copies) == (500, int(index["size"].sum()), 0)
    assert sum(found.buckets) == found.size


def test_the_seed_does_not_move_what_is_held_out() -> None:
    texts = [b"%d " % i * 300 for i in range(300)]
    one = choose(index_of(texts, seed_key(1), source=0, tokens=False))
    two = choose(index_of(texts, seed_key(2), source=0, tokens=False))
    assert one.sets == two.sets


def test_a_document_that_is_added_moves_no_other() -> None:
    before = choose(documents(500, 1000))
    after = choose(documents(500, 1000), documents(1, 1000, "new"))
    moved = set(before.held) ^ set(after.held)
    assert len(moved) <= 2, "the new one, and the last one, which it may push out"


def test_copies_are_counted_once() -> None:
    index = documents(400, 1000)
    assert choose(index, index, index).copies == 800
    assert choose(index, index).sets == choose(index).sets


def test_a_set_for_each_source() -> None:
    one, two = documents(300, 1000, "a", 0), documents(200, 1000, "b", 1)
    split = choose(one, two, sources={0: "one", 1: "two"})
    assert [held.name for held in split.sets] == ["all", "one", "two"]
    assert set(split.sets[1].digests) <= set(digests_of(one))
    assert set(split.sets[2].digests) <= set(digests_of(two))
    assert set(split.held) == {digest for held in split.sets for digest in held.digests}
    both = set(split.sets[1].digests) | set(split.sets[2].digests)
    assert set(split.sets[0].digests) <= both, "the first documents by digest are those of a source, too"


def test_a_source_of_copies_alone_has_no_set() -> None:
    index = documents(300, 1000)
    copies = index.copy()
    copies["source"] = 1
    with pytest.raises(OperatorError, match="'two' has no text of its own"):
        choose(index, copies, sources={0: "one", 1: "two"})


@pytest.mark.parametrize("sizes", [[100_000], [90_000, 40], [150_000, 150_001]])
def test_of_few_large_documents_the_end_of_the_largest_is_held_out(sizes: Sequence[int]) -> None:
    texts = [bytes([65 + i]) * size for i, size in enumerate(sizes)]
    index = index_of(texts, KEY, source=0, tokens=False)
    (held,) = choose(index).sets
    assert held.digests == tuple(digests_of(index[[int(np.argmax(index["size"]))]]))
    assert 0.05 * sum(sizes) < held.tail <= 0.11 * sum(sizes)


def test_where_sets_differ_the_longest_part_of_a_document_is_held_out() -> None:
    split = Split(2, 2, 0, (HeldSet("a", (b"x",), 7), HeldSet("b", (b"x",), 9), HeldSet("c", (b"y",))), ())
    assert split.held == {b"x": 9, b"y": 0}
    whole = Split(1, 1, 0, (HeldSet("a", (b"x",), 7), HeldSet("b", (b"x",))), ())
    assert whole.held == {b"x": 0}


def test_nothing_is_refused() -> None:
    with pytest.raises(OperatorError, match="no document has any text"):
        choose(documents(0, 10))


def test_one_source_has_no_second_set_that_is_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two names of one blob were measured twice."""
    (tmp_path / "x.jsonl").write_text("".join(f'{{"text": "text number {i}"}}\n' for i in range(400)))
    one = Request([f"{tmp_path}/x.jsonl"], jobs=1)
    data = make_data(one._replace(eval_per_source=True), tmp_path / "1", Lines())
    assert [s.name for s in data.evaluations] == ["all"]
    assert (
        "There is one --data, so its evaluation set is that of the whole corpus." in capsys.readouterr().out
    )
    assert data == make_data(one, tmp_path / "2", Lines())
