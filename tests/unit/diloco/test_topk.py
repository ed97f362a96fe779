"""topk: sizes to the byte, the largest values, and nothing untrusted gets through (scenarios D1, S6)."""

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from p2pdiloco import limits
from p2pdiloco.diloco.compress import decode, encode, encoded_size, topk
from p2pdiloco.diloco.layout import layout_of
from p2pdiloco.errors import PeerError
from p2pdiloco.rules.delta_layout import CHUNK, HEADER_BYTES, bit_parts, kept_of
from p2pdiloco.run_spec import TensorSpec

# Two whole chunks that join, a short one, a single value left over, raw tensors between.
TENSORS = (
    TensorSpec("norm", (7,)),
    TensorSpec("whole", (32, 128)),
    TensorSpec("whole too", (64, 64)),
    TensorSpec("short", (11, 101)),
    TensorSpec("small", (3, 5)),
    TensorSpec("one left", (17, 241)),
)
PARAMS = sum(t.size for t in TENSORS)
CODED = [(7, 4096), (4103, 4096), (8199, 1111), (9325, 4096), (13421, 1)]  # each chunk: first value, values
CHUNKS = len(CODED)
RAW = np.r_[0:7, 9310:9325]
DENSITIES = [32, 64, 128]


def normal(seed=0, size=1e-3):
    return (np.random.default_rng(seed).standard_normal(PARAMS) * size).astype(np.float32)


def kept_in_all(k):
    return sum(-(-n * k // CHUNK) for _, n in CODED)


def sections(k):
    """Where scales, low, high, signs, groups and raw begin in a blob."""
    starts = np.cumsum([HEADER_BYTES, 4 * CHUNKS, *bit_parts(k, kept_in_all(k))])
    return dict(zip(("scales", "low", "high", "signs", "groups", "raw"), starts.tolist(), strict=True))


@pytest.mark.parametrize(("k", "bits"), [(32, 9), (64, 8), (128, 7)])
def test_sizes_are_exact(k, bits):
    codec, kept = f"topk{k}", kept_in_all(k)
    expected = (
        HEADER_BYTES + 4 * CHUNKS + -(-kept * (bits - 2) // 8) + -(-kept // 4) + 2 * -(-kept // 8) + 2 * 22
    )
    assert encoded_size(codec, TENSORS) == len(encode(codec, normal(), TENSORS)) == expected
    matrix = (TensorSpec("matrix", (1024, 1024)),)
    assert (encoded_size(codec, matrix) - HEADER_BYTES) * 8 / 2**20 == (k * (bits + 2) + 32) / CHUNK


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(1e-5, 30), st.sampled_from(DENSITIES))
def test_each_chunk_keeps_its_largest_with_sign_and_size(seed, size, k):
    flat = normal(seed, size)
    again = decode(f"topk{k}", encode(f"topk{k}", flat, TENSORS), TENSORS)
    assert np.array_equal(again[RAW], flat[RAW].astype(np.float16))
    for first, n in CODED:
        before, after = flat[first : first + n], again[first : first + n]
        sent = np.flatnonzero(after)
        assert len(sent) == kept_of(k, n)
        smallest, rest = np.abs(before[sent]).min(), np.delete(np.abs(before), sent)
        assert n == 1 or smallest >= rest.max() * (1 - 2.0**-11)
        assert np.array_equal(np.sign(after[sent]), np.sign(before[sent]))
        assert len(np.unique(np.abs(after[sent]))) <= 2


def test_the_cut_between_the_groups_is_the_best_one():
    flat = normal(4)
    again = decode("topk64", encode("topk64", flat, TENSORS), TENSORS)
    for first, n in CODED[:4]:
        sent = np.flatnonzero(again[first : first + n]) + first
        sizes = np.sort(np.abs(flat[sent]).astype(np.float64))
        errors = [sizes[:i].var() * i + sizes[i:].var() * (len(sizes) - i) for i in range(1, len(sizes))]
        made = ((np.abs(again[sent]) - np.abs(flat[sent])) ** 2).sum()
        assert made == pytest.approx(min(errors), rel=1e-3)


@pytest.mark.parametrize("k", DENSITIES)
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, -1e-40, 1e-12])
def test_what_rounds_to_nothing_is_not_sent(k, value):
    flat = np.full(PARAMS, value, np.float32)
    with np.errstate(all="raise", under="ignore"):
        again = decode(f"topk{k}", encode(f"topk{k}", flat, TENSORS), TENSORS)
    assert not again.any()


def test_fewer_values_than_are_kept_leave_the_others_out():
    flat = np.zeros(PARAMS, np.float32)
    flat[[10, 700, 4000]] = [0.5, -0.5, 0.5]
    again = decode("topk64", encode("topk64", flat, TENSORS), TENSORS)
    assert np.array_equal(again, flat)


def test_equal_magnitudes_keep_as_many_as_others():
    flat = np.full(PARAMS, 0.25, np.float32)
    flat[::3] *= -1
    again = decode("topk32", encode("topk32", flat, TENSORS), TENSORS)
    for first, n in CODED:
        sent = np.flatnonzero(again[first : first + n]) + first
        assert len(sent) == kept_of(32, n)
        assert np.array_equal(again[sent], flat[sent])


