"""The real trainer process under the real supervisor, and `run new` from text files to a signed run."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.ids import Digest, digest_of
from p2pdiloco.protocol.actions import Settled
from p2pdiloco.run_spec import RunSpec, open_run_spec
from p2pdiloco.wire.codec import encode
from p2pdiloco.wire.signing import Ed25519Signer, verify_ed25519
from p2pdiloco_node.run.new import Draft, Order, create_run
from p2pdiloco_node.storage.blob_store import DiskBlobStore
from p2pdiloco_node.storage.files import Files, replace_file
from p2pdiloco_node.storage.keys import load_key, make_key
from p2pdiloco_node.training import frames
from p2pdiloco_node.training.arrays import read_array
from p2pdiloco_node.training.checkpoints import MomentsCheckpoints
from p2pdiloco_node.training.contributor import DiskContributor
from p2pdiloco_node.training.ranks import WORKER
from p2pdiloco_node.training.supervisor import Beginning, Supervisor, Told, TrainerDown
from p2pdiloco_node.training.timing import time_inner_steps
from p2pdiloco_node.training.token_files import open_token_files

pytestmark = [pytest.mark.e2e, pytest.mark.timed]

WORD = "the swarm trains one model together over the ordinary internet\n"


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for number in range(12):
        (folder / f"{number}.txt").write_text("".join(f"{number + i} {WORD}" for i in range(60)))
    return folder


def make(out: Path, texts: Path, owner_key: Path, tune: Any = None) -> None:
    order = Order(
        "test", "llama:tiny", [f"{texts}/*.txt"], 10**6, admission="local", seed=1,
        inner={"inner_steps": 10, "pass_s": 60.0},
    )  # fmt: skip
    asyncio.run(create_run(order, out, owner_key=owner_key, tune=tune))


@pytest.fixture(scope="module")
def run_folder(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    make(folder / "run", texts, folder / "owner" / "owner.key")
    return folder / "run"


def opened(folder: Path) -> RunSpec:
    return open_run_spec((folder / "spec.bin").read_bytes(), verify_ed25519)[1]


def test_run_new_makes_a_whole_signed_run(run_folder: Path) -> None:
    spec = opened(run_folder)
    owner = load_key(run_folder.parent / "owner" / "owner.key")
    witness = load_key(run_folder / "witness.key")
    assert spec.owner_key == owner.public_key != witness.public_key
    assert spec.committee.genesis.members == (witness.peer_id,)
    blobs = {p.name: p.read_bytes() for p in (run_folder / "blobs").iterdir()}
    assert all(digest_of(data).hex() == name for name, data in blobs.items())
    named = [*spec.data.shards, spec.data.evaluation]
    assert all(len(blobs[ref.digest.hex()]) == ref.size < ref.tokens for ref in named)
    params = np.frombuffer(b"".join(blobs[c.hex()] for c in spec.genesis.params), "<f4")
    momentum = np.frombuffer(b"".join(blobs[c.hex()] for c in spec.genesis.momentum), "<f4")
    assert params.size == momentum.size == spec.model.params
    assert 0.005 < params.std() < 0.3
    assert not momentum.any()
    mentioned = {r.digest.hex() for r in named} | {
        c.hex() for c in (*spec.genesis.params, *spec.genesis.momentum)
    }
    assert set(blobs) == mentioned
    # Whoever gets the folder cannot speak for the owner.
    secret = (run_folder.parent / "owner" / "owner.key").read_bytes().strip()
    assert all(secret not in p.read_bytes() for p in run_folder.rglob("*") if p.is_file())
    assert (run_folder / "witness.key").stat().st_mode & 0o777 == 0o600


def test_run_new_interrupted_is_no_run_and_goes_on(run_folder: Path, texts: Path, tmp_path: Path) -> None:
    owner = run_folder.parent / "owner" / "owner.key"
    out = tmp_path / "run"

    async def interrupt(draft: Draft) -> RunSpec:
        tokens = [shard.tokens for shard in draft.spec.data.shards]
        assert [p.stat().st_size for p in draft.shards] == tokens
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(out, texts, owner, tune=interrupt)
    assert not (out / "spec.bin").exists()
    witness = load_key(out / "witness.key")

    async def shorten(draft: Draft) -> RunSpec:
        return msgspec.structs.replace(draft.spec, target_tokens=100_000)

    make(out, texts, owner, tune=shorten)
    first, second = opened(run_folder), opened(out)
    assert second.committee.genesis.members == (witness.peer_id,) != first.committee.genesis.members
    # The same files: the same shards. Another run all the same.
    assert first.data == second.data
    assert first.owner_key == second.owner_key
    assert first.nonce != second.nonce
    # The last word on the target moves the warm-up along: a fiftieth of the run.
    assert (first.inner.warmup_tokens, second.inner.warmup_tokens) == (20_000, 2_000)
    with pytest.raises(OperatorError, match="already holds a run"):
        make(out, texts, owner)


class Node:
    """The part of a daemon that trains: supervisor, contributor, and a swarm of one that merges at once."""

    parallel = "auto"

    def __init__(self, run_folder: Path, folder: Path, **supervisor: Any) -> None:
        """`supervisor`: more of its arguments."""
        self.run, self.spec = open_run_spec((run_folder / "spec.bin").read_bytes(), verify_ed25519)
        for name in ("exchange", "moments", "own", "tokens"):
            (folder / name).mkdir(exist_ok=True)
        files = Files()

        def write(path: Path, data: bytes | memoryview) -> None:
            replace_file(files, path, data)

        key = folder / "identity.key"
        self.signer: Ed25519Signer = load_key(key) if key.exists() else make_key(key)
        self.blobs = DiskBlobStore(folder / "blobs", files, also=[run_folder / "blobs"])
        self.contributor = DiskContributor(
            folder / "own", self.run, self.spec, self.signer, self.blobs, write
        )
        chunks = [self.blobs.read(Digest(c)) for c in self.spec.genesis.params]
        self.params = np.frombuffer(b"".join(chunks), "<f4").copy()
        data = self.spec.data
        self.tokens = open_token_files(
            [*data.shards, data.evaluation], self.blobs.read, folder / "tokens", write
        )
        self.told: list[Told] = []
        self.news = asyncio.Condition()
        self.supervisor = Supervisor(
            folder / "exchange",
            MomentsCheckpoints(folder / "moments", write),
            begin=self._begin,
            on_event=self._hear,
            **supervisor,
        )

    async def _begin(self) -> Beginning:
        configure = frames.Configure(
            spec=encode(self.spec),
            peer=self.signer.peer_id,
            shards=tuple(map(str, self.tokens[:-1])),
            evaluations=(str(self.tokens[-1]),),
            exchange="",
            cursor=self.contributor.cursor,
            next_sequence=0,
            device="cpu",
            parallel=self.parallel,
        )
        view = self.contributor.view(self.params)
        return Beginning(configure, 0, 0, self.spec.target_tokens, view)

    async def _hear(self, event: Told) -> None:
        if isinstance(event, frames.PassDone):
            delta = read_array(Path(event.delta), self.spec.model.params)
            self.contributor.finish_pass(delta, event)
        async with self.news:
            self.told.append(event)
            self.news.notify_all()

    async def until(self, found: Callable[[], bool], seconds: float = 60.0) -> None:
        async with asyncio.timeout(seconds), self.news:
            await self.news.wait_for(found)

    def passes(self) -> list[frames.PassDone]:
        return [e for e in self.told if isinstance(e, frames.PassDone)]

    def evaluated(self) -> list[frames.Evaluated]:
        return [e for e in self.told if isinstance(e, frames.Evaluated)]


async def end(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_a_node_trains_waits_evaluates_survives_its_trainer_and_resumes(
    run_folder: Path, tmp_path: Path
) -> None:
    node = Node(run_folder, tmp_path)
    task = asyncio.create_task(node.supervisor.run())
    await node.supervisor.evaluate(0, bytes(32), node.params)
    node.supervisor.allow(2, 0, "waiting for the swarm (no quorum)")
    # Two passes, then a prolonged one, then it waits.
    await node.until(lambda: any(isinstance(e, frames.Waiting) for e in node.told))
    assert [(p.sequence, p.steps, p.data_first) for p in node.passes()] == [(1, 10, 0), (2, 10, 40)]
    (before,) = node.evaluated()
    assert before.losses[0] == pytest.approx(np.log(256), abs=0.3)
    assert 0 < before.tokens[0] <= limits.evaluation_tokens_max
    # The swarm merged both as they are (alone, eta 1): the node's view does not move.
    anchor = node.contributor.anchor(node.params)
    node.params = anchor.copy()
    for header in node.contributor.in_flight():
        node.contributor.settle(Digest(header.delta), Settled.LISTED)
    view = node.contributor.view(node.params)
    clock = 20 * node.spec.tokens_per_inner_step
    await node.supervisor.adopt(2, clock, node.spec.target_tokens, view)
    await node.supervisor.evaluate(2, bytes(32), node.params)
    node.supervisor.allow(2, 2, "")
    await node.until(lambda: len(node.evaluated()) == 2 and len(node.passes()) >= 3)
    assert node.passes()[2].steps == 40
    assert node.evaluated()[1].losses[0] < before.losses[0] - 0.2
    node.supervisor.save_checkpoint()
    await node.until(lambda: any(isinstance(e, frames.Saved) for e in node.told))
    # kill -9 of the trainer: the daemon lives, and goes on where the last pass ended.
    node.supervisor.allow(2, node.contributor.next_sequence - 1 - len(node.contributor.in_flight()), "")
    pid = node.supervisor.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await node.until(lambda: any(isinstance(e, TrainerDown) for e in node.told))
    for header in node.contributor.in_flight():
        node.contributor.settle(Digest(header.delta), Settled.LISTED)
    known, cursor = len(node.passes()), node.contributor.cursor
    node.supervisor.allow(2, node.contributor.next_sequence - 1, "")
    await node.until(lambda: len(node.passes()) > known)
    again = node.passes()[known]
    assert again.data_first == cursor
    assert again.sequence == node.passes()[known - 1].sequence + 1
    await end(task)
    # The daemon's own restart: the same record, the same cursor.
    second = Node(run_folder, tmp_path)
    assert second.contributor.in_flight() == node.contributor.in_flight()
    assert second.contributor.cursor == node.contributor.cursor >= cursor + 40


def test_the_trainer_ends_with_its_daemon(tmp_path: Path) -> None:
    """kill -9 of the daemon: no orphan, whatever the trainer is doing (here: importing)."""
    script = tmp_path / "daemon.py"
    script.write_text(
        "import subprocess, sys, time\n"
        "from p2pdiloco_node.training.ranks import WORKER\n"
        "trainer = subprocess.Popen(WORKER, stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "print(trainer.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdout is not None
        trainer = psutil.Process(int(daemon.stdout.readline()))
        daemon.kill()
    _, alive = psutil.wait_procs([trainer], timeout=5)
    assert not alive


def test_closing_stdin_ends_the_trainer_at_once() -> None:
    with subprocess.Popen(WORKER, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as trainer:
        assert trainer.stdin is not None
        trainer.stdin.close()
        assert trainer.wait(timeout=5) == 0


async def test_an_inner_step_is_timed_with_trainers_at_once(run_folder: Path, tmp_path: Path) -> None:
    spec = opened(run_folder)
    shards = open_token_files(
        spec.data.shards,
        lambda digest: (run_folder / "blobs" / digest.hex()).read_bytes(),
        tmp_path,
        Path.write_bytes,
    )
    chunks = [(run_folder / "blobs" / c.hex()).read_bytes() for c in spec.genesis.params]
    params = np.frombuffer(b"".join(chunks), "<f4")
    step_s = await time_inner_steps(spec, params, shards, tmp_path, trainers=2, seconds=1.0)
    assert 0.0005 < step_s < 2.0
