"""The RunSpec that the product's rules are given for an experiment."""

from __future__ import annotations

from msgspec.structs import replace

from p2pdiloco.ids import PeerId, digest_of
from p2pdiloco.run_spec import OuterSpec, RunSpec, TensorSpec
from p2pdiloco.sim.keys import signer_named
from p2pdiloco.sim.lab.experiment import Experiment
from p2pdiloco.sim.tiny_run import tiny_run

ENDLESS = 2**53  # tokens: the lab ends a run by itself


def peer_of(node: int) -> PeerId:
    """The name of a node. Any will do: only its order matters, and that is as good as random."""
    return PeerId(digest_of(b"lab node %d" % node))


def terms_of(e: Experiment, tensors: tuple[TensorSpec, ...]) -> RunSpec:
    """A `local` run on the experiment's figures; `tensors` of one fragment."""
    tiny = tiny_run(signer_named("owner", real=False), signer_named("witness", real=False).peer_id).spec
    outer = OuterSpec(
        mu=e.outer.mu,
        decay=e.outer.decay,
        lambda_=e.outer.lambda_,
        staleness_max=e.outer.staleness_max,
        eta_alone=e.outer.eta or e.outer.eta_alone,
        eta_eight=e.outer.eta or e.outer.eta_eight,
        deadline_passes=e.outer.deadline_passes,
        codec=e.outer.codec,
        error_feedback_beta=e.outer.error_feedback_beta,
    )
    inner = replace(
        tiny.inner,
        inner_steps=e.inner.inner_steps,
        pass_s=e.pass_s,
        sequences_per_step=e.inner.sequences_per_step,
        lr=e.inner.lr,
        lr_min_share=e.inner.lr_min_share,
        warmup_tokens=round(e.inner.warmup_share * e.target_tokens),
        moments_warmup_steps=e.inner.moments_warmup_steps,
        weight_decay=e.inner.weight_decay,
        clip_norm=e.inner.clip_norm,
    )
    model = replace(tiny.model, seq_len=e.model.seq_len, tensors=tensors)
    return replace(tiny, model=model, inner=inner, outer=outer, target_tokens=ENDLESS)
