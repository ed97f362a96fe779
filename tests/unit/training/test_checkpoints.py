"""Moments on disk: whole or skipped (scenarios F1 and F2)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from p2pdiloco_node.training.checkpoints import MomentsCheckpoints
from p2pdiloco_node.training.frames import Saved
from p2pdiloco_node.training.moments_file import read_moments, write_moments

PARAMS = 50


def store(folder: Path) -> MomentsCheckpoints:
    return MomentsCheckpoints(folder, lambda path, data: path.write_bytes(data) and None)


def save(checkpoints: MomentsCheckpoints, steps: int) -> Path:
    path = checkpoints.next_path()
    size, digest = write_moments(path, steps, np.full((2, PARAMS), steps, np.float32))
    checkpoints.commit(Saved(str(path), size, digest))
    return path


def steps_in(path: Path | None) -> int:
    assert path is not None
    steps, both = read_moments(path, PARAMS)
    assert (both == steps).all()
    return steps


def test_nothing_yet(tmp_path: Path) -> None:
    assert store(tmp_path).newest() is None


def test_the_newest_is_found_again_and_the_one_before_kept(tmp_path: Path) -> None:
    checkpoints = store(tmp_path)
    for steps in (10, 20, 30):
        save(checkpoints, steps)
    assert steps_in(store(tmp_path).newest()) == 30
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "manifest.2",
        "manifest.3",
        "moments.2",
        "moments.3",
    ]


def test_data_without_a_manifest_does_not_count(tmp_path: Path) -> None:
    """kill -9 after the data and before its manifest."""
    checkpoints = store(tmp_path)
    save(checkpoints, 10)
    write_moments(checkpoints.next_path(), 20, np.zeros((2, PARAMS), np.float32))
    again = store(tmp_path)
    assert steps_in(again.newest()) == 10
    assert steps_in(save(again, 30)) == 30  # under a name of its own
    assert steps_in(store(tmp_path).newest()) == 30


@pytest.mark.parametrize("cut", ["moments", "manifest", "flip", "gone"])
def test_a_damaged_newest_falls_back(tmp_path: Path, cut: str, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = store(tmp_path)
    save(checkpoints, 10)
    newest = save(checkpoints, 20)
    if cut == "moments":
        newest.write_bytes(newest.read_bytes()[:-1])
    elif cut == "manifest":
        manifest = tmp_path / "manifest.2"
        manifest.write_bytes(manifest.read_bytes()[:-1])
    elif cut == "flip":
        data = bytearray(newest.read_bytes())
        data[100] ^= 4
        newest.write_bytes(data)
    else:
        newest.unlink()
    assert steps_in(store(tmp_path).newest()) == 10
    assert "damaged" in caplog.text


def test_forgotten_after_a_long_absence(tmp_path: Path) -> None:
    checkpoints = store(tmp_path)
    save(checkpoints, 10)
    (tmp_path / "something-else").touch()
    checkpoints.forget()
    assert checkpoints.newest() is None
    assert [p.name for p in tmp_path.iterdir()] == ["something-else"]


def test_moments_of_another_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="bytes instead of"):
        read_moments(save(store(tmp_path), 1), PARAMS + 1)
