"""Makes version 0: `python -m p2pdiloco_node.training.genesis`, a process with torch.

Started by version_0.py. Reads a GenesisOrder, writes the params as raw little-endian float32 to a file, one
tensor at a time, and a GenesisMade to standard output. Version 0 travels as a snapshot, never as a seed: the
same seed gives other numbers on another CPU (algorithm.md 5).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.wire.codec import decode, encode
from p2pdiloco_node.training.checkpoint_reader import read_checkpoint
from p2pdiloco_node.training.families import check_values, drops_out
from p2pdiloco_node.training.models import (
    frozen_config,
    initialised,
    make_config,
    outline,
    releases,
    tensor_layout,
)
from p2pdiloco_node.training.presets import config_bytes
from p2pdiloco_node.training.version_0 import KNOWN_WHY, GenesisMade, GenesisOrder


def make(order: GenesisOrder) -> GenesisMade:
    """Raises: OperatorError: the config or the checkpoint cannot become a run's model."""
    given = json.loads(order.config)
    check_values(order.family, given)
    config = make_config(order.family, given, from_file=True)
    if order.seq_len > config.max_position_embeddings:
        raise OperatorError(
            f"--seq-len {order.seq_len} is more than the {config.max_position_embeddings} positions of the "
            "model."
        )
    arguments = frozen_config(config)
    try:
        frozen = config_bytes(arguments)
    except (TypeError, ValueError) as error:
        raise OperatorError(f"the model's config holds what JSON cannot: {error}.") from None
    if len(frozen) > limits.model_config_bytes_max:
        raise OperatorError(f"the model's config takes more than {limits.model_config_bytes_max} bytes.")
    notes = (
        [f"Dropout as the config asks: {', '.join(found)}."]
        if (found := drops_out(order.family, arguments))
        else []
    )
    if order.checkpoint:
        model = read_checkpoint(order.family, config, Path(order.checkpoint))
    elif order.params:
        torch.manual_seed(order.seed)
        model = initialised(order.family, config)
    else:
        model = outline(order.family, config)
    if not order.params:
        return GenesisMade(frozen, tensor_layout(model), tuple(notes), releases())
    with Path(order.params).open("wb") as file:
        for _, parameter in model.named_parameters():
            values = parameter.detach().float().contiguous().numpy()
            if not np.isfinite(values).all():
                raise OperatorError("the checkpoint holds values that are not finite: it is no sound start.")
            values.astype("<f4", copy=False).tofile(file)
    return GenesisMade(frozen, tensor_layout(model), tuple(notes), releases())


def main() -> None:
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is not the answer
    order = decode(sys.stdin.buffer.read(), GenesisOrder)
    try:
        made = make(order)
    except OperatorError as error:
        print(error, file=sys.stderr, flush=True)
        raise SystemExit(KNOWN_WHY) from None
    output.write(encode(made))
    output.close()


if __name__ == "__main__":
    main()
