"""What people read about a long work."""

from __future__ import annotations

import io
import threading

import pytest
from rich.console import Console

from p2pdiloco_node import progress
from p2pdiloco_node.progress import Bar, Lines, Pace, amount, in_short, shown


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_rate_and_time_to_go_are_of_this_call() -> None:
    clock = Clock()
    pace = Pace(clock)
    assert pace.words("Reading", 5e9, 10e9, "bytes") == "50 %"
    clock.now += 10
    # What an earlier call had done is in the share, and not in the rate.
    assert pace.words("Reading", 5.5e9, 10e9, "bytes") == "55 %, 50.0 MB/s, 2 min to go"
    assert pace.words("Writing shards", 3, 10, "shards") == "30 %", "another step begins anew"
    clock.now += 4
    assert pace.words("Writing shards", 9, 10, "shards") == "90 %, 1.5 shards/s, 1 s to go"
    assert pace.words("Training", 0.0, 1.0, "") == ""
    assert pace.words("Streaming", 0, 0, "bytes") == "0 bytes so far"
    clock.now += 10
    assert pace.words("Streaming", 2e6, 0, "bytes") == "2.0 MB so far, 200.0 KB/s"


def test_a_bar_shows_the_step_that_is_under_way() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    bar = Bar(console)
    with bar.bars:
        bar.progress("Reading", 30, 100, "bytes")
        bar.progress("Training", 0.0)
        bar.say("A [sentence].")
        bar.progress("Writing shards", 3, 4, "shards")
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "A [sentence]." in shown
    assert "Writing shards" in shown
    assert "75 %" in shown
    assert len(bar.bars.tasks) == 1


def test_lines_come_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    lines = Lines(clock)
    for done in range(0, 100, 10):
        lines.progress("Reading", done * 1e6, 1e8, "bytes")
        clock.now += 4
    lines.progress("Training", 0.0)
    lines.progress("Training", 1.0)
    lines.say("A sentence.")
    assert capsys.readouterr().out.splitlines() == [
        "Reading ...",
        "Reading: 30 %, 2.5 MB/s, 28 s to go",
        "Reading: 60 %, 2.5 MB/s, 16 s to go",
        "Reading: 90 %, 2.5 MB/s, 4 s to go",
        "Training ...",
        "A sentence.",
    ]


def test_a_step_that_is_not_counted_shows_what_it_is_at_and_for_how_long(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Minutes of a large model, in which nobody calls."""
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    clock = Clock()
    lines, bar = Lines(clock), Bar(console, clock)

    def minutes_of(told: Lines | Bar) -> None:
        told.tick()
        for second in range(25):
            if second in (0, 13):
                told.progress("Looking at the model", 0.0, doing="backward pass" if second else "building it")
            clock.now += 1
            told.tick()

    minutes_of(lines)
    assert capsys.readouterr().out.splitlines() == [
        "Looking at the model ...",
        "Looking at the model: building it, 10 s so far",
        "Looking at the model: backward pass, 20 s so far",
    ]
    with bar.bars:
        minutes_of(bar)
    assert "backward pass, 25 s so far" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_step_that_is_not_counted_ends(capsys: pytest.CaptureFixture[str]) -> None:
    """It went on for as long as something silent came behind it."""
    clock = Clock()
    lines, bar = Lines(clock), Bar(Console(file=io.StringIO(), force_terminal=True), clock)
    for told in (lines, bar):
        told.progress("Training", 0.0)
        clock.now += 20
        told.progress("Training", 1.0)
        clock.now += 60
        told.tick()
    assert bar.bars.tasks == []
    lines.progress("Training", 0.0)
    clock.now += 12
    lines.tick()
    assert capsys.readouterr().out.splitlines() == ["Training ...", "Training ...", "Training: 12 s so far"]


def test_a_step_that_is_counted_says_itself_when_it_moves(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    lines = Lines(clock)
    lines.progress("Reading", 30, 100, "bytes")
    clock.now += 60
    lines.tick()
    assert capsys.readouterr().out == "Reading ...\n"


def test_time_goes_on_while_nobody_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    ticked = threading.Event()
    monkeypatch.setattr(progress, "TICK_S", 0.001)
    monkeypatch.setattr(Lines, "tick", lambda _: ticked.set())
    with shown():
        assert ticked.wait(30)


def test_where_standard_output_is_for_what_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with shown(on_stderr=True) as told:
        told.progress("checking the log", 1, 2, "entries")
        told.say("A sentence.")
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "checking the log ...\nA sentence.\n"


def test_amounts_and_times() -> None:
    assert [amount(n) for n in (0, 999, 1500, 2_340_000, 12.3e9)] == [
        "0 bytes", "999 bytes", "1.5 KB", "2.3 MB", "12.3 GB",
    ]  # fmt: skip
    assert [in_short(s) for s in (4.4, 89, 600, 7200)] == ["4 s", "89 s", "10 min", "2.0 h"]


def test_a_step_of_which_lines_were_said_is_said_to_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    """The last line of a long export was 83 %."""
    clock = Clock()
    lines = Lines(clock)
    for done in (0, 50, 83, 100, 100):
        clock.now += 6
        lines.progress("Writing", done, 100, "bytes")
    lines.progress("Short", 0, 2, "bytes")
    lines.progress("Short", 2, 2, "bytes")
    said = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in said] == [
        "Writing ...", "Writing: 83 %", "Writing: 100 %", "Short ...",
    ]  # fmt: skip
