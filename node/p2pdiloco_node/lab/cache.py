"""Results of earlier runs, kept by everything that they depend on.

The key covers the experiment without its name, the seed, the code that matters (as parsed, so that comments,
docstrings and layout do not count), the data files' content and the versions of Python, numpy, torch and
transformers. It does not cover the machine: the folder is for one. Each entry holds a digest of its content.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import platformdirs

import p2pdiloco
import p2pdiloco_node
from p2pdiloco import limits
from p2pdiloco.sim.lab.experiment import Experiment
from p2pdiloco.sim.lab.result import Result
from p2pdiloco_node.config import LAB_COMPILE
from p2pdiloco_node.corpus.sources import find_files
from p2pdiloco_node.lab.study import read_regular

CORE = (  # of p2pdiloco: what a run imports
    "errors.py", "exit_codes.py", "ids.py", "limits.py", "run_spec.py", "words.py", "rules", "diloco",
    "wire",
    "sim/lab", "sim/chance.py", "sim/clock.py", "sim/keys.py", "sim/tiny_run.py",
)  # fmt: skip
MODEL = (  # of p2pdiloco_node, for arms with a model
    "lab/model.py", "lab/compiling.py", "lab/networks.py", "lab/text.py",
    "training/activations.py", "training/adamw.py", "training/arrays.py", "training/data.py",
    "training/device.py", "training/flat_params.py", "training/moments_file.py", "training/rank_group.py",
    "training/families.py", "training/inner_loop.py", "training/losses.py", "training/machine.py",
    "training/memory_plan.py", "training/models.py", "training/presets.py", "training/ram.py",
    "training/shapes.py",
    "training/shard_plan.py", "training/sharded_params.py",
    "corpus/documents.py", "corpus/held_out.py", "corpus/in_memory.py", "corpus/readers.py",
    "corpus/sources.py", "corpus/streams.py", "corpus/tables.py", "corpus/token_input.py",
)  # fmt: skip


class Cache:
    """A folder of results; `fresh` writes and never reads."""

    def __init__(self, folder: Path | None = None, *, fresh: bool = False) -> None:
        self.folder = folder or Path(platformdirs.user_cache_dir("p2pdiloco")) / "lab"
        self.fresh = fresh

    def find(self, experiment: Experiment, seed: int) -> Result | None:
        """A kept result, under this arm's name; None where there is none or it cannot be read."""
        # Also where it is not read: the run to come belongs to the code and the data of now.
        path = self._path(experiment, seed)
        if self.fresh:
            return None
        try:
            result = _opened(path.name, read_regular(path, limits.lab_message_bytes_max))
        except (OSError, ValueError, RecursionError):
            return None
        return msgspec.structs.replace(result, arm=experiment.name)

    def keep(self, experiment: Experiment, result: Result) -> str:
        """Written whole or not at all. A cache that cannot be written is no reason to lose a run.

        Returns: why it is not kept; empty if it is.
        """
        path = self._path(experiment, result.seed)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            part.write_bytes(_sealed(path.name, json.dumps(msgspec.to_builtins(result)).encode()))
            part.replace(path)
        except OSError as error:
            return error.strerror or str(error)
        finally:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
        return ""

    def trim(self) -> None:
        """Remove the oldest results beyond the limit."""
        with contextlib.suppress(OSError):
            files = sorted((p.stat().st_mtime, p.stat().st_size, p) for p in self.folder.iterdir())
            total = sum(size for _, size, _ in files)
            for _, size, path in files:
                if total <= limits.lab_cache_bytes_max:
                    break
                path.unlink(missing_ok=True)
                total -= size

    def _path(self, experiment: Experiment, seed: int) -> Path:
        return self.folder / f"{key_of(experiment, seed)}.json"


def _sealed(name: str, body: bytes) -> bytes:
    """An entry of that name: a digest, and a result in Python's own JSON, which knows infinity."""
    return b'{"digest": "%s", "result": %s}' % (
        hashlib.sha256(name.encode() + body).hexdigest().encode(),
        body,
    )


def _opened(name: str, data: bytes) -> Result:
    """Raises: ValueError: not as it was written under this name."""
    body = data[len(_sealed("", b"")) - 1 : -1]
    if _sealed(name, body) != data:
        raise ValueError(f"{name} is damaged")
    return msgspec.convert(json.loads(body), Result)


def key_of(experiment: Experiment, seed: int) -> str:
    """Hex digest of everything that a run depends on.

    Raises: OperatorError: a data file that is named is not there.
    """
    learns = experiment.model.kind != "none"
    parts = [
        msgspec.json.encode(msgspec.structs.replace(experiment, name="")),
        str(seed).encode(),
        source_digest(with_model=learns).encode(),
        platform.python_version().encode(),
        _version("numpy").encode(),
    ]
    if learns:
        # Compiled and eager steps round differently.
        switch = os.environ.get(LAB_COMPILE, "")
        parts += [_data_digest(experiment.data.files).encode(), switch.encode()]
        parts += [_version(package).encode() for package in ("torch", "transformers")]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()[:40]


@functools.cache
def source_digest(*, with_model: bool) -> str:
    """Hex digest of the code that decides a result, without docstrings, comments and layout.

    Read once in a process, so later edits do not get into it.
    """
    core, shell = (Path(str(p.__file__)).parent for p in (p2pdiloco, p2pdiloco_node))
    places = [core / part for part in CORE]
    if with_model:
        places += [shell / part for part in MODEL]
    for place in places:
        # A module that moved would drop out of the key unseen.
        assert place.exists(), f"{place} decides results and is not there"
    files = [f for place in places for f in _python_files(place)]
    digest = hashlib.sha256()
    for file in files:
        digest.update(code_of(file.read_text(encoding="utf-8")).encode())
    return digest.hexdigest()


def code_of(source: str) -> str:
    """A module as Python sees it, docstrings left out."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        kept = [
            s
            for s in body
            if not (
                isinstance(s, ast.Expr)
                and isinstance(s.value, ast.Constant)
                and isinstance(s.value.value, str)
            )
        ]
        node.body = kept  # type: ignore[attr-defined]
    return ast.dump(tree)


def _python_files(place: Path) -> Iterable[Path]:
    return [place] if place.is_file() else sorted(place.rglob("*.py"))


@functools.cache
def _data_digest(files: tuple[str, ...]) -> str:
    """The standard library is known by Python's version; files that are named, by their content."""
    if not files:
        return ""
    digest = hashlib.sha256()
    for block in _blocks(find_files(files)):
        digest.update(block)
    return digest.hexdigest()


def _blocks(files: Iterable[Path]) -> Iterator[bytes]:
    for file in files:
        with file.open("rb") as opened:
            yield f"{file.name}\0".encode() + hashlib.file_digest(opened, "sha256").digest()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
