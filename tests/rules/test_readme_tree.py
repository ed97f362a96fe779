"""The README's tree is the map that newcomers use: every file has a line, every line has a file."""

from __future__ import annotations

from pathlib import Path

import pytest

# Folders that may stand for all they hold; everything else is listed file by file.
AS_ONE = ("tests/", "docs/adr/", "docs/results/")
SKIPPED = (".gitignore", ".gitattributes")


def tree_block(readme: str) -> str:
    _, _, after = readme.partition("## The tree\n")
    _, _, block = after.partition("```text\n")
    return block.partition("```")[0]


def entries(block: str) -> dict[str, str]:
    """Path to its line's description; folders end in a slash."""
    found: dict[str, str] = {}
    above: list[str] = []
    for line in block.splitlines():
        if not line.strip():
            continue
        name, _, text = line.strip().partition(" ")
        depth = (len(line) - len(line.lstrip(" "))) // 2
        above = [*above[:depth], name]
        found["".join(above)] = text.strip()
    return found


def faults(listed: dict[str, str], files: list[str]) -> list[str]:
    wrong = [f"{path} is listed without a word about it" for path, text in listed.items() if not text]
    folders = {path for path in listed if path.endswith("/")}
    whole = [folder for folder in folders if folder.startswith(AS_ONE) and folder != "tests/"]
    wrong += [
        f"{path} has no line in the README's tree"
        for path in files
        if path not in listed and path not in SKIPPED and not path.startswith(tuple(whole))
    ]
    wrong += [
        f"the README's tree lists {path}, which does not exist"
        for path in listed
        if path not in files and not (path.endswith("/") and any(file.startswith(path) for file in files))
    ]
    return wrong


def test_the_tree_is_the_repository(root: Path, files: list[Path]) -> None:
    listed = entries(tree_block((root / "README.md").read_text()))
    assert len(listed) > 20
    wrong = faults(listed, [path.as_posix() for path in files])
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["a/b.py", "a/c.py", "tests/unit/x.py"], "a/c.py has no line"),
        (["tests/unit/x.py"], "lists a/b.py, which does not exist"),
        (["a/b.py", "tests/other/x.py"], "tests/other/x.py has no line"),
    ],
)
def test_the_check_finds_what_it_is_for(files: list[str], message: str) -> None:
    listed = entries("a/        first\n  b.py    second\ntests/    third\n  unit/   fourth\n")
    assert listed == {"a/": "first", "a/b.py": "second", "tests/": "third", "tests/unit/": "fourth"}
    assert any(message in fault for fault in faults(listed, files))
