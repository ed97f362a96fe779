"""A model's tensors under the names in which its family is published, as contiguous parts of the flat array.

A run's tensors have the names and shapes of transformers' modules. Three families of modules differ from
their published checkpoints, which every other tool reads: experts that are one tensor there are one tensor an
expert here, and gpt_neox calls its head otherwise. transformers itself loads either.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from p2pdiloco.run_spec import TensorSpec

EXPERTS = re.compile(r"(?P<layer>.+)\.mlp\.experts\.(?P<which>gate_up_proj|down_proj)")
# Published as gate_proj, up_proj and down_proj of each expert.
SPLIT = frozenset({"qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3"})
# What AutoModelForCausalLM makes of a family: for tools that ask config.json. Other families: transformers'.
ARCHITECTURES = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_neox": "GPTNeoXForCausalLM",
    "granite": "GraniteForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
}


class Piece(NamedTuple):
    """One published tensor: values [start, start + size) of the flat array."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def published(family: str, tensors: Sequence[TensorSpec]) -> list[Piece]:
    """All of a model's tensors, in the order of the flat array and without gaps; tied ones once."""
    pieces: list[Piece] = []
    start = 0
    for tensor in tensors:
        pieces += _pieces(family, tensor, start)
        start += tensor.size
    return pieces


def _pieces(family: str, tensor: TensorSpec, start: int) -> list[Piece]:
    found = EXPERTS.fullmatch(tensor.name)
    if found is None or len(tensor.shape) != 3 or not (family == "mixtral" or family in SPLIT):
        return [Piece(_renamed(family, tensor.name), tensor.shape, start)]
    experts, rows, columns = tensor.shape
    layer, mixtral = found["layer"], family == "mixtral"
    module = f"{layer}.block_sparse_moe.experts" if mixtral else f"{layer}.mlp.experts"
    if found["which"] == "down_proj":
        parts = ["w2" if mixtral else "down_proj"]
    else:  # the gate's rows, then the up projection's
        parts = ["w1", "w3"] if mixtral else ["gate_proj", "up_proj"]
    shape = (rows // len(parts), columns)
    names = [f"{module}.{expert}.{part}.weight" for expert in range(experts) for part in parts]
    return [Piece(name, shape, start + i * math.prod(shape)) for i, name in enumerate(names)]


def _renamed(family: str, name: str) -> str:
    if family == "mixtral":
        return name.replace(".mlp.", ".block_sparse_moe.")
    if family == "gpt_neox" and name == "lm_head.weight":
        return "embed_out.weight"
    return name
