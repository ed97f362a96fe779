"""Each flag of `generate` is in what the process with the model is asked (the rest: test_generate.py)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from p2pdiloco_node.cli import run_command
from p2pdiloco_node.generation import command

ECHO = """
import json, sys
asked = sys.stdin.readline()
print(json.dumps({"type": "said", "text": asked}))
print(json.dumps({"type": "done", "tokens": 1, "seconds": 0.5, "why": "tokens", "device": "cpu"}))
"""


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        ("", "tokens", 128),
        ("--tokens 5", "tokens", 5),
        ("--temperature 0.5", "temperature", 0.5),
        ("--top-p 0.25", "top_p", 0.25),
        ("--seed 7", "seed", 7),
        ("--device cuda:1", "device", "cuda:1"),
    ],
)
def test_what_the_process_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: str,
    key: str, value: Any,
) -> None:  # fmt: skip
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(command, "WORKER", (sys.executable, "-c", ECHO))
    words = ["generate", "--from", str(tmp_path), "--prompt", "a prompt", "--json", *flags.split()]
    assert run_command(words) == 0
    asked = json.loads(json.loads(capsys.readouterr().out)["text"])
    assert asked[key] == value
    assert (asked["folder"], asked["prompt"]) == (str(tmp_path), "a prompt")
