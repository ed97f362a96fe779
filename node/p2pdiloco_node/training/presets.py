"""Models and inner loops by name, for `run new`. Plain numbers: no torch here.

Sizes are counted with a vocabulary of 256 bytes; a larger one adds hidden x vocabulary parameters, twice
where embeddings are not tied.

Where the inner loops come from: learning rates and batches of models trained alone and published with both
(GPT-3, arXiv 2005.14165, table 2.1: 125M 6e-4 with 0.5M tokens, 350M 3e-4 with 0.5M, 1.3B 2e-4 with 1M, 6.7B
1.2e-4 with 2M; Pythia, 2304.01373, table 4: 70M 1e-3, 160M 6e-4, 410M and 1B 3e-4, 2.8B 1.6e-4, 6.9B 1.2e-4,
all with 2M; TinyLlama, 2401.02385: 1.1B 4e-4 with 2M; Llama 2, 2307.09288: 7B 3e-4 with 4M). Here several
nodes, usually four to sixteen, each take a batch of their own, and DiLoCo bears larger ones in all than data
parallel training (2503.09799): so one node's batch is an eighth to a quarter of those, with the higher of
the published rates. Passes grow with the delta that must travel meanwhile.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from p2pdiloco.errors import OperatorError
from p2pdiloco.exit_codes import USAGE
from p2pdiloco.run_spec import BYTES, InnerSpec, ModelSpec, TensorSpec
from p2pdiloco_node.config import nearest

VOCAB_BYTES = BYTES.vocab_size
ROWS_MULTIPLE = 64  # of embedding rows: odd numbers of them multiply slowly on GPUs


class Inner(NamedTuple):
    """The inner loop of models of about `params` parameters."""

    params: float
    seq_len: int  # tokens
    batch_tokens: int  # of one inner step of one node
    inner_steps: int  # H
    pass_s: float
    lr: float


LADDER = (
    Inner(20e3, 32, 128, 4, 2.0, 5e-3),  # for tests only
    Inner(1e6, 128, 1024, 24, 5.0, 3e-3),  # the demo: an inner step takes 0.12 s on one CPU thread
    Inner(20e6, 512, 16_384, 100, 120.0, 1.5e-3),  # an evening on a laptop's GPU
    Inner(110e6, 1024, 65_536, 200, 600.0, 8e-4),  # home GPUs
    Inner(350e6, 1024, 131_072, 200, 900.0, 5e-4),
    Inner(1e9, 2048, 262_144, 200, 1800.0, 4e-4),
    Inner(3e9, 2048, 524_288, 150, 3600.0, 3e-4),
    Inner(7e9, 2048, 524_288, 150, 7200.0, 3e-4),
)


class Preset(NamedTuple):
    """A model by name: a family's config, without vocabulary and positions."""

    family: str
    config: Mapping[str, Any]
    params: float  # about so many, with bytes: which rung of the ladder


def _dense(family: str, hidden: int, inside: int, layers: int, heads: int, key_heads: int, params: float,
           **more: Any) -> Preset:  # fmt: skip
    config = {
        "hidden_size": hidden,
        "intermediate_size": inside,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "tie_word_embeddings": True,
    } | more
    return Preset(family, config, params)


def _neox(hidden: int, layers: int, heads: int, params: float) -> Preset:
    config = {
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "tie_word_embeddings": False,
    }
    return Preset("gpt_neox", config, params)


def _mixtral(hidden: int, inside: int, layers: int, heads: int, key_heads: int, params: float,
             *, experts: int = 8) -> Preset:  # fmt: skip
    # 0.02: what the mixture's authors trained with; the class's default is for tuning.
    return _dense("mixtral", hidden, inside, layers, heads, key_heads, params, num_local_experts=experts,
                  num_experts_per_tok=2, router_aux_loss_coef=0.02)  # fmt: skip


