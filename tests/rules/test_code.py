"""Small rules about the code itself: size, banned calls, comments on limits, nothing private inside."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from p2pdiloco_node.storage import run_folder

LINES_MAX = 500
BANNED_MODULES = ("pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve")
BANNED_CALLS = ("eval", "exec", "torch.load", "yaml.load", "yaml.unsafe_load", "np.load", "numpy.load")
BANNED_NAMES = ("utils.py", "util.py", "helpers.py", "misc.py", "common.py")
# Assembled from parts, or this file would find itself.
PRIVATE = tuple(
    "".join(parts)
    for parts in (
        ("/wo", "rk/"),
        ("/ro", "ot/"),
        ("/op", "t/wheels"),
        ("/op", "t/pypi"),
        ("pypi", ".org"),
        ("download.pytorch", ".org"),
    )
)
TEXT = {
    ".py",
    ".md",
    ".toml",
    ".yaml",
    ".yml",
    ".html",
    ".css",
    ".js",
    ".json",
    ".sh",
    ".service",
    ".Dockerfile",
    "",
}


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def banned_faults(source: str) -> list[str]:
    """Ways in which bytes from outside could become code."""
    faults = []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        faults += [
            f"line {node.lineno} imports {name}: use MessagePack through p2pdiloco/wire/codec.py"  # type: ignore[attr-defined]
            for name in names
            if name.partition(".")[0] in BANNED_MODULES
        ]
        if isinstance(node, ast.Call):
            call = dotted(node.func)
            if call in BANNED_CALLS:
                faults.append(
                    f"line {node.lineno} calls {call}: raw arrays go through np.frombuffer with a size"
                )
            if any(word.arg == "allow_pickle" for word in node.keywords):
                faults.append(f"line {node.lineno} says allow_pickle: never")
    return faults


def test_nothing_turns_bytes_into_code(root: Path, files: list[Path]) -> None:
    python = [path for path in files if path.suffix == ".py"]
    faults = [f"{path} {fault}" for path in python for fault in banned_faults((root / path).read_text())]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x', weights_only=True)",
        "eval('1')",
        "import yaml\nyaml.load('')",
        "import numpy as np\nnp.fromfile('x', allow_pickle=True)",
    ],
)
def test_banned_calls_are_found(source: str) -> None:
    assert banned_faults(source)


def test_model_eval_is_not_a_banned_call() -> None:
    assert banned_faults("model.eval()") == []


def test_no_file_is_too_long(root: Path, files: list[Path]) -> None:
    long = {
        str(path): lines
        for path in files
        if path.suffix in {".py", ".html", ".css", ".js"}
        and (lines := (root / path).read_text().count("\n")) > LINES_MAX
    }
    assert not long, f"over {LINES_MAX} lines, split by what changes together: {long}"


def test_no_drawer_modules(files: list[Path]) -> None:
    drawers = [str(path) for path in files if path.name in BANNED_NAMES]
    assert not drawers, f"name these after what they do: {drawers}"


def test_modules_explain_themselves(root: Path, sources: list[Path]) -> None:
    silent = [str(p) for p in sources if not ast.get_docstring(ast.parse((root / p).read_text()))]
    assert not silent, f"a module begins with a docstring that says what it is: {silent}"


def test_every_limit_has_a_unit_and_a_reason(root: Path) -> None:
    """A bare number in limits.py tells nobody what breaks when it changes."""
    plain = {"KIB", "MIB"}
    reasons = re.compile(r"^(\w+)(?:: \w+)? = [^#]+(#.*)?$")
    missing = []
    seen = 0
    for line in (root / "p2pdiloco/limits.py").read_text().splitlines():
        match = reasons.match(line)
        if match and match[1] not in plain:
            seen += 1
            if not match[2] or len(match[2]) < 10:
                missing.append(match[1])
    assert seen > 20
    assert not missing, f"limits without a comment that says why: {missing}"


def test_no_machine_or_registry_is_named(root: Path, files: list[Path]) -> None:
    found = []
    for path in files:
        if path.suffix not in TEXT:
            continue
        text = (root / path).read_text(errors="replace")
        # A folder of the same name inside something else (RUN/work/) is no machine's path.
        found += [f"{path}: {name}" for name in PRIVATE if re.search(r"(?<!\w)" + re.escape(name), text)]
    assert not found, "the repository speaks of the project alone:\n" + "\n".join(found)


def test_names_in_a_run_s_folder_are_written_once(root: Path, sources: list[Path]) -> None:
    names = {run_folder.SPEC, run_folder.WITNESS_KEY, run_folder.HISTORY, run_folder.ADDRESS}
    wrong = [
        f"{path}:{node.lineno}: {node.value!r}"
        for path in sources
        if path != Path("node/p2pdiloco_node/storage/run_folder.py")
        for node in ast.walk(ast.parse((root / path).read_text()))
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert not wrong, "take it from node/p2pdiloco_node/storage/run_folder.py: " + ", ".join(wrong)


def test_nothing_is_raised_in_a_group_s_handler(sources: list[Path]) -> None:
    """Before Python 3.11.4 what is raised inside `except*` comes out wrapped in a group: raise it behind."""
    handlers = [
        (path, handler)
        for path in sources
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.TryStar)
        for handler in node.handlers
    ]
    assert handlers
    raising = [
        f"{path}:{inner.lineno}"
        for path, handler in handlers
        for inner in ast.walk(handler)
        if isinstance(inner, ast.Raise)
    ]
    assert raising == []
