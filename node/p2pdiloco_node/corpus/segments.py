"""Cleaned documents on disk between reading and tokenising, in buckets of the shuffled order.

A segment is what one process read before its memory was full. It holds, for each bucket, the records of its
documents and their text, each compressed as one piece: reading one bucket of all segments is a few reads in
each, and reading all records needs none of the text. Buckets divide the order into equal ranges, so bucket
after bucket is the shuffled corpus, whatever the number of segments, buckets and processes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import compress, islice
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from p2pdiloco import limits
from p2pdiloco_node.corpus.documents import RECORD, Index, first_of_copies, index_of, shuffled

LEVEL = 1  # written and read once
BUCKETS_MAX = 2**24  # the bits of the order that tell them apart
HEAD_BYTES = 8  # the size of the head, before it
Write = Callable[[Path, Sequence[bytes]], None]
"""A file with these parts, whole or not at all."""


class Fault(msgspec.Struct, frozen=True, array_like=True):
    """A broken document: which input, where in it, and why."""

    number: int
    at: int
    why: str


class Counted(msgspec.Struct, frozen=True, array_like=True):
    """What was read."""

    documents: int = 0
    size: int = 0  # bytes of text
    empty: int = 0
    broken: int = 0
    first_broken: Fault | None = None

    def plus(self, other: Counted) -> Counted:
        return Counted(
            self.documents + other.documents,
            self.size + other.size,
            self.empty + other.empty,
            self.broken + other.broken,
            self.first_broken or other.first_broken,
        )


class Head(msgspec.Struct, frozen=True, array_like=True):
    """What a segment says of itself."""

    counted: Counted
    part: int  # of the portion: where reading goes on
    after: int | None  # in that part; None: at its beginning
    done: bool  # the portion ends with this segment
    table: bytes  # (buckets, 5) int64: size of the records, where the text is, its size, documents, bytes


class Slice(NamedTuple):
    """Documents of one bucket, in no order, without copies."""

    records: Index
    texts: list[bytes]

    def documents(self, places: npt.NDArray[np.int64]) -> list[bytes]:
        """Texts of these documents, in this order."""
        return [self.texts[place] for place in places.tolist()]


class Builder:
    """Collects documents until they are written as one segment."""

    def __init__(self, key: bytes, buckets: int) -> None:
        self._key, self._buckets = key, buckets
        self._indices: list[Index] = []
        self._texts: list[bytes] = []
        self.size = 0

    def __len__(self) -> int:
        return len(self._texts)

    def add(self, texts: Sequence[bytes], *, source: int, tokens: bool) -> None:
        self._indices.append(index_of(texts, self._key, source=source, tokens=tokens))
        self._texts += texts
        self.size += sum(map(len, texts))

    def write(
        self, path: Path, counted: Counted, part: int, after: int | None, *, done: bool, write: Write
    ) -> None:
        """Raises: what `write` raises."""
        index: Index = np.concatenate([np.empty(0, RECORD), *self._indices])
        bucket = bucket_of(index, self._buckets)
        # Buckets are ranges of the order, and so are the parts in which one may be read.
        by_bucket = np.argsort(index["order"], kind="stable")
        cuts = np.searchsorted(bucket[by_bucket], np.arange(self._buckets + 1))
        packer = zstandard.ZstdCompressor(level=LEVEL)
        records: list[bytes] = []
        texts: list[bytes] = []
        table = np.zeros((self._buckets, 5), np.int64)
        for number in range(self._buckets):
            places = by_bucket[cuts[number] : cuts[number + 1]]
            text = b"".join([self._texts[place] for place in places.tolist()])
            records.append(packer.compress(index[places].tobytes()) if len(places) else b"")
            texts.append(packer.compress(text) if len(places) else b"")
            table[number] = len(records[-1]), 0, len(texts[-1]), len(places), len(text)
        table[:, 1] = np.cumsum(table[:, 2]) - table[:, 2]
        head = msgspec.msgpack.encode(Head(counted, part, after, done, table.tobytes()))
        write(path, [len(head).to_bytes(HEAD_BYTES, "little"), head, *records, *texts])
        self._indices, self._texts, self.size = [], [], 0


class Segment:
    """One segment on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            size = int.from_bytes(file.read(HEAD_BYTES), "little")
            self.head = msgspec.msgpack.decode(file.read(size), type=Head)
        self._records_at = HEAD_BYTES + size
        self._table = np.frombuffer(self.head.table, np.int64).reshape(-1, 5)

    @property
    def buckets(self) -> int:
        return len(self._table)

    def records(self, bucket: int) -> Index:
        """What is known of a bucket's documents, in their order, without their text."""
        size, _, _, count, _ = self._table[bucket].tolist()
        if not count:
            return np.empty(0, RECORD)
        with self.path.open("rb") as file:
            file.seek(self._records_at + int(self._table[:bucket, 0].sum()))
            packed = file.read(size)
        unpacked = zstandard.ZstdDecompressor().decompress(packed, max_output_size=count * RECORD.itemsize)
        return np.frombuffer(unpacked, RECORD)

    def texts(self, bucket: int) -> Generator[bytes]:
        """The text of each of its records, one after the other; held is what is not unpacked yet."""
        _, at, size, _, _ = self._table[bucket].tolist()
        with self.path.open("rb") as file:
            file.seek(self._records_at + int(self._table[:, 0].sum()) + at)
            unpacked = zstandard.ZstdDecompressor().stream_reader(file.read(size))
        for length in self.records(bucket)["size"].tolist():
            yield unpacked.read(length)


