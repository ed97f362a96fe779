"""Words that every sentence for people shares."""

from __future__ import annotations


def count_of(number: int, one: str, many: str = "") -> str:
    """`1 shard`, `1,200 shards`. `many`: where it is not `one` and an s."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
