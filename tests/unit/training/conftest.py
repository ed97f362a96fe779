"""A run of `llama:tiny` on disk, for everything that trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from p2pdiloco.ids import digest_of, tagged_digest
from p2pdiloco.run_spec import BYTES, BlobRef, DataSpec, EvaluationSet, RunSpec
from p2pdiloco.sim.keys import FastSigner
from p2pdiloco.sim.tiny_run import tiny_run
from p2pdiloco.wire.codec import encode
from p2pdiloco_node.training import frames
from p2pdiloco_node.training.presets import inner_spec, model_spec


class TinyModelRun(NamedTuple):
    spec: RunSpec
    params: npt.NDArray[np.float32]  # version 0
    shards: tuple[Path, ...]
    evaluation: Path
    folder: Path

    def configure(self, **changes: Any) -> frames.Configure:
        """The command for a trainer of this run that is to begin at the beginning."""
        spec = changes.pop("spec", self.spec)
        fields: dict[str, Any] = {
            "spec": encode(spec),
            "peer": tagged_digest("test-peer"),
            "shards": tuple(map(str, self.shards)),
            "evaluations": (str(self.evaluation),),
            "exchange": str(self.folder),
            "cursor": 0,
            "next_sequence": 1,
            "device": "cpu",
        }
        return frames.Configure(**(fields | changes))


@pytest.fixture(scope="session")
def _layout() -> tuple[Any, npt.NDArray[np.float32]]:
    import torch

    from p2pdiloco_node.training.models import build_model, flatten_params, tensor_layout

    torch.set_num_threads(1)
    torch.manual_seed(7)
    model = build_model(model_spec("llama:tiny", ()))
    return tensor_layout(model), flatten_params(model).numpy()


@pytest.fixture
def tiny(tmp_path: Path, _layout: Any) -> TinyModelRun:
    """Two shards of text-like bytes and a held-out one; H = 4."""
    layout, params = _layout
    rng = np.random.default_rng(3)
    # Words over a small alphabet: there is something to learn in a few steps.
    words = rng.integers(97, 105, (40, 5), dtype=np.uint8)
    texts = [words[rng.integers(0, 40, n)].tobytes() for n in (901, 700, 500)]
    paths = [tmp_path / f"shard-{i}" for i in range(3)]
    for path, text in zip(paths, texts, strict=True):
        path.write_bytes(text)
    refs = [BlobRef(digest_of(t), len(t), len(t)) for t in texts]
    owner = FastSigner("owner")
    inner = msgspec.structs.replace(
        inner_spec("llama:tiny", 10**6), pass_s=3600.0, warmup_tokens=0, moments_warmup_steps=0
    )
    spec = msgspec.structs.replace(
        tiny_run(owner, owner.peer_id).spec,
        model=model_spec("llama:tiny", layout),
        data=DataSpec(BYTES, 1, tuple(refs[:2]), (EvaluationSet("all", refs[2], refs[2].tokens),)),
        inner=inner,
        target_tokens=10**6,
    )
    exchange = tmp_path / "exchange"
    exchange.mkdir()
    return TinyModelRun(spec, params.copy(), tuple(paths[:2]), paths[2], exchange)
