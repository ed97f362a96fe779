"""What is held out: whole documents in the order of their content's digest, so that a document that is added
moves no other between the two sides.

Of a corpus of a few large documents the end of the largest one is held out instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco_node.corpus.documents import RECORD, Index, boundary, digests_of, first_of_copies

HELD_OUT_SHARE = 0.01  # but enough for two full evaluations where the corpus allows
CANDIDATES_BYTES = 16 * limits.held_out_bytes_max  # whole small corpora: there some documents do not fit
WHOLE = "all"  # the set of the whole corpus
TAIL_WINDOW_BYTES = 4096  # behind the place where a document is divided, for the end of a paragraph
END_BYTES = 1  # a document's end counts, too: it becomes a token


class HeldSet(msgspec.Struct, frozen=True, array_like=True):
    """One evaluation set."""

    name: str
    digests: tuple[bytes, ...]  # ascending
    tail: int = 0  # 0, or of the one document only so many of the last bytes


class Split(msgspec.Struct, frozen=True, array_like=True):
    """What the corpus holds without copies, and what of it is held out."""

    documents: int
    size: int  # bytes of text
    copies: int
    sets: tuple[HeldSet, ...]
    buckets: tuple[int, ...]  # bytes of text in each

    @property
    def held(self) -> dict[bytes, int]:
        """Digest to its tail in bytes, 0 for the whole document; the longest one where sets differ."""
        found: dict[bytes, int] = {}
        for held_set in self.sets:
            for digest in held_set.digests:
                whole = not held_set.tail or found.get(digest) == 0
                found[digest] = 0 if whole else max(held_set.tail, found.get(digest, 0))
        return found


class Sides(NamedTuple):
    """Documents of a bucket. A flag says whether a text is tokens already."""

    training: list[tuple[bytes, bool]]
    held_out: list[tuple[bytes, bytes, bool]]  # with the digest


class _Chooser:
    """Sees the documents of one set, group by group, and keeps those that may be held out."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._bytes = 0
        self._lowest: Index = np.empty(0, RECORD)
        self._largest: Index = np.empty(0, RECORD)

    def see(self, index: Index) -> None:
        """`index`: without copies; no document comes twice."""
        if not len(index):
            return
        self._bytes += int(index["size"].sum(dtype=np.int64)) + END_BYTES * len(index)
        both = np.concatenate([self._lowest, index])
        both = both[np.lexsort((both["low"], both["high"]))]
        enough = int(np.searchsorted(np.cumsum(both["size"], dtype=np.int64), CANDIDATES_BYTES)) + 1
        self._lowest = both[:enough].copy()
        largest = np.concatenate([self._largest, index])
        self._largest = largest[np.lexsort((largest["low"], largest["high"], largest["size"]))[-1:]].copy()

    def choose(self, evaluation_bytes: int) -> HeldSet:
        """Raises: OperatorError: there is nothing."""
        if not self._bytes:
            raise OperatorError(
                f"--data {self.name!r} has no text of its own: all of it stands in an earlier --data. "
                "Leave it out, or leave --eval-per-source out."
            )
        most = min(int(self._bytes * limits.evaluation_share_max), limits.held_out_bytes_max)
        wanted = min(max(2 * evaluation_bytes, int(self._bytes * HELD_OUT_SHARE)), most)
        chosen: list[int] = []
        held = 0
        for place, size in enumerate((self._lowest["size"].astype(np.int64) + END_BYTES).tolist()):
            if held >= wanted:
                break
            if held + size <= most:
                chosen.append(place)
                held += size
        if chosen and held >= wanted // 2:
            return HeldSet(self.name, tuple(digests_of(self._lowest[chosen])))
        size = int(self._largest["size"][0])
        return HeldSet(self.name, tuple(digests_of(self._largest)), max(1, min(wanted, size // 2)))


def choose_held_out(buckets: Iterable[Index], *, sources: dict[int, str], evaluation_bytes: int) -> Split:
    """`buckets`: all documents, those with one digest in one bucket. `sources`: names of those that have a
    set of their own. `evaluation_bytes`: of the text that one full evaluation reads.

    Raises: OperatorError: nothing is there.
    """
    whole = _Chooser(WHOLE)
    own = {number: _Chooser(name) for number, name in sources.items()}
    copies = 0
    documents: list[int] = []
    sizes: list[int] = []
    for index in buckets:
        unique = index[first_of_copies(index)]
        copies += len(index) - len(unique)
        documents.append(len(unique))
        sizes.append(int(unique["size"].sum(dtype=np.int64)))
        whole.see(unique)
        for number, chooser in own.items():
            chooser.see(unique[unique["source"] == number])
    if not any(sizes):
        raise OperatorError("the corpus is empty: no document has any text; choose other files with --data.")
    sets = tuple(chooser.choose(evaluation_bytes) for chooser in (whole, *own.values()))
    return Split(sum(documents), sum(sizes), copies, sets, tuple(sizes))


def divide(index: Index, documents: Sequence[bytes], held_out: Mapping[bytes, int], width: int) -> Sides:
    """What is trained on and what is held out of these documents, in their order.

    `held_out`: digest to bytes at the end, 0 for all. `width`: bytes of a ready token.
    """
    sides = Sides([], [])
    ready = index["tokens"].astype(np.bool_).tolist()
    for digest, text, is_tokens in zip(digests_of(index), documents, ready, strict=True):
        tail = held_out.get(digest)
        at = len(text) if tail is None else 0 if not tail else _place(text, tail, width if is_tokens else 0)
        if at:
            sides.training.append((text[:at], is_tokens))
        if at < len(text):
            sides.held_out.append((digest, text[at:], is_tokens))
    return sides


def _place(text: bytes, tail: int, width: int) -> int:
    """Where the last `tail` bytes begin, or a paragraph soon behind that; of ready tokens, a token."""
    at = max(0, len(text) - tail)
    if width:
        return at - at % width
    return min(len(text) - 1, at + boundary(text[at : at + min(TAIL_WINDOW_BYTES, tail // 2)]))
