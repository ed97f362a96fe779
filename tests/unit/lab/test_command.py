"""`p2pdiloco simulate FILE` from end to end, with a stand-in for the engine."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from p2pdiloco.errors import OperatorError
from p2pdiloco.sim.lab.experiment import Experiment
from p2pdiloco.sim.lab.result import Result
from p2pdiloco_node.cli import run_command
from p2pdiloco_node.lab import command
from p2pdiloco_node.lab.cache import Cache
from p2pdiloco_node.lab.command import Options, simulate_study


def test_a_study_is_run_printed_kept_and_drawn(
    two_arms: Path, tmp_path: Path, fake: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    out, page = tmp_path / "out.json", tmp_path / "out.md"
    options = Options(two_arms, jobs=1, json=str(out), markdown=page)
    assert simulate_study(options, work=fake.work, cache=Cache(tmp_path / "cache")) == 0
    said = capsys.readouterr().out
    assert said.startswith("Does it wait?")
    assert "Against barrier" in said
    assert max(len(line) for line in said.splitlines()) <= 110
    kept = json.loads(out.read_text())
    assert [(r["arm"], r["seed"]) for r in kept["results"]] == [
        (arm, seed) for arm in ("barrier", "quorum") for seed in (1, 2, 3)
    ]
    assert kept["study"]["arms"][1]["outer"]["policy"] == "quorum"
    assert kept["summary"]["gaps"][0]["loss"]["mean"] == pytest.approx(-0.01)
    assert kept["machine"]["cores"] >= 1
    assert "| barrier | 3 |" in page.read_text()


@pytest.mark.parametrize(
    ("variable", "sentence"),
    [
        ("P2PDILOCO_LAB_COMPLIE", "P2PDILOCO_LAB_COMPLIE; did you mean 'P2PDILOCO_LAB_COMPILE'?"),
        ("P2PDILOCO_LAB_COMPILE", "P2PDILOCO_LAB_COMPILE: 'yes' is not possible: give 1, 0 or auto."),
    ],
)
def test_a_slip_in_a_variable_is_refused(
    two_arms: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    variable: str, sentence: str,
) -> None:  # fmt: skip
    monkeypatch.setenv(variable, "yes")
    assert run_command(["simulate", str(two_arms)]) == 3
    assert sentence in capsys.readouterr().err


def test_the_second_time_comes_from_the_cache(
    two_arms: Path, tmp_path: Path, fake: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    options = Options(two_arms, jobs=1, json="-")
    cache = Cache(tmp_path / "cache")
    first = (simulate_study(options, work=fake.pid, cache=cache), capsys.readouterr().out)
    again = (simulate_study(options, work=fake.pid, cache=cache), *capsys.readouterr())
    assert "Kept from earlier: 6 of 6 runs;" in again[2]
    assert json.loads(first[1])["results"] == json.loads(again[1])["results"]
    fresh = Cache(tmp_path / "cache", fresh=True)
    simulate_study(options, work=fake.pid, cache=fresh)
    assert json.loads(capsys.readouterr().out)["results"] != json.loads(first[1])["results"]


def test_the_code_is_that_of_the_start(
    two_arms: Path, tmp_path: Path, fake: ModuleType, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Somebody commits while a study runs: its figures belong to the commit before."""
    kept = tmp_path / "cache"
    monkeypatch.setattr(command, "_commit", lambda: f"after {len(list(kept.glob('*.json')))} runs")
    monkeypatch.setattr(
        command, "source_digest", lambda *, with_model: f"{with_model}, {len(list(kept.glob('*.json')))}"
    )
    assert simulate_study(Options(two_arms, jobs=1, json="-"), work=fake.work, cache=Cache(kept)) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["commit"], said["source_digest"]) == ("after 0 runs", "True, 0")


