"""Where shards come from (shards.Source): the network, and the fake that the unit tests use, say the same."""

from __future__ import annotations

import hashlib
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from p2pdiloco.errors import TransportError
from p2pdiloco.ids import Digest, PeerId, RunId, digest_of
from p2pdiloco.run_spec import BlobRef
from p2pdiloco.sim.keys import FastSigner
from p2pdiloco.sim.tiny_run import tiny_run
from p2pdiloco.wire.log import Committee
from p2pdiloco_node.data.shards import Source
from p2pdiloco_node.ports import Purpose
from p2pdiloco_node.taking_part.blobs import RunBlobs
from p2pdiloco_node.telemetry import Telemetry
from tests.unit.data.test_shards import Node, World
from tests.unit.transport.conftest import End, Ends, ends  # noqa: F401 - a fixture

DATA = [hashlib.shake_128(bytes([n])).digest(400_000) for n in range(3)]
REFS = [BlobRef(digest_of(data), len(data), len(data)) for data in DATA]


def source_of(end: End, witness: PeerId, nodes: list[PeerId]) -> RunBlobs:
    owner = FastSigner("owner")
    spec = tiny_run(owner, owner.peer_id).spec
    committee = msgspec.structs.replace(spec.committee, genesis=Committee(witness, ()))
    said = Telemetry("n", owner.peer_id, RunId(bytes(32)), "run", role="node", pid=1, inner_steps=1)
    return RunBlobs(
        msgspec.structs.replace(spec, committee=committee), end.client, end.blobs, said,
        lambda: [witness, *nodes], Random(1),
    )  # fmt: skip


@pytest.fixture(params=["fake", "network"])
async def kit(request: Any, tmp_path: Path, ends: Ends) -> tuple[Source, Any, Any]:  # noqa: F811
    """(source, the store it fills, a store from which it may fetch)."""
    if request.param == "fake":
        world = World(tmp_path / "world", 1)
        node = Node(world)

        class Donor:
            def put(self, digest: Digest, data: bytes, _purpose: Purpose) -> None:
                world.frames[digest] = data

        return node, node.store, Donor()
    me, witness, other = await ends(3)
    return source_of(me, witness.peer, [other.peer]), me.blobs, other.blobs


async def test_what_was_fetched_is_in_the_store_and_what_nobody_has_is_said(kit: Any) -> None:
    source, store, donor = kit
    assert not source.deltas_on_the_way
    with pytest.raises(TransportError):
        await source.fetch_shard(REFS[0])
    assert not store.has(Digest(REFS[0].digest))
    donor.put(Digest(REFS[0].digest), DATA[0], Purpose.SHARD)
    await source.fetch_shard(REFS[0])
    assert store.read(Digest(REFS[0].digest)) == DATA[0]
    assert store.digests(Purpose.SHARD) == [REFS[0].digest]


async def test_nodes_feed_each_other_and_a_liar_is_struck(ends: Ends) -> None:  # noqa: F811
    """Whoever got a shard gives it on; bytes that are not the shard's are gone, and are held against
    their sender."""
    two, liar, witness = await ends(3)
    for ref, data in zip(REFS, DATA, strict=True):
        liar.blobs.put(Digest(ref.digest), data, Purpose.SHARD)
        path = liar.blobs.path(Digest(ref.digest))
        assert path is not None
        path.write_bytes(bytes(len(data)))
    source = source_of(two, witness.peer, [liar.peer])
    with pytest.raises(TransportError):
        await source.fetch_shard(REFS[0])
    assert two.client.strikes.total(liar.peer) >= 1
    assert not two.blobs.has(Digest(REFS[0].digest))
    two.blobs.put(Digest(REFS[1].digest), DATA[1], Purpose.SHARD)
    three = source_of(witness, witness.peer, [liar.peer, two.peer])
    await three.fetch_shard(REFS[1])
    assert witness.blobs.read(Digest(REFS[1].digest)) == DATA[1]
