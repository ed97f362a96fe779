"""Each flag of `run new`, `run inspect` and `run fork` changes what is made or said.

The commands themselves, from the words to the signed run. Only the process with torch that makes version 0 is
stood in for: it costs many seconds, and has tests of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from p2pdiloco.run_spec import RunSpec, TensorSpec, open_run_spec
from p2pdiloco.wire.codec import decode, encode
from p2pdiloco.wire.signing import verify_ed25519
from p2pdiloco_node.cli import run_command
from p2pdiloco_node.corpus import making
from p2pdiloco_node.run.new import when_over
from p2pdiloco_node.storage.files import Files
from p2pdiloco_node.storage.keys import load_or_make_key
from p2pdiloco_node.training import version_0
from p2pdiloco_node.training.version_0 import GenesisMade, GenesisOrder
from tests.unit.export.conftest import KeptRun

# The smallest that `--data` and everything after it can be seen in.
PLAIN = "--name plain --model llama:tiny --data words --admission local"
WHOLE = (
    "--name whole --model llama:tiny --data words --config run.toml --tokens 3M --seed 5 "
    "--admission local --outer-steps 70 --inner-steps 9 --pass-s 6.5 --seq-len 24 --batch 3 --lr 0.002 "
    "--codec fp16 --committee 5 --eval-every 3 --prompt once --prompt twice --set outer.mu=0.25 "
    "--owner-key whole.key"
)
MATRIX = TensorSpec("matrix", (64, 32))


class Made(NamedTuple):
    plain: RunSpec
    whole: RunSpec


async def stand_in(order: bytes, at: version_0.At, laid_out: Callable[[bytes], None]) -> bytes:
    """For the process: one matrix, from the seed."""
    asked = decode(order, GenesisOrder, bytes_max=2**20)
    if asked.params:
        values = np.random.default_rng(asked.seed).standard_normal(MATRIX.size).astype("<f4")
        values.tofile(asked.params)
    made = encode(GenesisMade(asked.config, (MATRIX,), (), "nothing"))
    laid_out(made)
    return made


def spec_in(folder: str | Path) -> RunSpec:
    return open_run_spec(Path(folder, "spec.bin").read_bytes(), verify_ed25519)[1]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    """Two runs, in the folder that the tests then stand in."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
        patch.setattr(version_0, "_run", stand_in)
        Path("words").mkdir()
        for n in range(40):
            Path(f"words/{n}.txt").write_text(f"{n} words of many\n" * 100)
        Path("run.toml").write_text("[inner]\nweight_decay = 0.05\nlr = 0.5\n[outer]\nmu = 0.75\n")
        for flags, out in ((PLAIN, "plain"), (WHOLE, "whole")):
            assert run_command(["run", "new", "--out", out, *flags.split()]) == 0
        yield Made(spec_in("plain"), spec_in("whole"))


def test_each_flag_of_run_new_is_in_the_signed_run(made: Made) -> None:
    whole, plain = made.whole, made.plain
    assert (whole.name, plain.name) == ("whole", "plain")
    assert (whole.target_tokens, plain.target_tokens) == (3_000_000, 20_000_000)
    assert (whole.target_version, plain.target_version) == (70, 0)
    assert (whole.inner.inner_steps, whole.inner.pass_s) == (9, 6.5)
    assert (whole.model.seq_len, whole.inner.sequences_per_step) == (24, 3)
    assert (whole.outer.codec, plain.outer.codec) == ("fp16", "int4")
    assert (whole.committee.size_max, plain.committee.size_max) == (5, 3)
    assert (whole.eval_every, plain.eval_every) == (3, 8)
    assert (whole.samples.prompts, plain.samples.prompts) == (("once", "twice"), ())
    assert whole.genesis.params != plain.genesis.params, "--seed is that of the params"
    assert whole.data.shards != plain.data.shards, "--seed is that of the order"
    # A flag goes before --set, and --set before the file.
    assert (whole.inner.lr, whole.outer.mu, whole.inner.weight_decay) == (0.002, 0.25, 0.05)
    key = load_or_make_key(Path("whole.key"), Files())
    assert whole.owner_key == key.public_key != plain.owner_key
    assert Path("config/p2pdiloco/owner.key").exists(), "where nobody names another"


def test_admission_is_who_may_take_part(made: Made) -> None:
    open_ = [word for word in PLAIN.split() if word not in ("--admission", "local")]
    assert run_command(["run", "new", "--out", "open", *open_]) == 0
    assert (spec_in("open").admission, made.plain.admission) == ("open", "local")


def inspected(capsys: pytest.CaptureFixture[str], *flags: str) -> Any:
    capsys.readouterr()
    assert run_command(["run", "inspect", "plain", *flags]) == 0
    return capsys.readouterr().out


