"""Flag before variable before file before default, for each kind of value; and no peers are not "none"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from p2pdiloco_node.cli import run_command


@pytest.mark.parametrize(
    ("key", "flag", "variable", "in_file", "values"),
    [
        ("threads", ["--threads", "4"], "3", "2", (4, 3, 2, 1)),  # a number
        ("peers", ["--peers", "c:3"], "b:2", '["a:1"]', (("c:3",), ("b:2",), ("a:1",), None)),  # a list
        ("data_dir", ["--data-dir", "f"], "v", '"t"', ("f", "v", "t", "p2pdiloco-node")),  # a path
        (
            "device",
            ["--device", "cpu"],
            "cuda:1",
            '"cuda:2"',
            ("cpu", "cuda:1", "cuda:2", "auto"),
        ),  # a choice
    ],
)
def test_flag_before_variable_before_file_before_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, flag: list[str], variable: str, in_file: str,
    values: tuple[Any, ...],
) -> None:  # fmt: skip
    """Each is left out in turn."""
    file = tmp_path / "node.toml"
    file.write_text(f"{key} = {in_file}\n")
    named = ["--config", str(file)]
    monkeypatch.setenv(f"P2PDILOCO_{key.upper()}", variable)
    got = [asked(monkeypatch, key, *named, *flag), asked(monkeypatch, key, *named)]
    monkeypatch.delenv(f"P2PDILOCO_{key.upper()}")
    got += [asked(monkeypatch, key, *named), asked(monkeypatch, key)]
    assert tuple(got) == values


def test_a_switch_is_turned_on_and_off_by_whoever_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "node.toml"
    file.write_text("stay = true\n")
    named = ["--config", str(file)]
    assert asked(monkeypatch, "stay") is False
    assert asked(monkeypatch, "stay", *named) is True
    assert asked(monkeypatch, "stay", *named, "--no-stay") is False
    monkeypatch.setenv("P2PDILOCO_STAY", "0")
    assert asked(monkeypatch, "stay", *named) is False
    assert asked(monkeypatch, "stay", *named, "--stay") is True


def asked(patch: pytest.MonkeyPatch, key: str, *words: str) -> Any:
    """What the daemon of this command line is told."""
    told: list[Any] = []
    with patch.context() as patched:
        patched.setattr("p2pdiloco_node.daemon.run_node", lambda config: told.append(config) or 0)
        assert run_command(["node", *words]) == 0
    return getattr(told[0], key)


@pytest.mark.parametrize("how", ["flag", "variable", "file"])
def test_an_empty_list_of_peers_is_refused_wherever_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    """Scenario G1: a variable that is not set."""
    monkeypatch.chdir(tmp_path)
    words = ["node", "--join", "http://127.0.0.1:9/", "--data-dir", "n"]
    if how == "flag":
        words += ["--peers", ""]
    elif how == "variable":
        monkeypatch.setenv("P2PDILOCO_PEERS", "")
    else:
        Path("node.toml").write_text("peers = []\n")
        words += ["--config", "node.toml"]
    assert run_command(words) == 2
    assert "The list of peers is empty (an unset variable?)" in capsys.readouterr().err
    assert not Path("n").exists()
