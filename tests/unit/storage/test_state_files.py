"""The newest whole state, always (scenarios F1, F2, S11)."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from p2pdiloco.errors import OperatorError
from p2pdiloco.wire.messages import SnapshotOffer
from p2pdiloco_node.storage.files import Files
from p2pdiloco_node.storage.state_files import KeptSnapshot, KeptState, SnapshotList, StateFiles

SIZE = 1000


def state(index: int) -> KeptState:
    params = np.full(SIZE, index, np.float32)
    return KeptState(index, index * 2, params, -params, b"rules %d" % index)


def same(found: KeptState | None, index: int) -> bool:
    assert found is not None
    expected = state(index)
    return (
        (found.index, found.version, found.rules) == (index, expected.version, expected.rules)
        and np.array_equal(found.params, expected.params)
        and np.array_equal(found.momentum, expected.momentum)
    )


def test_two_are_kept_and_the_newest_is_loaded(tmp_path: Path) -> None:
    kept = StateFiles(tmp_path)
    assert kept.load(SIZE) is None
    for index in (3, 5, 12):
        kept.save(state(index))
    assert same(StateFiles(tmp_path).load(SIZE), 12)
    assert len(list(tmp_path.iterdir())) == 2
    assert StateFiles(tmp_path).load(SIZE + 1) is None
    found = StateFiles(tmp_path).load(SIZE)
    assert found is not None
    assert found.params.flags.writeable


def test_at_every_crash(tmp_path: Path, crash_everywhere: Callable[..., int]) -> None:
    folder = tmp_path / "state"
    said = 0

    def reset() -> None:
        nonlocal said
        shutil.rmtree(folder, ignore_errors=True)
        StateFiles(folder).save(state(1))
        StateFiles(folder).save(state(2))
        said = 2

    def work(files: Files) -> None:
        nonlocal said
        for index in (3, 4):
            StateFiles(folder, files).save(state(index))
            said = index

    def check() -> None:
        found = StateFiles(folder).load(SIZE)
        assert found is not None
        assert found.index in (said, said + 1)
        assert same(found, found.index)
        StateFiles(folder).save(state(found.index + 1))
        assert same(StateFiles(folder).load(SIZE), found.index + 1)

    assert crash_everywhere(work, check, reset) > 30


def test_on_a_failing_disk(tmp_path: Path, fail_everywhere: Callable[..., int]) -> None:
    folder = tmp_path / "state"

    def reset() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        StateFiles(folder).save(state(1))

    def work(files: Files) -> None:
        StateFiles(folder, files).save(state(2))

    def check() -> None:
        found = StateFiles(folder).load(SIZE)
        assert found is not None
        assert same(found, found.index)

    assert fail_everywhere(work, check, reset) > 20


@pytest.mark.parametrize("name", ["params", "momentum", "rules", "manifest"])
@pytest.mark.parametrize("how", ["flip", "truncate", "grow", "remove", "empty"])
def test_a_damaged_one_is_skipped(
    tmp_path: Path, name: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    kept = StateFiles(tmp_path)
    kept.save(state(1))
    kept.save(state(2))
    path = max(tmp_path.iterdir()) / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    changed: dict[str, bytes] = {
        "flip": bytes(data),
        "truncate": bytes(data[:-1]),
        "grow": path.read_bytes() + b"x",
        "empty": b"",
    }
    if how == "remove":
        path.unlink()
    else:
        path.write_bytes(changed[how])
    with caplog.at_level(logging.WARNING):
        assert same(StateFiles(tmp_path).load(SIZE), 1)
    assert "skipped" in caplog.text
    StateFiles(tmp_path).save(state(2))
    assert same(StateFiles(tmp_path).load(SIZE), 2)


def test_the_one_before_stays_until_the_new_one_was_read_back(tmp_path: Path) -> None:
    class Forgetful(Files):
        def write(self, fd: int, data: bytes | memoryview) -> None:
            super().write(fd, bytes(len(memoryview(data).cast("B"))))

    StateFiles(tmp_path).save(state(1))
    with pytest.raises(OperatorError, match="check that disk"):
        StateFiles(tmp_path, Forgetful()).save(state(2))
    assert same(StateFiles(tmp_path).load(SIZE), 1)


def test_list_of_snapshots(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    listed = SnapshotList(tmp_path)
    kept = [KeptSnapshot(i, SnapshotOffer(i, (bytes(32),), (bytes(32),), b"rules")) for i in (16, 32, 48)]
    for snapshot in kept:
        listed.save(snapshot)
    listed.remove(16)
    assert SnapshotList(tmp_path).load() == kept[1:]
    path = max(tmp_path.iterdir())
    path.write_bytes(path.read_bytes()[:-1])
    assert SnapshotList(tmp_path).load() == kept[1:2]
    assert "skipped" in caplog.text
