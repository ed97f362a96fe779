"""The trainer's loop with a mixture of experts, and what it says of how it works."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from p2pdiloco.run_spec import ModelSpec, TensorSpec
from p2pdiloco_node.training import frames
from p2pdiloco_node.training.arrays import write_array
from p2pdiloco_node.training.families import ModelRefused
from p2pdiloco_node.training.presets import config_bytes
from tests.unit.training.test_families import tiny_config

if TYPE_CHECKING:
    from tests.unit.training.conftest import TinyModelRun


def mixture(tiny: TinyModelRun) -> tuple[Any, Any]:
    """The tiny run with a mixture in the model's place: its spec, and version 0."""
    import torch

    from p2pdiloco_node.training.models import (
        flatten_params,
        frozen_config,
        initialised,
        make_config,
        tensor_layout,
    )  # fmt: skip

    torch.manual_seed(2)
    config = make_config("mixtral", tiny_config("mixtral", vocab_size=256, max_position_embeddings=32))
    model = initialised("mixtral", config)
    spec = ModelSpec("mixtral", "x", config_bytes(frozen_config(config)), 256, 32, tensor_layout(model))
    return msgspec.structs.replace(tiny.spec, model=spec), flatten_params(model).numpy()


def worker(tiny: TinyModelRun, spec: Any, events: list[Any], **settings: Any) -> Any:
    from p2pdiloco_node.training.worker import Worker

    return Worker(tiny.configure(spec=spec, **settings), events.append, lambda: 0.0)


def test_a_pass_of_a_mixture_says_how_evenly_its_experts_are_used(tiny: TinyModelRun) -> None:
    spec, params = mixture(tiny)
    events: list[Any] = []
    made = worker(tiny, spec, events, micro_batch=3, checkpointing="on")
    assert events[0].how == ("3 sequences per forward pass; activations computed twice (checkpointing).",)
    anchor = tiny.folder / "anchor.f32"
    write_array(anchor, params)
    made.obey(frames.Adopt(0, 0, spec.target_tokens, str(anchor), 0, reset=False))
    made.obey(frames.Allow(1, ""))
    while not any(isinstance(event, frames.PassDone) for event in events):
        made.turn()
    done = next(event for event in events if isinstance(event, frames.PassDone))
    assert len(done.evenness) == 2
    assert all(0.5 < share <= 1 for share in done.evenness)
    assert done.loss == pytest.approx(np.log(256), abs=0.5)


def test_without_wishes_the_batch_goes_at_once(tiny: TinyModelRun) -> None:
    events: list[Any] = []
    worker(tiny, tiny.spec, events)
    assert events[0].how == (f"{tiny.spec.inner.sequences_per_step} sequences per forward pass.",)


def test_a_run_that_lies_about_its_model_is_refused(tiny: TinyModelRun) -> None:
    tensors = (*tiny.spec.model.tensors[:-1], TensorSpec("more", (10**9, 10)))
    lie = msgspec.structs.replace(tiny.spec, model=msgspec.structs.replace(tiny.spec.model, tensors=tensors))
    with pytest.raises(ModelRefused, match="names the tensor more"):
        worker(tiny, lie, [])
