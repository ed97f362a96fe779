"""`run new` refuses before it reads the text, with the flag and its bounds, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from p2pdiloco.errors import OperatorError
from p2pdiloco.exit_codes import INTERRUPTED
from p2pdiloco.run_spec import RunSpec, TensorSpec, open_run_spec
from p2pdiloco.sim.keys import FastSigner
from p2pdiloco.sim.tiny_run import tiny_run
from p2pdiloco.wire.codec import encode
from p2pdiloco.wire.signing import verify_ed25519
from p2pdiloco_node.cli import run_command
from p2pdiloco_node.progress import Quiet
from p2pdiloco_node.run import new as module
from p2pdiloco_node.run.new import Draft, Order, check_folder, create_run, drop_others
from p2pdiloco_node.run.stopping import run_making, sigterm_is_ctrl_c, stoppable
from p2pdiloco_node.training import version_0
from p2pdiloco_node.training.families import ModelRefused, check_values
from p2pdiloco_node.training.version_0 import GenesisMade

NEW = ["run", "new", "--name", "x", "--model", "llama:tiny", "--data", "texts/*.txt", "--out", "n"]


@pytest.mark.parametrize(
    ("flags", "code", "sentence"),
    [
        (["--up-mbit", "0"], 2, "--up-mbit is a number above 0"),
        (["--memory-gb", "nan"], 2, "--memory-gb is a number above 0"),
        (["--batch", "99999999"], 2, "--batch is a whole number from 1 to"),
        (["--eval-every", "0"], 2, "--eval-every is a whole number from 1 to"),
        (["--lr", "5"], 2, "--lr is a number above 0 and at most 1; 5.0 is not possible"),
        (["--outer-steps", "99999999999999"], 2, "--outer-steps is a whole number from 0 to"),
        (["--name", "a name of more than thirty-two characters"], 2, "--name is text of 1 to 32 characters"),
        (["--prompt", "a" * 100_000], 2, "--prompt is a list of at most 4, each text of 0 to"),
        (["--set", "outer.mu=2"], 2, "--set outer.mu is a number from 0 to 1; 2 is not possible"),
        (["--set", "run.evaluators_max=9"], 2, "--set run.evaluators_max is a whole number from 1 to 3"),
        (["--set", "data.window_shards=0"], 2, "--set data.window_shards is a whole number from 1 to 256"),
        (["--set", "committee.timeout_s_min=0.5"], 2, "less than 2 heartbeats"),
        (["--seed", "99999999999999999999"], 2, "--seed is a whole number from 0 to"),
        (["--jobs", "100000"], 2, "--jobs is 0 to"),
        (["--owner-key", "texts/a.txt/deep/owner.key"], 3, "a.txt is no folder that can be written to"),
    ],
)
def test_what_needs_no_text_is_refused_before_any_is_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    code: int,
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    Path("texts").mkdir()
    Path("texts/a.txt").write_text("words and more words\n" * 5000)
    given = NEW + flags if flags[0] != "--name" else [*NEW[:2], *flags, *NEW[4:]]
    assert run_command(given) == code
    out, err = capsys.readouterr()
    assert sentence in err
    assert "$[" not in err
    assert "documents" not in out + err
    assert [p.name for p in tmp_path.iterdir()] == ["texts"]


# As genesis.py answers, but for the params: this process never gets that far.
LAYS_OUT = """
import os, signal, sys
sys.stdin.buffer.read()
answer = bytes.fromhex(sys.argv[1])
os.write(1, len(answer).to_bytes(4, "big") + answer)
signal.pause()
"""


@pytest.mark.parametrize(
    ("flags", "code", "sentence"),
    [
        (["--pass-s", "0.05", "--up-mbit", "0.001"], 2, "a pass takes 0.05 s"),
        (["--memory-gb", "0.001"], 2, "0.001 GiB are declared"),
        # A small text and a large model: it is the model that fills the disk.
        ([], 6, "of which version 0 of the model takes 2.2 MB"),
    ],
)
def test_a_model_that_is_too_large_is_refused_before_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    flags: list[str], code: int, sentence: str,
) -> None:  # fmt: skip
    """And tried, which takes minutes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    Path("texts").mkdir()
    Path("texts/a.txt").write_text("words and more words\n" * 5000)
    tensors = (TensorSpec("embedding", (320, 512)), TensorSpec("mlp", (212, 512)))
    answer = encode(GenesisMade(b'{"hidden_size": 512, "num_hidden_layers": 1}', tensors, (), "tried with"))
    monkeypatch.setattr(version_0, "GENESIS", (sys.executable, "-c", LAYS_OUT, answer.hex()))
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1 << 20})())
    assert run_command([*NEW, *flags]) == code
    assert sentence in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["texts"]


