"""`verify` reads what the RunSpec names: a damaged file has a name. Replays are tested with real runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from p2pdiloco.diloco.global_state import chunks_of
from p2pdiloco.errors import OperatorError
from p2pdiloco.ids import digest_of
from p2pdiloco.run_spec import (
    BYTES,
    BlobRef,
    DataSpec,
    EvaluationSet,
    Genesis,
    RunSpec,
    TensorSpec,
    sign_run_spec,
)
from p2pdiloco.wire.signing import Ed25519Signer
from p2pdiloco_node.ports import Purpose
from p2pdiloco_node.storage import journal
from p2pdiloco_node.verify import print_verified, verify_run

OWNER = Ed25519Signer(bytes(range(32)))
SHARDS = (b"first shard", b"second shard")
EVALUATION = b"held out"


@pytest.fixture
def run(tmp_path: Path, fake_run: Any) -> tuple[Path, RunSpec]:
    """A run's folder as `run new` makes it and a tracker has opened it: no entry yet."""
    size = 1000
    model = msgspec.structs.replace(fake_run().spec.model, tensors=(TensorSpec("w", (size,)),))
    params = np.random.default_rng(1).standard_normal(size).astype(np.float32)
    chunks = [[bytes(c) for c in chunks_of(a)] for a in (params, np.zeros_like(params))]
    refs = [BlobRef(digest_of(b), len(b), len(b)) for b in (*SHARDS, EVALUATION)]
    spec: RunSpec = fake_run(
        model=model,
        owner_key=OWNER.public_key,
        data=DataSpec(BYTES, 1, tuple(refs[:2]), (EvaluationSet("all", refs[2], refs[2].tokens),)),
        genesis=Genesis(*(tuple(digest_of(c) for c in part) for part in chunks)),
    ).spec
    folder = tmp_path / "tiny-run"
    (folder / "blobs").mkdir(parents=True)
    for blob in (*SHARDS, EVALUATION, *chunks[0], *chunks[1]):
        (folder / "blobs" / digest_of(blob).hex()).write_bytes(blob)
    (folder / "spec.bin").write_bytes(sign_run_spec(spec, OWNER))
    (folder / "witness" / "journal").mkdir(parents=True)
    (folder / "witness" / "journal" / "log").write_bytes(journal.TAG)
    return folder, spec


def named(spec: RunSpec) -> dict[str, bytes]:
    return {
        "data shard 1 of 2": spec.data.shards[0].digest,
        "data shard 2 of 2": spec.data.shards[1].digest,
        "the evaluation shard": spec.data.evaluation.digest,
        "chunk 0 of version 0's params": spec.genesis.params[0],
        "chunk 0 of version 0's momentum": spec.genesis.momentum[0],
    }


def test_a_whole_run_verifies_and_tells_what_it_read(
    run: tuple[Path, RunSpec], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = run
    told: list[tuple[str, float, float, str]] = []
    verified = verify_run(folder, lambda *news: told.append(news))
    assert (verified.version, verified.blobs) == (0, 5)
    assert [news[1:] for news in told] == [(n, 5, "blobs") for n in range(1, 6)]
    assert print_verified(folder, as_json=True) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["blobs"] == 5
    assert said.err == "Reading data and version 0 ...\n"


def test_a_version_0_that_is_not_one_of_its_model_is_said(run: tuple[Path, RunSpec]) -> None:
    """It was said not to be kept there."""
    folder, spec = run
    large = (folder / "blobs" / spec.genesis.params[0].hex()).read_bytes() + bytes(4)
    (folder / "blobs" / digest_of(large).hex()).write_bytes(large)
    genesis = msgspec.structs.replace(spec.genesis, params=(digest_of(large),))
    made = msgspec.structs.replace(spec, genesis=genesis)
    (folder / "spec.bin").write_bytes(sign_run_spec(made, OWNER))
    with pytest.raises(OperatorError, match="a chunk of version 0 is not one of its model") as caught:
        verify_run(folder)
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("harm", ["bit", "short", "gone"])
@pytest.mark.parametrize(
    "what",
    [
        "data shard 1 of 2",
        "data shard 2 of 2",
        "the evaluation shard",
        "chunk 0 of version 0's params",
        "chunk 0 of version 0's momentum",
    ],
)
def test_a_damaged_file_is_named(run: tuple[Path, RunSpec], what: str, harm: str) -> None:
    folder, spec = run
    path = folder / "blobs" / named(spec)[what].hex()
    data = path.read_bytes()
    if harm == "gone":
        path.unlink()
    else:
        path.write_bytes(data[:-1] if harm == "short" else bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(OperatorError) as caught:
        verify_run(folder)
    assert caught.value.exit_code == 1
    assert f"{what} is {'missing' if harm == 'gone' else 'damaged'}: {path} " in str(caught.value)


def test_a_node_s_folder_may_lack_data_but_holds_no_damaged_one(run: tuple[Path, RunSpec]) -> None:
    folder, spec = run
    (folder / "witness" / "journal").rename(folder / "journal")
    shard = folder / "blobs" / spec.data.shards[0].digest.hex()
    shard.rename(folder / "aside")
    assert verify_run(folder).blobs == 4
    shard.write_bytes(b"another")
    with pytest.raises(OperatorError, match="data shard 1 of 2 is damaged"):
        verify_run(folder)


def test_every_copy_is_read(run: tuple[Path, RunSpec]) -> None:
    """The witness's store may hold a whole one beside the run's own that is damaged."""
    folder, spec = run
    shard = folder / "blobs" / spec.data.evaluation.digest.hex()
    name = shard.name
    store = folder / "witness" / "blobs" / Purpose.SHARD / name[:2]
    store.mkdir(parents=True)
    (store / name).write_bytes(EVALUATION)
    shard.write_bytes(b"held uot")
    with pytest.raises(OperatorError, match="the evaluation shard is damaged") as caught:
        verify_run(folder)
    assert str(shard) in str(caught.value)
