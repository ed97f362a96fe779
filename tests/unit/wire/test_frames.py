"""One zstd frame, bounded (scenario H3: bombs cost less than 64 MiB)."""

from __future__ import annotations

import gc
import random
import resource
import sys

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from p2pdiloco import limits
from p2pdiloco.errors import PeerError
from p2pdiloco.wire.frames import make_frame, open_frame

TEXT = b"def f(x):\n    return x\n" * 400
MAGIC = b"\x28\xb5\x2f\xfd"


def rle(content_size: int, blocks: int, *, block: int = 128 * 1024) -> bytes:
    """A frame that declares `content_size` and unpacks to `blocks` runs of one byte, four bytes each."""
    head = MAGIC + bytes([0b11100000]) + content_size.to_bytes(8, "little")
    body = b"".join(
        ((block << 3) | (1 << 1) | (n == blocks - 1)).to_bytes(3, "little") + b"x" for n in range(blocks)
    )
    return head + body


def opened_size(frame: bytes, size: int) -> int | str:
    """Bytes that came out, or the reason why none did; anything else it raises is a fault of ours."""
    try:
        return len(open_frame(frame, size))
    except PeerError as error:
        return error.reason


@given(st.binary(max_size=5000))
def test_what_was_made_is_opened(data: bytes) -> None:
    assert open_frame(make_frame(data), len(data)) == data


def test_text_shrinks() -> None:
    assert len(make_frame(TEXT)) < len(TEXT) / 3


@given(st.binary(max_size=400), st.integers(0, 10_000))
def test_rubbish_is_refused(data: bytes, size: int) -> None:
    for frame in (data, MAGIC + data):
        assert opened_size(frame, size) in (size, "BAD_FRAME", "TOO_BIG")


@given(st.integers(0, len(make_frame(TEXT)) - 1), st.integers(1, 255))
def test_a_damaged_frame_gives_its_size_or_nothing(at: int, bits: int) -> None:
    frame = bytearray(make_frame(TEXT))
    frame[at] ^= bits
    assert opened_size(bytes(frame), len(TEXT)) in (len(TEXT), "BAD_FRAME")
    with pytest.raises(PeerError):
        open_frame(make_frame(TEXT)[:at], len(TEXT))


SKIPPABLE = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"abcd"
GOOD = make_frame(TEXT)
WIDE = zstandard.ZstdCompressor(
    compression_params=zstandard.ZstdCompressionParameters.from_level(3, window_log=24)
)


def wide_frame() -> tuple[bytes, int]:
    """A frame that asks for a window of 16 MiB."""
    size = 20 * limits.MIB
    maker = WIDE.compressobj(size=size)
    piece = bytes(limits.MIB)
    return b"".join(maker.compress(piece) for _ in range(20)) + maker.flush(), size


@pytest.mark.parametrize(
    ("frame", "size", "why"),
    [
        (GOOD, len(TEXT) - 1, "instead of"),
        (GOOD, len(TEXT) + 1, "instead of"),
        (GOOD + b"x", len(TEXT), "end of the data"),
        (GOOD + GOOD, len(TEXT), "end of the data"),
        (GOOD + SKIPPABLE, len(TEXT), "end of the data"),
        (SKIPPABLE + GOOD, len(TEXT), "no zstd frame"),
        (SKIPPABLE, 4, "no zstd frame"),
        (b"", 0, "no zstd frame"),
        (GOOD[:-1], len(TEXT), "cut off"),
        (zstandard.ZstdCompressor(write_content_size=False).compress(TEXT), len(TEXT), "no size"),
        (rle(2**40, 8), 2**40, "at most"),
        (rle(2**40, 8), 4 * limits.MIB, "instead of"),
        (rle(limits.MIB, 1000), limits.MIB, "."),  # unpacks to 125 MiB
        (rle(limits.MIB, 1), limits.MIB, "."),  # unpacks to less
    ],
)
def test_bombs_and_lies_are_refused(frame: bytes, size: int, why: str) -> None:
    with pytest.raises(PeerError, match=why) as caught:
        open_frame(frame, size)
    assert caught.value.reason in ("BAD_FRAME", "TOO_BIG")


def test_a_wide_window_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    frame, size = wide_frame()
    assert zstandard.get_frame_parameters(frame).window_size > limits.zstd_window_bytes_max
    monkeypatch.setattr(limits, "frame_content_bytes_max", size)
    with pytest.raises(PeerError, match="window"):
        open_frame(frame, size)


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux")
def test_bombs_cost_little_memory() -> None:
    """H3: less than 64 MiB, whatever a frame of 4 MiB claims and holds."""
    size = limits.frame_content_bytes_max
    bombs = [rle(size, n) for n in (33, 1000, 30_000)] + [rle(2**40, 30_000), GOOD + rle(size, 30_000)]
    rng = random.Random(5)
    bombs += [MAGIC + rng.randbytes(200) for _ in range(200)]
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for bomb in bombs:
        with pytest.raises(PeerError):
            open_frame(bomb, size)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024
