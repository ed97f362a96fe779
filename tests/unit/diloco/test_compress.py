"""Deltas as bytes: exact sizes, small errors, and nothing untrusted gets through (scenarios D1, S6)."""

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from p2pdiloco import limits
from p2pdiloco.diloco.compress import Origin, decode, encode, encoded_size, origin_of
from p2pdiloco.errors import PeerError
from p2pdiloco.ids import PeerId
from p2pdiloco.rules.delta_layout import HEADER_BYTES
from p2pdiloco.run_spec import TensorSpec

# Odd sizes before and between blocked tensors: padded blocks, runs that join, unaligned starts.
TENSORS = (
    TensorSpec("norm", (7,)),
    TensorSpec("whole", (16, 128)),
    TensorSpec("whole too", (9, 128)),
    TensorSpec("padded", (11, 101)),
    TensorSpec("small", (3, 5)),
    TensorSpec("last", (1025, 1)),
)
PARAMS = sum(t.size for t in TENSORS)
CODECS = ("fp16", "int4")
SCALES_AT = HEADER_BYTES
BLOCKS = 16 + 9 + 9 + 9


def normal(seed=0, size=1e-3):
    return (np.random.default_rng(seed).standard_normal(PARAMS) * size).astype(np.float32)


def blocks_of(flat):
    """Each block's values, by the layout's description."""
    start = 0
    for tensor in TENSORS:
        values = flat[start : start + tensor.size]
        start += tensor.size
        if len(tensor.shape) > 1 and tensor.size > 1024:
            yield from (values[i : i + 128] for i in range(0, len(values), 128))


@pytest.mark.parametrize("codec", CODECS)
def test_sizes_are_exact(codec):
    expected = HEADER_BYTES + (2 * PARAMS if codec == "fp16" else BLOCKS * 66 + 2 * (7 + 15))
    assert encoded_size(codec, TENSORS) == len(encode(codec, normal(), TENSORS)) == expected


def test_int4_takes_4_125_bits_for_a_value():
    assert (encoded_size("int4", (TensorSpec("matrix", (1024, 1024)),)) - HEADER_BYTES) * 8 / 2**20 == 4.125


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(1e-6, 100))
def test_int4_errs_by_half_a_step_at_most(seed, size):
    flat = normal(seed, size)
    again = decode("int4", encode("int4", flat, TENSORS), TENSORS)
    for before, after in zip(blocks_of(flat), blocks_of(again), strict=True):
        step = np.abs(before).max() / 7
        # The scale is rounded to 11 bits, so the largest value may lie 7 * 2**-11 of a step further out.
        assert np.abs(before - after).max() <= step * (0.5 + 7 / 2048)


@pytest.mark.parametrize("codec", CODECS)
def test_decoding_is_stable(codec):
    once = decode(codec, encode(codec, normal(), TENSORS), TENSORS)
    again = decode(codec, encode(codec, once, TENSORS), TENSORS)
    assert np.allclose(once, again, rtol=2e-3, atol=1e-7)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, -1e-40, 1e-12, 3e-8])
def test_tiny_values_give_no_nan(codec, value):
    flat = np.full(PARAMS, value, np.float32)
    with np.errstate(all="raise", under="ignore"):
        again = decode(codec, encode(codec, flat, TENSORS), TENSORS)
    assert np.isfinite(again).all()
    assert np.abs(again - flat).max() <= 3e-8


@pytest.mark.parametrize(
    ("steps", "sent"), [(2.8, 0), (4.2, 4), (9.8, 7), (16.8, 14), (18.2, 18), (38.43, 35)]
)
def test_a_scale_that_float16_rounds_coarsely_turns_no_value_over(steps, sent):
    """The smallest scale is 2**-32: 9.8 of it must stop at 7, not wrap to the other sign."""
    flat = np.full(PARAMS, steps * 2.0**-32, np.float32)
    flat[::2] *= -1
    again = decode("int4", encode("int4", flat, TENSORS), TENSORS)
    block = slice(7, 7 + 2048)
    assert np.array_equal(again[block], np.float32(sent * 2.0**-32) * np.sign(flat[block]))


