"""The golden vectors hold here, in their written-out form too, and they can fail."""

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from p2pdiloco.diloco import golden
from p2pdiloco.diloco.compress import decode
from p2pdiloco.rules.float32 import is_f32

VECTORS = Path(__file__).resolve().parents[2] / "vectors" / "outer_step.json"


def test_this_machine_computes_the_golden_bits():
    assert golden.check_golden() is None


def test_a_machine_that_flushes_denormals_finds_out():
    torch = pytest.importorskip("torch")
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        assert "does not vote" in golden.check_golden()
    finally:
        torch.set_flush_denormal(False)
    assert golden.check_golden() is None


def test_other_processor_features_compute_the_same_bits():
    """numpy picks its loops by processor; the plainest ones must agree with the fastest (algorithm.md 5)."""
    features = cpu_features()
    disabled = " ".join(name for name in features.__cpu_dispatch__ if features.__cpu_features__[name])
    if not disabled:
        pytest.skip("this build of numpy picks no loops by processor")
    code = "from p2pdiloco.diloco.golden import check_golden; raise SystemExit(check_golden())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "NPY_DISABLE_CPU_FEATURES": disabled},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def cpu_features():
    try:
        from numpy._core import _multiarray_umath
    except ImportError:  # numpy 1
        from numpy.core import _multiarray_umath
    return _multiarray_umath


def test_denormals_and_all_scalars_are_in_the_vectors():
    computed = golden.compute_golden()
    for array in (*computed.before, *computed.after):
        tiny = (array != 0) & (np.abs(array) < np.finfo(np.float32).tiny)
        assert tiny.sum() > 30
        assert np.isfinite(array).all()
    for _, factors, scalars in golden.STEPS:
        figures = [x for pair in factors for x in pair]
        figures += [getattr(scalars, name) for name in scalars.__struct_fields__]
        assert all(is_f32(x) for x in figures)


def test_coordinates_that_none_one_two_and_three_sent_are_in_the_vectors():
    place = [codec for codec, _, _ in golden.STEPS].index("topk128")
    blobs = golden.compute_golden().blobs[place]
    matrix = [decode("topk128", blob, golden.TENSORS)[: golden.PARAMS - 16] for blob in blobs]
    senders = sum((values != 0).astype(int) for values in matrix)
    assert set(senders.tolist()) == {0, 1, 2, 3}
    # A place that was kept with a scale of zero was not sent.
    assert min(np.count_nonzero(values) for values in matrix) < 130


def test_the_written_vectors_are_what_is_computed():
    written = json.loads(VECTORS.read_text())
    computed = golden.compute_golden()
    assert [s["blobs"] for s in written["steps"]] == [
        [base64.b64encode(blob).decode() for blob in blobs] for blobs in computed.blobs
    ]
    for name, array in (
        ("params_before", computed.before.params),
        ("momentum_before", computed.before.momentum),
        ("params_after", computed.after.params),
        ("momentum_after", computed.after.momentum),
    ):
        assert base64.b64decode(written[name]) == array.astype("<f4").tobytes(), name
