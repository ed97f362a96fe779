"""Version 0 by a real process with torch."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from p2pdiloco.errors import OperatorError
from p2pdiloco.run_spec import ModelSpec
from p2pdiloco_node.training.arrays import Floats
from p2pdiloco_node.training.model_choice import choose_model
from p2pdiloco_node.training.version_0 import make_version_0

pytestmark = pytest.mark.e2e


def made(
    model: str, *, vocab_size: int = 256, seed: int = 1, seq_len: int | None = None
) -> tuple[ModelSpec, Floats]:
    choice = choose_model(model, seq_len=seq_len)
    spec, params, _ = asyncio.run(make_version_0(choice, seed, vocab_size=vocab_size))
    return spec, params


def test_a_preset_is_initialised_by_its_seed() -> None:
    spec, params = made("llama:tiny", vocab_size=300, seq_len=48)
    assert (spec.family, spec.preset, spec.vocab_size, spec.seq_len) == ("llama", "llama:tiny", 300, 48)
    assert params.shape == (spec.params,)
    assert spec.tensors[0].shape == (320, 32)  # rows for 300 tokens, up to a multiple of 64
    assert 0.005 < params.std() < 0.3
    again, other = made("llama:tiny", vocab_size=300, seq_len=48)[1], made("llama:tiny", seed=2)[1]
    assert np.array_equal(params, again)
    assert not np.array_equal(params[:1000], other[:1000])


def test_why_it_failed_is_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llama", "hidden_size": 30, "num_attention_heads": 4}))
    with pytest.raises(
        OperatorError, match="version 0 is not made: a model of the family 'llama' cannot be made"
    ) as e:
        made(str(file))
    assert "Traceback" not in str(e.value)