@pytest.mark.parametrize("place", [0, 7, 8199 + 1110, 13421, PARAMS - 1])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf, 1e38, 1024.5])
def test_the_sender_finds_out_before_it_sends(place, value):
    flat = normal()
    flat[place] = value
    with pytest.raises(PeerError) as error:
        encode("topk64", flat, TENSORS)
    assert error.value.reason == "NOT_FINITE"


def test_the_largest_value_allowed_travels():
    flat = np.full(PARAMS, -limits.delta_value_max, np.float32)
    again = decode("topk128", encode("topk128", flat, TENSORS), TENSORS)
    assert again.min() == -limits.delta_value_max


@pytest.mark.parametrize("half", [np.nan, np.inf, -np.inf, 32800.0, -1.0])
@pytest.mark.parametrize("scale", [0, 2 * CHUNKS - 1])
def test_a_hostile_scale_is_refused(half, scale):
    blob = bytearray(encode("topk64", normal(), TENSORS))
    blob[HEADER_BYTES + 2 * scale : HEADER_BYTES + 2 * scale + 2] = np.array(half, "<f2").tobytes()
    with pytest.raises(PeerError) as error:
        decode("topk64", blob, TENSORS)
    assert error.value.reason == "NOT_FINITE"


def packed(places, k=64):
    """A blob with these places, one of each slot, and harmless other parts."""
    layout = layout_of(f"topk{k}", TENSORS)
    flags = np.zeros(len(places), np.bool_)
    scales = np.full((CHUNKS, 2), 0.5, np.float16)
    blob = bytearray(encode(f"topk{k}", normal(), TENSORS))
    coded = np.frombuffer(blob, np.uint8)[HEADER_BYTES : sections(k)["raw"]]
    topk.pack(topk.Kept(scales, np.asarray(places, np.int64), flags, flags), k, coded)
    assert layout.blocks == CHUNKS
    return blob


def honest(k=64):
    """Places: the first values of each chunk."""
    starts = np.cumsum([0, *(kept_of(k, n) for _, n in CODED)])[:-1] * (CHUNK // k)
    return np.concatenate([s + np.arange(kept_of(k, n)) for s, (_, n) in zip(starts, CODED, strict=True)])


def test_honest_places_come_back():
    again = decode("topk64", packed(honest()), TENSORS)
    sent = np.concatenate([first + np.arange(kept_of(64, n)) for first, n in CODED])
    assert np.array_equal(
        np.flatnonzero(np.delete(again, RAW)),
        np.flatnonzero(np.isin(np.delete(np.arange(PARAMS), RAW), sent)),
    )


@pytest.mark.parametrize(
    ("slot", "place"),
    [
        (1, 0),  # twice the same
        (0, 1),
        (5, 3),  # not increasing
        (63, 4096),  # the second chunk's
        (64, 100),  # the first chunk's
        (128 + 17, 8192 + 1111),  # behind the end of a short chunk
        (-1, 8192 + 18 * 64 + 4096 + 1),  # the same where one value is left
    ],
)  # fmt: skip
def test_places_that_no_encoder_writes_are_refused(slot, place):
    places = honest()
    places[slot] = place
    with pytest.raises(PeerError) as error:
        decode("topk64", packed(places), TENSORS)
    assert error.value.reason == "BAD_SHAPE"


@pytest.mark.parametrize("part", ["low", "high", "signs", "groups"])
def test_padding_is_zero(part):
    """Otherwise one content would have many names."""
    blob = bytearray(encode("topk32", normal(), TENSORS))  # 32 x 3 + 9 + 1 = 106 kept: every part is padded
    at = sections(32)
    end = list(at.values())[list(at).index(part) + 1]
    blob[end - 1] |= 0x80
    with pytest.raises(PeerError) as error:
        decode("topk32", blob, TENSORS)
    assert error.value.reason == "BAD_SHAPE"


@pytest.mark.parametrize("k", DENSITIES)
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_flipped_bits_decode_to_as_many_values_in_range_or_are_refused(k, data):
    codec = f"topk{k}"
    blob = bytearray(encode(codec, normal(), TENSORS))
    for bit in data.draw(st.lists(st.integers(8 * HEADER_BYTES, 8 * len(blob) - 1), min_size=1, max_size=3)):
        blob[bit // 8] ^= 1 << bit % 8
    with suppress(PeerError):  # any other exception fails the test
        flat = decode(codec, blob, TENSORS)
        assert np.abs(flat).max() <= limits.delta_value_max
        for first, n in CODED:
            assert np.count_nonzero(flat[first : first + n]) <= kept_of(k, n)


@settings(max_examples=100, deadline=None)
@given(arrays(np.uint8, encoded_size("topk64", TENSORS) - HEADER_BYTES))
def test_any_bytes_are_refused_or_in_range(rubbish):
    blob = encode("topk64", normal(), TENSORS)[:HEADER_BYTES] + rubbish.tobytes()
    with suppress(PeerError):
        assert np.abs(decode("topk64", blob, TENSORS)).max() <= limits.delta_value_max


def test_what_was_in_the_room_is_gone():
    room = np.full(PARAMS, 5, np.float32)
    blob = encode("topk64", normal(), TENSORS)
    assert decode("topk64", memoryview(blob), TENSORS, room) is room
    assert np.array_equal(room, decode("topk64", blob, TENSORS))
