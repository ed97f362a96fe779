"""Makes version 0: `python -m p2pdiloco_node.training.genesis MODEL PARAMS_FILE SEED`, a process with torch.

MODEL is a preset's name. Writes the params as raw little-endian float32 to PARAMS_FILE and the encoded
tensor layout to stdout. Version 0 travels as a snapshot, never as
this seed: the same seed gives other numbers on another CPU (algorithm.md 5).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from p2pdiloco.wire.codec import encode
from p2pdiloco_node.training.arrays import write_array
from p2pdiloco_node.training.models import build_model, flatten_params, tensor_layout
from p2pdiloco_node.training.presets import model_spec


def main() -> None:
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is not the layout
    preset, path, seed = sys.argv[1:]
    torch.manual_seed(int(seed))
    model = build_model(model_spec(preset, ()))
    write_array(Path(path), flatten_params(model).numpy())
    output.write(encode(tensor_layout(model)))
    output.close()


if __name__ == "__main__":
    main()
