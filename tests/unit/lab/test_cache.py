"""What a kept result depends on: everything that a run imports, and what it reads."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

import p2pdiloco
import p2pdiloco_node
from p2pdiloco.sim.lab.experiment import Experiment, Model
from p2pdiloco_node.lab import cache
from p2pdiloco_node.lab.cache import CORE, MODEL, Cache, key_of, source_digest

PACKAGES = {p.__name__: Path(str(p.__file__)).parent for p in (p2pdiloco, p2pdiloco_node)}
# Their words reach people and the environment, not a result.
OUTSIDE = {PACKAGES["p2pdiloco_node"] / "config.py"}


def place_of(module: str) -> Path | None:
    """A module's file; None for packages and for what is not ours."""
    top, *rest = module.split(".")
    if top not in PACKAGES or not rest:
        return None
    file = PACKAGES[top].joinpath(*rest).with_suffix(".py")
    return file if file.is_file() else None


def imported(start: str) -> set[Path]:
    """Files of ours that a module imports, directly or not."""
    found: set[Path] = set()
    ahead = [start]
    while ahead:
        file = place_of(ahead.pop())
        if file is None or file in found or file in OUTSIDE:
            continue
        found.add(file)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                ahead += [node.module, *(f"{node.module}.{name.name}" for name in node.names)]
            elif isinstance(node, ast.Import):
                ahead += [name.name for name in node.names]
    return found


def missing(files: set[Path], listed: Iterable[Path]) -> list[Path]:
    places = set(listed)
    return sorted(f for f in files if not places & {f, *f.parents})


def test_every_module_that_a_run_imports_is_in_the_key() -> None:
    core, shell = PACKAGES["p2pdiloco"], PACKAGES["p2pdiloco_node"]
    engine = imported("p2pdiloco.sim.lab.engine")
    assert core / "rules" / "outer_step.py" in engine
    assert missing(engine, (core / part for part in CORE)) == []
    model = imported("p2pdiloco_node.lab.model")
    assert shell / "training" / "inner_loop.py" in model
    # Frames come in with a trainer's messages; the whole of wire/ is listed.
    assert missing(model, [*(core / part for part in CORE), *(shell / part for part in MODEL)]) == []


@pytest.mark.parametrize("with_model", [False, True])
def test_a_listed_module_that_moved_is_our_own_fault(
    with_model: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "MODEL" if with_model else "CORE", ("gone.py",))
    with pytest.raises(AssertionError, match=r"gone\.py decides results and is not there"):
        source_digest.__wrapped__(with_model=with_model)


@pytest.mark.parametrize("package", ["numpy", "torch", "transformers"])
def test_versions_of_what_computes_are_in_the_key(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Experiment(model=Model(kind="none"))
    before, plain_before = key_of(Experiment(), 1), key_of(plain, 1)
    real = cache._version
    monkeypatch.setattr(cache, "_version", lambda name: "other" if name == package else real(name))
    assert key_of(Experiment(), 1) != before
    assert (key_of(plain, 1) != plain_before) is (package == "numpy")


def test_a_fresh_run_is_kept_under_what_it_began_with(tmp_path: Path, fake: ModuleType) -> None:
    text = tmp_path / "a.txt"
    text.write_text("one")
    experiment = msgspec.convert({"data": {"files": [str(text)]}}, Experiment)
    fresh = Cache(tmp_path / "cache", fresh=True)
    assert fresh.find(experiment, 1) is None
    text.write_text("two")  # while it runs
    fresh.keep(experiment, fake.result(experiment, 1))
    cache._data_digest.cache_clear()  # the next process
    assert Cache(tmp_path / "cache").find(experiment, 1) is None
    text.write_text("one")
    cache._data_digest.cache_clear()
    assert Cache(tmp_path / "cache").find(experiment, 1) is not None
