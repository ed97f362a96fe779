"""Makes version 0: `python -m p2pdiloco_node.training.genesis`, a process with torch.

Started by version_0.py. Reads a GenesisOrder, lets the model compute once (trial.py), writes the params as
raw little-endian float32 to a file, one tensor at a time. Standard output has a GenesisMade as soon as the
tensors are known, without notes and behind its length, and another at the end; standard error has what goes
on, and what is wrong. Version 0 travels as a snapshot, never as a seed: the same seed gives other numbers on
another CPU (algorithm.md 5).
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.run_spec import ModelSpec
from p2pdiloco.wire.codec import decode, encode
from p2pdiloco_node.training.checkpoint_reader import read_checkpoint
from p2pdiloco_node.training.families import check_values, drops_out, open_config
from p2pdiloco_node.training.models import (
    frozen_config,
    initialised,
    make_config,
    outline,
    releases,
    tensor_layout,
)
from p2pdiloco_node.training.presets import config_bytes
from p2pdiloco_node.training.ram import ram
from p2pdiloco_node.training.trainer_process import die_with_parent
from p2pdiloco_node.training.trial import check_room, try_model
from p2pdiloco_node.training.version_0 import DOING, KNOWN_WHY, LENGTH_BYTES, GenesisMade, GenesisOrder


def make(
    order: GenesisOrder,
    at: Callable[[str], None] = lambda _: None,
    laid_out: Callable[[GenesisMade], None] = lambda _: None,
) -> GenesisMade:
    """`at` hears what is going on, `laid_out` what is known before any param is made.

    Raises: OperatorError: the config or the checkpoint cannot become a run's model.
    """
    at("building it")
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
    # From here on the config is what every node will read.
    config = make_config(order.family, open_config(order.family, frozen))
    if order.vocab_size > config.vocab_size:
        raise OperatorError(
            f"the tokenizer has {order.vocab_size} tokens and the model knows {config.vocab_size}: use the "
            "tokenizer it was trained with (--tokenizer)."
        )
    tensors = tensor_layout(outline(order.family, config))
    spec = ModelSpec(order.family, "", frozen, order.vocab_size, order.seq_len, tensors)
    laid_out(GenesisMade(frozen, tensors, (), releases()))
    check_room(spec, ram().free)
    notes = []
    if found := drops_out(order.family, arguments):
        notes.append(f"Dropout as the config asks: {', '.join(found)}.")
    at("reading its checkpoint" if order.checkpoint else "initialising its params")
    if order.checkpoint:
        model = read_checkpoint(order.family, config, Path(order.checkpoint))
    else:
        torch.manual_seed(order.seed)
        model = initialised(order.family, config)
    at("looking at its params")
    for name, parameter in model.named_parameters():
        largest = float(parameter.detach().float().abs().max())  # nan, if one is
        if not largest <= limits.param_max:
            start = "checkpoint" if order.checkpoint else "initialised model"
            what = f"a value of {largest:.1g}" if math.isfinite(largest) else "values that are not finite"
            raise OperatorError(f"the {start} holds {what} ({name}): it is no sound start.")
    if not order.tried:
        notes += try_model(model, spec, ram().free, at)
    if order.params:
        at("writing its params")
        with Path(order.params).open("wb") as file:
            for _, parameter in model.named_parameters():
                values = parameter.detach().float().contiguous().numpy()
                values.astype("<f4", copy=False).tofile(file)
    return GenesisMade(frozen, tensors, tuple(notes), releases())


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is that of the process that started this one
    die_with_parent()
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is not the answer
    order = decode(sys.stdin.buffer.read(), GenesisOrder)

    def laid_out(made: GenesisMade) -> None:
        answer = encode(made)
        output.write(len(answer).to_bytes(LENGTH_BYTES, "big") + answer)
        output.flush()

    try:
        made = make(order, lambda doing: print(f"{DOING}{doing}", file=sys.stderr, flush=True), laid_out)
    except OperatorError as error:
        print(error, file=sys.stderr, flush=True)
        raise SystemExit(KNOWN_WHY + error.exit_code) from None
    output.write(encode(made))
    output.close()


if __name__ == "__main__":
    main()