# As the originals of these sizes have it.
_QWEN: Any = {"head_dim": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
PRESETS: Mapping[str, Preset] = {
    "llama:tiny": _dense("llama", 32, 64, 1, 2, 1, 20e3),
    "llama:1m": _dense("llama", 160, 432, 3, 4, 4, 1e6),
    "llama:20m": _dense("llama", 448, 1216, 8, 7, 7, 20e6),
    "llama:110m": _dense("llama", 768, 2048, 16, 12, 12, 110e6),
    "llama:350m": _dense("llama", 1024, 2816, 28, 16, 8, 350e6),
    "llama:1b": _dense("llama", 2048, 5632, 22, 32, 8, 1e9, tie_word_embeddings=False),
    "llama:3b": _dense("llama", 3072, 8192, 28, 24, 8, 3e9, tie_word_embeddings=False),
    "llama:7b": _dense("llama", 4096, 11008, 32, 32, 32, 7e9, tie_word_embeddings=False),
    "qwen:20m": _dense("qwen3", 448, 1216, 8, 7, 7, 20e6, head_dim=64),
    "qwen:110m": _dense("qwen3", 768, 2048, 16, 12, 6, 110e6, head_dim=64),
    "qwen:0.6b": _dense("qwen3", 1024, 3072, 28, 16, 8, 350e6, **_QWEN),
    "qwen:1.7b": _dense("qwen3", 2048, 6144, 28, 16, 8, 1e9, **_QWEN),
    "qwen:4b": _dense("qwen3", 2560, 9728, 36, 32, 8, 3e9, **_QWEN),
    "mistral:7b": _dense(
        "mistral", 4096, 14336, 32, 32, 8, 7e9, tie_word_embeddings=False, sliding_window=None
    ),
    "mixtral:tiny": _mixtral(128, 192, 3, 4, 4, 1e6),
    "mixtral:8x20m": _mixtral(448, 1216, 8, 7, 7, 110e6),
    "mixtral:8x110m": _mixtral(768, 2048, 16, 12, 12, 350e6),
    "mixtral:8x350m": _mixtral(1024, 2816, 28, 16, 8, 1e9),
    "gpt_neox:tiny": _neox(32, 1, 2, 20e3),
    "gpt_neox:20m": _neox(512, 6, 8, 20e6),
    "gpt_neox:85m": _neox(768, 12, 12, 110e6),
    "gpt_neox:300m": _neox(1024, 24, 16, 350e6),
    "gpt_neox:0.8b": _neox(2048, 16, 8, 1e9),
    "gpt_neox:2.8b": _neox(2560, 32, 32, 3e9),
    "gpt_neox:6.9b": _neox(4096, 32, 32, 7e9),
    "gpt2:85m": Preset("gpt2", {"n_embd": 768, "n_layer": 12, "n_head": 12}, 110e6),
    "gpt2:300m": Preset("gpt2", {"n_embd": 1024, "n_layer": 24, "n_head": 16}, 350e6),
}


def preset(name: str) -> Preset:
    """Raises: OperatorError: no such preset, with the nearest and all there are."""
    found = PRESETS.get(name)
    if found is None:
        # Whoever is near one needs no list of all.
        known = nearest(name, PRESETS) or f": choose one of {', '.join(PRESETS)}"
        files = " Or" if known.endswith("?") else ", or"
        raise OperatorError(
            f"there is no model {name!r}{known}{files} name a config.json or a folder with a checkpoint.",
            USAGE,
        )
    return found


def inner_of(params: float) -> Inner:
    """The rung of the ladder whose models are nearest in size."""
    return min(LADDER, key=lambda rung: abs(math.log(params / rung.params)))


def model_spec(
    name: str, tensors: tuple[TensorSpec, ...], *, vocab_size: int = VOCAB_BYTES, seq_len: int | None = None
) -> ModelSpec:
    """The RunSpec's model: the preset's numbers, and the layout that genesis finds (empty before).

    `vocab_size`: of the tokenizer; the embedding gets rows up to a multiple of `ROWS_MULTIPLE`. `seq_len`:
    None for what the preset's size has.
    """
    chosen = preset(name)
    seq_len = seq_len or inner_of(chosen.params).seq_len
    return ModelSpec(
        family=chosen.family,
        preset=name,
        config=config_bytes(
            from_scratch(chosen.family, chosen.config, vocab_size=vocab_size, seq_len=seq_len)
        ),
        vocab_size=vocab_size,
        seq_len=seq_len,
        tensors=tensors,
    )


def from_scratch(family: str, config: Mapping[str, Any], *, vocab_size: int, seq_len: int) -> dict[str, Any]:
    """`config` of a model that begins with these tokens: rows for them, positions for a sequence."""
    positions = "n_positions" if family == "gpt2" else "max_position_embeddings"
    # The classes' own numbers of special tokens belong to other vocabularies.
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    rows = -(-vocab_size // ROWS_MULTIPLE) * ROWS_MULTIPLE
    return {positions: seq_len} | dict(config) | special | {"vocab_size": rows}


def config_bytes(config: Mapping[str, Any]) -> bytes:
    """The one form in which a config's arguments stand in a RunSpec."""
    return json.dumps(config, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def warmup_tokens(target_tokens: int, step_tokens: int) -> int:
    """A fiftieth of the run, but at least eight inner steps (of `step_tokens`) and at most 1000."""
    return min(max(target_tokens // 50, 8 * step_tokens), 1000 * step_tokens)


def inner_spec(name: str, target_tokens: int) -> InnerSpec:
    """algorithm.md 2, for a preset."""
    rung = inner_of(preset(name).params)
    return inner_loop(rung, target_tokens, seq_len=rung.seq_len)


def inner_loop(rung: Inner, target_tokens: int, *, seq_len: int) -> InnerSpec:
    """The same for a rung of the ladder; with other sequences the batch keeps its tokens."""
    sequences = max(1, round(rung.batch_tokens / seq_len))
    return InnerSpec(
        inner_steps=rung.inner_steps,
        pass_s=rung.pass_s,
        sequences_per_step=sequences,
        lr=rung.lr,
        lr_min_share=0.1,
        warmup_tokens=warmup_tokens(target_tokens, sequences * seq_len),
        moments_warmup_steps=10,
        beta1=0.9,
        beta2=0.95,
        weight_decay=0.1,
        clip_norm=1.0,
    )
