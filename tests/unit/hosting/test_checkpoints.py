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
from p2pdiloco.rules.state import genesis_state
from p2pdiloco.run_spec import RunSpec, TensorSpec
from p2pdiloco.wire.codec import encode
from p2pdiloco.wire.log import OuterStep, OwnerEntry, OwnerWord, Scalars
from p2pdiloco.wire.messages import SnapshotOffer
from p2pdiloco_node.export.chain import Tally
from p2pdiloco_node.export.facts import Evaluation, Heard, Origin
from p2pdiloco_node.export.hf_folder import Content
from p2pdiloco_node.export.sources import room_needed
from p2pdiloco_node.hosting.checkpoint_maker import CheckpointMaker, Seen
from p2pdiloco_node.hosting.checkpoint_shelf import LISTED, CheckpointShelf, Job

SIZE = 1000
PARAMS = np.random.default_rng(1).standard_normal(SIZE).astype(np.float32)


@pytest.fixture
def spec(fake_run: Any) -> RunSpec:
    model = msgspec.structs.replace(fake_run().spec.model, tensors=(TensorSpec("w", (SIZE,)),))
    made: RunSpec = fake_run(model=model).spec
    return made


def head_of(index: int, branch: bytes = b"") -> Digest:
    return digest_of(b"entry %d" % index + branch)


def of_log(index: int, head: Digest) -> bool:
    """A log that has them all."""
    return head == head_of(index)


def job(spec: RunSpec, version: int, params: Any = PARAMS) -> Job:
    tally = Tally()
    tally.version, tally.tokens = version, 100 * version
    root = merkle_root(chunk_digests(params))
    origin = Origin(cast("Any", bytes(32)), spec, version, version, head_of(version), root, tally)
    content = Content(origin, Heard(), b"", "float32")
    return Job(content, lambda: iter(chunks_of(params)), 1.0)


def test_a_checkpoint_is_a_whole_folder_with_digests(spec: RunSpec, tmp_path: Path) -> None:
    shelf = CheckpointShelf(tmp_path / "checkpoints", 3)
    shelf.load(of_log)
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
    shelf.load(of_log)
    for version in (16, 32, 48):
        shelf.make(job(spec, version))
    assert [c.version for c in shelf.offered] == [32, 48]
    assert shelf.find("v16/model.safetensors") is None
    assert sorted(path.name for path in folder.iterdir()) == ["v32", "v48"]
    again = CheckpointShelf(folder, 1)
    again.load(of_log)
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
    shelf.load(of_log)
    shelf.make(job(spec, 16))
    harm(folder / "v16")
    again = CheckpointShelf(folder, 2)
    again.load(of_log)
    assert again.offered == ()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    "holds", [lambda index, _head: index <= 20, lambda _index, head: head != head_of(32)]
)
def test_what_the_log_no_longer_has_is_not_offered_after_a_restart(
    spec: RunSpec, tmp_path: Path, holds: Callable[[int, Digest], bool]
) -> None:
    """A life that ended between the cut of a recovery and the work that follows it leaves it here."""
    shelf = CheckpointShelf(tmp_path / "checkpoints", 2)
    shelf.load(of_log)
    shelf.make(job(spec, 16))
    shelf.make(job(spec, 32))
    again = CheckpointShelf(tmp_path / "checkpoints", 2)
    again.load(holds)
    assert [c.version for c in again.offered] == [16]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["v16"]


def test_one_alone_is_offered_until_the_next_is_whole(spec: RunSpec, tmp_path: Path) -> None:
    shelf = CheckpointShelf(tmp_path / "checkpoints", 1)
    shelf.load(of_log)
    shelf.make(job(spec, 16))
    whole = job(spec, 32)
    offered = []

    def chunks() -> Any:
        offered.append([c.version for c in shelf.offered])
        assert shelf.find("v16/model.safetensors") is not None
        return whole.chunks()

    def broken() -> Any:
        raise OperatorError("the disk failed")

    with pytest.raises(OperatorError, match="the disk failed"):
        shelf.make(Job(whole.content, broken, 1.0))
    assert [c.version for c in shelf.offered] == [16]
    shelf.make(Job(whole.content, chunks, 1.0))
    assert offered == [[16]]
    assert [c.version for c in shelf.offered] == [32]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["v32"]


