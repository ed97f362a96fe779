"""What a fork has of its parent."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from p2pdiloco.errors import OperatorError
from p2pdiloco.run_spec import Parent, RunSpec, sign_run_spec
from p2pdiloco.sim.keys import FastSigner
from p2pdiloco.sim.tiny_run import tiny_run
from p2pdiloco_node.corpus.making import Request
from p2pdiloco_node.corpus.work import Taken, Work
from p2pdiloco_node.owner import fork as module
from p2pdiloco_node.owner.fork import _spec, fork
from p2pdiloco_node.progress import Quiet, Told
from p2pdiloco_node.run import new as run_new
from p2pdiloco_node.run.checks import Declared
from p2pdiloco_node.run.file import read_run_file
from p2pdiloco_node.storage.files import Files
from p2pdiloco_node.storage.keys import load_or_make_key
from tests.unit.export.conftest import KeptRun

STRICT = {"admission": "open", "trust_tokens": 123_456_789, "bootstrap_tokens": 987_654_321}


class Heard:
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def forked(parent: dict[str, Any], **tables: dict[str, Any]) -> tuple[RunSpec, RunSpec, list[str]]:
    """(parent, fork, what was said)."""
    tiny = tiny_run(FastSigner("owner"), FastSigner("witness").peer_id)
    spec = msgspec.structs.replace(tiny.spec, **parent)
    parts = read_run_file(None)
    for table, fields in tables.items():
        parts[table].update(fields)
    told = Heard()
    made = _spec(spec, Parent(tiny.run, 1, bytes(32)), parts, spec.data, spec.genesis, cast("Any", told))
    return spec, made, told.said


@pytest.mark.parametrize("tables", [{}, {"inner": {"lr": 1e-5}}, {"run": {"tokens": 10**9}}])
def test_a_strict_run_stays_strict(tables: dict[str, dict[str, Any]]) -> None:
    spec, fork, said = forked(STRICT, **tables)
    assert (fork.trust_tokens, fork.bootstrap_tokens) == (spec.trust_tokens, spec.bootstrap_tokens)
    assert fork.admission == "open"
    assert not said


def test_a_longer_pass_asks_for_as_many_passes_and_says_so() -> None:
    steps = forked(STRICT)[0].inner.inner_steps
    spec, fork, said = forked(STRICT, inner={"inner_steps": 3 * steps})
    assert (fork.trust_tokens, fork.bootstrap_tokens) == (3 * spec.trust_tokens, 3 * spec.bootstrap_tokens)
    assert "370,370,367" in said[0]
    assert forked(STRICT, inner={"inner_steps": 3 * steps}, run={"trust_tokens": 7})[1].trust_tokens == 7


def test_another_admission_has_the_figures_of_a_new_run() -> None:
    assert forked(STRICT, run={"admission": "local"})[1].trust_tokens == 0
    local, fork, said = forked({"admission": "local", "trust_tokens": 0, "bootstrap_tokens": 0},
                               run={"admission": "open"})  # fmt: skip
    of_a_pass = local.inner.inner_steps * local.inner.sequences_per_step * local.model.seq_len
    assert (fork.trust_tokens, fork.bootstrap_tokens) == (16 * of_a_pass, 64 * of_a_pass)
    assert len(said) == 1


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"run": {"name": "n" * 200}}, "name"),
        ({"run": {"tokens": 1}}, "1 tokens are less than one full round"),
        ({"inner": {"lr": -1.0}}, "lr"),
        ({"inner": {"nonsense": 1}}, "has no field 'nonsense'"),
        ({"outer": {"mu": 1.0}}, "outer.mu is 1"),
        ({"committee": {"timeout_s_min": 0.001}}, "committee.timeout_s_min"),
        ({"model": {"seq_len": 2000}}, "no data shard holds a sequence"),
        ({"data": {"text_key": "body"}}, "name the text with --data"),
        ({"data": {"data": ["nowhere.txt"]}}, "nowhere.txt"),
        ({"run": {"name": "fine"}}, "log"),  # and only then is the log looked at
    ],
    ids=str,
)
async def test_what_cannot_work_is_said_before_anything_is_read(
    tmp_path: Path, tables: dict[str, dict[str, Any]], said: str
) -> None:
    """The parent's folder has a RunSpec, and a log that holds nothing."""
    owner = load_or_make_key(tmp_path / "owner.key", Files())
    tiny = tiny_run(owner, FastSigner("witness").peer_id)
    parent = tmp_path / "parent"
    (parent / "journal").mkdir(parents=True)
    (parent / "spec.bin").write_bytes(sign_run_spec(tiny.spec, owner))
    (parent / "journal/log").write_bytes(b"no log")
    parts = read_run_file(None)
    for table, fields in tables.items():
        parts[table].update(fields)
    with pytest.raises(OperatorError, match=said) as e:
        await fork(
            parent, "newest", tmp_path / "out", parts, owner_key=tmp_path / "mine.key", declared=Declared(),
            told=Quiet(),
        )  # fmt: skip
    assert (str(parent) in str(e.value)) == (said == "log")
    assert sorted(os.listdir(tmp_path)) == ["owner.key", "parent"]  # noqa: PTH208


