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

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.exit_codes import RUN
from p2pdiloco.ids import PeerId, RunId, tagged_digest
from p2pdiloco.rules.evaluation import sequences_measured
from p2pdiloco.run_spec import TOKEN_WIDTHS

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
        self._window: tuple[int, int, _Window] | None = None  # epoch, number

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

        Raises: NothingHere: no sequence is left.
        """
        if not missing:
            return self.places(cursor, count), cursor + count
        absent = np.zeros(len(self._blocks), np.bool_)
        absent[np.fromiter(missing, np.int64, len(missing))] = True
        if not self._blocks[~absent].any():
            raise NothingHere("no data shard is here")
        found: list[Place] = []
        while True:
            epoch, position = divmod(cursor, self.sequences_per_epoch)
            number = self._number_at(epoch, position)
            if absent[self._members(number)].all():  # without making it: there may be thousands
                cursor += int(self._starts[number + 1]) - position
                continue
            window = self._window_at(epoch, position)
            first = position - window.first
            here = first + np.flatnonzero(~absent[window.shard[first:]])[: count - len(found)]
            found += map(Place, window.shard[here].tolist(), window.offset[here].tolist())
            if len(found) == count:
                return found, cursor + int(here[-1]) - first + 1
            cursor += window.size - first

    def window(self, cursor: int) -> tuple[int, ...]:
        """The shards in use at `cursor`, those that hold a sequence, in their order."""
        return next(self.windows(cursor))

    def windows(self, cursor: int) -> Iterator[tuple[int, ...]]:
        """The windows from `cursor` on as they will be read, until each shard was named once.

        A window is the shards of it that hold a sequence. Those of the next epoch follow without those that
        the windows before them name.
        """
        epoch, position = divmod(cursor, self.sequences_per_epoch)
        number = self._number_at(epoch, position)
        named = self._blocks == 0
        while not named.all():
            self._turn_to(epoch)
            members = self._members(number)
            fresh = members[~named[members]]
            named[members] = True
            if len(fresh):
                yield tuple(fresh.tolist())
            number += 1
            if number * self._window_shards >= len(self._shards):
                epoch, number = epoch + 1, 0

    def bounds(self, cursor: int) -> tuple[int, int]:
        """The first cursor of the window at `cursor`, and that of the next one."""
        epoch, position = divmod(cursor, self.sequences_per_epoch)
        number = self._number_at(epoch, position)
        start = epoch * self.sequences_per_epoch
        return start + int(self._starts[number]), start + int(self._starts[number + 1])

    def last_used(self, cursor: int) -> Indices:
        """(shards,) When each was used last before the window at `cursor`; larger is later, -1 never."""
        epoch, position = divmod(cursor, self.sequences_per_epoch)
        number = self._number_at(epoch, position)
        n = len(self._blocks)
        used = np.full(n, -1, np.int64)
        if epoch:
            used[self._permutation("shards", epoch - 1, 0, n)] = np.arange(n)
        before = self._shards[: number * self._window_shards]
        used[before] = n + np.arange(len(before))
        return used

    def _turn_to(self, epoch: int) -> None:
        if epoch != self._epoch:
            shards = self._permutation("shards", epoch, 0, len(self._blocks))
            cumulated = np.concatenate(([0], np.cumsum(self._blocks[shards])))
            cuts = np.append(np.arange(0, len(shards), self._window_shards), len(shards))
            self._shards, self._starts, self._epoch = shards, cumulated[cuts], epoch

    def _number_at(self, epoch: int, position: int) -> int:
        """The last window that begins at or before the position: empty ones begin where the next does."""
        self._turn_to(epoch)
        return int(np.searchsorted(self._starts, position, side="right")) - 1

    def _members(self, number: int) -> Indices:
        return self._shards[number * self._window_shards : (number + 1) * self._window_shards]

    def _window_at(self, epoch: int, position: int) -> _Window:
        number = self._number_at(epoch, position)
        if self._window is None or self._window[:2] != (epoch, number):
            self._window = (epoch, number, self._make_window(epoch, number))
        return self._window[2]

    def _make_window(self, epoch: int, number: int) -> _Window:
        members = self._members(number)
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


class NothingHere(OperatorError):
    """No data shard can be read; training waits until one is there."""


class ShardMissing(OperatorError):
    """One shard cannot be read; the others can."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(why, 6)
        self.number = number


def unusable(why: str) -> OperatorError:
    """The run's own data are wrong; everybody who has them has them so."""
    return OperatorError(
        f"The run's data is unusable: {why}. This machine and its peers are fine; tell the owner of the run.",
        exit_code=RUN,
    )


def token_type(token_bytes: int) -> np.dtype[np.unsignedinteger]:
    """Tokens as they lie on disk. Raises: OperatorError: no such width, which a RunSpec may say."""
    if token_bytes not in TOKEN_WIDTHS:
        raise unusable(f"its tokens have {token_bytes} bytes each instead of 1, 2 or 4")
    return np.dtype(f"<u{token_bytes}")