def test_a_small_value_among_large_ones_and_late_in_a_run():
    """Scales around 1e-6 keep their precision, where a bare float16 would have one digit left."""
    flat = normal(1, 3e-6)
    again = decode("int4", encode("int4", flat, TENSORS), TENSORS)
    block = slice(7, 7 + 2048)
    assert np.linalg.norm(flat[block] - again[block]) < 0.15 * np.linalg.norm(flat[block])


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("place", [0, 7, 7 + 2048 + 1152 + 1110, PARAMS - 1])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e38, -1e38, 1025.0])
def test_the_sender_finds_out_before_it_sends(codec, place, value):
    flat = normal()
    flat[place] = value
    with pytest.raises(PeerError) as error:
        encode(codec, flat, TENSORS)
    assert error.value.reason == "NOT_FINITE"


@pytest.mark.parametrize("codec", CODECS)
def test_the_largest_value_allowed_travels(codec):
    flat = normal()
    flat[[0, 100, PARAMS - 1]] = [-limits.delta_value_max, limits.delta_value_max, limits.delta_value_max]
    again = decode(codec, encode(codec, flat, TENSORS), TENSORS)
    assert np.abs(again).max() == pytest.approx(limits.delta_value_max, rel=1e-3)


@pytest.mark.parametrize("half", [np.nan, np.inf, -np.inf, 65504.0, -1.0])
@pytest.mark.parametrize("block", [0, 24, BLOCKS - 1])
def test_a_hostile_scale_is_refused(half, block):
    blob = bytearray(encode("int4", normal(), TENSORS))
    blob[SCALES_AT + 2 * block : SCALES_AT + 2 * block + 2] = np.array(half, "<f2").tobytes()
    with pytest.raises(PeerError) as error:
        decode("int4", blob, TENSORS)
    assert error.value.reason == "NOT_FINITE"


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("half", [np.nan, np.inf, -np.inf, 65504.0, -65504.0])
def test_a_hostile_raw_value_is_refused(codec, half):
    blob = bytearray(encode(codec, normal(), TENSORS))
    blob[-2:] = np.array(half, "<f2").tobytes()
    if codec == "int4":
        blob[-2 * 22 :] = np.full(22, half, "<f2").tobytes()
    with pytest.raises(PeerError) as error:
        decode(codec, blob, TENSORS)
    assert error.value.reason == "NOT_FINITE"


@pytest.mark.parametrize("codec", CODECS)
def test_another_size_or_header_is_refused(codec):
    blob = encode(codec, normal(), TENSORS)
    for bad, reason in (
        (b"", "BAD_SHAPE"),
        (blob[:-1], "BAD_SHAPE"),
        (blob + b"\0", "TOO_BIG"),
        (b"X" + blob[1:], "BAD_SHAPE"),
        (blob[:4] + b"\x02" + blob[5:], "BAD_SHAPE"),
        (blob[:5] + b"\x07" + blob[6:], "BAD_SHAPE"),
        (encode(CODECS[codec == "fp16"], normal(), TENSORS), "BAD_SHAPE" if codec == "fp16" else "TOO_BIG"),
    ):
        with pytest.raises(PeerError) as error:
            decode(codec, bad, TENSORS)
        assert error.value.reason == reason


@settings(max_examples=100, deadline=None)
@given(arrays(np.uint8, encoded_size("int4", TENSORS) - HEADER_BYTES))
def test_any_bytes_decode_to_numbers_in_range_or_are_refused(rubbish):
    blob = encode("int4", normal(), TENSORS)[:HEADER_BYTES] + rubbish.tobytes()
    flat = np.zeros(1, np.float32)
    with suppress(PeerError):  # any other exception fails the test
        flat = decode("int4", blob, TENSORS)
    assert np.abs(flat).max() <= limits.delta_value_max * 8 / 7 * 1.001


def test_a_blob_is_its_senders_own():
    zeros = np.zeros(PARAMS, np.float32)
    origins = [Origin(PeerId(bytes([p] * 32)), s) for p in (1, 2) for s in (1, 2**40)]
    blobs = [encode("int4", zeros, TENSORS, origin) for origin in origins]
    assert len(set(blobs)) == 4
    assert [origin_of(blob) for blob in blobs] == origins
    with pytest.raises(PeerError):
        origin_of(blobs[0][: HEADER_BYTES - 1])


def test_decodes_into_room_that_is_there():
    room = np.full(PARAMS, 5, np.float32)
    blob = encode("int4", normal(), TENSORS)
    assert decode("int4", memoryview(blob), TENSORS, room) is room
    assert np.array_equal(room, decode("int4", blob, TENSORS))
