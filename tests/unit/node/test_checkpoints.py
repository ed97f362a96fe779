"""What a tracker offers: whole folders or nothing, the newest few, within its bounds, also after a crash."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

from p2pdiloco import limits
from p2pdiloco.diloco.global_state import chunk_digests, chunks_of
from p2pdiloco.errors import OperatorError, TransportError
from p2pdiloco.ids import Digest, digest_of, merkle_root
from p2pdiloco.protocol.run_log import RunLog
from p2pdiloco.rules.state import genesis_state
from p2pdiloco.run_spec import RunSpec, TensorSpec
from p2pdiloco.wire.codec import encode
from p2pdiloco.wire.log import OuterStep, Scalars
from p2pdiloco.wire.messages import SnapshotOffer
from p2pdiloco_node.checkpoint_maker import CheckpointMaker
from p2pdiloco_node.checkpoint_shelf import LISTED, CheckpointShelf, Job
from p2pdiloco_node.export.chain import Tally
from p2pdiloco_node.export.facts import Evaluation, Heard, Origin
from p2pdiloco_node.export.hf_folder import Content
from p2pdiloco_node.participant import Participant

SIZE = 1000
PARAMS = np.random.default_rng(1).standard_normal(SIZE).astype(np.float32)


@pytest.fixture
def spec(fake_run: Any) -> RunSpec:
    model = msgspec.structs.replace(fake_run().spec.model, tensors=(TensorSpec("w", (SIZE,)),))
    made: RunSpec = fake_run(model=model).spec
    return made


def job(spec: RunSpec, version: int, params: Any = PARAMS) -> Job:
    tally = Tally()
    tally.version, tally.tokens = version, 100 * version
    root = merkle_root(chunk_digests(params))
    origin = Origin(cast("Any", bytes(32)), spec, version, version, Digest(bytes(32)), root, tally)
    content = Content(origin, Heard(), b"", "float32")
    return Job(content, lambda: iter(chunks_of(params)), 1.0)


def test_a_checkpoint_is_a_whole_folder_with_digests(spec: RunSpec, tmp_path: Path) -> None:
    shelf = CheckpointShelf(tmp_path / "checkpoints", 3)
    shelf.load()
    made = shelf.make(job(spec, 16))
    assert shelf.offered == (made,)
    assert made.files[0].name == "model.safetensors"
    names = {file.name for file in made.files}
    assert {"config.json", "tokenizer.json", "README.md", "p2pdiloco.json"} < names
    for file in made.files:
        found = shelf.find(f"v16/{file.name}")
        assert found is not None
        data = found.path.read_bytes()
        assert (found.size, found.sha256) == (len(data), digest_of(data).hex()) == (file.bytes, file.sha256)
        assert file.path == f"checkpoints/v16/{file.name}"
    weights = shelf.find("v16/model.safetensors")
    assert weights is not None
    assert load_file(weights.path)["w"].tobytes() == PARAMS.tobytes()
    for name in (f"v16/{LISTED}", "v16/../v16/config.json", "v17/config.json", ""):
        assert shelf.find(name) is None


def test_the_oldest_go_and_a_restart_has_the_rest(spec: RunSpec, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    shelf = CheckpointShelf(folder, 2)
    shelf.load()
    for version in (16, 32, 48):
        shelf.make(job(spec, version))
    assert [c.version for c in shelf.offered] == [32, 48]
    assert shelf.find("v16/model.safetensors") is None
    assert sorted(path.name for path in folder.iterdir()) == ["v32", "v48"]
    again = CheckpointShelf(folder, 1)
    again.load()
    assert [c.version for c in again.offered] == [48]
    assert sorted(path.name for path in folder.iterdir()) == ["v48"], "fewer are wanted now"


def no_list(folder: Path) -> None:
    (folder / LISTED).unlink()


def shorter(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def another_name(folder: Path) -> None:
    folder.rename(folder.with_name("v99"))


def half_made(folder: Path) -> None:
    folder.rename(folder.with_name("making"))


@pytest.mark.parametrize("harm", [no_list, shorter, another_name, half_made])
def test_what_is_not_whole_is_removed_at_the_start(
    spec: RunSpec, tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    folder = tmp_path / "checkpoints"
    shelf = CheckpointShelf(folder, 2)
    shelf.load()
    shelf.make(job(spec, 16))
    harm(folder / "v16")
    again = CheckpointShelf(folder, 2)
    again.load()
    assert again.offered == ()
    assert list(folder.iterdir()) == []


def test_a_making_that_fails_costs_nothing(spec: RunSpec, tmp_path: Path) -> None:
    shelf = CheckpointShelf(tmp_path / "checkpoints", 2)
    shelf.load()
    shelf.make(job(spec, 16))
    whole = job(spec, 32)

    def broken() -> Any:
        yield next(iter(whole.chunks()))[:8]
        raise OperatorError("the disk failed")

    with pytest.raises(OperatorError, match="the disk failed"):
        shelf.make(Job(whole.content, broken, 1.0))
    shelf.stop()
    with pytest.raises(OperatorError, match="the tracker ends"):
        shelf.make(whole)
    assert [c.version for c in shelf.offered] == [16]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["v16"]


def test_a_full_disk_and_too_large_a_model_are_said(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = CheckpointShelf(tmp_path / "checkpoints", 2)
    shelf.load()
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=1000))
        with pytest.raises(OperatorError, match=r"1,000|0 MB are free.*--checkpoints 0") as caught:
            shelf.make(job(spec, 16))
        assert caught.value.exit_code == 6
    monkeypatch.setattr(limits, "checkpoint_store_bytes_max", 1)
    with pytest.raises(OperatorError, match="more than a tracker may offer"):
        shelf.make(job(spec, 16))


# When one is made.


class Stage:
    """A witness as the maker sees it."""

    def __init__(self, spec: RunSpec, folder: Path) -> None:
        self.spec = spec
        self.now = 0.0
        self.said: list[str] = []
        self.evaluated: dict[int, float] = {}
        self.blobs: dict[Digest, bytes] = {}
        self.keeper = SimpleNamespace(snapshots=(), index=0, params=lambda: PARAMS)
        self.log = RunLog(cast("Any", bytes(32)), spec)
        cast("Any", self.log).head_at = lambda _index: Digest(bytes(32))
        self.state = genesis_state(spec)
        self.shelf = CheckpointShelf(folder / "checkpoints", 3)
        self.shelf.load()
        participant = SimpleNamespace(
            node=self,
            keeper=self.keeper,
            blobs=SimpleNamespace(read=self.blobs.__getitem__),
            setting=SimpleNamespace(run=bytes(32), spec=spec),
        )
        self.maker = CheckpointMaker(
            cast("Participant", participant), self.shelf, heard=self.heard,
            say=lambda _kind, text: self.said.append(text), clock=lambda: self.now,
        )  # fmt: skip

    @property
    def version(self) -> int:
        return self.state.version

    @property
    def index(self) -> int:
        return int(self.keeper.index)

    def heard(self, version: int) -> Heard:
        loss = self.evaluated.get(version)
        return Heard(None if loss is None else Evaluation(version, loss, 64))

    def step(self) -> None:
        self.state = msgspec.structs.replace(self.state, version=self.version + 1)
        self.keeper.index += 1
        contributions = cast("Any", ())
        scalars = Scalars(1.0, 1.0, 0.5, 1.0, 0.5)
        content = OuterStep(self.version, 0, contributions, (), (), scalars, 10 * self.version, 1, bytes(32))
        self.maker.entry(self.index, content, self.now)

    def snapshot(self) -> None:
        chunks = {digest_of(c): bytes(c) for c in chunks_of(PARAMS)}
        self.blobs.update(chunks)
        offer = SnapshotOffer(self.index, tuple(chunks), tuple(chunks), encode(self.state))
        self.keeper.snapshots = (*self.keeper.snapshots, offer)[-2:]

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()
            if self.version % limits.snapshot_every_versions == 0:
                self.snapshot()

    @property
    def versions(self) -> list[int]:
        return [c.version for c in self.shelf.offered]


@pytest.fixture
def stage(spec: RunSpec, tmp_path: Path) -> Stage:
    return Stage(spec, tmp_path)


async def test_a_snapshot_is_offered_when_it_is_evaluated(stage: Stage) -> None:
    stage.steps(16)
    await stage.maker.look()
    assert stage.versions == [], "its evaluation is on the way"
    stage.evaluated[16] = 2.5
    await stage.maker.look()
    assert stage.versions == [16]
    found = stage.shelf.find("v16/p2pdiloco.json")
    assert found is not None
    facts = json.loads(found.path.read_bytes())
    assert (facts["version"], facts["tokens"], facts["evaluation"]["loss"]) == (16, 160, 2.5)
    assert "version 16 can be downloaded" in stage.said[0]
    await stage.maker.look()
    assert len(stage.said) == 1, "once"


async def test_an_evaluation_that_never_comes_holds_nothing_up(stage: Stage) -> None:
    stage.steps(16)
    await stage.maker.look()
    stage.now += limits.checkpoint_evaluation_s
    await stage.maker.look()
    assert stage.versions == [16]


async def test_they_come_at_intervals_and_the_last_version_always(stage: Stage) -> None:
    stage.evaluated = dict.fromkeys(range(100), 3.0)
    stage.steps(16)
    await stage.maker.look()
    stage.steps(16)
    await stage.maker.look()
    assert stage.versions == [16], "too soon after the one before"
    stage.now += limits.checkpoint_interval_s_min
    await stage.maker.look()
    assert stage.versions == [16, 32]
    stage.steps(3)
    stage.state = msgspec.structs.replace(stage.state, finished=True)
    await stage.maker.look()
    assert stage.versions == [16, 32, 35]
    found = stage.shelf.find("v35/model.safetensors")
    assert found is not None
    assert load_file(found.path)["w"].tobytes() == PARAMS.tobytes()


async def test_a_restart_offers_no_version_twice_and_counts_from_the_log_alone(
    stage: Stage, spec: RunSpec, tmp_path: Path
) -> None:
    stage.evaluated = dict.fromkeys(range(100), 3.0)
    stage.steps(16)
    await stage.maker.look()
    again = Stage(spec, tmp_path)
    again.evaluated = stage.evaluated
    again.steps(16)
    await again.maker.look()
    assert again.said == []
    again.keeper.index = 0
    again.state = genesis_state(spec)
    again.steps(32)  # the owner's recovery dropped entries: told from the first on
    await again.maker.look()
    found = again.shelf.find("v32/p2pdiloco.json")
    assert found is not None
    assert json.loads(found.path.read_bytes())["tokens"] == 320


async def test_a_chunk_that_is_gone_is_said_and_not_tried_for_ever(stage: Stage, caplog: Any) -> None:
    """In the log: what fails on this machine's disk is nothing for the page."""

    def gone(_digest: Digest) -> bytes:
        raise TransportError("blob is not here")

    stage.evaluated[16] = 1.0
    stage.steps(16)
    cast("Any", stage.maker._participant).blobs.read = gone
    await stage.maker.look()
    stage.now += 1000
    await stage.maker.look()
    assert [r.message for r in caplog.records] == ["Version 16 is not offered for download: blob is not here"]
    assert stage.said == []
    assert stage.versions == []


async def test_versions_that_a_recovery_dropped_are_offered_no_more_and_may_come_again(
    stage: Stage, tmp_path: Path
) -> None:
    for _ in range(2):
        stage.steps(16)
        stage.evaluated[stage.version] = 2.5
        stage.now += limits.checkpoint_interval_s_min
        await stage.maker.look()
    assert stage.versions == [16, 32]
    stage.maker.went_back(40)
    await stage.maker.look()
    assert stage.versions == [16, 32]
    stage.keeper.snapshots = stage.keeper.snapshots[:1]
    stage.maker.went_back(20)
    await stage.maker.look()
    assert stage.versions == [16]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["v16"]
    stage.state = msgspec.structs.replace(stage.state, version=20)
    stage.steps(12)
    stage.now += limits.checkpoint_interval_s_min
    await stage.maker.look()
    assert stage.versions == [16, 32]
