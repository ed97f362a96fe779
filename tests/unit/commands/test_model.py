"""Flags of `export` and `generate` arrive where they work; slips are said in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from p2pdiloco_node import tracker
from p2pdiloco_node.cli import run_command
from p2pdiloco_node.export import command as export_command
from p2pdiloco_node.generation import command as generate_command

LINK = "http://127.0.0.1:7474/#" + "ab" * 32


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the commands were called with."""
    found: list[Any] = []

    def note(options: Any) -> int:
        found.append(options)
        return 0

    monkeypatch.setattr(export_command, "print_export", note)
    monkeypatch.setattr(generate_command, "print_generated", note)
    monkeypatch.setattr(tracker, "run_tracker", note)
    return found


def test_export(given: list[Any]) -> None:
    assert run_command(["export", "--join", LINK, "--format", "hf", "out"]) == 0
    assert given[-1] == export_command.Options(Path("out"), LINK)
    words = ["export", "out", "--run", "r", "--version", "12", "--dtype", "bfloat16", "--held-out"]
    assert run_command(words) == 0
    expected = export_command.Options(Path("out"), None, Path("r"), None, "12", "bfloat16", True)
    assert given[-1] == expected
    assert run_command(["export", "--data-dir", "d", "out"]) == 0
    assert given[-1].data_dir == Path("d")


def test_generate(given: list[Any]) -> None:
    assert run_command(["generate", "--from", "out", "--prompt", "--- a list"]) == 0
    assert given[-1] == generate_command.Options("out", "--- a list")
    words = (
        "generate --from out --prompt x --tokens 5 --temperature 0.5 --top-p 0.9 --seed 3 --device cpu --json"
    )
    assert run_command(words.split()) == 0
    assert given[-1] == generate_command.Options("out", "x", 5, 0.5, 0.9, 3, "cpu", True)


def test_checkpoints(given: list[Any]) -> None:
    assert run_command(["tracker", "--run", "r"]) == 0
    assert given[-1].checkpoints == 3
    assert run_command(["tracker", "--run", "r", "--checkpoints", "0"]) == 0
    assert given[-1].checkpoints == 0


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["export", "--join", LINK], 2, "OUT"),
        (["export", "out", "--format", "onnx"], 2, "onnx"),
        (["export", "out", "--dtype", "int8"], 2, "int8"),
        (["generate", "--prompt", "x"], 2, "--from"),
        (["generate", "--from", "out"], 2, "--prompt"),
        (["generate", "--from", "out", "--prompt", "x", "--tokens", "2.5"], 2, "not a whole number"),
        (["generate", "--from", "out", "--prompt", "x", "--temprature", "1"], 2, "'--temperature'"),
        (["tracker", "--run", "r", "--checkpoints", "17"], 3, "checkpoints"),
    ],
)
def test_slips(words: list[str], code: int, sentence: str, given: list[Any], capsys: Any) -> None:
    assert run_command(words) == code
    said = capsys.readouterr().err
    assert sentence in said
    assert len(said.strip().splitlines()) == 1
    assert given == []
