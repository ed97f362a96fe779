"""What a codec loses is sent later, whatever the lag at which deltas are settled (algorithm.md 6, 7)."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdiloco.diloco.compress import Origin, decode, encode
from p2pdiloco.diloco.error_feedback import ErrorFeedback
from p2pdiloco.errors import PeerError
from p2pdiloco.ids import PeerId
from p2pdiloco.run_spec import TensorSpec

TENSORS = (TensorSpec("matrix", (16, 80)), TensorSpec("norm", (5,)))
PARAMS = 1285
ME = PeerId(bytes([7] * 32))


def delta(rng):
    return (rng.standard_normal(PARAMS) * 1e-2).astype(np.float32)


def send(feedback, raw, sequence, codec="int4"):
    return feedback.send(raw, codec, TENSORS, Origin(ME, sequence))


@pytest.mark.parametrize("codec", ["int4", "topk64"])
@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from(["send", "listed", "passed_over", "dropped"]), max_size=30), st.integers(0, 99)
)
def test_nothing_is_lost_at_any_lag(codec, events, seed):
    """Listed + dropped + pending + e is the sum of all pseudo-gradients, in any order of settling."""
    rng = np.random.default_rng(seed)
    feedback = ErrorFeedback(PARAMS)
    total, settled = np.zeros(PARAMS), np.zeros(PARAMS)
    sequence = 0
    for event in events:
        if event == "send" and len(feedback.pending) < 2:
            sequence += 1
            raw = delta(rng)
            total += raw
            send(feedback, raw, sequence, codec)
        elif event != "send" and feedback.pending:
            digest = list(feedback.pending)[int(rng.integers(len(feedback.pending)))]
            if event != "passed_over":
                settled += feedback.pending[digest]
            getattr(feedback, event)(digest)
            getattr(feedback, event)(digest)  # settling twice is settling once
    pending = sum(feedback.pending.values(), start=np.zeros(PARAMS))
    assert np.allclose(settled + pending + feedback.e, total, atol=1e-5)
    assert (feedback.raw.keys() == feedback.pending.keys()) if codec == "topk64" else not feedback.raw


def test_the_rest_stays_small_and_the_mean_sent_is_the_mean_meant():
    rng = np.random.default_rng(3)
    feedback = ErrorFeedback(PARAMS)
    raw = delta(rng)
    sent = np.zeros(PARAMS)
    for sequence in range(1, 41):
        one = send(feedback, raw, sequence)
        feedback.listed(one.digest)
        sent += one.decoded
    assert np.linalg.norm(sent / 40 - raw) < 0.01 * np.linalg.norm(raw)


def test_receivers_decode_what_is_pending():
    feedback = ErrorFeedback(PARAMS)
    sent = send(feedback, delta(np.random.default_rng(0)), 1)
    assert np.array_equal(decode("int4", sent.blob, TENSORS), feedback.pending[sent.digest])
    assert np.array_equal(feedback.in_flight(), sent.decoded)


def test_in_flight_of_a_sparse_codec_is_the_raw_pseudo_gradient():
    """algorithm.md 3: of the decoded one nearly all is missing, and the node would lose sight of its work."""
    rng = np.random.default_rng(0)
    feedback = ErrorFeedback(PARAMS)
    raws = [delta(rng), delta(rng)]
    sent = [send(feedback, raw.copy(), s + 1, "topk32") for s, raw in enumerate(raws)]
    assert np.array_equal(feedback.in_flight(), raws[0] + raws[1])
    e = feedback.e.copy()
    feedback.passed_over(sent[0].digest)
    # Back into e comes what was taken out of it, not the raw one: the rest is there already.
    assert np.array_equal(feedback.e, e + sent[0].decoded)
    assert np.array_equal(feedback.in_flight(), raws[1])
    feedback.listed(sent[1].digest)
    assert not feedback.in_flight().any()


def test_the_array_that_was_sent_may_be_used_again():
    feedback = ErrorFeedback(PARAMS)
    raw = delta(np.random.default_rng(0))
    expected = raw.copy()
    send(feedback, raw, 1, "topk32")
    raw[:] = 7
    assert np.array_equal(feedback.in_flight(), expected)


@pytest.mark.parametrize("codec", ["int4", "topk64"])
def test_without_error_feedback_nothing_is_kept(codec):
    rng = np.random.default_rng(0)
    feedback = ErrorFeedback(PARAMS, enabled=False)
    raw = delta(rng)
    sent = send(feedback, raw, 1, codec)
    assert np.array_equal(sent.decoded, decode(codec, encode(codec, raw, TENSORS, Origin(ME, 1)), TENSORS))
    feedback.passed_over(sent.digest)
    assert not feedback.e.any()
    assert not feedback.pending


def test_the_bound_on_solo_work_can_be_lifted():
    feedback = ErrorFeedback(PARAMS, in_flight_max=5)
    for sequence in range(1, 6):
        send(feedback, np.zeros(PARAMS, np.float32), sequence)
    with pytest.raises(AssertionError, match="5 deltas"):
        send(feedback, np.zeros(PARAMS, np.float32), 6)


def test_beta_lets_old_errors_fade():
    feedback = ErrorFeedback(PARAMS, beta=0.5)
    feedback.e[:] = 1.0
    sent = send(feedback, np.zeros(PARAMS, np.float32), 1)
    assert np.allclose(sent.decoded + feedback.e, 0.5)


def test_a_delta_that_is_not_finite_changes_nothing():
    feedback = ErrorFeedback(PARAMS)
    rng = np.random.default_rng(0)
    first = send(feedback, delta(rng), 1)
    kept = feedback.e.copy()
    bad = delta(rng)
    bad[3] = np.nan
    with pytest.raises(PeerError):
        send(feedback, bad, 2)
    assert np.array_equal(feedback.e, kept)
    assert list(feedback.pending) == [first.digest]


def test_a_third_delta_in_flight_is_our_own_fault():
    feedback = ErrorFeedback(PARAMS)
    for sequence in (1, 2):
        send(feedback, np.zeros(PARAMS, np.float32), sequence)
    with pytest.raises(AssertionError):
        send(feedback, np.zeros(PARAMS, np.float32), 3)


def test_clearing_forgets_everything():
    feedback = ErrorFeedback(PARAMS)
    send(feedback, delta(np.random.default_rng(0)), 1)
    feedback.clear()
    assert not feedback.pending
    assert not feedback.e.any()


@pytest.mark.parametrize("codec", ["int4", "topk64"])
def test_a_checkpoint_holds_all_of_it(codec):
    rng = np.random.default_rng(5)
    feedback = ErrorFeedback(PARAMS, beta=0.9)
    order = [send(feedback, delta(rng), s, codec).digest for s in (1, 2)]
    again = ErrorFeedback.from_arrays(feedback.to_arrays(), PARAMS, beta=0.9)
    assert list(again.pending) == order
    assert np.array_equal(again.e, feedback.e)
    assert np.array_equal(again.in_flight(), feedback.in_flight())
    raw = delta(rng)
    for one in (feedback, again):
        one.listed(order[0])
    assert send(again, raw, 3, codec).blob == send(feedback, raw, 3, codec).blob
    again.passed_over(order[1])
    feedback.passed_over(order[1])
    assert np.array_equal(again.e, feedback.e)


@pytest.mark.parametrize(
    "arrays",
    [
        {},
        {"e": np.zeros(3, np.float32)},
        {"e": np.zeros(PARAMS, np.float64)},
        {"e": np.zeros(PARAMS, np.float32), "other": np.zeros(PARAMS, np.float32)},
        {"e": np.zeros(PARAMS, np.float32), "pending/0/xyz": np.zeros(PARAMS, np.float32)},
        {"e": np.zeros(PARAMS, np.float32), "pending/0/00ff": np.zeros(PARAMS, np.float32)},
        {"e": np.zeros(PARAMS, np.float32), "raw/0/" + "00" * 32: np.zeros(PARAMS, np.float32)},
    ],
)
def test_other_arrays_are_refused(arrays):
    with pytest.raises(PeerError):
        ErrorFeedback.from_arrays(arrays, PARAMS)
