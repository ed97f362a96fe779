"""The work folder: what a making was asked for, and how far it is. Its files are its journal.

    plan.bin          the command and what it reads; another command in the same folder is refused
    tokenizer.json    copied, or trained here
    read/P-N.seg      segment N of portion P of the input
    split.bin         written when everything is read: what is held out
    tokens/B          bucket B, shuffled and tokenised; B.held: what of it is held out
    tokens.bin        written when everything is tokenised; the segments may go then
    shards.txt        a line for each shard that is in the blobs; the tokens behind them may go
    data.bin          the DataSpec

A file that has its name is whole and durable. One process at a time works here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import msgspec

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.run_spec import BlobRef, DataSpec
from p2pdiloco_node.corpus.held_out import Split
from p2pdiloco_node.corpus.readers import END, Part
from p2pdiloco_node.corpus.sources import HUB, JSONL, PARQUET, TEXT, TOKENS, Input
from p2pdiloco_node.corpus.tokenizer import Vocabulary
from p2pdiloco_node.storage.files import TEMPORARY, Files, guarded, lock_folder, make_folder, replace_file_by

T = TypeVar("T")
SHARD_LINE = re.compile(r"(\d+) ([0-9a-f]{64}) (\d+) (\d+)\n")
PIECES_MIN = 16  # a small corpus is divided, too, so that all processes have something to do
HUB_BYTES = 16 << 30  # assumed of a dataset whose size nobody knows


class Command(msgspec.Struct, frozen=True, array_like=True):
    """What was asked for."""

    data: tuple[str, ...]  # empty: the standard library
    text_key: str
    tokenizer: str  # bytes, bpe:N, or a file's digest
    end_token: str  # of a file, empty: one of those that are known
    eval_per_source: bool
    seed: int


class Plan(msgspec.Struct, frozen=True, array_like=True):
    """All that shards depend on; what else there is to know follows from it."""

    command: Command
    inputs: tuple[Input, ...]
    vocabulary: Vocabulary | None  # None: the tokenizer is trained when everything is read

    @property
    def vocab_size(self) -> int:
        """Tokens of the tokenizer; of one that is trained here at most."""
        return self.vocabulary.size if self.vocabulary else int(self.command.tokenizer.partition(":")[2])

    @property
    def text_bytes(self) -> int:
        """Bytes of text to be read, as far as can be told before."""
        return sum(i.text_bytes or (HUB_BYTES if i.kind == HUB else 0) for i in self.inputs)

    @property
    def buckets(self) -> int:
        piece = min(limits.bucket_bytes, max(1 << 20, self.text_bytes // PIECES_MIN))
        return max(1, -(-self.text_bytes // piece))

    def portions(self) -> list[tuple[Part, ...]]:
        """What one process reads at a time, about `limits.portion_bytes`; a compressed file is one."""
        most = min(limits.portion_bytes, max(1 << 20, self.text_bytes // PIECES_MIN))
        most -= most % limits.document_bytes_max
        portions: list[tuple[Part, ...]] = []
        group: list[Part] = []
        size = 0
        for number, entry in enumerate(self.inputs):
            for part, part_bytes in _parts(number, entry, most):
                if group and size + part_bytes > most:
                    portions.append(tuple(group))
                    group, size = [], 0
                group.append(part)
                size += part_bytes
        if group:
            portions.append(tuple(group))
        return portions

    def portion_bytes(self, portion: Sequence[Part]) -> int:
        """Bytes of text in it, as far as can be told."""
        return sum(_part_bytes(self.inputs[part.number], part) for part in portion)


class Tokenised(msgspec.Struct, frozen=True, array_like=True):
    """Tokens to train on in each bucket."""

    vocabulary: Vocabulary
    counts: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(self.counts)


class Work:
    """Paths and small files of one making."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = Files()
        self.tokenizer = root / "tokenizer.json"

    @property
    def segments(self) -> Path:
        return self.root / "read"

    @property
    def tokens(self) -> Path:
        return self.root / "tokens"

    def segment(self, portion: int, number: int) -> Path:
        return self.segments / f"{portion:06}-{number:06}.seg"

    def segment_paths(self) -> list[Path]:
        """Of all portions, in their order."""
        return sorted(self.segments.glob("*.seg"))

    def tokens_of(self, bucket: int) -> Path:
        return self.tokens / f"{bucket:06}"

    def begun_bytes(self, bucket: int) -> int:
        """Of tokens of a bucket that is on its way."""
        path = self.tokens_of(bucket)
        try:
            return path.with_name(path.name + TEMPORARY).stat().st_size
        except OSError:
            return 0

    def held_of(self, bucket: int) -> Path:
        return self.tokens / f"{bucket:06}.held"

    def write(self, path: Path, parts: Iterable[bytes]) -> None:
        """Whole or not at all, durably; parts may be made meanwhile. Raises: OperatorError."""
        replace_file_by(self.files, path, parts)

    def plan(self) -> Plan | None:
        return self._read("plan.bin", Plan)

    def split(self) -> Split | None:
        return self._read("split.bin", Split)

    def tokenised(self) -> Tokenised | None:
        return self._read("tokens.bin", Tokenised)

    def data(self) -> DataSpec | None:
        return self._read("data.bin", DataSpec)

    def keep(self, what: Plan | Split | Tokenised | DataSpec) -> None:
        """Raises: OperatorError."""
        names: dict[type, str] = {
            Plan: "plan.bin", Split: "split.bin", Tokenised: "tokens.bin", DataSpec: "data.bin",
        }  # fmt: skip
        self.write(self.root / names[type(what)], [msgspec.msgpack.encode(what)])

    def shards(self, blobs: Path) -> dict[int, BlobRef]:
        """Shards that are made and still there, by number."""
        path = self.root / "shards.txt"
        text = path.read_text() if path.exists() else ""
        found: dict[int, BlobRef] = {}
        for number, digest, size, tokens in SHARD_LINE.findall(text):
            blob = blobs / digest
            if blob.is_file() and blob.stat().st_size == int(size):
                found[int(number)] = BlobRef(bytes.fromhex(digest), int(size), int(tokens))
        return found

    def shard_is_made(self, number: int, ref: BlobRef) -> None:
        """One line more. Raises: OperatorError."""
        path = self.root / "shards.txt"
        line = f"{number} {ref.digest.hex()} {ref.size} {ref.tokens}\n".encode()

        def append() -> None:
            fd = self.files.open_append(path)
            try:
                self.files.write(fd, line)
                self.files.fsync(fd)
            finally:
                os.close(fd)

        guarded(append, path)

    def _read(self, name: str, kind: type[T]) -> T | None:
        path = self.root / name
        if not path.exists():
            return None
        try:
            return msgspec.msgpack.decode(guarded(path.read_bytes, path), type=kind)
        except msgspec.MsgspecError:
            raise OperatorError(
                f"{path} is of another version of this program, or damaged: remove {self.root} and "
                "start again."
            ) from None


