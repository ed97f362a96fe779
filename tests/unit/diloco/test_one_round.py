"""A round of real blobs from check to state root, with a node that sends rubbish (scenario D1)."""

import random

import msgspec
import numpy as np
import pytest

from p2pdiloco.diloco.compress import Origin, decode, encode
from p2pdiloco.diloco.global_state import GlobalState, roots_of
from p2pdiloco.diloco.merge import merge_listed
from p2pdiloco.diloco.norms import l2_norm
from p2pdiloco.diloco.outer_step import apply_outer_step
from p2pdiloco.errors import PeerError
from p2pdiloco.ids import PeerId, digest_of
from p2pdiloco.rules.outer_step import Candidate, plan_outer_step
from p2pdiloco.rules.state import genesis_state
from p2pdiloco.sim.tiny_run import PARAMS, TENSORS, tiny_run
from p2pdiloco.wire.signing import Ed25519Signer

SPEC = tiny_run(Ed25519Signer(bytes(32)), PeerId(bytes(32)), codec="fp16").spec


def blob_of(number):
    flat = (np.random.default_rng(number).standard_normal(PARAMS) * 1e-2).astype(np.float32)
    return encode("fp16", flat, TENSORS, Origin(PeerId(bytes([number] * 32)), 1))


def run_round(blobs):
    """What an aggregator or a voter does with `blobs` by node number, as they arrived."""
    candidates, stored, reasons = [], {}, {}
    for number, blob in blobs:
        try:
            flat = decode("fp16", blob, TENSORS)
        except PeerError as error:
            reasons[number] = error.reason
            continue
        digest = digest_of(blob)
        stored[digest] = blob
        who = PeerId(bytes([number] * 32))
        candidates.append(Candidate(digest, who, 0, 1, 4, l2_norm(flat), bytes(32), bytes(64)))
    step = plan_outer_step(genesis_state(SPEC), SPEC, candidates, [])
    state = GlobalState(np.ones(PARAMS, np.float32), np.zeros(PARAMS, np.float32))
    apply_outer_step(state, merge_listed(SPEC, step, stored.__getitem__), step.scalars, SPEC.outer.mu)
    return step, roots_of(state), reasons


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 65504.0])  # 1e38 has no name on the wire
def test_one_hostile_value_changes_no_bit_for_the_others(value):
    good = [(n, blob_of(n)) for n in (1, 3, 4)]
    bad = bytearray(blob_of(2))
    bad[200:202] = np.array(value, "<f2").tobytes()
    step, roots, reasons = run_round([*good, (2, bytes(bad))])
    assert reasons == {2: "NOT_FINITE"}
    assert (step, roots, {}) == run_round(good)


def test_arrival_order_changes_no_bit():
    blobs = [(n, blob_of(n)) for n in range(1, 9)]
    reference = run_round(blobs)
    for seed in range(5):
        random.Random(seed).shuffle(blobs)
        assert run_round(blobs) == reference


def test_what_an_entry_lists_is_its_senders_delta():
    """The majority that certified it looked, and so does whoever computes the step again (math.md)."""
    blob = blob_of(3)
    step, _, _ = run_round([(3, blob)])
    seen = []
    mean = merge_listed(SPEC, step, {digest_of(blob): blob}.__getitem__, lambda *what: seen.append(what[0]))
    assert np.array_equal(mean, decode("fp16", blob, TENSORS) * np.float32(step.contributions[0].clip))
    assert seen == [digest_of(blob)]
    (listed,) = step.contributions
    for other in ({"peer": bytes([4] * 32)}, {"sequence": 2}):
        lie = msgspec.structs.replace(step, contributions=(msgspec.structs.replace(listed, **other),))
        with pytest.raises(PeerError, match="BAD_SHAPE"):
            merge_listed(SPEC, lie, {digest_of(blob): blob}.__getitem__)
