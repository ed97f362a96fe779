"""How figures get out: whole or not at all, in any encoding, and a sentence where they do not."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from pathlib import Path

import pytest

from p2pdiloco.errors import OperatorError
from p2pdiloco_node.cli import run_command
from p2pdiloco_node.lab.seeds import parse_seeds, print_simulation, say, write_output


def full_disk(part: Path, data: bytes) -> int:
    with part.open("wb") as opened:
        opened.write(data[:3])
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(b"good")
    monkeypatch.setattr(Path, "write_bytes", full_disk)
    with pytest.raises(OperatorError, match=r"a\.json cannot be written: No space left on device") as refused:
        write_output(file, b"newer")
    assert refused.value.exit_code == 6
    assert file.read_bytes() == b"good"
    assert list(tmp_path.iterdir()) == [file]


def test_a_link_a_mode_and_a_pipe_stay_what_they_are(tmp_path: Path) -> None:
    file, link, pipe = tmp_path / "a.json", tmp_path / "link", tmp_path / "pipe"
    file.write_bytes(b"old")
    file.chmod(0o640)
    link.symlink_to(file)
    write_output(link, b"new")
    assert (link.is_symlink(), file.read_bytes(), file.stat().st_mode & 0o777) == (True, b"new", 0o640)
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_output(pipe, b"through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("flags", [[], ["--json", "-"]])
def test_a_full_standard_output_is_a_sentence(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Path("/dev/full").open("w") as full, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", full)
        assert run_command(["simulate", "--seeds", "5", *flags]) == 6
    said = capsys.readouterr().err
    assert said == (
        "p2pdiloco: Standard output cannot be written: No space left on device; make room there.\n"
    )


def test_any_encoding_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", narrow)
    say("\U0001f419 …")
    assert narrow.buffer.getvalue() == b"? ?\n"  # type: ignore[attr-defined]


def test_the_report_is_written_though_nobody_reads_the_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as gone, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", gone)
        with pytest.raises(BrokenPipeError):
            print_simulation("5", json_file=str(tmp_path / "a.json"))
        os.dup2(os.open(os.devnull, os.O_WRONLY), gone.fileno())
    assert json.loads((tmp_path / "a.json").read_text())["seeds"] == 1


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("18446744073709551616", "at most 18446744073709551615"),
        (f"0..{10**30}", "at most 18446744073709551615"),
        (f"0..{2**63}", "seeds at once"),
        (f"-{2**70}..5", "seeds at once"),
        ("9" * 5000, "is not understood"),
    ],
)
def test_seeds_have_64_bits(text: str, sentence: str) -> None:
    with pytest.raises(OperatorError, match=sentence) as refused:
        parse_seeds(text)
    assert refused.value.exit_code == 2
    assert len(str(refused.value)) < 250
    assert parse_seeds("18446744073709551615") == [2**64 - 1]


@pytest.mark.parametrize("jobs", [-3, 257])
def test_processes_are_counted_from_one(jobs: int) -> None:
    with pytest.raises(OperatorError, match=f"--jobs {jobs}: give 1 to 256") as refused:
        print_simulation("5", jobs=jobs)
    assert refused.value.exit_code == 2
