"""The lab's text, in memory, once per process: the demo's corpus, or kinds of text where data is not i.i.d.

Split, shards and order are the product's (`corpus/in_memory.py`, `training/data.py`); only the disk is left
out. By kind, node i reads kind i mod kinds and nothing else:

- files named by the experiment: each glob is one kind, in the order given; a file belongs to the first;
- else parts of this Python, from unlike to alike: `library` (its modules), `tables` (codec tables and
  decimal test vectors), `prose` (the language reference and help texts), `headers` (C), `tests` (its own
  test suite). A kind that this Python came without, or with less than 256 KiB of, is left out.

Held out is then an equal share of each kind that is read. `mixed` is the control arm: the same kinds and the
same held-out text, but every batch of every node goes through all kinds in turn.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.ids import PeerId, RunId, tagged_digest
from p2pdiloco.sim.lab.experiment import Experiment
from p2pdiloco_node.corpus.in_memory import byte_corpus
from p2pdiloco_node.corpus.sources import find_files
from p2pdiloco_node.training.data import DataOrder, Tokens, evaluation_places

Bytes = npt.NDArray[np.uint8]

KIND_BYTES_MIN = 256 << 10
KINDS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("tables", "stdlib", ("encodings/*.py", "test/**/*.decTest")),
    ("prose", "stdlib", ("pydoc_data/*.py", "idlelib/*.txt", "idlelib/*.html", "LICENSE.txt")),
    ("headers", "include", ("**/*.h",)),
    ("tests", "stdlib", ("test/**/*.py",)),
)


class Kind(NamedTuple):
    """One kind of text, split; the i.i.d. corpus is one kind."""

    name: str
    training: Bytes  # all shards, one after the other
    shards: tuple[int, ...]  # tokens of each
    held_out: Bytes


class Text(NamedTuple):
    kinds: tuple[Kind, ...]
    digest: str  # hex, of every byte that is trained on or held out

    def feed(self, experiment: Experiment, seed: int, node: int) -> Feed:
        """Where node number `node` reads."""
        data = experiment.data
        chosen = self.kinds
        if data.by_kind and not data.mixed:
            chosen = (self.kinds[node % len(self.kinds)],)
        return Feed(chosen, seed=seed, node=node, seq_len=experiment.model.seq_len)

    def held_out(self, *, seq_len: int, tokens: int) -> Tokens:
        """(sequences, seq_len + 1): at most `tokens` targets, evenly spread, an equal share of each kind."""
        parts = []
        for kind in self.kinds:
            places = evaluation_places(
                len(kind.held_out), seq_len=seq_len, tokens_max=tokens // len(self.kinds)
            )
            parts.append(_gather(kind.held_out, [place.offset for place in places], seq_len))
        # Equal shares also where one kind has less than its share held out.
        fewest = min(map(len, parts))
        if not fewest:
            raise OperatorError(f"held-out text is shorter than a sequence of {seq_len} tokens; add text.")
        return np.concatenate([part[:fewest] for part in parts])


class Feed:
    """One node's endless batches."""

    def __init__(self, kinds: Sequence[Kind], *, seed: int, node: int, seq_len: int) -> None:
        """Keyed by (seed, node) as the product's order is by (run, peer).

        Raises: OperatorError: a kind holds no whole sequence.
        """
        run = RunId(tagged_digest("lab/run", seed.to_bytes(8, "big")))
        peer = PeerId(tagged_digest("lab/peer", node.to_bytes(8, "big")))
        self._seq_len = seq_len
        self._kinds = kinds
        self._orders = [
            DataOrder(run, peer, k.shards, seq_len=seq_len, window_shards=limits.data_window_shards)
            for k in kinds
        ]
        self._starts = [np.concatenate(([0], np.cumsum(k.shards))) for k in kinds]
        self._cursors = [0] * len(kinds)
        self._turn = node  # so that not every node begins with the same kind

    def next_batch(self, count: int) -> Tokens:
        """(count, seq_len + 1); of several kinds one sequence each in turn."""
        counts = [0] * len(self._kinds)
        for _ in range(count):
            counts[self._turn % len(counts)] += 1
            self._turn += 1
        return np.concatenate([self._take(i, n) for i, n in enumerate(counts) if n])

    def _take(self, kind: int, count: int) -> Tokens:
        places = self._orders[kind].places(self._cursors[kind], count)
        self._cursors[kind] += count
        starts = self._starts[kind]
        offsets = [int(starts[place.shard]) + place.offset for place in places]
        return _gather(self._kinds[kind].training, offsets, self._seq_len)


def load_text(experiment: Experiment) -> Text:
    """The experiment's text. Cached: processes run many experiments on the same text.

    Raises: OperatorError: no text, or too few kinds of it.
    """
    swarm, data = experiment.swarm, experiment.data
    if not data.by_kind:
        return _whole(data.files)
    kinds = _by_kind(data.files)
    # Those that somebody reads; who joins later reads the next kinds.
    most = swarm.nodes + sum(n for _, n in swarm.joins)
    return _text(kinds[:most])


@lru_cache(maxsize=4)
def _whole(files: tuple[str, ...]) -> Text:
    return _text((_kind("all", find_files(files or None)),))


@lru_cache(maxsize=4)
def _by_kind(files: tuple[str, ...]) -> tuple[Kind, ...]:
    groups = [(glob, find_files([glob])) for glob in files] if files else _parts_of_python()
    taken: set[Path] = set()
    kinds = []
    for name, paths in groups:
        own = [path for path in paths if path not in taken]
        taken.update(own)
        if sum(path.stat().st_size for path in own) >= KIND_BYTES_MIN:
            kinds.append(_kind(name, own))
        elif files:
            raise OperatorError(f"{name!r} matches less than 256 KiB of its own; a kind of text needs more.")
    if len(kinds) < 2:
        raise OperatorError(
            "data.by_kind needs two kinds of text; name a glob for each in data.files, "
            'such as files = ["novels/*.txt", "code/**/*.py"].'
        )
    return tuple(kinds)


def _parts_of_python() -> list[tuple[str, list[Path]]]:
    groups: list[tuple[str, list[Path]]] = []
    elsewhere: set[Path] = set()
    for name, root, patterns in KINDS:
        place = Path(sysconfig.get_paths()[root])
        found = sorted({path for pattern in patterns for path in place.glob(pattern) if path.is_file()})
        groups.append((name, found))
        elsewhere.update(found)
    library = [path for path in find_files(None) if path not in elsewhere]
    return [("library", library), *groups]


def _kind(name: str, files: Sequence[Path]) -> Kind:
    found = byte_corpus(files)
    return Kind(
        name,
        np.frombuffer(found.training, np.uint8),
        found.shards,
        np.frombuffer(found.held_out, np.uint8),
    )


def _text(kinds: Iterable[Kind]) -> Text:
    kinds = tuple(kinds)
    digest = hashlib.sha256()
    for kind in kinds:
        for part in (kind.training, kind.held_out):
            digest.update(len(part).to_bytes(8, "big"))
            digest.update(part.data)
    return Text(kinds, digest.hexdigest())


def _gather(text: Bytes, offsets: Sequence[int], seq_len: int) -> Tokens:
    if not offsets:
        return np.empty((0, seq_len + 1), np.int64)
    index = np.asarray(offsets, np.int64)[:, None] + np.arange(seq_len + 1)
    found: Tokens = text[index].astype(np.int64)
    return found
