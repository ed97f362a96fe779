"""Identity on disk, and whose folder it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from p2pdiloco.errors import OperatorError
from p2pdiloco.ids import RunId
from p2pdiloco_node.storage.data_dir import DataDir
from p2pdiloco_node.storage.keys import check_key, load_key, load_or_make_key, make_key


def test_made_once_for_nobody_else(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "identity.key"
    key = load_or_make_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_or_make_key(path).peer_id == key.peer_id
    with pytest.raises(OperatorError, match="never overwritten"):
        make_key(path)


def test_a_key_that_cannot_be_made_or_read_is_known_before_it_is_needed(tmp_path: Path) -> None:
    check_key(tmp_path / "deep" / "owner.key")
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(OperatorError, match="file is no folder"):
        check_key(tmp_path / "file" / "deep" / "owner.key")
    make_key(tmp_path / "owner.key")
    check_key(tmp_path / "owner.key")
    (tmp_path / "owner.key").write_text("damaged")
    with pytest.raises(OperatorError, match="is damaged"):
        check_key(tmp_path / "owner.key")


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o644, 0o666, 0o610])
def test_a_key_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "identity.key"
    make_key(path)
    path.chmod(mode)
    with pytest.raises(OperatorError, match=f"chmod 600 {path}"):
        load_or_make_key(path)
    path.chmod(0o600)
    load_or_make_key(path)


@pytest.mark.parametrize("text", ["", "ab", "g" * 64, "a" * 63, "a" * 65, "é" * 32, "00" * 31 + " 0"])
def test_a_damaged_key_is_refused_and_kept(tmp_path: Path, text: str) -> None:
    path = tmp_path / "identity.key"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(OperatorError, match="damaged"):
        load_or_make_key(path)
    assert path.read_text() == text


def test_no_key_and_a_folder_in_its_place(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="no key file"):
        load_key(tmp_path / "none")
    with pytest.raises(OperatorError, match="not a file"):
        load_or_make_key(tmp_path)


def test_a_second_daemon_on_the_same_folder_is_refused(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from p2pdiloco_node.storage.data_dir import DataDir\n"
        "with DataDir(Path(sys.argv[1])): print('in', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"in\n"
        with pytest.raises(OperatorError, match=rf"process {other.pid}\) already uses"), DataDir(tmp_path):
            pass
        other.kill()
        other.wait()
        with DataDir(tmp_path) as folder:
            assert folder.run_folder(RunId(bytes(32))).is_relative_to(tmp_path)
