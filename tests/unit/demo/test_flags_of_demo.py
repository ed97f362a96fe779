"""Each flag of `demo` changes what it makes, starts or shows; whole demos are in tests/e2e/test_demo.py."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2pdiloco.exit_codes import INTERRUPTED
from p2pdiloco.ids import RunId
from p2pdiloco.run_spec import RunSpec
from p2pdiloco_node.cli import run_command
from p2pdiloco_node.demo import command as module
from p2pdiloco_node.demo.command import Options
from p2pdiloco_node.demo.view import LiveView, PlainView, make_view
from p2pdiloco_node.storage.run_folder import MAKING
from p2pdiloco_node.training import version_0
from tests.unit.run.test_flags_of_run import stand_in

RUN = RunId(bytes(32))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(version_0, "_run", stand_in)
    for folder in ("words", "others"):
        Path(folder).mkdir()
        for n in range(40):
            Path(f"{folder}/{n}.txt").write_text(f"{n} {folder} of many\n" * 200)
    return tmp_path


def options_of(patch: pytest.MonkeyPatch, *words: str) -> Options:
    """What the command line asks for."""
    asked: list[Options] = []
    with patch.context() as patched:
        patched.setattr(module, "run_demo", lambda options: asked.append(options) or 0)
        assert run_command(["demo", *words]) == 0
    return asked[0]


def made(patch: pytest.MonkeyPatch, out: str, *words: str) -> tuple[RunSpec, int]:
    """The run that such a demo makes where an inner step takes 0.1 s; and how many trainers timed it."""
    timed: list[int] = []

    async def time_inner_steps(
        _spec: RunSpec, _params: Any, shards: Sequence[Path], folder: Path, *, trainers: int, **_: Any
    ) -> float:
        timed.append(trainers)
        # In the run's own folder: whatever kills the demo, they go as it does.
        assert all(path.exists() and path.is_relative_to(out) for path in (folder, *shards))
        return 0.1

    patch.setattr(module, "time_inner_steps", time_inner_steps)
    options = options_of(patch, *words)
    _, spec = asyncio.run(module._make_run(options, Path(out), Path("owner.key"), PlainView()))
    assert not (Path(out) / MAKING).exists()
    return spec, timed[0]


@pytest.mark.usefixtures("here")
def test_what_the_run_is(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, trainers = made(monkeypatch, "1", "--corpus", "words/*.txt")
    assert (usual.target_version, usual.inner.inner_steps, trainers) == (24, 40, 3)
    words = "--corpus others/*.txt --outer-steps 7 --inner-steps 9 --nodes 5 --seed 2"
    other, trainers = made(monkeypatch, "2", *words.split())
    assert (other.target_version, other.inner.inner_steps, trainers) == (7, 9, 5)
    assert other.data.shards != usual.data.shards
    seed = made(monkeypatch, "3", "--corpus", "words/*.txt", "--seed", "2")[0]
    assert seed.genesis.params != usual.genesis.params
    assert seed.data.shards != usual.data.shards, "of the order, too"
    chaos = made(monkeypatch, "4", "--corpus", "words/*.txt", "--chaos")[0]
    assert chaos.target_version == 48, "long enough for every fault"


def test_what_is_started_and_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, nodes = module._daemons(options_of(monkeypatch), tmp_path, RUN)
    assert [node.name for node in nodes] == ["node-1", "node-2", "node-3"]
    assert not any("--keep-deltas" in node.arguments for node in nodes)
    kept = options_of(monkeypatch, "--nodes", "2", "--keep", str(tmp_path / "kept"))
    _, nodes = module._daemons(kept, tmp_path, RUN)
    assert ["--keep-deltas" in node.arguments for node in nodes] == [True, True]
    with module._folder(kept.keep) as folder:
        assert folder == tmp_path / "kept"
    assert folder.is_dir()
    with module._folder(None) as folder:
        assert folder.is_dir()
    assert not folder.exists()


def test_headless_is_plain_lines_on_a_terminal_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    for words, kind in (((), LiveView), (("--headless",), PlainView)):
        with make_view(headless=options_of(monkeypatch, *words).headless) as view:
            assert type(view) is kind


@pytest.mark.parametrize("chaos", [False, True])
def test_chaos_hits_the_swarm_until_the_run_is_over(
    monkeypatch: pytest.MonkeyPatch, fake_run: Any, chaos: bool
) -> None:
    """What the faults are is in the demo itself."""
    node, hit = SimpleNamespace(status=SimpleNamespace(over=False)), []

    async def inject_faults(swarm: Any, _faults: Any, _say: Any) -> None:
        hit.append(swarm)

    async def poll() -> None:
        node.status.over = True

    swarm = cast("Any", SimpleNamespace(nodes=[node], poll=poll, dead=lambda: None))
    view = cast("Any", SimpleNamespace(show=lambda *_: None, say=lambda _: None))
    monkeypatch.setattr(module, "inject_faults", inject_faults)
    monkeypatch.setattr(module, "POLL_S", 0.0)
    options = options_of(monkeypatch, *(["--chaos"] if chaos else []))
    asyncio.run(module._follow(options, swarm, fake_run().spec, [], view))
    assert bool(hit) is chaos


def test_ctrl_c_ends_it_with_its_code_and_leaves_no_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def stopped(_options: Options, folder: Path, owner: Path) -> int:
        assert folder.is_dir() and owner.parent.is_dir()  # noqa: ASYNC240, PT018
        raise asyncio.CancelledError

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(module, "_demo", stopped)
    assert run_command(["demo"]) == INTERRUPTED
    assert "every process has ended" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
