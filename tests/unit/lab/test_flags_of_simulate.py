"""Each flag of `simulate` changes what is run, printed or written: the real command, a stand-in engine."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from p2pdiloco_node.cli import run_command
from p2pdiloco_node.lab import command
from p2pdiloco_node.lab import seeds as module


class Bench:
    """Runs the command on the study of two arms and three seeds, and its cache in the test's own folder."""

    def __init__(self, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.file, self.capsys = file, capsys
        self.jobs: list[int] = []

    def said(self, *flags: str) -> tuple[str, str]:
        assert run_command(["simulate", str(self.file), *flags]) == 0
        return self.capsys.readouterr()

    def json(self, *flags: str) -> Any:
        return json.loads(self.said("--json", "-", *flags)[0])


@pytest.fixture
def bench(
    two_arms: Path, tmp_path: Path, fake: ModuleType, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Bench:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = Bench(two_arms, capsys)
    real_study, real_tasks = command.simulate_study, command.run_tasks

    def tasks(*given: Any, jobs: int, **more: Any) -> Any:
        made.jobs.append(jobs)
        return real_tasks(*given, jobs=1, **more)

    monkeypatch.setattr(command, "simulate_study", partial(real_study, work=fake.work))
    monkeypatch.setattr(command, "run_tasks", tasks)
    return made


def test_what_is_run(bench: Bench) -> None:
    usual = bench.json()
    assert [(r["arm"], r["seed"]) for r in usual["results"]] == [
        (arm, seed) for arm in ("barrier", "quorum") for seed in (1, 2, 3)
    ]
    assert {r["seed"] for r in bench.json("--seeds", "7,9")["results"]} == {7, 9}
    assert {r["arm"] for r in bench.json("--arms", "quorum")["results"]} == {"quorum"}
    changed = bench.json("--set", "swarm.nodes=3")
    assert [arm["swarm"]["nodes"] for arm in changed["study"]["arms"]] == [3, 3]
    assert "Against barrier" in bench.said()[0]
    assert "Against quorum" in bench.said("--against", "quorum")[0]


def test_fresh_runs_again_what_is_kept(bench: Bench) -> None:
    bench.said()
    assert "Kept from earlier: 6 of 6 runs;" in bench.said()[1]
    assert "Kept from earlier" not in bench.said("--fresh")[1]


def test_jobs_are_processes(bench: Bench) -> None:
    """How many run at once with that number: test_runs.py."""
    bench.said("--fresh")
    bench.said("--fresh", "--jobs", "3")
    assert bench.jobs == [os.cpu_count(), 3]


def test_what_is_written(bench: Bench, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    before = set(tmp_path.iterdir())
    said = bench.said("--json", "a.json", "--markdown", "a.md", "--plot", "a.svg")[0]
    assert "Against barrier" in said, "the tables are printed all the same"
    assert {p.name for p in set(tmp_path.iterdir()) - before} == {"a.json", "a.md", "a.svg", "cache"}
    assert len(json.loads(Path("a.json").read_text())["results"]) == 6
    assert "| barrier | 3 |" in Path("a.md").read_text()
    assert "<svg" in Path("a.svg").read_text()


def test_without_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[int] = []
    real = module.simulate_seeds

    def seeds(numbers: Any, *, jobs: int, **more: Any) -> Any:
        asked.append(jobs)
        return real(numbers, jobs=1, **more)

    monkeypatch.setattr(module, "simulate_seeds", seeds)
    monkeypatch.setattr(module.limits, "simulated_chunk_seeds", 1)
    assert run_command(["simulate", "--seeds", "5,6", "--jobs", "2", "--json", "x.json"]) == 0
    assert capsys.readouterr().out.startswith("2 seeds and 0 directed schedules")
    assert json.loads(Path("x.json").read_text())["seeds"] == 2
    assert run_command(["simulate", "--seeds", "5", "--jobs", "1", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["seeds"] == 1
    assert asked == [2, 1]
