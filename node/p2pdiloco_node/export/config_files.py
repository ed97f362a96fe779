"""config.json and generation_config.json of an exported model.

What the RunSpec says is enough for transformers, which fills in the defaults of its class. Other tools and
later versions know other defaults, so where transformers is installed a process of its own writes every value
out (hf_config.py); a tracker, which has none, leaves it at the RunSpec's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from p2pdiloco.errors import OperatorError
from p2pdiloco.exit_codes import FILES, RESOURCES, RUN
from p2pdiloco.run_spec import ModelSpec, TokenizerSpec
from p2pdiloco.wire.codec import encode
from p2pdiloco_node.export.names import ARCHITECTURES
from p2pdiloco_node.training.families import open_config

PROCESS = (sys.executable, "-P", "-m", "p2pdiloco_node.export.hf_config")
PROCESS_S_MAX = 300.0  # importing torch and transformers on a busy machine takes 10 s
UNUSED_IDS_MAX = 1024  # listed in generation_config.json
Config = dict[str, Any]


class Outline(msgspec.Struct, frozen=True):
    """What the process is told."""

    config: Config
    model: bytes  # the RunSpec's ModelSpec, encoded


def model_config(model: ModelSpec, tokenizer: TokenizerSpec, dtype: str) -> Config:
    """config.json as far as the RunSpec knows it.

    Raises: OperatorError: a config that no trainer of this build would take; nothing of it is passed on.
    """
    said = open_config(model.family, model.config)
    known = ARCHITECTURES.get(model.family)
    return {
        **({"architectures": [known]} if known else {}),
        "bos_token_id": None,
        "pad_token_id": None,
        **{key: value for key, value in said.items() if key != "model_type"},
        "model_type": model.family,
        "eos_token_id": tokenizer.end_token,
        "use_cache": True,
        "dtype": dtype,
        "torch_dtype": dtype,  # the same for older programs
    }


def generation_config(model: ModelSpec, tokenizer: TokenizerSpec) -> Config:
    """A text ends at the token that stands behind each document; ids without a token are never chosen."""
    unused = list(range(tokenizer.vocab_size, model.vocab_size))
    suppressed = {"suppress_tokens": unused} if 0 < len(unused) <= UNUSED_IDS_MAX else {}
    return {"eos_token_id": tokenizer.end_token, "pad_token_id": tokenizer.end_token, **suppressed}


def full_config(config: Mapping[str, Any], model: ModelSpec, environment: Mapping[str, str]) -> Config | None:
    """The same with every value of transformers' class written out; None where transformers is missing.

    Takes seconds. Raises: OperatorError: transformers does not take this config, or makes another model of
    it than the RunSpec's tensors are of: whoever loaded the folder would get the memory that a config asks
    for, and params that nobody trained.
    """
    try:
        done = subprocess.run(
            PROCESS,
            input=msgspec.json.encode(Outline(dict(config), encode(model))),
            capture_output=True,
            env=dict(environment),
            timeout=PROCESS_S_MAX,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    if done.returncode == 0:
        found = json.loads(done.stdout)
        assert isinstance(found, dict), "hf_config.py writes an object"
        return found
    last = (done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
    if "No module named" in last:
        return None
    if done.returncode in {FILES, RUN}:  # as hf_config.py ends where it refuses the model
        raise OperatorError(f"transformers does not take this run's model ({last[:300]}).", RUN)
    raise OperatorError(
        f"the process that writes the model's config out failed ({last[:300]}): free memory, try again.",
        RESOURCES,
    )
