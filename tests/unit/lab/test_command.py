"""`p2pdiloco simulate FILE` from end to end, with a stand-in for the engine."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from p2pdiloco.errors import OperatorError
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


def test_the_second_time_comes_from_the_cache(
    two_arms: Path, tmp_path: Path, fake: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    options = Options(two_arms, jobs=1, json="-")
    cache = Cache(tmp_path / "cache")
    first = (simulate_study(options, work=fake.pid, cache=cache), capsys.readouterr().out)
    again = (simulate_study(options, work=fake.pid, cache=cache), capsys.readouterr().out)
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
        (["good.toml", "--set", "swarm.nodes=lots"], 2, "expected int"),
        (["good.toml", "--seeds", "3..1"], 2, "names no seed"),
        (["good.toml", "--jobs", "-1"], 2, "--jobs -1"),
        (["good.toml", "--json", "--fresh"], 2, "a file's name or - is missing before --fresh"),
        (["good.toml", "--plot", "x.pdf"], 2, ".svg or .png"),
        (["good.toml", "--set", "model.kind=none", "--plot", "x.svg"], 2, "has none"),
        (["good.toml", "--json", "nowhere/x.json"], 3, "there is no folder nowhere"),
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
    Path("bad.toml").write_text('[outer]\npolcy = "barrier"\n')
    assert run_command(["simulate", *flags]) == code
    said = capsys.readouterr().err
    assert sentence in said
    assert len(said.splitlines()) == 1


def test_nobody_waits_for_hours_to_hear_that_matplotlib_is_missing(
    two_arms: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake: ModuleType
) -> None:
    monkeypatch.setattr("p2pdiloco_node.lab.plots.importlib.util.find_spec", lambda _name: None)
    with pytest.raises(OperatorError, match=r"p2pdiloco\[lab\]"):
        simulate_study(Options(two_arms, plot=tmp_path / "x.svg"), work=fake.work)