def test_what_a_killed_call_left_of_version_0_is_taken_up(tmp_path: Path) -> None:
    """Its folder is inside the one that the next call knows."""
    (tmp_path / "making" / "version-0").mkdir(parents=True)
    check_folder(tmp_path)


@pytest.mark.parametrize("ctrl_c", [signal.default_int_handler, signal.SIG_IGN])  # the second: `command &`
def test_sigterm_cleans_up_as_ctrl_c_does(ctrl_c: Any) -> None:
    cleaned = []
    before = signal.signal(signal.SIGINT, ctrl_c)

    async def life() -> None:
        with sigterm_is_ctrl_c():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.wait_for(asyncio.Event().wait(), 30)
            finally:
                cleaned.append(1)

    try:
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(life())
    finally:
        signal.signal(signal.SIGINT, before)
    assert cleaned == [1]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("llama", "num_hidden_layers"),
        ("llama", "intermediate_size"),
        ("mixtral", "num_experts_per_tok"),
        ("mixtral", "num_local_experts"),
    ],
)
def test_a_model_of_nothing_is_refused(family: str, key: str) -> None:
    with pytest.raises(ModelRefused, match=f"{key} is 0: it is a whole number, at least 1"):
        check_values(family, {key: 0})


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"num_experts_per_tok": 5, "num_local_experts": 2}, "num_experts_per_tok is 5, more than"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "no multiple of num_key_value_heads"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0: it is above 0"),
        ({"rope_theta": 0}, "rope_theta is 0: it is above 0"),
        ({"rope_scaling": {"factor": 0.0}}, "rope_scaling.factor is 0.0"),
    ],
)
def test_a_model_that_cannot_train_is_refused_by_its_keys(config: dict[str, Any], key: str) -> None:
    with pytest.raises(ModelRefused, match=key):
        check_values("mixtral", config)


def test_what_no_call_has_made_stays_among_the_blobs(tmp_path: Path) -> None:
    """--out may name a folder that has a folder `blobs` of somebody else's."""
    spec = tiny_run(FastSigner("owner"), FastSigner("witness").peer_id).spec
    theirs = ["cat.png", "album", "AB" * 32]
    (tmp_path / "album").mkdir()
    for name in ("cat.png", "AB" * 32, "ab" * 32, "cd" * 32 + ".tmp"):
        (tmp_path / name).write_bytes(b"x")
    digests = [ref.digest for ref in spec.data.blobs] + [*spec.genesis.params, *spec.genesis.momentum]
    ours = {digest.hex() for digest in digests}
    for name in ours:
        (tmp_path / name).write_bytes(b"x")
    drop_others(tmp_path, spec)
    assert {path.name for path in tmp_path.iterdir()} == {*theirs, *ours}
    (tmp_path / min(ours)).unlink()
    with pytest.raises(OperatorError, match=r"lacks 1 blob of this run.*give the same command again"):
        drop_others(tmp_path, spec)


