"""What is in flight: the rules (Delivery) and the durable record (DiskContributor) must say the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from p2pdiloco.ids import Digest, digest_of
from p2pdiloco.protocol.actions import SettleDelta
from p2pdiloco.protocol.context import Context, Identity
from p2pdiloco.protocol.delivery import Delivery
from p2pdiloco.sim.keys import FastSigner, verify_fast
from p2pdiloco.sim.tiny_run import PARAMS, tiny_run
from p2pdiloco.wire.log import Committee
from p2pdiloco.wire.messages import DeltaReceipt, Outcome
from p2pdiloco_node.training.contributor import DiskContributor
from p2pdiloco_node.training.frames import PassDone

OWNER, NODE, VOTERS = FastSigner("owner"), FastSigner("node"), [FastSigner(f"voter {i}") for i in range(3)]
RUN = tiny_run(OWNER, OWNER.peer_id, codec="int4")
COMMITTEE = Committee(VOTERS[0].peer_id, (VOTERS[1].peer_id, VOTERS[2].peer_id))


class Blobs:
    def __init__(self) -> None:
        self.kept: dict[Digest, bytes] = {}

    def put(self, digest: Digest, data: bytes, _purpose: object = None) -> None:
        assert digest_of(data) == digest
        self.kept[digest] = data

    def read(self, digest: Digest) -> bytes:
        return self.kept[digest]


@pytest.mark.parametrize("outcome", [Outcome.NOT_FINITE, Outcome.BAD_SHAPE])
def test_after_a_refusal_by_a_majority(tmp_path: Path, outcome: Outcome) -> None:
    """algorithm.md 6, row 3: the refused one is removed, the other stays until the log settles it."""
    blobs: Any = Blobs()

    def start() -> DiskContributor:
        return DiskContributor(tmp_path, RUN.run, RUN.spec, NODE, blobs, Path.write_bytes)  # type: ignore[arg-type]

    mine = start()
    rng = np.random.default_rng(1)
    for sequence in (1, 2):
        delta = (rng.standard_normal(PARAMS) * 0.01).astype(np.float32)
        mine.finish_pass(delta, PassDone(sequence, "", 0, 4, 0, 4, 2.5))
    bad, other = mine.in_flight()
    ctx = Context(Identity(RUN.run, RUN.spec, NODE, 1, "node", verify_fast), lambda: 0.5)
    delivery = Delivery(ctx, mine.in_flight())
    for voter in VOTERS[:2]:
        delivery.on_receipt(voter.peer_id, DeltaReceipt(bad.delta, outcome, "", 0.0), COMMITTEE)
    for action in ctx.out:
        if isinstance(action, SettleDelta):
            mine.settle(action.delta, action.how)
    assert list(delivery.in_flight) == mine.in_flight() == start().in_flight() == [other]
