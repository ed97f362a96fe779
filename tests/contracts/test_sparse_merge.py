"""Node, verify and simulator compute the same state from sparse deltas (algorithm.md 5, 7)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from p2pdiloco.diloco.compress import Origin, decode, encode
from p2pdiloco.diloco.global_state import GlobalState, roots_of
from p2pdiloco.ids import Digest, digest_of
from p2pdiloco.protocol.run_log import RunLog
from p2pdiloco.rules.outer_step import Candidate, plan_outer_step
from p2pdiloco.rules.state import after_outer_step, genesis_state
from p2pdiloco.sim.arithmetic import Arithmetic
from p2pdiloco.sim.disk import StateFiles
from p2pdiloco.sim.keys import FastSigner
from p2pdiloco.sim.tiny_run import tiny_run
from p2pdiloco.wire.codec import encode as encode_struct
from p2pdiloco.wire.log import OuterStep
from p2pdiloco_node.export.kept import Kept
from p2pdiloco_node.ports import Purpose
from p2pdiloco_node.storage.blob_store import DiskBlobStore
from p2pdiloco_node.storage.state_keeper import DiskStateKeeper
from p2pdiloco_node.verify import _Replay

NODES = [FastSigner(f"node {i}") for i in range(3)]
RUN = tiny_run(FastSigner("owner"), FastSigner("witness").peer_id, codec="topk128")
TENSORS, PARAMS = RUN.spec.model.tensors, RUN.spec.model.params


@pytest.fixture
def blobs(tmp_path: Path) -> DiskBlobStore:
    store = DiskBlobStore(tmp_path / "blobs")
    for array in (RUN.params, RUN.momentum):
        store.put(digest_of(array.tobytes()), array.tobytes(), Purpose.SNAPSHOT)
    return store


@pytest.fixture
def deltas() -> dict[Digest, bytes]:
    rng = np.random.default_rng(3)
    made = [
        encode("topk128", rng.normal(0, 0.01, PARAMS).astype(np.float32), TENSORS, Origin(node.peer_id, 1))
        for node in NODES
    ]
    return {digest_of(blob): blob for blob in made}


def planned(keeper: DiskStateKeeper, deltas: dict[Digest, bytes]) -> OuterStep:
    candidates = []
    for place, (node, delta) in enumerate(zip(NODES, deltas, strict=True)):
        norm = keeper.check_delta(None, delta).norm
        candidates.append(Candidate(delta, node.peer_id, 0, 1, 2 + place, norm, node.public_key, bytes(64)))
    step = plan_outer_step(genesis_state(RUN.spec), RUN.spec, candidates, [])
    assert step is not None
    assert len(step.contributions) == 3
    return step


def by_hand(step: OuterStep, deltas: dict[Digest, bytes]) -> GlobalState:
    """The definition, coordinate by coordinate: of each the weights of those who sent it."""
    values = np.stack([decode("topk128", deltas[Digest(c.delta)], TENSORS) for c in step.contributions])
    weights = np.array([[c.weight] for c in step.contributions])
    sent = values != 0
    sent[:, -16:] = True  # the raw tensor is everybody's
    clips = np.array([[c.clip] for c in step.contributions])
    mean = (values * weights * clips).sum(axis=0) / np.maximum((sent * weights).sum(axis=0), 1e-30)
    s, mu = step.scalars, RUN.spec.outer.mu
    momentum = s.momentum_gain * mean
    return GlobalState(RUN.params - s.eta * s.rho * (mean + mu * momentum), momentum)


def test_node_verify_and_simulator_agree(
    tmp_path: Path, blobs: DiskBlobStore, deltas: dict[Digest, bytes]
) -> None:
    for delta, data in deltas.items():
        blobs.put(delta, data)
    keeper = DiskStateKeeper(tmp_path, RUN.spec, blobs, clock=lambda: 0.0)
    step = planned(keeper, deltas)
    rules = after_outer_step(genesis_state(RUN.spec), step, RUN.spec)

    ticket = digest_of(b"ticket")
    keeper.prepare(ticket, step)
    keeper.install(1, 1, ticket, encode_struct(rules))
    node = GlobalState(keeper.params(), keeper.momentum())

    folder = tmp_path / "flat"
    folder.mkdir()
    for delta, data in deltas.items():
        (folder / delta.hex()).write_bytes(data)
    log = RunLog(RUN.run, RUN.spec)
    replay = _Replay(
        Kept(tmp_path, tmp_path, (folder,)), log, RUN.spec, GlobalState(RUN.params.copy(), RUN.momentum)
    )
    replay._outer_step(1, genesis_state(RUN.spec), step)

    before = StateFiles(0, 0, RUN.params, RUN.momentum, b"")
    simulated = Arithmetic(RUN).step(before, step, deltas)
    assert simulated is not None

    assert (
        roots_of(replay._state)
        == roots_of(node)
        == roots_of(GlobalState(simulated.params, simulated.momentum))
    )
    expected = by_hand(step, deltas)
    np.testing.assert_allclose(node.momentum, expected.momentum, rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(node.params, expected.params, rtol=1e-5, atol=1e-7)
