"""A run small enough that a whole swarm of it costs a fraction of a second: 160 params, short passes.

Under a sparse codec it has 4128 params, or it would be sent raw as a whole.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from p2pdiloco.ids import NO_DIGEST, PeerId, RunId, digest_of
from p2pdiloco.rules.delta_layout import is_sparse
from p2pdiloco.run_spec import (
    BYTES,
    FORMAT,
    MATH_VERSION,
    BlobRef,
    CommitteeSpec,
    DataSpec,
    EvaluationSet,
    Genesis,
    InnerSpec,
    ModelSpec,
    OuterSpec,
    RunSpec,
    TensorSpec,
    run_id_of,
)
from p2pdiloco.wire.codec import encode
from p2pdiloco.wire.log import Committee
from p2pdiloco.wire.signing import Signer

Array = npt.NDArray[np.float32]

TENSORS = (TensorSpec("matrix", (16, 9)), TensorSpec("norm", (16,)))
PARAMS = 160
# Where the codec is topk: one whole chunk and a short one.
SPARSE_TENSORS = (TensorSpec("matrix", (16, 257)), TensorSpec("norm", (16,)))


class Timings(NamedTuple):
    """Seconds. The ratios are those of protocol.md 4; the demo's are about half of these."""

    pass_s: float = 4.0
    heartbeat_s: float = 1.0
    timeout_s_min: float = 3.0
    timeout_s_max: float = 6.0
    voter_standing_s: float = 3.0
    voter_lease_s: float = 12.0


class TinyRun(NamedTuple):
    """A RunSpec with what a bare machine needs to start: its id and version 0 (momentum is zero)."""

    run: RunId
    spec: RunSpec
    params: Array

    @property
    def momentum(self) -> Array:
        return np.zeros_like(self.params)


def tiny_run(
    owner: Signer,
    witness: PeerId,
    *,
    size_max: int = 3,
    rotation: int = 3,
    timings: Timings = Timings(),  # noqa: B008 (an immutable tuple)
    codec: str = "fp16",
    target_version: int = 0,
    nonce: int = 0,
) -> TinyRun:
    """A run of `local` admission whose first committee is the witness alone."""
    tensors = SPARSE_TENSORS if is_sparse(codec) else TENSORS
    params = ((np.arange(sum(t.size for t in tensors)) % 17 - 8) / 64).astype(np.float32)
    momentum = np.zeros_like(params)
    shard = BlobRef(NO_DIGEST, 1024, 1024)
    spec = RunSpec(
        format=FORMAT,
        math_version=MATH_VERSION,
        name="simulated",
        owner_key=owner.public_key,
        model=ModelSpec(
            family="llama", preset="simulated", config=b"{}", vocab_size=256, seq_len=8, tensors=tensors,
        ),
        data=DataSpec(BYTES, 1, (shard,), (EvaluationSet("all", shard, 1024),)),
        inner=InnerSpec(
            inner_steps=4, pass_s=timings.pass_s, sequences_per_step=1, lr=1e-3, lr_min_share=0.1,
            warmup_tokens=0, moments_warmup_steps=0, beta1=0.9, beta2=0.95, weight_decay=0.1, clip_norm=1.0,
        ),
        outer=OuterSpec(codec=codec),
        committee=CommitteeSpec(
            genesis=Committee(witness, ()), size_max=size_max, rotation=rotation,
            heartbeat_s=timings.heartbeat_s, timeout_s_min=timings.timeout_s_min,
            timeout_s_max=timings.timeout_s_max, voter_standing_s=timings.voter_standing_s,
            voter_lease_s=timings.voter_lease_s,
        ),
        genesis=Genesis((digest_of(params.tobytes()),), (digest_of(momentum.tobytes()),)),
        admission="local",
        trust_tokens=0,
        bootstrap_tokens=0,
        target_tokens=2**40,
        target_version=target_version,
        eval_every=1000,
        nonce=nonce.to_bytes(16, "big"),
    )  # fmt: skip
    return TinyRun(run_id_of(encode(spec)), spec, params)
