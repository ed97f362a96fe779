"""Processes that serve runs, and results kept for later."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import time
from pathlib import Path
from types import ModuleType

import msgspec
import psutil
import pytest

from p2pdiloco import limits
from p2pdiloco.sim.lab.experiment import Experiment, Model, Outer
from p2pdiloco_node.lab.cache import Cache, code_of, key_of
from p2pdiloco_node.lab.runs import Done, Failed, Heard, Share, Task, run_tasks

QUICK = Experiment(name="quick", model=Model(kind="none"))


def named(name: str) -> Experiment:
    return msgspec.structs.replace(QUICK, name=name)


def ends(heard: list[Heard]) -> dict[int, Done | Failed]:
    return {h.task: h.said for h in heard if not isinstance(h.said, Share)}


def test_each_task_ends_once_with_its_own_result(fake: ModuleType) -> None:
    tasks = [Task(named(name), seed) for name in ("a", "b") for seed in (1, 2, 3)]
    heard = list(run_tasks(tasks, jobs=2, work=fake.work))
    assert sum(not isinstance(h.said, Share) for h in heard) == 6
    for number, said in ends(heard).items():
        assert isinstance(said, Done)
        assert said.result == fake.result(tasks[number].experiment, tasks[number].seed)
    shares = [h.said for h in heard if isinstance(h.said, Share)]
    assert shares
    assert all(s == Share(0.5, "half") for s in shares)


def test_a_process_serves_many_runs(fake: ModuleType) -> None:
    tasks = [Task(QUICK, seed) for seed in range(5)]
    results = [
        s.result for s in ends(list(run_tasks(tasks, jobs=1, work=fake.pid))).values() if isinstance(s, Done)
    ]
    assert len(results) == 5
    assert len({r.versions for r in results}) == 1
    assert results[0].versions != os.getpid()


def test_a_fault_and_a_death_cost_their_own_runs_alone(fake: ModuleType) -> None:
    tasks = [Task(named(name), 1) for name in ("dies", "breaks", "unwell", "a", "b")]
    found = ends(list(run_tasks(tasks, jobs=1, work=fake.work)))
    dead, broken, unwell = found[0], found[1], found[2]
    assert isinstance(dead, Failed)
    assert "SIGKILL" in dead.reason
    assert isinstance(broken, Failed)
    assert broken.reason == "ZeroDivisionError: an engine's slip"
    assert "in work" in broken.story
    assert unwell == Failed("no data there", "")
    assert isinstance(found[3], Done)
    assert isinstance(found[4], Done)


def test_closing_ends_all_processes_at_once(fake: ModuleType) -> None:
    before = set(psutil.Process().children())
    tasks = [Task(named("hangs"), seed) for seed in (1, 2, 3)]
    with contextlib.closing(run_tasks(tasks, jobs=2, work=fake.work)) as heard:
        while len({next(heard).task for _ in range(2)}) < 2:
            pass
        began = time.monotonic()
    assert time.monotonic() - began < 3
    # The resource tracker of multiprocessing stays; it is no run.
    left = [
        p for p in set(psutil.Process().children()) - before if "resource_tracker" not in "".join(p.cmdline())
    ]
    assert left == []


def test_a_kept_result_comes_back_under_the_arms_name_and_as_it_was(tmp_path: Path, fake: ModuleType) -> None:
    cache = Cache(tmp_path)
    learner = Experiment(name="learner")
    result = msgspec.structs.replace(fake.result(learner, 3), final_loss=math.inf)
    cache.keep(learner, result)
    assert cache.find(learner, 3) == result
    renamed = cache.find(msgspec.structs.replace(learner, name="other"), 3)
    assert renamed == msgspec.structs.replace(result, arm="other")
    assert cache.find(learner, 4) is None
    assert cache.find(msgspec.structs.replace(learner, outer=Outer(mu=0.65)), 3) is None
    assert Cache(tmp_path, fresh=True).find(learner, 3) is None


@pytest.mark.parametrize(
    "damage", [b"", b"{", b'{"arm": 3}', b"[" * 100_000, b'{"a":' * 100_000 + b"1" + b"}" * 100_000]
)
def test_a_damaged_entry_is_run_again(tmp_path: Path, fake: ModuleType, damage: bytes) -> None:
    cache = Cache(tmp_path)
    cache.keep(QUICK, fake.result(QUICK, 1))
    (entry,) = tmp_path.glob("*.json")
    entry.write_bytes(damage)
    assert cache.find(QUICK, 1) is None
    assert cache.keep(QUICK, fake.result(QUICK, 1)) == ""
    assert cache.find(QUICK, 1) == fake.result(QUICK, 1)


def test_another_figure_of_the_right_type_is_damage_too(tmp_path: Path, fake: ModuleType) -> None:
    cache = Cache(tmp_path)
    cache.keep(QUICK, fake.result(QUICK, 1))
    cache.keep(QUICK, fake.result(QUICK, 2))
    entries = [tmp_path / f"{key_of(QUICK, seed)}.json" for seed in (1, 2)]
    whole = entries[0].read_bytes()
    assert b'"goodput": 0.95' in whole
    entries[0].write_bytes(whole.replace(b'"goodput": 0.95', b'"goodput": 0.96'))
    assert cache.find(QUICK, 1) is None
    entries[1].write_bytes(whole)  # a whole entry, of another run
    assert cache.find(QUICK, 2) is None


def test_an_entry_without_end_is_not_read(tmp_path: Path, fake: ModuleType) -> None:
    cache = Cache(tmp_path)
    (tmp_path / f"{key_of(QUICK, 1)}.json").symlink_to("/dev/zero")
    assert cache.find(QUICK, 1) is None


def test_what_cannot_be_kept_is_said_and_leaves_nothing(
    tmp_path: Path, fake: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    assert Cache(file / "lab").keep(QUICK, fake.result(QUICK, 1)) == "Not a directory"

    def full(part: Path, data: bytes) -> int:
        with part.open("wb") as opened:
            opened.write(data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    cache = Cache(tmp_path / "cache")
    assert cache.keep(QUICK, fake.result(QUICK, 1)) == "No space left on device"
    assert list(cache.folder.iterdir()) == []


def test_the_oldest_results_go_first(
    tmp_path: Path, fake: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(tmp_path / "c")
    for seed in range(4):
        cache.keep(QUICK, fake.result(QUICK, seed))
        os.utime(cache.folder / f"{key_of(QUICK, seed)}.json", (seed, seed))
    size = sum(p.stat().st_size for p in cache.folder.iterdir())
    monkeypatch.setattr(limits, "lab_cache_bytes_max", size // 2)
    cache.trim()
    assert [cache.find(QUICK, seed) is not None for seed in range(4)] == [False, False, True, True]


def test_named_data_files_count_by_their_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from p2pdiloco_node.lab import cache as module

    text = tmp_path / "a.txt"
    text.write_text("one")
    experiment = msgspec.convert({"data": {"files": [str(text)]}}, Experiment)
    first = key_of(experiment, 1)
    text.write_text("two")
    module._data_digest.cache_clear()
    assert key_of(experiment, 1) != first


def test_comments_docstrings_and_layout_change_no_key_and_code_does() -> None:
    plain = "def f(x):\n    return x + 1\n"
    dressed = '"""About."""\n\ndef f(x):\n    """Adds."""\n    # one\n    return (x +\n        1)\n'
    assert code_of(plain) == code_of(dressed)
    assert code_of(plain) != code_of(plain.replace("1", "2"))