class ShardReader:
    """Tokens of shards on disk, mapped: little-endian, `token_bytes` each."""

    def __init__(
        self,
        paths: Sequence[Path],
        shard_tokens: Sequence[int],
        *,
        seq_len: int,
        token_bytes: int = 1,
        vocab_size: int = 256,
    ) -> None:
        self._paths = paths
        self._tokens = shard_tokens
        self._seq_len = seq_len
        self._type = token_type(token_bytes)
        self._vocab_size = vocab_size
        self._open: dict[int, npt.NDArray[np.unsignedinteger]] = {}
        # There may be 100,000, and they are looked for whenever one comes or goes.
        self._numbers: dict[str, list[int]] = {}
        for number, path in enumerate(paths):
            self._numbers.setdefault(str(path), []).append(number)
        self._folders = {os.path.dirname(path) for path in self._numbers}  # noqa: PTH120  # ten times as fast
        self._all = frozenset(range(len(paths)))

    def read(self, places: Sequence[Place]) -> Tokens:
        """(len(places), seq_len + 1) tokens.

        Raises: ShardMissing: a shard is missing or has another size. OperatorError: a token that no model of
            this run knows, which is its owner's fault (the frame's digest was right).
        """
        batch = np.empty((len(places), self._seq_len + 1), np.int64)
        for row, place in enumerate(places):
            batch[row] = self._shard(place.shard)[place.offset : place.offset + self._seq_len + 1]
        if batch.size and int(batch.max()) >= self._vocab_size:
            worst = int(np.argmax(batch.max(axis=1)))
            raise unusable(
                f"data shard {places[worst].shard} holds token {batch.max()}, and its tokenizer has "
                f"{self._vocab_size}"
            )
        return batch

    def absent(self) -> set[int]:
        """Shards without a file of the right size; one look at each folder, nothing is opened."""
        here = set(self._open)
        for folder in self._folders:
            try:
                with os.scandir(folder) as entries:
                    for entry in entries:
                        numbers = self._numbers.get(entry.path, ())
                        if numbers and entry.is_file():
                            size = entry.stat().st_size
                            here.update(n for n in numbers if size == self._file_bytes(n))
            except OSError:
                continue  # a folder that is not there holds nothing
        return set(self._all - here)

    def forget(self, shards: Collection[int]) -> None:
        """Their files may be gone or others: they are opened again when they are read again."""
        for number in shards:
            self._open.pop(number, None)

    def keep_only(self, shards: Collection[int]) -> None:
        """Let go of all others: a removed file takes room for as long as it is open."""
        self.forget([number for number in self._open if number not in shards])

    def _file_bytes(self, number: int) -> int:
        return self._tokens[number] * self._type.itemsize

    def _shard(self, number: int) -> npt.NDArray[np.unsignedinteger]:
        mapped = self._open.get(number)
        if mapped is None:
            path = self._paths[number]
            try:
                raw = np.memmap(path, np.uint8, mode="r")
            except (OSError, ValueError) as error:
                raise ShardMissing(
                    number, f"data shard {number} cannot be read at {path}: {error}."
                ) from None
            if len(raw) != self._file_bytes(number):
                raise ShardMissing(
                    number,
                    f"data shard {number} at {path} has {len(raw)} bytes instead of "
                    f"{self._file_bytes(number)}; it is made anew.",
                )
            mapped = self._open[number] = raw.view(self._type)
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
        """`on_missing` is told whenever it changes which shards of the window in use are passed over, and one
        of the reasons."""
        self._order = order
        self._reader = reader
        self._clock = clock
        self._on_missing = on_missing
        self._missing: set[int] = set()
        self._told: list[int] = []
        self._in_use: frozenset[int] = frozenset()
        self._look_again_at = 0.0

    def next_batch(self, cursor: int, count: int) -> tuple[Tokens, int]:
        """(count, seq_len + 1) tokens of the next sequences that are here, and the cursor behind them.

        Raises: NothingHere: no shard can be read.
        """
        if self._missing and self._clock() >= self._look_again_at:
            self._pass_over(self._reader.absent())
        why = ""
        while True:
            try:
                places, behind = self._order.places_but(cursor, count, self._missing)
                batch = self._reader.read(places)
            except ShardMissing as error:
                why = str(error)
                self._pass_over(self._missing | self._reader.absent() | {error.number})
            except NothingHere:
                self._tell(cursor, why)
                raise
            else:
                self._tell(behind, why)
                return batch, behind

    def look_again(self, gone: Collection[int]) -> None:
        """Files of shards came or went; those of `gone` are not to be read any more."""
        self._reader.forget(gone)
        self._pass_over(self._reader.absent())

    def _pass_over(self, missing: set[int]) -> None:
        self._look_again_at = self._clock() + limits.shard_retry_s
        self._missing = missing

    def _tell(self, cursor: int, why: str) -> None:
        in_use = frozenset(self._order.window(cursor))
        if in_use != self._in_use:
            self._in_use = in_use
            self._reader.keep_only(in_use)
        told = sorted(self._missing & in_use)
        if told != self._told:
            self._told = told
            self._on_missing(told, why)


def evaluation_places(tokens: int, *, seq_len: int, tokens_max: int) -> list[Place]:
    """The held-out sequences that every evaluation uses: the whole shard, or evenly spread over it.

    At least one, if the shard holds one.
    """
    blocks = max(0, tokens - 1) // seq_len
    count = sequences_measured(tokens, seq_len=seq_len, tokens_max=tokens_max)
    return [Place(0, (i * blocks // count) * seq_len) for i in range(count)]
