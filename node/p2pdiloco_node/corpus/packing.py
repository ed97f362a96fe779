"""Tokens become content-addressed shards. Each is one frame: a BlobRef's digest and size are the frame's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import msgspec
import numpy as np

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.ids import digest_of
from p2pdiloco.run_spec import BYTES as BYTES_TOKENIZER
from p2pdiloco.run_spec import BlobRef, EvaluationSet, TokenizerSpec
from p2pdiloco.wire.frames import make_frame
from p2pdiloco_node.corpus.held_out import Split
from p2pdiloco_node.corpus.token_input import shard_tokens
from p2pdiloco_node.corpus.tokenising import Held
from p2pdiloco_node.corpus.tokenizer import BYTES, Tokenizer
from p2pdiloco_node.corpus.work import Tokenised, Work


def put_frame(work: Work, blobs: Path, content: bytes, tokens: int) -> BlobRef:
    """Compress and write one blob. Raises: OperatorError."""
    frame = make_frame(content)
    digest = digest_of(frame)
    work.write(blobs / digest.hex(), [frame])
    return BlobRef(digest, len(frame), tokens)


def pack_shard(root: str, blobs: str, number: int) -> tuple[int, BlobRef]:
    """Shard `number`, from the buckets' tokens. A task of a process of its own.

    Raises: OperatorError: tokens are gone although their shards are not there; the disk.
    """
    work = Work(Path(root))
    tokenised = tokenised_of(root)
    width = tokenised.vocabulary.token_bytes
    size = shard_tokens(tokenised.tokens, width)
    first, stop = number * size, min((number + 1) * size, tokenised.tokens)
    starts = np.concatenate(([0], np.cumsum(tokenised.counts)))
    content = bytearray()
    for bucket in range(int(np.searchsorted(starts, first, side="right")) - 1, len(tokenised.counts)):
        begin = int(starts[bucket])
        if begin >= stop:
            break
        a, b = max(first, begin), min(stop, int(starts[bucket + 1]))
        content += _read(work.tokens_of(bucket), (a - begin) * width, (b - a) * width)
    return number, put_frame(work, Path(blobs), bytes(content), stop - first)


def evaluation_sets(
    work: Work, blobs: Path, split: Split, buckets: int, tokenizer: Tokenizer
) -> tuple[EvaluationSet, ...]:
    """What is held out, in the order of the digests. Raises: OperatorError."""
    token_bytes = tokenizer.vocabulary.token_bytes
    found: dict[bytes, Held] = {}
    for bucket in range(buckets):
        held = msgspec.msgpack.decode(work.held_of(bucket).read_bytes(), type=list[Held])
        found |= {document.digest: document for document in held}
    sets = []
    for held_set in split.sets:
        content = bytearray()
        text_bytes = 0
        for document in (found[digest] for digest in held_set.digests):
            # One frame. Only a tokenizer with several tokens for a byte comes that far.
            if content and len(content) + len(document.tokens) > limits.frame_content_bytes_max:
                break
            tokens = document.tokens[: limits.frame_content_bytes_max]
            content += tokens
            if len(tokens) == len(document.tokens):
                text_bytes += document.text_bytes
            else:  # of the text only what they stand for: bits per byte would look better than they are
                text_bytes += tokenizer.text_bytes(np.frombuffer(tokens, f"<u{token_bytes}"))
        ref = put_frame(work, blobs, bytes(content), len(content) // token_bytes)
        sets.append(EvaluationSet(held_set.name, ref, max(1, text_bytes)))
    return tuple(sets)


def tokenizer_spec(work: Work, blobs: Path, name: str, tokenizer: Tokenizer) -> TokenizerSpec:
    """The RunSpec's tokenizer, its file in frames among the blobs. Raises: OperatorError."""
    if name == BYTES:
        return BYTES_TOKENIZER
    data = work.tokenizer.read_bytes()
    step = limits.frame_content_bytes_max
    cut = [data[at : at + step] for at in range(0, len(data), step)]
    pieces = tuple(put_frame(work, blobs, piece, len(piece)) for piece in cut)
    words = tokenizer.vocabulary
    return TokenizerSpec("json", words.size, words.end_token, pieces)


def buckets_behind(counts: Sequence[int], shards_missing: Sequence[int], size: int) -> int:
    """How many of the first buckets no missing shard needs."""
    first = min(shards_missing, default=1 << 62) * size
    ends = np.cumsum(counts)
    return int(np.searchsorted(ends, first, side="right"))


def _read(path: Path, at: int, size: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(at)
            return file.read(size)
    except FileNotFoundError:
        raise OperatorError(
            f"{path} is gone, and a shard that was made from it, too: remove {path.parent.parent} and "
            "start again."
        ) from None


@lru_cache(maxsize=1)
def tokenised_of(root: str) -> Tokenised:
    """Kept by the process."""
    tokenised = Work(Path(root)).tokenised()
    assert tokenised is not None
    return tokenised


def forget() -> None:
    """What is kept belongs to another making."""
    tokenised_of.cache_clear()
