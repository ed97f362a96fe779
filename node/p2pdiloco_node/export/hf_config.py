"""Writes out a config: `python -m p2pdiloco_node.export.hf_config`, a process with transformers.

An Outline in on stdin, its config with every default of its class on stdout. The model is built without
memory and must have the RunSpec's tensors; nothing is fetched.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import msgspec
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.run_spec import ModelSpec
from p2pdiloco.wire.codec import decode
from p2pdiloco_node.export.config_files import Outline
from p2pdiloco_node.training.models import outline_of

# Of the class that read it, not of the model.
LEFT_OUT = ("transformers_version", "_name_or_path", "auto_map")


def written_out(config: dict[str, Any]) -> dict[str, Any]:
    """`config` with what its class adds; what `config` says stays."""
    family = config["model_type"]
    plain = {k: v for k, v in config.items() if k not in ("model_type", "torch_dtype", "architectures")}
    known = AutoConfig.for_model(family, **plain).to_diff_dict()
    known = {key: value for key, value in known.items() if key not in LEFT_OUT}
    rope = known.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:
        known.setdefault("rope_theta", rope["rope_theta"])  # where older programs look for it
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(family)
    named = {"architectures": [architecture]} if architecture else {}
    return dict(sorted({**known, **config, **named}.items()))


def main() -> None:
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is not the config
    told = msgspec.json.decode(sys.stdin.buffer.read(), type=Outline)
    try:
        outline_of(decode(told.model, ModelSpec, bytes_max=limits.run_spec_bytes_max))
    except OperatorError as error:
        print(error, file=sys.stderr, flush=True)
        raise SystemExit(error.exit_code) from None
    output.write(json.dumps(written_out(told.config)).encode())
    output.close()


if __name__ == "__main__":
    main()