@pytest.mark.usefixtures("made")
def test_each_flag_of_run_inspect_is_in_what_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    words = inspected(capsys)
    assert "at 20 Mbit/s" in words
    assert "at 100 Mbit/s" in words
    assert "Memory of a node" not in words
    words = inspected(capsys, "--up-mbit", "7", "--down-mbit", "8", "--memory-gb", "9")
    assert "at 7 Mbit/s" in words
    assert "at 8 Mbit/s" in words
    assert "Memory of a node with 9 GiB on its GPU" in words
    plain, fast = (json.loads(inspected(capsys, "--json", *f)) for f in ((), ("--up-mbit", "40")))
    assert plain["traffic"]["up_s"] == pytest.approx(2 * fast["traffic"]["up_s"])
    assert "memory" not in plain
    assert json.loads(inspected(capsys, "--json", "--memory-gb", "9"))["memory"]["gpu_bytes"] > 0


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_run: Any) -> KeptRun:
    """A run with two versions, in `tmp_path`/parent, where the test stands."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    Path("others.txt").write_text("".join(f"{n} other words\n\n" for n in range(3000)))
    Path("run.toml").write_text("[inner]\nweight_decay = 0.05\n[outer]\nmu = 0.75\n")
    return KeptRun(tmp_path / "parent", fake_run().spec).steps(2)


def fork(out: str, flags: str = "") -> int:
    return run_command(["run", "fork", "parent", "--out", out, *flags.split()])


def test_each_flag_of_run_fork_is_in_the_new_run(parent: KeptRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert fork("same") == 0
    assert "version 0 is version 2 of run" in capsys.readouterr().out
    same, before = spec_in("same"), parent.spec
    assert (same.name, same.target_tokens, same.data) == (before.name, before.target_tokens, before.data)
    assert (same.outer, same.inner) == (before.outer, before.inner)
    flags = (
        "--name other --tokens 5M --data others.txt --set outer.mu=0.25 --config run.toml "
        "--outer-steps 70 --inner-steps 9 --pass-s 6.5 --batch 3 --lr 0.002 --eval-every 3 --prompt once "
        "--owner-key fork.key --version 1 --json"
    )
    assert fork("other", flags) == 0
    shown, other = json.loads(capsys.readouterr().out), spec_in("other")
    assert (shown["name"], other.name) == ("other", "other")
    assert other.parent is not None
    assert (shown["version"], other.parent.version) == (1, 1)
    assert (other.target_tokens, other.outer.mu, other.inner.weight_decay) == (5_000_000, 0.25, 0.05)
    assert (other.target_version, other.eval_every, other.samples.prompts) == (70, 3, ("once",))
    assert (other.inner.inner_steps, other.inner.pass_s) == (9, 6.5)
    assert (other.inner.sequences_per_step, other.inner.lr) == (3, 0.002)
    assert other.data.shards != before.data.shards
    assert other.owner_key == load_or_make_key(Path("fork.key"), Files()).public_key != same.owner_key
    assert other.genesis.params != same.genesis.params


def test_when_a_run_is_over_is_said_when_it_is_made(
    parent: KeptRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a fork nobody typed it: it is the parent's."""
    tokens, version = parent.spec.target_tokens, parent.spec.target_version
    assert fork("said", "") == 0
    assert when_over(tokens, version) in capsys.readouterr().out
    assert fork("said-2", "--tokens 4M --outer-steps 9") == 0
    out = capsys.readouterr().out
    assert "It is over at version 9 (--outer-steps), or before that after 4,000,000 tokens (--tokens)" in out
    assert fork("said-3", "--tokens 4M --outer-steps 0") == 0
    assert "It is over after 4,000,000 tokens" in capsys.readouterr().out


@pytest.mark.usefixtures("parent")
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--up-mbit 0.0001", "at 0.0001 Mbit/s up"),
        ("--down-mbit 0.0001", "at 0.0001 Mbit/s down"),
        ("--memory-gb 0.0001", "0.0001 GiB are declared"),
    ],
)
def test_a_fork_that_cannot_work_on_the_expected_machines_is_refused(
    capsys: pytest.CaptureFixture[str], flags: str, sentence: str
) -> None:
    assert fork("no", flags) == 2
    assert sentence in capsys.readouterr().err
    assert not Path("no/spec.bin").exists()


@pytest.mark.usefixtures("made")
def test_jobs_are_the_processes_that_prepare_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Counted(making.Processes):
        def __init__(self, jobs: int, *rest: Any) -> None:
            asked.append(jobs)
            super().__init__(0, *rest)

    monkeypatch.setattr(making, "Processes", Counted)
    monkeypatch.setattr(making, "INLINE_BYTES", 0)
    for jobs in ("3", "1"):
        assert run_command(["run", "new", "--out", f"jobs-{jobs}", *PLAIN.split(), "--jobs", jobs]) == 0
    assert asked == [3, 0]
