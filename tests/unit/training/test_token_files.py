"""Raw token files from compressed shards: opened once, and a bad frame is nobody's fault here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from p2pdiloco.errors import OperatorError
from p2pdiloco.ids import Digest, digest_of
from p2pdiloco.run_spec import BlobRef
from p2pdiloco.wire.frames import make_frame
from p2pdiloco_node.training.token_files import open_token_files

TEXTS = [b"one " * 300, b"two " * 200]


class Blobs:
    """Blobs by digest; counts what is read."""

    def __init__(self) -> None:
        self.kept: dict[Digest, bytes] = {}
        self.reads = 0

    def add(self, frame: bytes, tokens: int) -> BlobRef:
        self.kept[digest_of(frame)] = frame
        return BlobRef(digest_of(frame), len(frame), tokens)

    def read(self, digest: Digest) -> bytes:
        self.reads += 1
        return self.kept[digest]


def test_each_is_opened_once_and_again_if_it_went_away_or_was_cut(tmp_path: Path) -> None:
    blobs = Blobs()
    refs = [blobs.add(make_frame(text), len(text)) for text in TEXTS]

    def start() -> list[Path]:
        return open_token_files(refs, blobs.read, tmp_path, Path.write_bytes)

    paths = start()
    assert [p.read_bytes() for p in paths] == TEXTS
    assert start() == paths
    assert blobs.reads == 2
    paths[0].unlink()
    paths[1].write_bytes(b"cut")
    assert [p.read_bytes() for p in start()] == TEXTS
    assert blobs.reads == 4


@pytest.mark.parametrize(("frame", "tokens"), [(TEXTS[0], len(TEXTS[0])), (make_frame(TEXTS[0]), 5)])
def test_a_shard_that_is_not_what_was_signed_is_the_run_s_fault(
    tmp_path: Path, frame: bytes, tokens: int
) -> None:
    blobs = Blobs()
    ref = blobs.add(frame, tokens)
    with pytest.raises(OperatorError, match="tell the owner of the run") as caught:
        open_token_files([ref], blobs.read, tmp_path, Path.write_bytes)
    assert caught.value.exit_code == 5
    assert list(tmp_path.iterdir()) == []


def test_wide_tokens_are_opened_as_they_are(tmp_path: Path) -> None:
    blobs = Blobs()
    tokens = np.array([0, 300, 999], "<u2").tobytes()
    ref = blobs.add(make_frame(tokens), 3)
    (path,) = open_token_files([ref], blobs.read, tmp_path, Path.write_bytes, token_bytes=2, vocab_size=1000)
    assert path.read_bytes() == tokens
    open_token_files([ref], blobs.read, tmp_path, Path.write_bytes, token_bytes=2)
    assert blobs.reads == 1


def test_a_width_that_there_is_not_is_the_run_s_fault(tmp_path: Path) -> None:
    """The RunSpec's own type lets it pass."""
    blobs = Blobs()
    ref = blobs.add(make_frame(bytes(6)), 2)
    with pytest.raises(OperatorError, match="tokens have 3 bytes each instead of 1, 2 or 4") as caught:
        open_token_files([ref], blobs.read, tmp_path, Path.write_bytes, token_bytes=3)
    assert caught.value.exit_code == 5


def test_a_token_outside_the_vocabulary_is_the_run_s_fault(tmp_path: Path) -> None:
    blobs = Blobs()
    ref = blobs.add(make_frame(np.array([0, 1000], "<u2").tobytes()), 2)
    with pytest.raises(OperatorError, match="holds token 1000, and its tokenizer has 1000") as caught:
        open_token_files([ref], blobs.read, tmp_path, Path.write_bytes, token_bytes=2, vocab_size=1000)
    assert caught.value.exit_code == 5
    assert list(tmp_path.iterdir()) == []
