"""Words that sentences for people share."""

from __future__ import annotations

import pytest

from p2pdiloco.words import count_of


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (count_of(1, "shard"), "1 shard"),
        (count_of(0, "shard"), "0 shards"),
        (count_of(1200, "shard"), "1,200 shards"),
        (count_of(1, "entry", "entries"), "1 entry"),
        (count_of(2, "entry", "entries"), "2 entries"),
    ],
)
def test_one_of_a_thing_is_not_many(said: str, words: str) -> None:
    assert said == words
