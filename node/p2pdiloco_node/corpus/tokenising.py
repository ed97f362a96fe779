"""One bucket of documents becomes tokens, and a sample of the first buckets a tokenizer.

Tasks of processes of their own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import msgspec
import numpy as np

from p2pdiloco import limits
from p2pdiloco_node.corpus.documents import RECORD, Index
from p2pdiloco_node.corpus.held_out import Split, divide
from p2pdiloco_node.corpus.reading import plan_of
from p2pdiloco_node.corpus.segments import Segment, read_bucket
from p2pdiloco_node.corpus.tokenizer import BYTES, ByteTokens, JsonTokens, Tokenizer, Tokens, train_bpe
from p2pdiloco_node.corpus.work import Work


class Held(msgspec.Struct, frozen=True, array_like=True):
    """A document, or the end of one, that is held out. `tokens`: little-endian, with the end token."""

    digest: bytes
    tokens: bytes
    text_bytes: int


def train(root: str, vocab_size: int) -> None:
    """Train on the first documents of the shuffled corpus that are not held out; writes the tokenizer.

    Raises: OperatorError.
    """
    work = Work(Path(root))
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    try:
        data = train_bpe((t.decode() for t in _sample(root, limits.tokenizer_sample_bytes_max)), vocab_size)
    finally:
        os.environ["TOKENIZERS_PARALLELISM"] = before or "true"
    work.write(work.tokenizer, [data])


def lost_share(root: str) -> float:
    """Of the letters of the first documents, those that are lost in tokens. Raises: OperatorError."""
    tokenizer = tokenizer_of(root)
    assert isinstance(tokenizer, JsonTokens)
    most = limits.tokenizer_tried_bytes
    return tokenizer.lost_share(
        [text[:most].decode(errors="ignore").encode() for text in _sample(root, most)]
    )


def _sample(root: str, size: int) -> Iterator[bytes]:
    """Texts of the first documents of the shuffled corpus, `size` bytes or a little more."""
    left = size
    held = split_of(root).held
    for bucket in range(plan_of(root).buckets):
        for whole, places in read_bucket(segments_of(root), bucket):
            # Of a document whose end is held out the rest is there: it may be all that there is.
            sides = divide(whole.records[places], whole.documents(places), held, width=1)
            for text, ready in sides.training:
                if ready:
                    continue
                yield text
                left -= len(text)
                if left <= 0:
                    return


def tokenise_bucket(root: str, bucket: int) -> tuple[int, int]:
    """The bucket's number, and its tokens to train on. Raises: OperatorError."""
    work = Work(Path(root))
    tokenizer = tokenizer_of(root)
    held_out = split_of(root).held
    width = tokenizer.vocabulary.token_bytes
    kept: list[Held] = []
    size = 0

    def parts() -> Iterator[bytes]:
        nonlocal size
        for whole, places in read_bucket(segments_of(root), bucket):
            sides = divide(whole.records[places], whole.documents(places), held_out, width)
            ends = _encode(tokenizer, [(text, ready) for _, text, ready in sides.held_out])
            kept.extend(
                Held(digest, tokens.tobytes(), tokenizer.text_bytes(tokens[:-1]) if ready else len(text))
                for (digest, text, ready), tokens in zip(sides.held_out, ends, strict=True)
            )
            encoded = _encode(tokenizer, sides.training)
            data = np.concatenate(encoded).tobytes() if encoded else b""
            size += len(data)
            yield data
        # Before the tokens have their name, which says that the bucket is done.
        work.write(work.held_of(bucket), [msgspec.msgpack.encode(kept)])

    work.write(work.tokens_of(bucket), parts())
    return bucket, size // width


def _encode(tokenizer: Tokenizer, documents: Sequence[tuple[bytes, bool]]) -> list[Tokens]:
    """Tokens of each document, with the end token behind it; of ready ones as they are."""
    words = tokenizer.vocabulary
    width = f"<u{words.token_bytes}"
    end = np.array([words.end_token], width)
    encoded = iter(tokenizer.encode([text for text, ready in documents if not ready]))
    found = [np.frombuffer(text, width) if ready else next(encoded) for text, ready in documents]
    return [np.concatenate([tokens, end]) for tokens in found]


def open_tokenizer(work: Work, name: str, end_token: str) -> Tokenizer:
    """`name`: as the plan's command has it. Raises: OperatorError."""
    if name == BYTES:
        return ByteTokens()
    return JsonTokens(work.tokenizer.read_bytes(), end_token or None)


@lru_cache(maxsize=1)
def tokenizer_of(root: str) -> Tokenizer:
    """Kept by the process: opening one takes a second. Raises: OperatorError."""
    command = plan_of(root).command
    return open_tokenizer(Work(Path(root)), command.tokenizer, command.end_token)


@lru_cache(maxsize=1)
def split_of(root: str) -> Split:
    """Kept by the process."""
    split = Work(Path(root)).split()
    assert split is not None
    return split


@lru_cache(maxsize=1)
def segments_of(root: str) -> tuple[Segment, ...]:
    """Kept by the process; everything is read when it is asked for."""
    return tuple(map(Segment, Work(Path(root)).segment_paths()))


def records_of(segments: Sequence[Segment], bucket: int) -> Index:
    """What is known of a bucket's documents, copies included."""
    return np.concatenate([np.empty(0, RECORD), *(segment.records(bucket) for segment in segments)])


def forget() -> None:
    """What is kept belongs to another making."""
    for kept in (tokenizer_of, split_of, segments_of):
        kept.cache_clear()
