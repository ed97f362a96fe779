"""How much of the disk is for the run's data (`--data-disk`), and who is asked for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError, TransportError
from p2pdiloco.ids import Digest, PeerId, RunId, tagged_digest
from p2pdiloco.run_spec import BlobRef
from p2pdiloco.sim.keys import FastSigner
from p2pdiloco.sim.tiny_run import tiny_run
from p2pdiloco_node.config import NodeConfig, load, parse_size
from p2pdiloco_node.data.room import DataRoom
from p2pdiloco_node.taking_part.blobs import DONORS_TRIED_MAX, RunBlobs
from p2pdiloco_node.telemetry import Telemetry
from p2pdiloco_node.training.machine import Machine
from p2pdiloco_node.training.memory_plan import DATA_ROW, MemoryPlan, Wishes, plan_memory
from p2pdiloco_node.training.shard_plan import costs_of, least_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [("20GB", 20 * 10**9), ("1.5TiB", 3 * 2**39), (" 500 mb ", 5 * 10**8), ("64GiB", 2**36), ("7KB", 7000)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, "--data-disk") == size


@pytest.mark.parametrize("text", ["", "20", "GB", "-1GB", "20XB", "0GB", "1e9GB", "9999999TB", "20 G B"])
def test_what_is_no_size_gets_a_sentence(text: str) -> None:
    with pytest.raises(OperatorError, match="write it like 20GB") as fault:
        parse_size(text, "--data-disk")
    assert fault.value.exit_code == 2


def test_the_default_is_the_limit_and_it_can_be_said_everywhere(tmp_path: Path) -> None:
    assert parse_size(NodeConfig().data_disk, "") == limits.shard_store_bytes_max
    file = tmp_path / "node.toml"
    file.write_text('data_disk = "30GB"\n')
    assert load(NodeConfig, {}, file=file, environment={}).values.data_disk == "30GB"
    environment = {"P2PDILOCO_DATA_DISK": "40GB"}
    assert load(NodeConfig, {}, file=file, environment=environment).values.data_disk == "40GB"
    assert load(NodeConfig, {"data_disk": "50GB"}, file=file, environment={}).values.data_disk == "50GB"


def test_the_plan_counts_the_quota_and_not_the_whole_corpus() -> None:
    """A disk that holds two windows is enough, however large the corpus is."""
    owner = FastSigner("owner")
    spec = tiny_run(owner, owner.peer_id).spec
    shard = spec.data.shards[0]
    shards = tuple(msgspec.structs.replace(shard, size=10**6, tokens=4 * 10**6) for _ in range(1000))
    spec = msgspec.structs.replace(spec, data=msgspec.structs.replace(spec.data, shards=shards))

    def data_row(disk: int, quota: int = 2**60) -> tuple[int, MemoryPlan]:
        plan = plan_memory(spec, Machine("", None, 2**40, disk, "/data"), Wishes(data_disk=quota))
        (row,) = [row for row in plan.rows if row.what == DATA_ROW]
        assert plan.disk - row.disk == plan.disk_of_others > 0
        return row.disk, plan

    assert data_row(2**50)[0] == costs_of(spec.data).all
    assert data_row(2**50, 2 * 10**9)[0] == 2 * 10**9
    tight, plan = data_row(10**9)
    assert least_bytes(spec.data) < tight < 10**9
    assert not plan.missing
    assert "on the disk" in data_row(10**8)[1].missing


def test_other_files_have_their_room_before_the_data(tmp_path: Path) -> None:
    """What they have taken already they need no more; the data's own files are not theirs."""
    now = 0.0
    room = DataRoom(tmp_path, 1000, free=lambda _folder: 10**12, clock=lambda: now)
    all_there = 10**12 - limits.data_disk_reserve_bytes
    assert room() == all_there - 1000
    for place in ("work/record.1", "blobs/delta/ab/x", "blobs/shard/ab/y", "tokens/z"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_bytes(bytes(150))
    assert room() == all_there - 1000  # measured every half minute
    now = 31.0
    assert room() == all_there - 700
    (tmp_path / "work/record.2").write_bytes(bytes(5000))
    now = 62.0
    assert room() == all_there


class Fetches:
    """A client that notes whom it would ask."""

    deltas_on_the_way = True

    def __init__(self) -> None:
        self.asked: list[list[PeerId]] = []
        self.here: dict[Digest, int] = {}  # size asked for
        self.refuses = ""
        self.refused = asyncio.Event()

    async def fetch(
        self,
        digest: Digest,
        size_max: int,
        donors: list[PeerId],
        _purpose: Any,
        *,
        of_spec: bool,
        tell: Callable[[str], None],
    ) -> None:
        assert of_spec, "what is larger is its owner's fault"
        self.asked.append(donors)
        if self.refuses:
            tell(self.refuses)
            self.refused.set()
            raise TransportError(self.refuses)
        self.here[digest] = size_max

    def has(self, digest: Digest) -> bool:
        return digest in self.here

    def size(self, _digest: Any) -> int:
        return 7


def new_telemetry(peer: PeerId) -> Telemetry:
    return Telemetry("n", peer, RunId(bytes(32)), "run", role="node", pid=1, inner_steps=1)


async def test_every_line_carries_its_share_of_the_data() -> None:
    """Two nodes are asked before the witness, each time others; a peer more or less changes nothing."""
    owner = FastSigner("owner")
    spec = tiny_run(owner, owner.peer_id).spec
    witness = PeerId(spec.committee.genesis.witness)
    nodes = [PeerId(tagged_digest("node", bytes([n]))) for n in range(30)]
    client: Any = Fetches()
    telemetry = new_telemetry(owner.peer_id)
    blobs = RunBlobs(spec, client, client, telemetry, lambda: [witness, *nodes], Random(1))
    assert blobs.deltas_on_the_way
    assert blobs.donors()[0] == witness
    ref = BlobRef(bytes(32), 7, 7)
    for _ in range(20):
        await blobs.fetch_shard(ref)
    assert {donors.index(witness) for donors in client.asked} == {2}
    assert {len(donors) for donors in client.asked} == {DONORS_TRIED_MAX}
    assert len({donors[0] for donors in client.asked}) > 5
    assert blobs.bytes_fetched == 20 * 7
    alone = RunBlobs(spec, client, client, telemetry, list, Random(1))
    await alone.fetch_shard(ref)
    assert client.asked[-1] == [witness]


async def test_a_piece_of_version_0_is_no_larger_than_the_model_makes_it() -> None:
    owner = FastSigner("owner")
    spec = tiny_run(owner, owner.peer_id).spec
    client: Any = Fetches()
    telemetry = new_telemetry(owner.peer_id)
    await RunBlobs(spec, client, client, telemetry, list, Random(1)).fetch_genesis()
    wanted = {*spec.genesis.params, *spec.genesis.momentum}
    assert client.here == dict.fromkeys(map(Digest, wanted), 4 * spec.model.params)


async def test_why_version_0_or_the_first_data_do_not_come_is_known_while_they_are_waited_for() -> None:
    """For as long as a donor was busy the node said that it asked for addresses."""
    owner = FastSigner("owner")
    spec = tiny_run(owner, owner.peer_id).spec
    client: Any = Fetches()
    client.refuses = "peer 0102 is busy"
    telemetry = new_telemetry(owner.peer_id)
    blobs = RunBlobs(spec, client, client, telemetry, list, Random(1))
    waiting = asyncio.create_task(blobs.fetch_genesis())
    async with asyncio.timeout(10):
        await client.refused.wait()
    now = telemetry.now()
    assert now.why.startswith("fetching pieces of version 0: 0 of ")
    assert now.last_try == "peer 0102 is busy"
    waiting.cancel()
    telemetry.fetching("data shards", 0, 2)
    assert telemetry.now().last_try == "", "of something else"
    with pytest.raises(TransportError):
        await blobs.fetch_shard(BlobRef(bytes(32), 7, 7))
    assert telemetry.now().last_try == "peer 0102 is busy"
    telemetry.fetching("data shards", 0, 2)
    assert telemetry.now().last_try == "peer 0102 is busy", "nothing came"
    telemetry.fetching("data shards", 1, 2)
    assert telemetry.now().last_try == ""
    telemetry.why = "catching up with the swarm"
    telemetry.fetch_failed("peer 0102 is busy")
    assert telemetry.now().last_try == "", "nothing waits for it"


def test_a_node_keeps_its_name_over_restarts(tmp_path: Path) -> None:
    from p2pdiloco_node.storage.data_dir import DataDir
    from p2pdiloco_node.taking_part.joining import kept_name

    with DataDir(tmp_path / "node") as data:
        assert kept_name(data, "") == ""
        assert kept_name(data, "attic") == "attic"
    with DataDir(tmp_path / "node") as data:
        assert kept_name(data, "") == "attic"
        assert kept_name(data, "cellar") == "cellar"
        assert kept_name(data, "") == "cellar"
