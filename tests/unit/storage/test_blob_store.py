"""Whole and verified, or a resumable part, never between."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError, TransportError
from p2pdiloco.ids import Digest, PeerId, digest_of
from p2pdiloco_node.ports import BlobStore, Origin, Purpose
from p2pdiloco_node.storage.blob_store import DiskBlobStore
from p2pdiloco_node.storage.files import Files

Harness = Callable[..., int]
DATA = bytes(range(256)) * 40
NAME = digest_of(DATA)


def small(root: Path, **budgets: int) -> DiskBlobStore:
    return DiskBlobStore(root, budgets={p: budgets.get(p.value, 10**6) for p in Purpose})


def test_put_is_there_now_and_in_the_next_life(tmp_path: Path) -> None:
    store: BlobStore = DiskBlobStore(tmp_path)
    assert not store.has(NAME)
    assert (store.size(NAME), store.path(NAME), store.purpose(NAME)) == (None, None, None)
    store.put(NAME, DATA, Purpose.SNAPSHOT)
    store.put(NAME, DATA)
    for here in (store, DiskBlobStore(tmp_path)):
        assert here.has(NAME)
        assert here.read(NAME) == DATA
        assert (here.size(NAME), here.purpose(NAME)) == (len(DATA), Purpose.SNAPSHOT)
    store.delete(NAME)
    assert not DiskBlobStore(tmp_path).has(NAME)
    with pytest.raises(TransportError):
        store.read(NAME)


def test_wrong_bytes_are_our_own_fault(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        DiskBlobStore(tmp_path).put(NAME, DATA + b"x")


def test_a_part_goes_on_in_the_next_life(tmp_path: Path) -> None:
    store = DiskBlobStore(tmp_path)
    store.append_part(NAME, 0, DATA[:3000], len(DATA))
    store.append_part(NAME, 3000, DATA[3000:5000], len(DATA))
    assert not store.has(NAME)
    store.close()
    store = DiskBlobStore(tmp_path)
    assert store.part_size(NAME) == 5000
    assert store.used(Purpose.DELTA) == len(DATA)
    store.append_part(NAME, 5000, DATA[5000:], len(DATA))
    assert store.finish_part(NAME)
    assert store.read(NAME) == DATA
    assert store.finish_part(NAME)
    assert store.part_size(NAME) == 0
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [store.path(NAME)]


def test_wrong_or_short_parts_are_gone(tmp_path: Path) -> None:
    store = DiskBlobStore(tmp_path)
    store.append_part(NAME, 0, DATA[:-1] + b"x", len(DATA))
    assert not store.finish_part(NAME)
    store.append_part(NAME, 0, DATA[:100], len(DATA))
    assert not store.finish_part(NAME)
    assert (store.part_size(NAME), store.has(NAME), store.used(Purpose.DELTA)) == (0, False, 0)
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_a_part_flipped_on_disk_between_two_lives_is_gone(tmp_path: Path) -> None:
    store = DiskBlobStore(tmp_path)
    store.append_part(NAME, 0, DATA[:-1], len(DATA))
    store.close()
    (path,) = (tmp_path / "delta" / "parts").iterdir()
    path.write_bytes(b"?" + DATA[1:-1])
    store = DiskBlobStore(tmp_path)
    store.append_part(NAME, len(DATA) - 1, DATA[-1:], len(DATA))
    assert not store.finish_part(NAME)


def test_two_writers_of_one_part_do_not_mix(tmp_path: Path) -> None:
    store = DiskBlobStore(tmp_path)
    store.append_part(NAME, 0, DATA[:100], len(DATA))
    for offset, size in ((0, len(DATA)), (50, len(DATA)), (101, len(DATA)), (100, len(DATA) + 1)):
        with pytest.raises(TransportError):
            store.append_part(NAME, offset, b"x", size)
    with pytest.raises(AssertionError):
        store.append_part(NAME, 100, DATA, len(DATA))


def test_budget_per_purpose(tmp_path: Path) -> None:
    store = small(tmp_path, delta=15_000)
    store.append_part(NAME, 0, b"1", len(DATA))
    other = os.urandom(6000)
    with pytest.raises(OperatorError, match="limit") as caught:
        store.put(digest_of(other), other)
    assert caught.value.exit_code == 6
    with pytest.raises(OperatorError):
        store.append_part(digest_of(other), 0, other, len(other))
    store.put(digest_of(other), other, Purpose.SHARD)
    store.delete(NAME)
    third = os.urandom(14_000)
    store.put(digest_of(third), third)
    assert store.used(Purpose.DELTA) == 14_000


class Crowd:
    """Parts of one byte by anybody, on a clock of the test."""

    def __init__(self, root: Path, **budgets: int) -> None:
        self.now = 0.0
        self.store = DiskBlobStore(
            root, budgets={p: budgets.get(p.value, 10**6) for p in Purpose}, clock=lambda: self.now
        )

    def put(self, what: int, peer: int, *, known: bool = False) -> Digest:
        return self.begin(what, Purpose.DELTA, Origin(PeerId(peer.to_bytes(32, "big")), known))

    def begin(self, what: int, purpose: Purpose, origin: Origin | None = None) -> Digest:
        digest = Digest(what.to_bytes(32, "big"))
        self.store.append_part(digest, 0, b"x", 2, purpose, origin)
        return digest

    def here(self, digests: list[Digest]) -> list[bool]:
        return [self.store.part_size(d) == 1 for d in digests]


def test_strangers_fill_their_own_share_of_the_unfinished_deltas_and_no_other(tmp_path: Path) -> None:
    """Sixteen strangers with a byte each stopped every intake, and a joining daemon ended."""
    crowd = Crowd(tmp_path)
    for n in range(limits.blob_parts_put_max):
        crowd.put(n, peer=n)
    with pytest.raises(TransportError, match="on their way") as caught:
        crowd.put(1000, peer=1000)
    assert caught.value.retry_after_s == limits.retry_after_s
    crowd.put(1001, peer=1001, known=True)  # the log knows it
    for n, purpose in enumerate(Purpose):  # what this node fetches itself
        crowd.begin(2000 + n, purpose)
    # They hold it only as long as they go on sending.
    crowd.now += limits.blob_part_spared_s + 1
    assert crowd.here([crowd.put(1000, peer=1000)]) == [True]
    assert sum(crowd.here([Digest(n.to_bytes(32, "big")) for n in range(limits.blob_parts_put_max)])) == (
        limits.blob_parts_put_max - 1
    )


def test_a_sender_s_own_oldest_part_gives_way(tmp_path: Path) -> None:
    crowd = Crowd(tmp_path)
    mine = []
    for n in range(limits.blob_parts_per_peer_max + 1):
        crowd.now += 1
        mine.append(crowd.put(n, peer=7, known=True))
    assert crowd.here(mine) == [False] + [True] * limits.blob_parts_per_peer_max
    assert crowd.store.used(Purpose.DELTA) == 2 * limits.blob_parts_per_peer_max


def test_what_this_node_fetches_has_a_share_for_each_purpose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "blob_parts_fetched_max", 3)
    crowd = Crowd(tmp_path)
    shards = []
    for n in range(4):
        crowd.now += 1
        shards.append(crowd.begin(n, Purpose.SHARD))
    other = [crowd.begin(10, Purpose.SNAPSHOT), crowd.begin(11, Purpose.DELTA), crowd.put(12, peer=1)]
    assert crowd.here(shards) == [False, True, True, True]
    assert crowd.here(other) == [True] * 3


def test_a_part_without_news_is_dropped_in_the_same_life(tmp_path: Path) -> None:
    crowd = Crowd(tmp_path)
    old = crowd.put(1, peer=1)
    crowd.now += limits.blob_part_idle_s_max - 1
    fresh = crowd.put(2, peer=2)
    assert crowd.here([old, fresh]) == [True, True]
    crowd.now += 2
    crowd.put(3, peer=3)
    assert crowd.here([old, fresh]) == [False, True]
    assert crowd.store.used(Purpose.DELTA) == 4


def test_a_full_store_is_a_sender_s_reason_to_wait_and_an_owner_s_to_act(tmp_path: Path) -> None:
    crowd = Crowd(tmp_path, delta=3)
    crowd.put(1, peer=1)
    with pytest.raises(TransportError, match="full") as caught:
        crowd.put(2, peer=2, known=True)
    assert caught.value.retry_after_s == limits.full_store_retry_s
    with pytest.raises(OperatorError, match="limit"):
        crowd.begin(3, Purpose.DELTA)


def test_bit_rot_is_found_by_reading(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = DiskBlobStore(tmp_path)
    store.put(NAME, DATA)
    path = store.path(NAME)
    assert path is not None
    path.write_bytes(DATA[:-1] + b"x")
    with pytest.raises(TransportError, match="damaged"):
        store.read(NAME)
    assert "damaged" in caplog.text
    assert not store.has(NAME)
    store.put(NAME, DATA)
    assert store.read(NAME) == DATA


def test_a_runs_own_folder_is_served_and_never_changed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / NAME.hex()).write_bytes(DATA)
    (run / "notes.txt").write_text("not a blob")
    store = DiskBlobStore(tmp_path / "store", also=[run])
    assert store.read(NAME) == DATA
    assert store.purpose(NAME) is Purpose.SHARD
    store.delete(NAME)
    assert (run / NAME.hex()).read_bytes() == DATA
    assert store.used(Purpose.SHARD) == 0


def test_blobs_at_every_crash(tmp_path: Path, crash_everywhere: Harness) -> None:
    root = tmp_path / "store"
    said = False

    def reset() -> None:
        nonlocal said
        shutil.rmtree(root, ignore_errors=True)
        said = False

    def put(files: Files) -> None:
        nonlocal said
        DiskBlobStore(root, files).put(NAME, DATA)
        said = True

    def by_parts(files: Files) -> None:
        nonlocal said
        store = DiskBlobStore(root, files)
        try:
            store.append_part(NAME, 0, DATA[:5000], len(DATA))
            store.append_part(NAME, 5000, DATA[5000:], len(DATA))
            assert store.finish_part(NAME)
        finally:
            store.close()
        said = True

    def check() -> None:
        store = DiskBlobStore(root)
        assert store.has(NAME) or not said
        if store.has(NAME):
            assert store.read(NAME) == DATA
            return
        here = store.part_size(NAME)
        store.append_part(NAME, here, DATA[here:], len(DATA))
        if not store.finish_part(NAME):
            store.append_part(NAME, 0, DATA, len(DATA))
            assert store.finish_part(NAME)
        assert store.read(NAME) == DATA

    assert crash_everywhere(put, check, reset) > 10
    assert crash_everywhere(by_parts, check, reset) > 10


def test_full_disk_is_a_sentence_and_costs_nothing_else(tmp_path: Path, faulty: type) -> None:
    files = faulty()
    store = DiskBlobStore(tmp_path, files)
    kept = b"kept"
    store.put(digest_of(kept), kept)
    files.at, files.error, files.forever = files.calls, errno.ENOSPC, True
    for _ in range(2):
        with pytest.raises(OperatorError, match="full") as caught:
            store.put(NAME, DATA)
        assert caught.value.exit_code == 6
        with pytest.raises(OperatorError):
            store.append_part(NAME, 0, DATA, len(DATA))
    files.at = -1
    assert store.read(digest_of(kept)) == kept
    assert store.used(Purpose.DELTA) == len(kept)
    store.put(NAME, DATA)
    assert store.read(NAME) == DATA


def test_eight_threads(tmp_path: Path) -> None:
    store = DiskBlobStore(tmp_path)
    blobs = [hashlib.sha256(bytes([n])).digest() * 100 for n in range(8)]

    def work() -> None:
        for data in blobs:
            store.put(digest_of(data), data)
            assert store.read(digest_of(data)) == data

    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(work) for _ in range(8)]:
            done.result()
    assert store.used(Purpose.DELTA) == sum(map(len, blobs))
    assert not list((tmp_path / "delta" / "parts").iterdir())
