"""Each flag of `tracker` changes what it serves, says or keeps: the real command line, the real tracker."""

from __future__ import annotations

import asyncio
import json
import logging
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from p2pdiloco.errors import OperatorError
from p2pdiloco.ids import Digest
from p2pdiloco_node import tracker as module
from p2pdiloco_node.cli import run_command
from p2pdiloco_node.config import TrackerConfig
from p2pdiloco_node.ports import Purpose
from p2pdiloco_node.process.lifetime import Leaving, run_life
from p2pdiloco_node.storage.data_dir import DataDir
from p2pdiloco_node.storage.run_folder import MAKING, SPEC
from p2pdiloco_node.tracker import Archive, Tracker
from tests.unit.export.conftest import KeptRun


def config_of(patch: pytest.MonkeyPatch, *words: str) -> TrackerConfig:
    """What the command line asks the tracker for."""
    asked: list[TrackerConfig] = []
    with patch.context() as patched:
        patched.setattr(module, "run_tracker", lambda config: asked.append(config) or 0)
        assert run_command(["tracker", *words]) == 0
    return asked[0]


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_run: Any) -> KeptRun:
    """A run of two versions, in the folder `run`, where the test stands."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run = KeptRun(tmp_path / "run", fake_run().spec).steps(2)
    key = tmp_path / "run" / "witness.key"
    key.write_text("07" * 32)
    key.chmod(0o600)
    run.blobs.close()
    run.journal.close()
    return run


def entered(config: TrackerConfig) -> Tracker:
    """As it is when it serves; ended again."""

    async def life() -> Tracker:
        async with Tracker(config, Leaving()) as made:
            url = f"http://127.0.0.1:{made.participant.listener.port}/v1/version"
            made.answer = await asyncio.to_thread(  # type: ignore[attr-defined]
                lambda: json.loads(urllib.request.urlopen(url, timeout=5).read())
            )
            return made

    return asyncio.run(life())


def test_run_listen_and_public_url_are_what_is_served_and_printed(
    kept: KeptRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], unused_tcp_port: int
) -> None:
    listen = f"127.0.0.1:{unused_tcp_port}"
    made = entered(config_of(monkeypatch, "--run", "run", "--listen", listen))
    assert made.answer["run"] == kept.run.hex()  # type: ignore[attr-defined]
    assert made.participant.listener.port == unused_tcp_port
    assert f"--join http://{listen}/#{kept.run.hex()}" in capsys.readouterr().out
    public = "http://203.0.113.7:9"
    entered(config_of(monkeypatch, "--run", "run", "--listen", listen, "--public-url", public))
    assert f"--join {public}/#{kept.run.hex()}" in capsys.readouterr().out


def test_a_second_tracker_is_not_told_to_serve_a_copy(
    kept: KeptRun, monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int
) -> None:
    """Its witness would be in two places, which docs/tracker-host.md forbids."""
    config = config_of(monkeypatch, "--run", "run", "--listen", f"127.0.0.1:{unused_tcp_port}")
    with DataDir(kept.folder / "witness"), pytest.raises(OperatorError) as caught:
        entered(config)
    assert "stop it, or leave it running: a run has one tracker" in str(caught.value)
    assert "a copy of its folder is never served" in str(caught.value)


@pytest.mark.usefixtures("kept")
def test_tensorboard_is_where_curves_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    entered(config_of(monkeypatch, "--run", "run", "--listen", "127.0.0.1:0"))
    assert not Path("curves").exists()
    entered(config_of(monkeypatch, "--run", "run", "--listen", "127.0.0.1:0", "--tensorboard", "curves"))
    assert list(Path("curves").glob("events*"))


def test_wandb_is_asked_for(
    kept: KeptRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("p2pdiloco_node.tracking.boards.importlib.util.find_spec", lambda _name: None)
    assert run_command(["tracker", "--run", str(kept.folder), "--wandb", "project"]) == 3
    assert "--wandb needs a library" in capsys.readouterr().err


@pytest.mark.parametrize(("level", "shown"), [("info", True), ("warning", False)])
def test_log_level_is_how_much_is_logged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], level: str, shown: bool
) -> None:
    """A node's goes the same way."""
    config = config_of(monkeypatch, "--log-level", level)

    async def life(_leaving: Leaving) -> int:
        logging.getLogger("p2pdiloco.tracker").info("a word")
        return 0

    assert run_life(life, level=config.log_level, orphan=True) == 0
    assert ("a word" in capsys.readouterr().err) is shown


@pytest.mark.usefixtures("kept")
def test_checkpoints_are_so_many_on_the_shelf(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a shelf does with the number is tested with it (test_checkpoints.py)."""
    for flags, count in (((), 3), (("--checkpoints", "5"), 5)):
        config = config_of(monkeypatch, "--run", "run", "--listen", "127.0.0.1:0", *flags)
        assert entered(config)._shelf._kept == count


# --archive-bytes-max


def merged(run: KeptRun) -> list[Digest]:
    """The deltas of the log, oldest first; each of the same size."""
    return module.deltas_named(run.journal.load_entries())


def test_the_newest_deltas_are_kept_up_to_the_archives_bytes(kept: KeptRun) -> None:
    deltas, blobs = merged(kept), kept.blobs
    size = blobs.used(Purpose.DELTA) // len(deltas)
    archive = Archive(blobs, 2 * size)
    for delta in deltas:
        assert archive.keeps(delta)
    assert blobs.digests(Purpose.DELTA) == sorted(deltas[-2:])


@pytest.mark.parametrize("left", [0, 1, 3, 4])
def test_a_restarted_tracker_keeps_the_newest_and_not_what_was_there_first(
    kept: KeptRun, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    """Also where the limit is lower than in the life before."""
    deltas = merged(kept)
    size = kept.blobs.used(Purpose.DELTA) // len(deltas)
    words = ("--run", "run", "--listen", "127.0.0.1:0", "--archive-bytes-max", str(left * size))
    config, leaving = config_of(monkeypatch, *words), Leaving()

    async def life() -> list[Digest]:
        leaving.ask("the test is over")
        async with Tracker(config, leaving) as made:
            await made.run()
            return made.participant.blobs.digests(Purpose.DELTA)

    assert asyncio.run(life()) == sorted(deltas[len(deltas) - left :])


def test_what_a_making_left_that_was_killed_at_its_end_goes(
    kept: KeptRun, monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int
) -> None:
    """The run was signed, so that `run new` would not look there again."""
    making = Path("run") / MAKING
    (making / "tokens").mkdir(parents=True)
    (making / "tokens" / "1").write_bytes(bytes(1000))
    entered(config_of(monkeypatch, "--run", "run", "--listen", f"127.0.0.1:{unused_tcp_port}"))
    assert not making.exists()
    assert (Path("run") / SPEC).is_file()
