"""One compiled forward and backward pass for the trainers of all nodes: a third faster on small models.

Compiling needs a C++ compiler and takes 10 to 30 s per process and shape of model, so it is left to runs
that are long enough. The arithmetic is the same, the rounding is not: like another CPU, it gives other bits.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from p2pdiloco.sim.lab.experiment import Experiment, Model
from p2pdiloco_node.config import lab_compile
from p2pdiloco_node.lab import networks
from p2pdiloco_node.training.models import tensor_layout
from p2pdiloco_node.training.presets import VOCAB_BYTES

STEPS_MIN = 3_000  # inner steps of a run that save what compiling costs
SHAPES_MAX = 64  # graphs of one process, beyond which torch would quietly stop to compile

LossSum = Callable[[Sequence[Any], Any], Any]
"""(parameters in the layout's order, tokens (sequences, seq_len + 1)) -> sum of cross-entropies in nats."""


class Compiled(NamedTuple):
    """`loss_sum` is None where nothing could be or should be compiled; `how` says why, for people."""

    loss_sum: LossSum | None
    how: str


def compiled_for(experiment: Experiment, *, wanted: bool | None = None) -> Compiled:
    """What the trainers of an experiment use. `wanted` None: by environment and length."""
    if experiment.model.kind != "llama":
        return Compiled(None, "eager: routes depend on the data")
    if wanted is None:
        wanted = _wanted(experiment)
    if not wanted:
        return Compiled(None, "eager")
    return _compile(experiment.model, experiment.inner.sequences_per_step)


def _wanted(experiment: Experiment) -> bool:
    switch = lab_compile(os.environ)  # 1 always, 0 never, auto: by length
    if switch != "auto":
        return switch == "1"
    return experiment.target_tokens // experiment.tokens_per_step >= STEPS_MIN


@lru_cache(maxsize=SHAPES_MAX)
def _compile(model: Model, sequences: int) -> Compiled:
    # This thread compiles: a pool of compilers would outlive the run and crowd out the other seeds.
    torch._inductor.config.compile_threads = 1
    torch._dynamo.config.recompile_limit = SHAPES_MAX
    torch._dynamo.config.accumulated_recompile_limit = 4 * SHAPES_MAX
    module = networks.build(model)
    names = [tensor.name for tensor in tensor_layout(module)]

    def loss_sum(parameters: Sequence[Any], tokens: Any) -> Any:
        named = dict(zip(names, parameters, strict=True))
        kwargs = {"input_ids": tokens[:, :-1]}
        logits = torch.func.functional_call(module, named, kwargs=kwargs, tie_weights=True).logits
        return networks.cross_entropy_sum(logits, tokens)

    compiled: LossSum = torch.compile(loss_sum, dynamic=False, fullgraph=True)
    # Not the module's own: that they are the same tensors would become a condition of this graph.
    parameters = tuple(torch.nn.Parameter(p.detach().clone()) for p in module.parameters())
    tokens = torch.randint(VOCAB_BYTES, (sequences, model.seq_len + 1), generator=torch.Generator())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's about itself, while it imports its compiler
            compiled(parameters, tokens).backward()
    except (RuntimeError, OSError) as error:  # no compiler, no headers, no place for its files
        cause = getattr(error, "inner_exception", error)
        reason = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
        return Compiled(None, f"eager, as compiling failed: {reason[:200]}")
    return Compiled(compiled, "compiled")