def test_where_the_disk_has_no_room_for_both_the_oldest_goes_first(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoints"
    shelf = CheckpointShelf(folder, 2)
    shelf.load(of_log)
    size = shelf.make(job(spec, 16)).bytes
    needed = room_needed(spec, 4, fetched=False)
    disk = SimpleNamespace(free=needed - size - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: disk)
    with pytest.raises(OperatorError, match="MB are free"):
        shelf.make(job(spec, 32))
    assert [c.version for c in shelf.offered] == [16], "its going would not have been enough"
    disk.free += 1
    shelf.make(job(spec, 32))
    assert [c.version for c in shelf.offered] == [32]


def test_a_folder_that_somebody_removed_is_made_again(spec: RunSpec, tmp_path: Path) -> None:
    shelf = CheckpointShelf(tmp_path / "checkpoints", 2)
    shelf.load(of_log)
    shelf.make(job(spec, 16))
    shutil.rmtree(tmp_path / "checkpoints")
    shelf.make(job(spec, 32))
    assert [c.version for c in shelf.offered] == [32]


def test_a_making_that_fails_costs_nothing(spec: RunSpec, tmp_path: Path) -> None:
    shelf = CheckpointShelf(tmp_path / "checkpoints", 2)
    shelf.load(of_log)
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
    shelf.load(of_log)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=1000))
        with pytest.raises(OperatorError, match=r"1,000|0 MB are free.*--checkpoints 0") as caught:
            shelf.make(job(spec, 16))
        assert caught.value.exit_code == 6
    monkeypatch.setattr(limits, "checkpoint_store_bytes_max", 1)
    with pytest.raises(OperatorError, match="more than a tracker may offer"):
        shelf.make(job(spec, 16))


# When one is made.


class Log:
    """One entry a version; a recovery begins another branch."""

    def __init__(self) -> None:
        self.index = 0
        self.branch = b""
        self.cut_at = 0

    def head_at(self, index: int) -> Digest:
        return head_of(index, self.branch if index > self.cut_at else b"")

    def version_at(self, index: int) -> int:
        return index


class Stage:
    """A witness as the maker sees it."""

    def __init__(self, spec: RunSpec, folder: Path) -> None:
        self.spec = spec
        self.now = 0.0
        self.said: list[str] = []
        self.evaluated: dict[int, float] = {}
        self.blobs: dict[Digest, bytes] = {}
        self.keeper = SimpleNamespace(snapshots=())
        self.log = Log()
        self.state = genesis_state(spec)
        self.shelf = CheckpointShelf(folder / "checkpoints", 3)
        self.shelf.load(of_log)
        self.maker = CheckpointMaker(
            cast("Any", bytes(32)), spec, self.shelf, seen=self.seen, read=lambda digest: self.read(digest),
            heard=self.heard, say=lambda _kind, text: self.said.append(text), clock=lambda: self.now,
        )  # fmt: skip

    @property
    def version(self) -> int:
        return self.state.version

    @property
    def index(self) -> int:
        return self.log.index

    def read(self, digest: Digest) -> bytes:
        return self.blobs[digest]

    def seen(self) -> Seen:
        finished = self.state.finished
        return Seen(
            cast("Any", self.log), finished, (lambda: PARAMS) if finished else None, self.keeper.snapshots
        )

    def heard(self, version: int) -> Heard:
        loss = self.evaluated.get(version)
        return Heard(None if loss is None else Evaluation(version, loss, 64))

    def step(self) -> None:
        self.state = msgspec.structs.replace(self.state, version=self.version + 1)
        self.log.index += 1
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
    word = OwnerWord("finish", 1, 0, b"", bytes(64))
    stage.maker.entry(stage.index + 1, OwnerEntry(word, bytes(32)), stage.now)
    await stage.maker.look()
    assert stage.versions == [16, 32, 35]
    facts = stage.shelf.find("v35/p2pdiloco.json")
    assert facts is not None
    assert json.loads(facts.path.read_bytes())["ended_by_owner"] is True
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
    again.log.index = 0
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
    cast("Any", stage).read = gone
    await stage.maker.look()
    stage.now += 1000
    await stage.maker.look()
    assert [r.message for r in caplog.records] == ["Version 16 is not offered for download: blob is not here"]
    assert stage.said == []
    assert stage.versions == []


async def test_nothing_that_fails_here_ends_the_witness(stage: Stage, caplog: Any) -> None:
    def fails(_digest: Digest) -> bytes:
        raise IndexError("a fault of this program")

    stage.evaluated = dict.fromkeys(range(100), 1.0)
    stage.steps(16)
    cast("Any", stage).read = fails
    await stage.maker.look()
    cast("Any", stage).read = stage.blobs.__getitem__
    stage.keeper.snapshots = (msgspec.structs.replace(stage.keeper.snapshots[-1], rules=b"?"),)
    stage.now += 1000
    await stage.maker.look()
    await stage.maker.look()
    said = [r.message for r in caplog.records]
    assert len(said) == 2, "each once"
    assert "IndexError" in said[0]
    assert "MALFORMED" in said[1]
    stage.steps(16)
    await stage.maker.look()
    assert stage.versions == [32]


async def test_what_a_recovery_cut_off_is_not_made_before_the_disk_has_heard_of_it(stage: Stage) -> None:
    stage.evaluated = dict.fromkeys(range(100), 2.5)
    stage.steps(16)
    stage.log.index = 10
    await stage.maker.look()
    assert stage.versions == []
    stage.log.branch, stage.log.cut_at, stage.log.index = b"another", 10, 20
    await stage.maker.look()
    assert stage.versions == [], "the entry in its place is another one"


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
    stage.log.index, stage.log.cut_at, stage.log.branch = 20, 20, b"another"
    stage.steps(12)
    stage.now += limits.checkpoint_interval_s_min
    await stage.maker.look()
    assert stage.versions == [16, 32]
