"""Cleaning, cutting, and numbers that follow from the content alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdiloco import limits
from p2pdiloco_node.corpus.documents import (
    WINDOW_BYTES,
    batches,
    boundary,
    clean,
    cut,
    digests_of,
    first_of_copies,
    index_of,
    seed_key,
    shuffled,
)

KEY = seed_key(1)


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"", None),
        (b" \n\t\r\n", None),
        ("\u2003\u00a0".encode(), None),
        (b"\xef\xbb\xbf", None),
        (b"\xef\xbb\xbf  \n", None),
        (b"\0\0", None),
        (b"a", b"a"),
        (b" a \r\n", b" a \r\n"),
        (b"\xef\xbb\xbfa\0b", b"ab"),
    ],
)
def test_blanks_are_no_document_and_text_stays_as_it_is(raw: bytes, text: bytes | None) -> None:
    assert clean(raw) == text


def test_what_is_not_utf_8_is_refused() -> None:
    with pytest.raises(UnicodeDecodeError):
        clean(b"caf\xe9")


def test_long_documents_are_cut_at_paragraphs_lines_or_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "document_bytes_max", 100)
    paragraphs = b"\n\n".join(b"%03d " % i * 7 for i in range(30)) + b"\n\n"
    assert all(part.endswith(b"\n\n") for part in cut(paragraphs))
    lines = b"\n".join(b"%03d " % i * 7 for i in range(30)) + b"\n"
    assert all(part.endswith(b"\n") for part in cut(lines))
    wide = "€".encode() * 200
    assert len(cut(wide)) == 6
    assert all(part.decode() for part in cut(wide))


@given(st.text(alphabet="ab \n€😀", max_size=2000))
def test_cutting_loses_nothing(text: str) -> None:
    raw = text.encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "document_bytes_max", 128)
        parts = cut(raw)
    assert b"".join(parts) == raw
    assert all(part.decode() == part.decode(errors="ignore") for part in parts)
    assert all(parts) or raw == b""
    assert max(map(len, parts)) <= 128 + WINDOW_BYTES


def test_a_boundary_is_at_a_paragraph_before_a_line() -> None:
    assert boundary(b"ab\ncd\n\nef") == 7
    assert boundary(b"ab\ncd") == 3
    assert boundary("é".encode()[1:] + b"x") == 1
    assert boundary(b"abc") == 0
    assert boundary(b"") == 0


def test_the_digest_is_the_content_s_and_the_order_the_seed_s() -> None:
    texts = [b"%d" % i for i in range(500)]
    one = index_of(texts, KEY, source=0, tokens=False)
    two = index_of(texts, seed_key(2), source=3, tokens=False)
    assert digests_of(one) == digests_of(two)
    assert len(set(digests_of(one))) == 500
    assert one[shuffled(one)]["size"].tolist() != two[shuffled(two)]["size"].tolist()
    assert digests_of(one) != digests_of(index_of(texts, KEY, source=0, tokens=True)), "tokens are no text"
    first, *_ = digests_of(one)
    assert first == int(one["high"][0]).to_bytes(8, "big") + int(one["low"][0]).to_bytes(8, "big")


def test_the_order_does_not_depend_on_where_documents_stand() -> None:
    texts = [b"%d" % i for i in range(300)]
    one = index_of(texts, KEY, source=0, tokens=False)
    two = index_of(texts[::-1], KEY, source=0, tokens=False)
    assert digests_of(one[shuffled(one)]) == digests_of(two[shuffled(two)])


def test_of_copies_the_one_of_the_first_source_stays() -> None:
    index = np.concatenate(
        [
            index_of([b"a", b"b", b"a"], KEY, source=2, tokens=False),
            index_of([b"b", b"c"], KEY, source=1, tokens=False),
        ]
    )
    kept = index[first_of_copies(index)]
    assert sorted(zip(digests_of(kept), kept["source"].tolist(), strict=True)) == sorted(
        zip(digests_of(index[[0, 3, 4]]), [2, 1, 1], strict=True)
    )
    assert len(first_of_copies(index[:0])) == 0


@pytest.mark.parametrize("seed", [0, 1, 2**62, 2**500])
def test_every_seed_is_a_key(seed: int) -> None:
    assert 1 <= len(seed_key(seed)) <= 64
    assert seed_key(seed) != seed_key(seed + 1)


def test_groups_are_bounded_and_whole() -> None:
    texts = [b"x" * n for n in (3, 4, 50, 1, 1, 9)]
    assert [[len(t) for t in g] for g in batches(texts, 10)] == [[3, 4], [50], [1, 1], [9]]
    assert list(batches([], 10)) == []
