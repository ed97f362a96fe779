"""Writes out a config: `python -m p2pdiloco_node.export.hf_config`, a process with transformers.

JSON in on stdin, the same with every default of its class on stdout. No model is built, nothing is fetched.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

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
    output.write(json.dumps(written_out(json.load(sys.stdin))).encode())
    output.close()


if __name__ == "__main__":
    main()
