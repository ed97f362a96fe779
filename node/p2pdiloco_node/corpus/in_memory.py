"""A corpus of bytes in memory, for the lab: as the product makes it, without the disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from p2pdiloco import limits
from p2pdiloco_node.corpus.documents import RECORD, first_of_copies, index_of, seed_key, shuffled
from p2pdiloco_node.corpus.held_out import choose_held_out, divide
from p2pdiloco_node.corpus.readers import END, Format, Part, read_part
from p2pdiloco_node.corpus.sources import inputs_of
from p2pdiloco_node.corpus.token_input import shard_tokens

END_OF_DOCUMENT = b"\0"


class ByteCorpus(NamedTuple):
    training: bytes  # all shards, one after the other
    shards: tuple[int, ...]  # tokens of each
    held_out: bytes


def byte_corpus(files: Sequence[Path], *, seed: int = 0) -> ByteCorpus:
    """Documents of these files, shuffled and split. What is broken is passed over.

    Raises: OperatorError: a file cannot be read, or there is no text.
    """
    documents: list[bytes] = []
    for entry in inputs_of(files):
        for batch in read_part(entry, Part(0, 0, END), Format("text")):
            documents += batch.texts
    index = np.concatenate([np.empty(0, RECORD), index_of(documents, seed_key(seed), source=0, tokens=False)])
    split = choose_held_out([index], sources={}, evaluation_bytes=limits.evaluation_tokens_max)
    kept = first_of_copies(index)
    places = kept[shuffled(index[kept])]
    sides = divide(index[places], [documents[place] for place in places.tolist()], split.held, 1)
    training = b"".join(text + END_OF_DOCUMENT for text, _ in sides.training)
    # By digest, as the product's evaluation sets are.
    held_out = b"".join(text + END_OF_DOCUMENT for _, text, _ in sorted(sides.held_out))
    size = shard_tokens(len(training), 1) if training else 0
    cuts = range(0, len(training), size) if size else ()
    return ByteCorpus(training, tuple(min(size, len(training) - at) for at in cuts), held_out)
