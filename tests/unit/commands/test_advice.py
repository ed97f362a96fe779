"""A command that is printed for people to copy is one that their shell takes, whatever the path is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2pdiloco.errors import OperatorError
from p2pdiloco_node.export import command as export_command
from p2pdiloco_node.owner import command as owner_command
from p2pdiloco_node.run import command as run_command
from p2pdiloco_node.tracker import _open_run
from p2pdiloco_node.training.model_choice import ModelChoice

OUT = Path("a b/it's")
QUOTED = """'a b/it'"'"'s'"""


def test_after_an_export(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    facts = {"version": 1, "run": {"name": "x", "id": "00" * 32}, "weights": {"dtype": "float32"}}
    folder = SimpleNamespace(facts=facts, files=())
    monkeypatch.setattr(export_command, "export", lambda *_: folder)
    export_command.print_export(export_command.Options(OUT))
    assert f"p2pdiloco generate --from {QUOTED} --prompt" in capsys.readouterr().out


def test_after_a_new_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    async def created(*_: object, **__: object) -> bytes:
        return bytes(32)

    monkeypatch.setattr(run_command, "create_run", created)
    parts: Any = {
        "run": {"name": "x"}, "model": {"model": "llama:tiny"}, "data": {}, "inner": {}, "outer": {},
        "committee": {}, "samples": {},
    }  # fmt: skip
    declared: Any = None
    run_command.print_made(parts, OUT, 1, None, declared)
    assert f"p2pdiloco tracker --run {QUOTED} --listen HOST:PORT" in capsys.readouterr().out


def test_after_a_fork(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parent = SimpleNamespace(run=bytes(32), version=3)

    async def forked(*_: object, **__: object) -> Any:
        spec = SimpleNamespace(parent=parent, target_tokens=10, target_version=0)
        return SimpleNamespace(spec=spec, run=bytes(32), warnings=())

    monkeypatch.setattr(owner_command, "fork", forked)
    reach: Any = SimpleNamespace(where=str(tmp_path), key=None)
    nothing: Any = None
    owner_command.print_forked(reach, "newest", OUT, nothing, nothing, as_json=False)
    assert f"p2pdiloco tracker --run {QUOTED} --listen HOST:PORT" in capsys.readouterr().out


def test_where_there_is_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OperatorError) as caught:
        _open_run(OUT)
    assert str(caught.value).endswith(f"p2pdiloco run new --out {QUOTED}.")


def test_where_a_model_has_a_tokenizer_of_its_own() -> None:
    rung: Any = None
    choice = ModelChoice("x", "llama", {"vocab_size": 3}, 8, rung, OUT, None)
    with pytest.raises(OperatorError) as caught:
        choice.arguments(4)
    assert """--tokenizer 'a b/it'"'"'s/tokenizer.json')""" in str(caught.value)
