"""One daemon to a folder; what is said to the second, and to whoever names a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2pdiloco.errors import OperatorError
from p2pdiloco_node.storage.data_dir import DataDir


def test_the_second_daemon_hears_what_it_can_do(tmp_path: Path) -> None:
    with DataDir(tmp_path):
        with pytest.raises(OperatorError, match=r"stop it, or give this one a folder .* --data-dir"):
            DataDir(tmp_path).__enter__()
        with pytest.raises(OperatorError, match=r"stop it, or leave it running.$") as caught:
            DataDir(tmp_path, otherwise="leave it running").__enter__()
        assert "--data-dir" not in str(caught.value)
    with DataDir(tmp_path):
        pass  # free again


@pytest.mark.parametrize("below", ["", "below"])
def test_a_file_is_no_folder(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OperatorError, match="a file has that name or is on the way") as caught:
        DataDir(tmp_path / "file" / below).__enter__()
    assert caught.value.exit_code == 3
    assert "disk" not in str(caught.value)
