"""Text files to byte tokens: training shards and one held-out shard, the same for the same files.

Files are read in the order of their names, duplicates once; a zero byte ends each. Held out are whole files
in the order of their content's hash, so that adding a file moves no other between the two sides.
"""

from __future__ import annotations

import glob
import hashlib
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.ids import Digest, digest_of
from p2pdiloco.run_spec import BYTES, BlobRef, DataSpec, EvaluationSet
from p2pdiloco.wire.frames import make_frame

READ_BYTES = 1 << 20
END_OF_FILE = b"\0"
# Held out: a hundredth of the corpus, but enough for a full evaluation where the corpus allows.
HELD_OUT_SHARE = 0.01
HELD_OUT_BYTES_MIN = 2 * limits.evaluation_tokens_max
# The standard library's tests are as large as the rest and full of generated tables.
NOT_PROSE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}

Progress = Callable[[str, float], None]
"""What is being done, and the share of it that is done."""


class Source(NamedTuple):
    """A file of the corpus, or a part of one: bytes [first, stop)."""

    path: Path
    digest: Digest  # of the whole file
    first: int
    stop: int

    @property
    def size(self) -> int:
        """Bytes that it adds to a shard, the end mark included."""
        return self.stop - self.first + len(END_OF_FILE)


class Corpus(NamedTuple):
    training: tuple[Source, ...]
    held_out: tuple[Source, ...]

    @property
    def training_tokens(self) -> int:
        return sum(s.size for s in self.training)

    @property
    def held_out_tokens(self) -> int:
        return sum(s.size for s in self.held_out)


def find_files(globs: Sequence[str] | None) -> list[Path]:
    """Files matching `globs` (`**` goes into folders), sorted; None: this interpreter's standard library.

    Raises: OperatorError: nothing matches, or too many do.
    """
    if globs is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        return sorted(p for p in root.rglob("*.py") if not NOT_PROSE & set(p.relative_to(root).parts))
    if not globs:
        raise OperatorError("the list of data files is empty; name files, such as --data 'texts/**/*.txt'.")
    found: set[Path] = set()
    for pattern in globs:
        place = Path(pattern).expanduser()
        if place.is_dir():
            raise OperatorError(f"{place} is a folder; say which files in it, such as '{place}/**/*.txt'.")
        matches = [Path(p) for p in glob.iglob(str(place), recursive=True)]  # noqa: PTH207  # absolute patterns
        files = [p for p in matches if p.is_file()]
        if not files:
            raise OperatorError(f"no file matches {pattern!r}; check the path, and quote it for the shell.")
        found.update(files)
        if len(found) > limits.corpus_files_max:
            raise OperatorError(f"more than {limits.corpus_files_max} files match; join small ones first.")
    return sorted(found)


def read_corpus(files: Sequence[Path], progress: Progress) -> Corpus:
    """Measure and hash every file, and choose what is held out.

    Raises: OperatorError: a file cannot be read, all are empty, or the corpus is too large.
    """
    sources: list[Source] = []
    seen: set[Digest] = set()
    total = 0
    for place, path in enumerate(files):
        progress("reading the corpus", place / len(files))
        digest, size = hashlib.sha256(), 0
        for piece in _pieces(Source(path, Digest(b""), 0, 1 << 62)):
            digest.update(piece)
            size += len(piece)
        name = Digest(digest.digest())
        if size == 0 or name in seen:
            continue
        seen.add(name)
        total += size
        if total > limits.corpus_bytes_max:
            raise OperatorError(
                f"the corpus has more than {limits.corpus_bytes_max >> 20} MiB; name fewer files with --data."
            )
        sources.append(Source(path, name, 0, size))
    if not sources:
        raise OperatorError(
            f"the corpus is empty: {len(files)} files without a byte; choose others with --data."
        )
    return _hold_out(sources)


def _hold_out(sources: list[Source]) -> Corpus:
    total = sum(s.size for s in sources)
    most = min(int(total * limits.evaluation_share_max), limits.chunk_bytes)
    wanted = min(max(HELD_OUT_BYTES_MIN, int(total * HELD_OUT_SHARE)), most)
    chosen: set[Digest] = set()
    held = 0
    for source in sorted(sources, key=lambda s: s.digest):
        if held < wanted and held + source.size <= most:
            chosen.add(source.digest)
            held += source.size
    if held >= wanted // 2:
        return Corpus(
            tuple(s for s in sources if s.digest not in chosen),
            tuple(s for s in sources if s.digest in chosen),
        )
    # A few large files: the tail of the largest one instead.
    largest = max(sources, key=lambda s: (s.size, s.digest))
    cut = largest.stop - min(wanted, largest.size // 2)
    training = tuple(s._replace(stop=cut) if s is largest else s for s in sources)
    return Corpus(training, (largest._replace(first=cut),))


def write_shards(corpus: Corpus, put: Callable[[Digest, bytes], None], progress: Progress) -> DataSpec:
    """Cut the training side into shards of equal size, at most 4 MiB, and the held-out side into one.

    Each is one zstd frame: a BlobRef's digest and size are the frame's, its tokens those inside.

    Raises: OperatorError: a file changed meanwhile; whatever `put` raises.
    """
    written: list[BlobRef] = []
    shards = -(-corpus.training_tokens // limits.chunk_bytes)
    for shard in training_shards(corpus):
        progress("writing shards", len(written) / shards)
        written.append(_shard(shard, put))
    held_out = _shard(held_out_shard(corpus), put)
    return DataSpec(BYTES, 1, tuple(written), (EvaluationSet("all", held_out, held_out.tokens),))


def training_shards(corpus: Corpus) -> Iterator[bytes]:
    """The training side, cut into shards of equal size, at most 4 MiB. Raises: OperatorError."""
    total = corpus.training_tokens
    shards = -(-total // limits.chunk_bytes)
    return _cut(_bytes_of(corpus.training), -(-total // shards))


def held_out_shard(corpus: Corpus) -> bytes:
    """The held-out side, at most 4 MiB. Raises: OperatorError."""
    (held_out,) = _cut(_bytes_of(corpus.held_out), limits.chunk_bytes)
    return held_out


def _shard(data: bytes, put: Callable[[Digest, bytes], None]) -> BlobRef:
    frame = make_frame(data)  # text shrinks three to four times
    digest = digest_of(frame)
    put(digest, frame)
    return BlobRef(digest, len(frame), len(data))


def _cut(pieces: Iterable[bytes], size: int) -> Iterator[bytes]:
    rest = bytearray()
    for piece in pieces:
        rest += piece
        while len(rest) >= size:
            yield bytes(rest[:size])
            del rest[:size]
    if rest:
        yield bytes(rest)


def _bytes_of(sources: Iterable[Source]) -> Iterator[bytes]:
    for source in sources:
        got = 0
        for piece in _pieces(source):
            got += len(piece)
            yield piece
        if got != source.stop - source.first:
            raise OperatorError(f"{source.path} changed while it was read; start again.")
        yield END_OF_FILE


def _pieces(source: Source) -> Iterator[bytes]:
    try:
        with source.path.open("rb") as file:
            file.seek(source.first)
            left = source.stop - source.first
            while left and (piece := file.read(min(READ_BYTES, left))):
                left -= len(piece)
                yield piece
    except OSError as error:
        raise OperatorError(
            f"{source.path} cannot be read ({error.strerror}); mend that, or leave it out with --data."
        ) from None
