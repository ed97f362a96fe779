"""Names: domain separation and the Merkle root over chunks (protocol.md 2)."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdiloco.ids import NO_DIGEST, Digest, digest_of, merkle_root, peer_id_of, short, tagged_digest

digests = st.binary(min_size=32, max_size=32).map(Digest)


def test_a_blob_is_named_by_plain_sha256() -> None:
    assert digest_of(b"abc") == hashlib.sha256(b"abc").digest()
    assert digest_of(memoryview(b"abc")) == digest_of(b"abc")


@given(st.lists(st.binary(max_size=4), max_size=4), st.lists(st.binary(max_size=4), max_size=4))
def test_where_one_part_ends_is_part_of_the_digest(a: list[bytes], b: list[bytes]) -> None:
    assert (tagged_digest("t", *a) == tagged_digest("t", *b)) == (a == b)


def test_two_tags_never_share_a_digest() -> None:
    assert len({tagged_digest(t, b"x") for t in ("a", "b", "ab", "")}) == 4
    assert tagged_digest("a", b"bc") != tagged_digest("ab", b"c")
    peer = bytes(peer_id_of(bytes(32)))
    assert peer == tagged_digest("peer", bytes(32)) != digest_of(bytes(32))


@given(st.lists(digests, max_size=9), st.lists(digests, max_size=9))
def test_two_lists_never_share_a_root(a: list[Digest], b: list[Digest]) -> None:
    assert (merkle_root(a) == merkle_root(b)) == (a == b)


@given(st.lists(digests, min_size=1, max_size=9), st.data())
def test_every_chunk_its_place_and_the_count_are_in_the_root(a: list[Digest], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(a) - 1))
    changed = list(a)
    changed[place] = digest_of(changed[place])
    assert merkle_root(changed) != merkle_root(a)
    assert merkle_root([*a, a[-1]]) != merkle_root(a)
    assert merkle_root(a[:-1]) != merkle_root(a)


def test_the_tree_as_it_is_written_down() -> None:
    """Leaves and inner nodes tagged apart, an odd node moves up unchanged, the count bound in."""
    a, b, c = (digest_of(bytes([i])) for i in range(3))
    la, lb, lc = (tagged_digest("leaf", x) for x in (a, b, c))
    top = tagged_digest("inner", tagged_digest("inner", la, lb), lc)
    assert merkle_root([a, b, c]) == tagged_digest("merkle", (3).to_bytes(8, "big"), top)
    assert merkle_root([a]) == tagged_digest("merkle", (1).to_bytes(8, "big"), la)


def test_an_inner_node_cannot_pose_as_a_chunk() -> None:
    a, b, c, d = (digest_of(bytes([i])) for i in range(4))
    inner = [
        tagged_digest("inner", tagged_digest("leaf", x), tagged_digest("leaf", y))
        for x, y in ((a, b), (c, d))
    ]
    assert merkle_root(inner) != merkle_root([a, b, c, d])


@pytest.mark.parametrize(("name", "text"), [(NO_DIGEST, "00000000"), (bytes(range(32)), "00010203")])
def test_short_names_are_for_people(name: bytes, text: str) -> None:
    assert short(name) == text
