"""Other text for a fork: its work folder holds what was fetched of the parent already."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from p2pdiloco.errors import OperatorError
from p2pdiloco_node.corpus.making import Request, make_data
from p2pdiloco_node.progress import Quiet


@pytest.fixture
def fetched(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("".join(f"{n} words and more words\n\n" for n in range(5000)))
    chunk = tmp_path / "out/making/fetched/chunk"
    chunk.parent.mkdir(parents=True)
    chunk.write_bytes(b"of the parent")
    return chunk


def made(tmp_path: Path) -> None:
    make_data(Request([str(tmp_path / "a.txt")], seq_len=64), tmp_path / "out", Quiet())


def test_what_is_fetched_is_not_the_makings_to_remove(fetched: Path, tmp_path: Path) -> None:
    """The text is mended in a minute; the parent's version may have come over a thin link."""
    (tmp_path / "a.txt").write_bytes("café\n".encode("latin-1") * 1000)
    with pytest.raises(OperatorError, match="there is no text: 1 of 1 document is broken"):
        made(tmp_path)
    assert [path.name for path in (tmp_path / "out/making").iterdir()] == ["fetched"]
    assert fetched.exists()


def test_a_disk_that_is_too_small_is_said(
    fetched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(OperatorError, match=r"of disk at .* are free"):
        made(tmp_path)
    assert [path.name for path in (tmp_path / "out").rglob("*") if path.is_file()] == [fetched.name]