def test_two_calls_at_once_do_not_overwrite_each_other_s_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second comes when the first has its data and makes version 0."""
    (tmp_path / "a.txt").write_text("words and more words\n" * 5000)
    order = Order("x", "llama:tiny", [str(tmp_path / "a.txt")], 2**30, admission="local")

    async def second(draft: Draft) -> RunSpec:
        monkeypatch.setattr(
            version_0, "GENESIS", (sys.executable, "-c", "raise SystemExit('no need of torch')")
        )
        with pytest.raises(OperatorError, match="Another p2pdiloco makes a run"):
            await create_run(order, tmp_path / "run", owner_key=tmp_path / "owner.key")
        return draft.spec

    run = asyncio.run(create_run(order, tmp_path / "run", owner_key=tmp_path / "owner.key", tune=second))
    assert open_run_spec((tmp_path / "run" / "spec.bin").read_bytes(), verify_ed25519)[0] == run
    assert {p.name for p in (tmp_path / "run").iterdir()} == {"blobs", "spec.bin", "witness.key"}
    with pytest.raises(OperatorError, match="already holds a run"):
        asyncio.run(create_run(order, tmp_path / "run", owner_key=tmp_path / "owner.key"))


async def test_who_comes_second_is_told_before_it_looks_at_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both begin at once: the first looks for half a minute, and has no data yet."""
    (tmp_path / "a.txt").write_text("words and more words\n" * 5000)
    order = Order("x", "llama:tiny", [str(tmp_path / "a.txt")], 2**30, admission="local")
    looks = 0

    async def look(*_: Any, **__: Any) -> Any:
        nonlocal looks
        looks += 1
        with pytest.raises(OperatorError, match="Another p2pdiloco makes a run"):
            await create_run(order, tmp_path / "run", owner_key=tmp_path / "owner.key")
        raise OperatorError("it cannot be computed with")

    monkeypatch.setattr(module, "look_at_model", look)
    for number in (1, 2):  # nobody holds it any more
        with pytest.raises(OperatorError, match="cannot be computed with"):
            await create_run(order, tmp_path / "run", owner_key=tmp_path / "owner.key")
        assert looks == number
    assert os.listdir(tmp_path) == ["a.txt"]  # noqa: PTH208


@pytest.mark.parametrize(
    ("made", "word"),
    [
        ("", "Stopped. Nothing was made."),
        ("run/making", "Stopped. The same command goes on where it was."),
        ("run/blobs", "Stopped. The same command goes on where it was."),
    ],
)
async def test_whoever_ends_it_is_told_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: str, word: str
) -> None:
    said: list[str] = []

    class Heard(Quiet):
        def say(self, text: str) -> None:
            said.append(text)

    async def look(*_: Any, **__: Any) -> Any:
        raise asyncio.CancelledError

    monkeypatch.setattr(module, "look_at_model", look)
    (tmp_path / "a.txt").write_text("words and more words\n" * 5000)
    (tmp_path / made).mkdir(parents=True, exist_ok=True)
    out = tmp_path / "run"
    order = Order("x", "llama:tiny", [str(tmp_path / "a.txt")], 2**30, admission="local")
    with pytest.raises(asyncio.CancelledError):
        await create_run(order, out, owner_key=tmp_path / "owner.key", told=Heard())
    assert said == [word]
    assert ("run" in os.listdir(tmp_path)) == bool(made)  # noqa: PTH208


@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM"])
def test_a_library_s_call_that_never_ends_does_not_outlive_ctrl_c(tmp_path: Path, how: str) -> None:
    script = (
        "import asyncio, signal, sys, threading; from pathlib import Path\n"
        "from p2pdiloco import limits; from p2pdiloco_node.progress import Quiet\n"
        "from p2pdiloco_node.run.stopping import run_making, stoppable\n"
        "limits.making_stop_s = 0.1\n"
        "async def make():\n"
        "    with stoppable(Path(sys.argv[1]), Quiet()):\n"
        "        asyncio.get_running_loop().call_soon(signal.raise_signal, signal.Signals[sys.argv[2]])\n"
        "        await asyncio.to_thread(threading.Event().wait)\n"
        "run_making(make())\n"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path), how], timeout=60, check=False)
    assert ended.returncode == INTERRUPTED


def test_whoever_called_is_not_ended_with_a_making_that_has_ended(tmp_path: Path) -> None:
    """The process went on, and was ended three seconds later whatever it was at."""
    before = threading.active_count()

    async def make() -> None:
        with stoppable(tmp_path, Quiet()):
            asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
            await asyncio.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        run_making(make())
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join(1.0)
    assert threading.active_count() == before
