"""Bytes to typed values: whatever comes, a value or a PeerError comes out (targets.md H3, H4)."""

from __future__ import annotations

import math
import struct
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdiloco import limits
from p2pdiloco.errors import PeerError
from p2pdiloco.rules.state import RulesState
from p2pdiloco.run_spec import RunSpec, SignedRunSpec
from p2pdiloco.wire import log
from p2pdiloco.wire.codec import decode, encode
from p2pdiloco.wire.messages import KINDS, Have, Heartbeat, NewerTerm, NodeReport

from .examples import values_of

ALL: list[type[Any]] = [*KINDS.values(), log.Body, log.Entry, RunSpec, SignedRunSpec, RulesState]
BYTES_MAX = limits.run_spec_bytes_max

anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary(max_size=64)
    | st.text(max_size=16),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=30,
)  # fmt: skip


@pytest.mark.parametrize("kind", ALL, ids=lambda k: k.__name__)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_decode_is_the_way_back_from_encode(kind: type[Any], data: st.DataObject) -> None:
    value = data.draw(values_of(kind))
    raw = encode(value)
    assert decode(raw, kind, bytes_max=BYTES_MAX) == value
    assert encode(decode(raw, kind, bytes_max=BYTES_MAX)) == raw


@settings(max_examples=150, deadline=None)
@given(raw=st.binary(max_size=300) | anything.map(msgpack.packb), kind=st.sampled_from(ALL))
def test_arbitrary_bytes_raise_nothing_but_a_peer_error(raw: bytes, kind: type[Any]) -> None:
    reason, value = "", None
    try:
        value = decode(raw, kind)
    except PeerError as error:
        reason = error.reason
    assert reason in ("MALFORMED", "TOO_BIG") or isinstance(value, kind)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_flipped_bit_gives_a_value_within_the_types_or_a_peer_error(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(ALL))
    raw = bytearray(encode(data.draw(values_of(kind))))
    place = data.draw(st.integers(0, 8 * len(raw) - 1))
    raw[place // 8] ^= 1 << place % 8
    try:
        value = decode(bytes(raw), kind, bytes_max=BYTES_MAX)
    except PeerError:
        return
    assert decode(encode(value), kind, bytes_max=BYTES_MAX) == value


def refused(raw: bytes, kind: type[Any], why: str | None = None, reason: str = "MALFORMED") -> None:
    with pytest.raises(PeerError, match=why) as error:
        decode(raw, kind)
    assert error.value.reason == reason


def test_too_long_a_message_is_not_even_parsed() -> None:
    refused(bytes(limits.message_bytes_max + 1), Have, "at most", "TOO_BIG")


@pytest.mark.parametrize("depth", [limits.nesting_max + 2, 200, 100_000])
def test_nesting_is_bounded(depth: int) -> None:
    refused(b"\x91" * depth + b"\x90", Have)


@pytest.mark.parametrize(
    "raw",
    [
        b"\xdd\xff\xff\xff\xff",  # an array of 4 G items
        b"\xdf\xff\xff\xff\xff",  # a map of 4 G items
        b"\xc6\xff\xff\xff\xff",  # 4 GiB of bytes
        b"\xdb\xff\xff\xff\xff",  # 4 GiB of text
        b"\xc9\xff\xff\xff\xff\x01",  # an extension of 4 GiB
        b"\xdc\xff\xff" + b"\xdc\xff\xff" * 8,  # arrays in arrays
    ],
    ids=["array", "map", "bytes", "text", "extension", "nested arrays"],
)
def test_a_claimed_length_allocates_nothing(raw: bytes) -> None:
    refused(raw, Have)


def test_longest_text_and_list_of_a_field() -> None:
    refused(msgpack.packb(["x" * 5000]), Have)
    many = [bytes(32)] * (limits.heartbeat_have_max + 1)
    refused(msgpack.packb([many]), Have, "length")
    assert len(decode(msgpack.packb([many[:-1]]), Have).deltas) == limits.heartbeat_have_max


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_are_finite(number: float) -> None:
    report = NodeReport("training", "", 0, 0, 0, 1.5, 0.0, "cpu", "", 0, 0, 0.0, "0.1.0")
    raw = encode(report).replace(struct.pack(">d", 1.5), struct.pack(">d", number))
    refused(raw, NodeReport, "not finite")


def test_ranges_hold() -> None:
    refused(msgpack.packb([-1]), NewerTerm, ">= 0")
    refused(msgpack.packb([2**63]), NewerTerm)
    assert decode(msgpack.packb([2**63 - 1]), NewerTerm) == NewerTerm(2**63 - 1)


def test_a_field_too_many_or_too_few() -> None:
    refused(msgpack.packb([1, 2]), NewerTerm)
    refused(msgpack.packb([]), NewerTerm)
    refused(msgpack.packb({"term": 1}), NewerTerm)


def test_bytes_after_the_end() -> None:
    refused(encode(NewerTerm(1)) + b"\0", NewerTerm)


def test_text_is_never_taken_for_bytes() -> None:
    """A second encoding of the same value would give one body two digests."""
    refused(msgpack.packb([["A" * 43 + "="]]), Have)
    refused(msgpack.packb([[b"A" * 31]]), Have, "length")


def test_a_number_is_never_taken_for_a_truth() -> None:
    beat = [1, bytes(32), 1, 1, 0, 0, 0, [], True]
    refused(msgpack.packb(beat), Heartbeat, "bool")
