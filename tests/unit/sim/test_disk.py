"""What a crash leaves on the simulated disk."""

from __future__ import annotations

import numpy as np
import pytest

from p2pdiloco.ids import NO_DIGEST
from p2pdiloco.protocol.actions import VoterRecord
from p2pdiloco.sim.disk import Disk, DiskFull, StateFiles

ZEROS = np.zeros(4, np.float32)
GENESIS = StateFiles(0, 0, ZEROS, ZEROS, b"")


def record(term: int) -> VoterRecord:
    return VoterRecord(term, 0, NO_DIGEST, None)


def test_a_record_survives_a_crash() -> None:
    disk = Disk(GENESIS)
    disk.save_record(record(3))
    disk.crash()
    assert disk.record == record(3)


def test_a_driver_that_forgets_to_sync_loses_it() -> None:
    disk = Disk(GENESIS, frozenset({"record"}))
    disk.save_record(record(3))
    assert disk.record == record(3)
    assert disk.durable_record is None
    disk.crash()
    assert disk.record is None


def test_state_files_lag_and_fall_back_to_the_last_that_was_synced() -> None:
    disk = Disk(GENESIS)
    disk.write_state(StateFiles(5, 5, ZEROS, ZEROS, b"five"))
    disk.crash()
    assert disk.state == GENESIS


def test_state_files_never_overtake_the_journal() -> None:
    disk = Disk(GENESIS)
    disk.write_state(StateFiles(5, 5, ZEROS, ZEROS, b"five"))
    disk.sync_state()  # no entry is durable yet
    disk.crash()
    assert disk.state.index == 0


def test_a_full_disk_refuses_and_keeps_what_it_has() -> None:
    disk = Disk(GENESIS)
    disk.save_record(record(1))
    disk.full = True
    with pytest.raises(DiskFull):
        disk.save_record(record(2))
    disk.crash()
    assert disk.record == record(1)


def test_an_old_image_takes_everything_back() -> None:
    disk = Disk(GENESIS)
    disk.count_boot()
    disk.save_record(record(1))
    image = disk.image()
    disk.count_boot()
    disk.save_record(record(9))
    disk.restore(image)
    assert (disk.boot, disk.record, disk.durable_record) == (1, record(1), record(1))