def test_a_run_that_fails_is_named_and_the_others_are_there(
    tmp_path: Path, fake: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "three.toml"
    file.write_text("[arms.good.run]\n[arms.breaks.run]\n[arms.unwell.run]\n")
    assert simulate_study(Options(file, jobs=2), work=fake.work, cache=Cache(tmp_path / "cache")) == 1
    captured = capsys.readouterr()
    assert "breaks, seed 1: ZeroDivisionError: an engine's slip" in captured.err
    assert "unwell, seed 1: no data there" in captured.err
    assert "in work" in captured.err  # the traceback of what is our fault
    assert "\ngood " in captured.out


@pytest.mark.parametrize(
    ("flags", "code", "sentence"),
    [
        (["missing.toml"], 3, "cannot be read: No such file"),
        (["bad.toml"], 3, "there is no key outer.polcy; did you mean 'policy'?"),
        (["good.toml", "--set", "outer.polcy=barrier"], 2, "did you mean 'policy'?"),
        (["good.toml", "--set", "policy=barrier"], 2, "did you mean 'outer.policy'?"),
        (["good.toml", "--set", "nonsense"], 2, "write SECTION.KEY=VALUE"),
        (["good.toml", "--set", "swarm.nodes=lots"], 2, "expected a whole number"),
        (["good.toml", "--seeds", "3..1"], 2, "names no seed"),
        (["good.toml", "--jobs", "-1"], 2, "--jobs -1"),
        (["good.toml", "--json", "--fresh"], 2, "a file's name or - is missing before --fresh"),
        (["good.toml", "--plot", "x.pdf"], 2, ".svg or .png"),
        (["good.toml", "--set", "model.kind=none", "--plot", "x.svg"], 2, "has none"),
        (["good.toml", "--json", "nowhere/x.json"], 3, "there is no folder nowhere"),
        (["good.toml", "--json", "n" * 300], 3, "cannot be written: File name too long"),
        (["good.toml", "--markdown", "."], 3, "it is a folder"),
        (["good.toml", "--json", "good.toml"], 2, "would write over the experiment"),
        (["good.toml", "--json", "link.json"], 2, "would write over the experiment"),
        (["good.toml", "--json", "./x.svg", "--plot", "x.svg"], 2, "would write over what --json writes"),
        (["--plot", "x.svg"], 2, "--plot is for an experiment"),
        (["--set", "outer.mu=0"], 2, "--set is for an experiment"),
    ],
)
def test_slips_get_one_sentence(
    flags: list[str], code: int, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("good.toml").write_text("[run]\nrounds = 2\n")
    Path("link.json").symlink_to("good.toml")
    Path("bad.toml").write_text('[outer]\npolcy = "barrier"\n')
    assert run_command(["simulate", *flags]) == code
    said = capsys.readouterr().err
    assert sentence in said
    assert len(said.splitlines()) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.toml", "good.toml", "link.json"]


def test_nobody_waits_for_hours_to_hear_that_matplotlib_is_missing(
    two_arms: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake: ModuleType
) -> None:
    monkeypatch.setattr("p2pdiloco_node.lab.plots.importlib.util.find_spec", lambda _name: None)
    with pytest.raises(OperatorError, match=r"p2pdiloco\[lab\]"):
        simulate_study(Options(two_arms, plot=tmp_path / "x.svg"), work=fake.work)


def test_a_full_disk_takes_neither_the_tables_nor_the_files_before(
    two_arms: Path, tmp_path: Path, fake: ModuleType, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    out, page = tmp_path / "out.json", tmp_path / "out.md"
    out.write_text("of the last time")

    def full(part: Path, data: bytes) -> int:
        if data.startswith(b"{"):
            raise OSError(errno.ENOSPC, "No space left on device")
        with part.open("wb") as opened:
            return opened.write(data)

    monkeypatch.setattr(Path, "write_bytes", full)
    options = Options(two_arms, jobs=1, json=str(out), markdown=page)
    with pytest.raises(OperatorError, match=r"out\.json cannot be written: No space left") as refused:
        simulate_study(options, work=fake.work, cache=Cache(tmp_path / "cache"))
    assert refused.value.exit_code == 6
    assert "Against barrier" in capsys.readouterr().out
    assert "| barrier | 3 |" in page.read_text()
    assert out.read_text() == "of the last time"


def test_files_are_written_though_nobody_reads_the_tables(
    two_arms: Path, tmp_path: Path, fake: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as gone, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", gone)
        with pytest.raises(BrokenPipeError):
            simulate_study(
                Options(two_arms, jobs=1, json=str(tmp_path / "a.json")), work=fake.work,
                cache=Cache(tmp_path / "cache"),
            )  # fmt: skip
        os.dup2(os.open(os.devnull, os.O_WRONLY), gone.fileno())
    assert len(json.loads((tmp_path / "a.json").read_text())["results"]) == 6


def test_names_that_the_terminal_cannot_write_lose_nothing(
    tmp_path: Path, fake: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.toml"
    file.write_text('[arms."\U0001f419 with a name of many letters".run]\n', encoding="utf-8")
    for json_file, expected in ((None, b"? with"), ("-", b"\\ud83d\\udc19 with")):
        narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", narrow)
            options = Options(file, jobs=1, json=json_file)
            assert simulate_study(options, work=fake.work, cache=Cache(tmp_path / "cache")) == 0
        assert expected in narrow.buffer.getvalue()  # type: ignore[attr-defined]


def test_what_is_not_kept_is_said_once_and_not_counted(
    two_arms: Path, tmp_path: Path, fake: ModuleType, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    nowhere = tmp_path / "file"
    nowhere.touch()
    cache = Cache(nowhere / "lab")
    keep, asked = cache.keep, []

    def keep_two(experiment: Experiment, result: Result) -> str:
        asked.append(result)
        if len(asked) > 2:
            raise KeyboardInterrupt
        return keep(experiment, result)

    monkeypatch.setattr(cache, "keep", keep_two)
    with pytest.raises(KeyboardInterrupt):
        simulate_study(Options(two_arms, jobs=1), work=fake.work, cache=cache)
    said = capsys.readouterr().err
    assert said.count("finished runs cannot be kept") == 1
    assert "Not a directory" in said
    assert "Finished, 0 kept: 2 of 6 runs;" in said