class Taken:
    """While it is entered, the work folder belongs to this process."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._fd = -1

    def __enter__(self) -> Self:
        """Raises: OperatorError: another process has it."""
        self._fd = _locked(self._work)
        for folder in (self._work.segments, self._work.tokens):
            make_folder(self._work.files, folder)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)


@contextmanager
def claimed(work: Work) -> Iterator[None]:
    """While it is entered, nobody else begins to make a run there: what comes before the work takes minutes.

    Folders that were made for that are gone at the end where nothing is in them.

    Raises: OperatorError: another process is at work there.
    """
    new = [folder for folder in (work.root, *work.root.parents) if not folder.exists()]
    fd = _locked(work)
    try:
        yield
    finally:
        with suppress(OSError):
            for folder in new:
                folder.rmdir()
        os.close(fd)


def _locked(work: Work) -> int:
    """Raises: OperatorError: another process has it."""
    make_folder(work.files, work.root)
    fd = guarded(lambda: lock_folder(work.root), work.root)
    if fd is None:
        raise OperatorError(
            f"Another p2pdiloco makes a run in {work.root.parent}: wait for it, or choose another folder "
            "with --out."
        )
    return fd


def _parts(number: int, entry: Input, most: int) -> list[tuple[Part, int]]:
    """Parts of an input, each with its bytes of text."""
    if entry.kind == PARQUET:
        return _row_groups(number, entry, most)
    if entry.packed or entry.kind == HUB:
        return [(Part(number, 0, END), entry.text_bytes)]
    assert entry.kind in {TEXT, JSONL, TOKENS}
    # Ready tokens are at least a byte each, so that a file of them has at most `size`.
    places = range(0, entry.size, most)
    return [(Part(number, at, at + most), min(most, entry.size - at)) for at in places]


def _row_groups(number: int, entry: Input, most: int) -> list[tuple[Part, int]]:
    parts: list[tuple[Part, int]] = []
    first = size = 0
    for group, group_bytes in enumerate(entry.groups):
        if group > first and size + group_bytes > most:
            parts.append((Part(number, first, group), size))
            first, size = group, 0
        size += group_bytes
    if first < len(entry.groups):
        parts.append((Part(number, first, len(entry.groups)), size))
    return parts


def _part_bytes(entry: Input, part: Part) -> int:
    if entry.kind == PARQUET:
        return sum(entry.groups[part.first : part.stop])
    return max(0, min(part.stop, entry.text_bytes) - part.first)
