"""What a voter said it HAS, it has after a restart."""

from __future__ import annotations

from pathlib import Path

from p2pdiloco.ids import Digest, PeerId, digest_of
from p2pdiloco.protocol.context import HeldDelta
from p2pdiloco.wire.messages import DeltaHeader
from p2pdiloco_node.storage.blob_store import DiskBlobStore
from p2pdiloco_node.storage.held_deltas import HeldDeltas


def held(blob: bytes, sequence: int) -> HeldDelta:
    header = DeltaHeader(digest_of(blob), len(blob), "int4", 0, 3, sequence, 5, 0, 5, 1.25, bytes(64))
    return HeldDelta(header, PeerId(b"s" * 32), b"k" * 32, 2.5)


def test_kept_headers_come_back_with_their_blobs(tmp_path: Path) -> None:
    blobs = DiskBlobStore(tmp_path / "blobs")
    shelf = HeldDeltas(tmp_path / "held")
    first, second, dropped, lost, torn = (held(bytes([n]) * 8, n) for n in range(1, 6))
    for n, one in enumerate((first, second, dropped, lost, torn), 1):
        shelf.keep(one)
        if one is not lost:
            blobs.put(Digest(one.header.delta), bytes([n]) * 8)
    shelf.drop(Digest(dropped.header.delta))
    damaged = tmp_path / "held" / torn.header.delta.hex()
    damaged.write_bytes(damaged.read_bytes()[:-1])
    again = HeldDeltas(tmp_path / "held").load(blobs)
    assert sorted(again, key=lambda h: h.header.sequence) == [first, second]
    assert len(list((tmp_path / "held").iterdir())) == 2
