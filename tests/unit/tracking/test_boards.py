"""What TensorBoard and W&B get, read back with their own readers; their failures end nothing else."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco_node.tracking.boards import About, Point, Tracking, Wanted

HOSTILE = "<script>alert(1)</script>\n# no heading\n[link](javascript:alert(1))"
POINTS = [
    Point(0, 1_790_000_000.0, {"loss": 5.5}),
    Point(2**40, 1_790_000_004.5, {"loss": 2.25, "evaluation/all/loss": 2.5}, {"samples/1": HOSTILE}),
]


def about(folder: Path) -> About:
    return About("run-node", folder, {"lr": 0.5})


async def track(wanted: Wanted, folder: Path, points: list[Point] = POINTS) -> list[str]:
    said: list[str] = []
    async with Tracking(wanted, about(folder), say=lambda _kind, text: said.append(text)) as tracking:
        assert tracking.is_on is any(wanted)
        for point in points:
            tracking.add(point)
    return said


def found(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.glob(pattern))


def read_events(folder: Path) -> Any:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(folder))
    events.Reload()
    return events


async def test_tensorboard_reads_what_was_tracked(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    assert await track(Wanted(tensorboard=str(folder)), tmp_path) == []
    events = read_events(folder)
    assert set(events.Tags()["scalars"]) == {"loss", "evaluation/all/loss"}
    assert [(e.step, e.wall_time, e.value) for e in events.Scalars("loss")] == [
        (0, 1_790_000_000.0, 5.5), (2**40, 1_790_000_004.5, 2.25),
    ]  # fmt: skip
    assert events.PluginTagToContent("text") == {"samples/1": b""}
    (text,) = events.Tensors("samples/1")
    (shown,) = text.tensor_proto.string_val
    assert shown.decode() == "\n".join("    " + line for line in HOSTILE.splitlines())  # code, not markup
    assert text.step == 2**40


async def test_tensorboards_text_page_shows_no_markup(tmp_path: Path) -> None:
    """As its text plugin renders it."""
    plugin = pytest.importorskip("tensorboard.plugin_util")
    await track(Wanted(tensorboard=str(tmp_path)), tmp_path)
    (text,) = read_events(tmp_path).Tensors("samples/1")
    page = str(plugin.markdown_to_safe_html(text.tensor_proto.string_val[0]))
    assert "<code>" in page
    assert not any(tag in page for tag in ("<script", "<a ", "<h1"))


async def test_two_lives_in_one_folder_are_both_read(tmp_path: Path) -> None:
    for n in range(2):
        await track(Wanted(tensorboard=str(tmp_path)), tmp_path, [Point(n, 1.79e9 + n, {"loss": 3.0 - n})])
    assert sorted(e.value for e in read_events(tmp_path).Scalars("loss")) == [2.0, 3.0]


async def test_without_a_flag_nothing_is_written(tmp_path: Path) -> None:
    assert await track(Wanted(), tmp_path) == []
    assert found(tmp_path, "*") == []


def test_without_a_flag_nothing_is_imported() -> None:
    code = (
        "import sys, p2pdiloco_node.tracking.boards, p2pdiloco_node.tracking.figures\n"
        "assert not {'tensorboard', 'wandb', 'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_daemon_that_tracks_imports_no_torch(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    code = (
        "import sys\nfrom p2pdiloco_node.tracking.boards import TensorBoardSink, Point\n"
        f"sink = TensorBoardSink({str(tmp_path)!r})\n"
        "sink.write(Point(1, 1.0, {'loss': 1.0}))\nsink.close()\n"
        "assert not {'torch', 'transformers', 'tensorflow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("flag", ["tensorboard", "wandb"])
async def test_a_library_that_is_missing_is_said_at_once(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(OperatorError, match=rf"pip install 'p2pdiloco\[{flag}\]'") as caught:
        Wanted(**{flag: "x"}).check()
    assert caught.value.exit_code == 3
    with pytest.raises(OperatorError, match=f"--{flag}"):
        await track(Wanted(**{flag: str(tmp_path / "x")}), tmp_path)


async def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OperatorError, match="--tensorboard"):
        await track(Wanted(tensorboard=str(tmp_path / "file")), tmp_path)


class Broken:
    """A sink on a full disk."""

    def __init__(self) -> None:
        self.writes = 0

    def write(self, point: Point) -> None:
        self.writes += 1
        raise OSError(28, "No space left on device")

    def close(self) -> None:
        raise AssertionError("it has ended already")


async def test_a_sink_that_fails_is_said_once_and_the_other_goes_on(tmp_path: Path) -> None:
    broken = Broken()
    said: list[str] = []
    tracking = Tracking(
        Wanted(tensorboard=str(tmp_path)), about(tmp_path), say=lambda _kind, text: said.append(text)
    )
    opened = tracking._open
    tracking._open = lambda: [broken, *opened()]  # type: ignore[method-assign]
    async with tracking:
        for point in POINTS:
            tracking.add(point)
    assert broken.writes == 1
    assert len(said) == 1
    assert "No space left" in said[0]
    assert len(read_events(tmp_path).Scalars("loss")) == 2


async def test_points_that_wait_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    monkeypatch.setattr(limits, "tracked_waiting_max", 5)
    go_on = threading.Event()
    written: list[Point] = []

    class Slow:
        def write(self, point: Point) -> None:
            go_on.wait(30)
            written.append(point)

        def close(self) -> None:
            pass

    tracking = Tracking(Wanted(tensorboard="x"), about(tmp_path), say=lambda _kind, _text: None)
    tracking._open = lambda: [Slow()]  # type: ignore[method-assign]
    async with tracking:
        for n in range(50):
            tracking.add(Point(n, 0.0, {}))
        go_on.set()
    assert 5 <= len(written) <= 6
    assert tracking._left_out == 50 - len(written)


@pytest.mark.extras
async def test_wandb_offline_keeps_what_was_tracked_below_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(limits, "tracking_end_s", 60.0)
    assert await track(Wanted(wandb="project"), tmp_path) == []
    (kept,) = found(tmp_path, "wandb/offline-run-*/*.wandb")
    data = await asyncio.to_thread(kept.read_bytes)  # its records are protocol buffers, as they are
    for name, value in (("evaluation/all/loss", "2.5"), ("loss", "2.25"), ("tokens", str(2**40))):
        assert name.encode() in data
        assert value.encode() in data
    (page,) = found(tmp_path, "wandb/offline-run-*/files/media/html/**/*.html")
    assert "&lt;script&gt;alert(1)" in await asyncio.to_thread(page.read_text)


@pytest.mark.extras
async def test_wandb_without_a_login_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(OperatorError, match="wandb login") as caught:
        await track(Wanted(wandb="project"), tmp_path)
    assert caught.value.exit_code == 3
