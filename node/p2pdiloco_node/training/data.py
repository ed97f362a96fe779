"""The order in which a node reads the run's data (algorithm.md 8): keyed, resumable, without leases.

A sequence is `seq_len` + 1 consecutive tokens of one shard: every input with its target. Neighbours share
one token, so each token but a shard's first is predicted once per epoch; a tail shorter than a sequence is
left out. Per epoch the shards are permuted, then cut into windows of a few shards; inside a window all
sequences are permuted. Both permutations depend on (RunId, PeerId, epoch) alone, so a cursor, counted in
sequences since the node's first, says exactly what comes next; two nodes overlap like independent samples.
A shard that is not on this disk is passed over until it is there again (scenario S12): the cursor moves past
its sequences as past those that were trained on, so the ranges named in headers hold every sequence that was.
Permutations sort raw Philox words, which numpy never changes, instead of its shuffles, which it may.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.ids import PeerId, RunId, tagged_digest

Tokens = npt.NDArray[np.int64]
Indices = npt.NDArray[np.int64]


class Place(NamedTuple):
    """Where a sequence lies: tokens [offset, offset + seq_len] of the shard."""

    shard: int
    offset: int


class _Window(NamedTuple):
    """A run of permuted shards and its permuted sequences, kept until the cursor leaves it."""

    first: int  # position in the epoch of its first sequence
    size: int  # sequences
    shard: Indices  # (size,)
    offset: Indices  # (size,)


class DataOrder:
    """The endless order of one node."""

    def __init__(
        self, run: RunId, peer: PeerId, shard_tokens: Sequence[int], *, seq_len: int, window_shards: int
    ) -> None:
        """`shard_tokens`: tokens of each shard, in the RunSpec's order.

        Raises: OperatorError: no shard holds a whole sequence.
        """
        self._run, self._peer = run, peer
        self._seq_len = seq_len
        self._window_shards = window_shards
        self._blocks = np.maximum(np.asarray(shard_tokens, dtype=np.int64) - 1, 0) // seq_len
        self.sequences_per_epoch = int(self._blocks.sum())
        if self.sequences_per_epoch == 0:
            raise OperatorError(
                f"no data shard is longer than a sequence of {seq_len} tokens; make the run from more text."
            )
        self._epoch = -1
        self._shards: Indices = np.empty(0, np.int64)
        self._starts: Indices = np.empty(0, np.int64)  # of each window in the epoch, and the epoch's end
        self._window: _Window | None = None

    def places(self, cursor: int, count: int) -> list[Place]:
        """The `count` sequences from `cursor` on; past the end of the data the next epoch begins."""
        found: list[Place] = []
        while count > 0:
            epoch, position = divmod(cursor, self.sequences_per_epoch)
            window = self._window_at(epoch, position)
            first = position - window.first
            part = slice(first, min(first + count, window.size))
            found += map(Place, window.shard[part].tolist(), window.offset[part].tolist())
            taken = part.stop - part.start
            cursor, count = cursor + taken, count - taken
        return found

    def places_but(self, cursor: int, count: int, missing: Collection[int]) -> tuple[list[Place], int]:
        """As `places`, without those in `missing` shards; and the cursor behind the last of them.

        Raises: OperatorError: no sequence is left.
        """
        if not missing:
            return self.places(cursor, count), cursor + count
        absent = np.asarray(sorted(missing), np.int64)
        if not np.delete(self._blocks, absent).any():
            raise OperatorError(
                "no data shard can be read; start again, and what is missing is made anew.", 6
            )
        found: list[Place] = []
        while True:
            epoch, position = divmod(cursor, self.sequences_per_epoch)
            window = self._window_at(epoch, position)
            first = position - window.first
            here = first + np.flatnonzero(~np.isin(window.shard[first:], absent))[: count - len(found)]
            found += map(Place, window.shard[here].tolist(), window.offset[here].tolist())
            if len(found) == count:
                return found, cursor + int(here[-1]) - first + 1
            cursor += window.size - first

    def _window_at(self, epoch: int, position: int) -> _Window:
        if epoch != self._epoch:
            shards = self._permutation("shards", epoch, 0, len(self._blocks))
            cumulated = np.concatenate(([0], np.cumsum(self._blocks[shards])))
            cuts = np.append(np.arange(0, len(shards), self._window_shards), len(shards))
            self._shards, self._starts = shards, cumulated[cuts]
            self._epoch, self._window = epoch, None
        window = self._window
        if window is None or not window.first <= position < window.first + window.size:
            # The last window that begins at or before the position: empty ones begin where the next does.
            number = int(np.searchsorted(self._starts, position, side="right")) - 1
            window = self._window = self._make_window(epoch, number)
        return window

    def _make_window(self, epoch: int, number: int) -> _Window:
        members = self._shards[number * self._window_shards : (number + 1) * self._window_shards]
        counts = self._blocks[members]
        total = int(counts.sum())
        shard = np.repeat(members, counts)
        within = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
        order = self._permutation("window", epoch, number, total)
        return _Window(int(self._starts[number]), total, shard[order], within[order] * self._seq_len)

    def _permutation(self, what: str, epoch: int, number: int, n: int) -> Indices:
        place = epoch.to_bytes(8, "big") + number.to_bytes(8, "big")
        key = tagged_digest(f"data/{what}", self._run, self._peer, place)
        words = np.random.Philox(key=int.from_bytes(key[:16], "big")).random_raw(n)
        return np.argsort(words, kind="stable").astype(np.int64)


class ShardMissing(OperatorError):
    """One shard cannot be read; the others can."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(why, 6)
        self.number = number


