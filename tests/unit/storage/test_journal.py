"""Old or new, never mixed, never forgotten: the voter's record, the boot counter, the log (targets R4)."""

from __future__ import annotations

import errno
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from p2pdiloco.errors import OperatorError
from p2pdiloco.protocol.actions import VoterRecord
from p2pdiloco.wire.log import AckSignature, Certificate, Entry
from p2pdiloco_node.storage.files import Files
from p2pdiloco_node.storage.journal import DiskJournal

Harness = Callable[..., int]


def record(term: int) -> VoterRecord:
    return VoterRecord(term, 0, bytes(32), None)


def entry(n: int) -> Entry:
    acks = (AckSignature(bytes(32), bytes(64)),)
    return Entry(n.to_bytes(4, "big") * 50, Certificate(bytes(32), n, False, acks))


def opened(folder: Path, files: Files | None = None) -> tuple[DiskJournal, list[Entry]]:
    journal = DiskJournal(folder, files)
    return journal, journal.load_entries()


def test_what_is_saved_is_there_in_the_next_life(tmp_path: Path) -> None:
    journal, entries = opened(tmp_path)
    assert (entries, journal.load_record()) == ([], None)
    journal.save_record(record(7))
    journal.append_entries([entry(1), entry(2)])
    journal.append_entries([entry(3)])
    assert journal.next_boot() == 1
    journal.close()
    journal, entries = opened(tmp_path)
    assert entries == [entry(1), entry(2), entry(3)]
    assert journal.load_record() == record(7)
    assert journal.next_boot() == 2
    journal.close()


def test_record_at_every_crash(tmp_path: Path, crash_everywhere: Harness) -> None:
    folder = tmp_path / "run"
    said = 0

    def reset() -> None:
        nonlocal said
        shutil.rmtree(folder, ignore_errors=True)
        DiskJournal(folder).save_record(record(1))
        said = 1

    def work(files: Files) -> None:
        nonlocal said
        journal = DiskJournal(folder, files)
        for term in (2, 3):
            journal.save_record(record(term))
            said = term

    def check() -> None:
        found = DiskJournal(folder).load_record()
        assert found in (record(said), record(said + 1))
        assert DiskJournal(folder).load_record() == found

    assert crash_everywhere(work, check, reset) == 2 * 14  # two files, seven calls each


def test_record_on_a_failing_disk(tmp_path: Path, fail_everywhere: Harness) -> None:
    folder = tmp_path / "run"
    said = 0

    def reset() -> None:
        nonlocal said
        shutil.rmtree(folder, ignore_errors=True)
        DiskJournal(folder).save_record(record(1))
        said = 1

    def work(files: Files) -> None:
        nonlocal said
        DiskJournal(folder, files).save_record(record(2))
        said = 2

    def check() -> None:
        assert DiskJournal(folder).load_record() in (record(said), record(said + 1))

    assert fail_everywhere(work, check, reset) >= 18


def test_log_at_every_crash(tmp_path: Path, crash_everywhere: Harness) -> None:
    folder = tmp_path / "run"
    said = 0

    def reset() -> None:
        nonlocal said
        shutil.rmtree(folder, ignore_errors=True)
        said = 0

    def work(files: Files) -> None:
        nonlocal said
        journal, _ = opened(folder, files)
        try:
            for n in (0, 2, 4):
                journal.append_entries([entry(n), entry(n + 1)])
                said = n + 2
        finally:
            journal.close()

    def check() -> None:
        journal, entries = opened(folder)
        assert entries == [entry(n) for n in range(len(entries))]
        assert said <= len(entries) <= said + 2
        journal.append_entries([entry(len(entries))])
        journal.close()
        journal, again = opened(folder)
        journal.close()
        assert again == [*entries, entry(len(entries))]

    assert crash_everywhere(work, check, reset) > 12


def test_after_a_failed_fsync_the_file_is_written_anew(tmp_path: Path, faulty: type) -> None:
    """The kernel calls the next fsync of that file fine, although the pages may be gone."""
    files = faulty()
    journal, _ = opened(tmp_path, files)
    journal.append_entries([entry(1)])
    inode = (tmp_path / "log").stat().st_ino
    files.at, files.error = files.calls + 1, errno.EIO  # the fsync after the next write
    with pytest.raises(OperatorError):
        journal.append_entries([entry(2)])
    files.at = -1
    journal.append_entries([entry(3)])
    journal.close()
    assert (tmp_path / "log").stat().st_ino != inode
    journal, entries = opened(tmp_path)
    journal.close()
    assert entries == [entry(1), entry(3)]


