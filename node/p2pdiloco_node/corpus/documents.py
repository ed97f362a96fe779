"""What a document is: cleaned, cut where it is too long, known by its content.

Two numbers follow from the content alone, so that no other document has a say in them. The *digest* (128 bits
of BLAKE2b) tells copies: among 10**8 documents two unlike ones share it with a probability of 10**-23. It
also chooses what is held out. The *order*, 64 bits of the digest keyed by the seed, is the place in the
shuffled corpus.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from p2pdiloco import limits

DIGEST_BYTES = 16
ORDER_BYTES = 8
WINDOW_BYTES = 64 << 10  # behind a place to cut in which the end of a paragraph is looked for
MARK = b"\xef\xbb\xbf"  # a byte order mark is no text
KIND_TEXT, KIND_TOKENS = b"", b"tokens"

RECORD = np.dtype(
    [
        ("high", ">u8"),  # digest; big-endian, so that numbers compare as the digests do
        ("low", ">u8"),
        ("order", "<u8"),
        ("size", "<u4"),  # bytes
        ("source", "<u2"),  # which --data argument
        ("tokens", "u1"),  # 1: its bytes are tokens already
    ]
)
Index = npt.NDArray[np.void]
"""Documents as RECORDs."""


def clean(raw: bytes) -> bytes | None:
    """A document's text, UTF-8, without zero bytes and byte order mark; None: nothing but blanks.

    Raises: UnicodeDecodeError.
    """
    text = raw.decode()
    if not text or text.isspace():
        return None
    raw = raw.removeprefix(MARK)
    if b"\0" in raw:
        raw = raw.replace(b"\0", b"")
    return raw if raw and not raw.isspace() else None


def boundary(window: bytes) -> int:
    """Where to cut at or behind the window's first byte: a paragraph's end, a line's, a character's."""
    if (at := window.find(b"\n\n")) >= 0:
        return at + 2
    if (at := window.find(b"\n")) >= 0:
        return at + 1
    at = 0
    while at < min(3, len(window)) and window[at] & 0xC0 == 0x80:
        at += 1
    return at


def cut(text: bytes) -> list[bytes]:
    """The document, or parts of it if it is longer than `limits.document_bytes_max` (and a window)."""
    size = limits.document_bytes_max
    if len(text) <= size:
        return [text]
    places = [at + boundary(text[at : at + WINDOW_BYTES]) for at in range(size, len(text), size)]
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True) if a < b]


def seed_key(seed: int) -> bytes:
    """Keys the order. `seed`: any whole number from 0 on."""
    return seed.to_bytes((seed.bit_length() + 7) // 8 or 1, "little")[:64]


def index_of(texts: Iterable[bytes], key: bytes, *, source: int, tokens: bool) -> Index:
    """(documents,) RECORDs."""
    person = KIND_TOKENS if tokens else KIND_TEXT
    names = bytearray()
    orders = bytearray()
    sizes: list[int] = []
    for text in texts:
        name = hashlib.blake2b(text, digest_size=DIGEST_BYTES, person=person).digest()
        names += name
        orders += hashlib.blake2b(name, digest_size=ORDER_BYTES, key=key).digest()
        sizes.append(len(text))
    index: Index = np.empty(len(sizes), RECORD)
    halves = np.frombuffer(names, ">u8").reshape(-1, 2)
    index["high"], index["low"] = halves[:, 0], halves[:, 1]
    index["order"] = np.frombuffer(orders, "<u8")
    index["size"], index["source"], index["tokens"] = sizes, source, tokens
    return index


def digests_of(index: Index) -> list[bytes]:
    """The digests, `DIGEST_BYTES` each."""
    halves = np.empty((len(index), 2), ">u8")
    halves[:, 0], halves[:, 1] = index["high"], index["low"]
    data = halves.tobytes()
    return [data[at : at + DIGEST_BYTES] for at in range(0, len(data), DIGEST_BYTES)]


def first_of_copies(index: Index) -> npt.NDArray[np.int64]:
    """Places of the documents that stay, by digest: of copies the one of the earliest source."""
    by_digest = np.lexsort((index["source"], index["low"], index["high"]))
    if not len(by_digest):
        return by_digest
    high, low = index["high"][by_digest], index["low"][by_digest]
    new = np.ones(len(by_digest), np.bool_)
    new[1:] = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
    return by_digest[new]


def shuffled(index: Index) -> npt.NDArray[np.int64]:
    """Places in the shuffled order, the same for the same documents and seed."""
    return np.lexsort((index["low"], index["high"], index["order"]))


def batches(texts: Iterable[bytes], bytes_max: int) -> Iterator[list[bytes]]:
    """Groups of at most `bytes_max` bytes, or of one document."""
    group: list[bytes] = []
    size = 0
    for text in texts:
        if group and size + len(text) > bytes_max:
            yield group
            group, size = [], 0
        group.append(text)
        size += len(text)
    if group:
        yield group
