"""Temporary folders: of one call alone while it lives, and nobody's once it was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from p2pdiloco_node.cli import run_command
from p2pdiloco_node.storage.scratch import remove_temporary_folders, temporary_folder

KILLED = """
import os, signal
from p2pdiloco_node.storage.scratch import temporary_folder
with temporary_folder("generate") as folder:
    (folder / "model").mkdir()
    (folder / "model" / "model.safetensors").write_bytes(bytes(1000))
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_what_a_killed_command_left_goes_with_the_next_one(tmp_path: Path) -> None:
    """A model of gigabytes stayed in the temporary folder for ever."""
    env = os.environ | {"TMPDIR": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", KILLED], env=env, check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    assert [len(list(left.rglob("*"))) for left in tmp_path.iterdir()] == [2]
    with temporary_folder("demo") as folder:
        assert run_command(["--version"]) == 0
        assert list(tmp_path.iterdir()) == [folder], "one that is in use stays"
    assert list(tmp_path.iterdir()) == []


def test_nothing_else_is_touched(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("mine")
    name = "p2pdiloco-generate-" + "0" * 31
    (tmp_path / f"{name}1").symlink_to(elsewhere)
    (tmp_path / f"{name}2").write_text("no folder")
    (tmp_path / name).mkdir()  # one digit less
    (tmp_path / "p2pdiloco-node").mkdir()
    before = sorted(tmp_path.rglob("*"))
    remove_temporary_folders()
    assert sorted(tmp_path.rglob("*")) == before


def test_of_another_user_nothing_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ("p2pdiloco-generate-" + "0" * 32)
    folder.mkdir()
    me = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    remove_temporary_folders()
    assert folder.is_dir()
    monkeypatch.setattr(os, "getuid", lambda: me)
    remove_temporary_folders()
    assert not folder.exists()