class ShardReader:
    """Tokens of shards on disk, mapped, one byte each."""

    def __init__(self, paths: Sequence[Path], shard_tokens: Sequence[int], *, seq_len: int) -> None:
        self._paths = paths
        self._tokens = shard_tokens
        self._seq_len = seq_len
        self._open: dict[int, npt.NDArray[np.uint8]] = {}

    def read(self, places: Sequence[Place]) -> Tokens:
        """(len(places), seq_len + 1) tokens.

        Raises: ShardMissing: a shard is missing or has another size.
        """
        batch = np.empty((len(places), self._seq_len + 1), np.int64)
        for row, place in enumerate(places):
            batch[row] = self._shard(place.shard)[place.offset : place.offset + self._seq_len + 1]
        return batch

    def is_here(self, number: int) -> bool:
        try:
            self._shard(number)
        except ShardMissing:
            return False
        return True

    def absent(self) -> set[int]:
        """Shards without a file of the right size; one look at each, nothing is opened."""
        return {
            number
            for number, path in enumerate(self._paths)
            if number not in self._open and not _has_size(path, self._tokens[number])
        }

    def _shard(self, number: int) -> npt.NDArray[np.uint8]:
        mapped = self._open.get(number)
        if mapped is None:
            path = self._paths[number]
            try:
                mapped = np.memmap(path, np.uint8, mode="r")
            except (OSError, ValueError) as error:
                raise ShardMissing(
                    number, f"data shard {number} cannot be read at {path}: {error}."
                ) from None
            if len(mapped) != self._tokens[number]:
                raise ShardMissing(
                    number,
                    f"data shard {number} at {path} has {len(mapped)} bytes instead of "
                    f"{self._tokens[number]}; start again, and it is made anew.",
                )
            self._open[number] = mapped
        return mapped


class DataFeed:
    """Batches along the node's order; a shard that cannot be read holds up nothing."""

    def __init__(
        self,
        order: DataOrder,
        reader: ShardReader,
        clock: Callable[[], float],
        on_missing: Callable[[Sequence[int], str], None],
    ) -> None:
        """`on_missing` is told whenever it changes which shards are passed over, and one of the reasons."""
        self._order = order
        self._reader = reader
        self._clock = clock
        self._on_missing = on_missing
        self._missing: set[int] = set()
        self._look_again_at = 0.0

    def next_batch(self, cursor: int, count: int) -> tuple[Tokens, int]:
        """(count, seq_len + 1) tokens of the next sequences that are here, and the cursor behind them.

        Raises: OperatorError: no shard can be read.
        """
        if self._missing and self._clock() >= self._look_again_at:
            self._pass_over({number for number in self._missing if not self._reader.is_here(number)}, "")
        while True:
            places, behind = self._order.places_but(cursor, count, self._missing)
            try:
                return self._reader.read(places), behind
            except ShardMissing as error:
                self._pass_over(self._missing | self._reader.absent() | {error.number}, str(error))

    def _pass_over(self, missing: set[int], why: str) -> None:
        self._look_again_at = self._clock() + limits.shard_retry_s
        if missing != self._missing:
            self._missing = missing
            self._on_missing(sorted(missing), why)


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False


def evaluation_places(tokens: int, *, seq_len: int, tokens_max: int) -> list[Place]:
    """The held-out sequences that every evaluation uses: the whole shard, or evenly spread over it.

    At least one, if the shard holds one.
    """
    blocks = max(0, tokens - 1) // seq_len
    count = min(blocks, max(1, tokens_max // seq_len))
    return [Place(0, (i * blocks // count) * seq_len) for i in range(count)]
