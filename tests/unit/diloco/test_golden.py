"""The golden vectors hold here, in their written-out form too, and they can fail."""

import base64
import json
from pathlib import Path

import numpy as np
import pytest

from p2pdiloco.diloco import golden
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
