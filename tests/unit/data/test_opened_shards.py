"""Opened shards are a cache: what is damaged, cut or of no use is found and made anew."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from p2pdiloco.errors import OperatorError, TransportError
from p2pdiloco.ids import Digest, digest_of
from p2pdiloco.run_spec import BlobRef
from p2pdiloco.wire.frames import make_frame
from p2pdiloco_node.data.opened_shards import OpenedShards
from p2pdiloco_node.storage.files import Files
from tests.unit.storage.conftest import Died, FaultyFiles

TOKENS = np.arange(500, dtype="<u2").tobytes()


class Kit:
    def __init__(self, folder: Path, files: Files | None = None) -> None:
        self.folder = folder
        self.kept: dict[Digest, bytes] = {}
        self.opened = OpenedShards(folder, self.read, files or Files())

    def read(self, digest: Digest) -> bytes:
        if digest not in self.kept:
            raise TransportError("not here")
        return self.kept[digest]

    def add(self, content: bytes, width: int = 2) -> BlobRef:
        frame = make_frame(content)
        self.kept[digest_of(frame)] = frame
        return BlobRef(digest_of(frame), len(frame), len(content) // width)

    def open(self, ref: BlobRef, vocab_size: int = 500) -> bytes:
        self.opened.open(ref, token_bytes=2, vocab_size=vocab_size)
        return self.opened.path(ref).read_bytes()


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return Kit(tmp_path / "tokens")


def test_what_was_opened_is_found_again_and_the_rest_is_removed(kit: Kit) -> None:
    one, two, three = (kit.add(TOKENS[: 2 * n]) for n in (100, 200, 300))
    assert kit.opened.find([one]) == set()
    assert kit.open(one) == TOKENS[:200]
    kit.open(two)
    (kit.folder / "something.tmp").write_bytes(b"left over")
    assert kit.opened.find([one, three]) == {one.digest}
    assert {p.name.partition(".")[0] for p in kit.folder.iterdir()} == {kit.opened.path(one).name}


@pytest.mark.parametrize("damage", ["a bit", "cut", "gone", "no checksum"])
def test_damage_is_seen_and_mended(kit: Kit, damage: str) -> None:
    ref = kit.add(TOKENS)
    kit.open(ref)
    path = kit.opened.path(ref)
    if damage == "a bit":
        content = bytearray(TOKENS)
        content[77] ^= 1  # the same size: only the checksum knows
        path.write_bytes(content)
    elif damage == "cut":
        path.write_bytes(TOKENS[:-1])
    elif damage == "gone":
        path.unlink()
    else:
        path.with_name(path.name + ".sum").unlink()
    assert not kit.opened.is_whole(ref)
    assert kit.opened.find([ref]) == set()
    assert list(kit.folder.iterdir()) == []  # its size may be right, and there may be no blob to make it from
    assert kit.open(ref) == TOKENS
    assert kit.opened.is_whole(ref)


def test_a_crash_at_any_call_leaves_nothing_that_passes_for_whole_and_is_not(tmp_path: Path) -> None:
    for at in range(100):
        folder = tmp_path / str(at)
        files = FaultyFiles()
        kit = Kit(folder, files)
        ref = kit.add(TOKENS)
        kit.opened.find([])
        files.calls, files.at = 0, at
        try:
            kit.open(ref)
        except Died:
            again = Kit(folder)
            again.kept = kit.kept
            if again.opened.find([ref]):
                assert again.opened.path(ref).read_bytes() == TOKENS
            assert again.open(ref) == TOKENS
        else:
            assert at > 4
            return
    raise AssertionError("never got through")


def test_without_a_blob_or_with_foreign_tokens_nothing_is_opened(kit: Kit) -> None:
    ref = kit.add(TOKENS)
    kit.opened.find([])
    with pytest.raises(OperatorError, match="tell the owner of the run") as fault:
        kit.open(ref, vocab_size=499)
    assert fault.value.exit_code == 5
    kit.kept.clear()
    with pytest.raises(TransportError):
        kit.open(ref)
    assert list(kit.folder.iterdir()) == []
    kit.opened.remove([ref])