def test_torn_tail_is_cut_with_a_log_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal, _ = opened(tmp_path)
    journal.append_entries([entry(1), entry(2)])
    journal.close()
    path = tmp_path / "log"
    whole = path.read_bytes()
    for cut in range(1, 40):
        path.write_bytes(whole[:-cut])
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            journal, entries = opened(tmp_path)
        assert entries == [entry(1)]
        assert "cut off" in caplog.text
        journal.append_entries([entry(2)])
        journal.close()
        assert path.read_bytes() == whole


def test_a_flipped_bit_never_gives_another_entry(tmp_path: Path) -> None:
    journal, _ = opened(tmp_path)
    entries = [entry(1), entry(2), entry(3)]
    journal.append_entries(entries)
    journal.close()
    path = tmp_path / "log"
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << (at % 8)
        path.write_bytes(damaged)
        journal, found = opened(tmp_path)
        journal.close()
        assert found == entries[: len(found)]
        assert len(found) < 3
        assert (tmp_path / "log.damaged").read_bytes() == damaged


@pytest.mark.parametrize("index", [0, 1, 2])
def test_entries_after_an_index_are_cut_off_for_good(tmp_path: Path, index: int) -> None:
    journal, _ = opened(tmp_path)
    journal.append_entries([entry(1), entry(2), entry(3)])
    journal.cut(index)
    journal.append_entries([entry(9)])
    journal.close()
    journal, found = opened(tmp_path)
    journal.close()
    assert found == [*[entry(n) for n in range(1, index + 1)], entry(9)]
    assert not (tmp_path / "log.damaged").exists()


def test_a_cut_at_every_crash_leaves_the_whole_log_or_the_shorter_one(
    tmp_path: Path, crash_everywhere: Harness
) -> None:
    folder = tmp_path / "run"

    def reset() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        journal, _ = opened(folder)
        journal.append_entries([entry(n) for n in range(1, 6)])
        journal.close()

    def work(files: Files) -> None:
        journal, _ = opened(folder, files)
        journal.cut(2)
        journal.append_entries([entry(7)])
        journal.close()

    def check() -> None:
        journal, found = opened(folder)
        journal.close()
        first = [entry(1), entry(2)]
        assert found in ([entry(n) for n in range(1, 6)], first, [*first, entry(7)])

    crash_everywhere(work, check, reset)


def test_one_damaged_copy_of_the_record_costs_nothing(tmp_path: Path) -> None:
    """Falling back to the record before the last would let this voter vote twice."""
    for name in ("record", "record.copy"):
        for flip in range(0, 60, 5):
            journal = DiskJournal(tmp_path)
            journal.save_record(record(1))
            journal.save_record(record(2))
            path = tmp_path / name
            data = bytearray(path.read_bytes())
            data[flip % len(data)] ^= 4
            path.write_bytes(data)
            assert DiskJournal(tmp_path).load_record() == record(2)
            path.unlink()
            assert DiskJournal(tmp_path).load_record() == record(2)
            assert path.exists()


def test_both_copies_damaged_is_said_and_nothing_older_is_used(tmp_path: Path) -> None:
    DiskJournal(tmp_path).save_record(record(2))
    for name in ("record", "record.copy"):
        (tmp_path / name).write_bytes(b"\0" * 100)
    with pytest.raises(OperatorError, match="backup"):
        DiskJournal(tmp_path).load_record()


def test_boot_counter_only_rises(tmp_path: Path, crash_everywhere: Harness) -> None:
    folder = tmp_path / "run"
    said = 0

    def reset() -> None:
        nonlocal said
        shutil.rmtree(folder, ignore_errors=True)
        said = DiskJournal(folder).next_boot()

    def work(files: Files) -> None:
        nonlocal said
        said = DiskJournal(folder, files).next_boot()

    def check() -> None:
        assert DiskJournal(folder).next_boot() > said

    crash_everywhere(work, check, reset)


def test_who_reads_bytes_can_tell_that_they_do_not_go_on(tmp_path: Path) -> None:
    journal = DiskJournal(tmp_path)
    journal.load_entries()
    journal.append_entries([entry(n) for n in range(3)])
    assert journal.rewrites == 0
    journal.cut(1)
    assert journal.rewrites == 1