async def test_a_fork_waits_for_nobody_and_overwrites_nobody_in_its_folder(
    tmp_path: Path, fake_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another call is at work there; another one has made its run there meanwhile."""
    parent = KeptRun(tmp_path / "parent", fake_run().spec).steps(2)
    out, mine = tmp_path / "out", tmp_path / "mine.key"

    async def begun() -> object:
        return await fork(
            parent.folder, "newest", out, read_run_file(None), owner_key=mine, declared=Declared(),
            told=Quiet(),
        )  # fmt: skip

    with Taken(Work(out / "making")):
        with pytest.raises(OperatorError, match="Another p2pdiloco makes a run"):
            await begun()
        assert not (out / "blobs").exists(), "nothing was fetched for it"
        theirs = out / "blobs" / ("ab" * 32)
        theirs.parent.mkdir()
        theirs.write_bytes(b"of the other call")
    really = module._same_data

    async def meanwhile(*arguments: Any) -> Any:
        (out / "spec.bin").write_bytes(b"the other call's")
        return await really(*arguments)

    monkeypatch.setattr(module, "_same_data", meanwhile)
    with pytest.raises(OperatorError, match="already holds a run"):
        await begun()
    assert (out / "spec.bin").read_bytes() == b"the other call's"
    assert theirs.exists()


async def test_a_fork_that_is_ended_stops_preparing_its_text(
    tmp_path: Path, fake_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process would stay until the last document is tokenised."""
    parent = KeptRun(tmp_path / "parent", fake_run().spec).steps(2)
    text, parts = tmp_path / "text.txt", read_run_file(None)
    text.write_text("words and more words\n" * 5000)
    parts["data"]["data"] = [str(text)]
    begun, stopped = threading.Event(), threading.Event()

    def make_data(request: Request, out: Path, told: Told, stop: threading.Event, **_: Any) -> None:
        begun.set()
        if stop.wait(10):
            stopped.set()

    monkeypatch.setattr(run_new, "make_data", make_data)
    making = asyncio.create_task(
        fork(
            parent.folder, "newest", tmp_path / "out", parts, owner_key=tmp_path / "mine.key",
            declared=Declared(), told=Quiet(),
        )
    )  # fmt: skip
    assert await asyncio.to_thread(begun.wait, 10)
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
    assert await asyncio.to_thread(stopped.wait, 10)


async def test_a_key_that_cannot_be_made_is_known_before_anything_is_fetched(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(OperatorError, match=r"cannot be made: .*file is no folder"):
        await fork(
            tmp_path / "nowhere", "newest", tmp_path / "out", read_run_file(None),
            owner_key=tmp_path / "file/mine.key", declared=Declared(), told=Quiet(),
        )  # fmt: skip
