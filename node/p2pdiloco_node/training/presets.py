"""Models and inner loops by name, for `run new`. Plain numbers: no torch here.

Sizes are counted with tied embeddings and a vocabulary of 256 bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from p2pdiloco.errors import OperatorError
from p2pdiloco.run_spec import InnerSpec, ModelSpec, TensorSpec


class Preset(NamedTuple):
    """A Llama-style model and the inner loop that suits it."""

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    seq_len: int  # tokens
    sequences_per_step: int
    inner_steps: int  # H
    pass_s: float
    lr: float


PRESETS = {
    # 20 thousand parameters: for tests only.
    "llama:tiny": Preset(32, 64, 1, 2, 1, 32, 4, 4, 2.0, 5e-3),
    # 0.97 million: the demo. An inner step of 1024 tokens takes 0.12 s on one CPU thread.
    "llama:1m": Preset(160, 432, 3, 4, 4, 128, 8, 24, 5.0, 3e-3),
    # 19 million: an evening on a laptop's GPU.
    "llama:20m": Preset(448, 1216, 8, 7, 7, 512, 32, 100, 120.0, 1.5e-3),
    # 110 million: home GPUs.
    "llama:110m": Preset(768, 2048, 16, 12, 12, 1024, 64, 200, 600.0, 8e-4),
}

VOCAB_BYTES = 256


def preset(name: str) -> Preset:
    """Raises: OperatorError: no such preset, with the list of those there are."""
    found = PRESETS.get(name)
    if found is None:
        raise OperatorError(f"there is no model {name!r}; choose one of {', '.join(PRESETS)}.", exit_code=2)
    return found


def model_spec(name: str, tensors: tuple[TensorSpec, ...]) -> ModelSpec:
    """The RunSpec's model: the preset's numbers and the layout that genesis finds (empty before)."""
    p = preset(name)
    config = {
        "vocab_size": VOCAB_BYTES,
        "hidden_size": p.hidden_size,
        "intermediate_size": p.intermediate_size,
        "num_hidden_layers": p.layers,
        "num_attention_heads": p.heads,
        "num_key_value_heads": p.kv_heads,
        "max_position_embeddings": p.seq_len,
        "tie_word_embeddings": True,
    }
    return ModelSpec(
        family=name.partition(":")[0],
        preset=name,
        config=config_bytes(config),
        vocab_size=VOCAB_BYTES,
        seq_len=p.seq_len,
        tensors=tensors,
    )


def config_bytes(config: Mapping[str, Any]) -> bytes:
    """The one form in which a config's arguments stand in a RunSpec."""
    return json.dumps(config, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def warmup_tokens(target_tokens: int, step_tokens: int) -> int:
    """A fiftieth of the run, but at least eight inner steps (of `step_tokens`) and at most 1000."""
    return min(max(target_tokens // 50, 8 * step_tokens), 1000 * step_tokens)


def inner_spec(name: str, target_tokens: int) -> InnerSpec:
    """algorithm.md 2."""
    p = preset(name)
    return InnerSpec(
        inner_steps=p.inner_steps,
        pass_s=p.pass_s,
        sequences_per_step=p.sequences_per_step,
        lr=p.lr,
        lr_min_share=0.1,
        warmup_tokens=warmup_tokens(target_tokens, p.sequences_per_step * p.seq_len),
        moments_warmup_steps=10,
        beta1=0.9,
        beta2=0.95,
        weight_decay=0.1,
        clip_norm=1.0,
    )