def bucket_of(index: Index, buckets: int) -> npt.NDArray[np.int64]:
    """Equal ranges of the order, at most `BUCKETS_MAX` of them; n times as many divide each into n."""
    return ((index["order"] >> np.uint64(40)) * np.uint64(buckets) >> np.uint64(24)).astype(np.int64)


def read_bucket(segments: Sequence[Segment], bucket: int) -> Iterator[tuple[Slice, npt.NDArray[np.int64]]]:
    """A bucket of all segments, and the places in it of its documents, shuffled: of copies only the first.

    How many buckets there are was chosen before the corpus was read. Where more text stays of it than
    compressed files looked like, a bucket comes in equal ranges of the order, one after the other, of about
    `limits.bucket_bytes` each: in memory there is one of them, and of what comes out nothing changes. Every
    text is unpacked once, copies and all, because a segment has its documents in the order, too.
    """
    each = [segment.records(bucket) for segment in segments]
    records: Index = np.concatenate([np.empty(0, RECORD), *each])
    if not len(records):
        return
    stays = np.zeros(len(records), np.bool_)
    stays[first_of_copies(records)] = True
    size = int(records["size"][stays].sum(dtype=np.int64))
    buckets = segments[0].buckets
    parts = min(-(-size // limits.bucket_bytes), BUCKETS_MAX // buckets)
    starts = np.cumsum([0, *map(len, each)])
    edges = bucket * parts + np.arange(parts + 1)
    # Where in each segment each part begins, and the last one ends.
    cuts = [np.searchsorted(bucket_of(index, buckets * parts), edges) for index in each]
    readers = [segment.texts(bucket) for segment in segments]
    for part in range(parts):
        places: list[npt.NDArray[np.int64]] = []
        texts: list[bytes] = []
        for start, cut, reader in zip(starts.tolist(), cuts, readers, strict=False):
            first, last = cut[part : part + 2].tolist()
            stay = stays[start + first : start + last]
            places.append(start + first + np.flatnonzero(stay))
            texts += compress(islice(reader, last - first), stay.tolist())
            if part == parts - 1:
                reader.close()
        whole = Slice(records[np.concatenate(places)], texts)
        yield whole, shuffled(whole.records)
