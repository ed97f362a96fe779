"""An experiment: all that a lab run depends on besides its seed. Sections and keys are those of the file.

Time is virtual: `step_s` seconds are one inner step of a node of speed 1. Keys marked "lab only" have no
counterpart in a RunSpec: they are here to be compared with, and what does not win stays here.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from p2pdiloco.errors import OperatorError

Share = Annotated[float, Meta(ge=0, le=1)]
Seconds = Annotated[float, Meta(ge=0, le=31_536_000)]
Positive = Annotated[int, Meta(ge=1, le=2**40)]
Count = Annotated[int, Meta(ge=0, le=2**40)]


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Swarm(_Section, frozen=True):
    """Who trains, over which links, and what goes wrong."""

    nodes: Annotated[int, Meta(ge=1, le=1024)] = 4
    speeds: Annotated[tuple[Annotated[float, Meta(gt=0, le=1000)], ...], Meta(min_length=1)] = (1.0,)
    # ^ inner steps in `step_s` seconds; node i has speeds[i % len]
    step_s: Annotated[float, Meta(gt=0, le=3600)] = 1.0
    jitter: Annotated[float, Meta(ge=0, le=0.9)] = 0.05  # each pass is so much slower or faster, at most
    stagger: Share = 1.0  # nodes start within this share of a pass, so that their deltas do not come at once
    up_mbit: Annotated[float, Meta(ge=0)] = 0.0  # of each node, Mbit/s; 0: as fast as you like
    down_mbit: Annotated[float, Meta(ge=0)] = 0.0
    latency_s: Seconds = 0.1  # one way
    committee: Annotated[int, Meta(ge=1, le=7)] = 3  # voters: each gets every delta
    commit_s: Seconds = 0.5  # from closing an outer step to its certificate
    failover_s: Seconds = 20.0  # no outer step for so long when the aggregator dies
    delta_loss: Share = 0.0  # of offers of a delta that arrive nowhere; it is offered again each pass
    delta_lost_for_good: Share = 0.0  # lab only: deltas that never arrive and are never offered again
    delta_delay_passes: Annotated[float, Meta(ge=0, le=64)] = 0.0  # lab only: controlled staleness
    mtbf_s: Seconds = 0.0  # mean time between failures of one node (exponential); 0: never
    repair_s: Seconds = 60.0  # from the death of a process until it trains again, downloads apart
    joins: tuple[tuple[Share, Positive], ...] = ()  # (share of the target's tokens, nodes that join then)
    leaves: tuple[tuple[Share, Positive], ...] = ()  # the same for nodes that say goodbye, newest first
    absences: tuple[tuple[Share, Count, Positive], ...] = ()  # (from, node, passes away)


class Model(_Section, frozen=True):
    """`kind` none: no arrays at all, for questions about traffic and goodput."""

    kind: Literal["none", "llama", "mixtral"] = "llama"
    params: Positive = 1_000_000  # of kind none; the others count their own
    hidden_size: Positive = 88
    intermediate_size: Positive = 240
    layers: Positive = 2
    heads: Positive = 2
    seq_len: Positive = 64
    experts: Positive = 4  # mixtral
    experts_per_token: Positive = 2
    balance: Annotated[float, Meta(ge=0, le=10)] = 0.02  # weight of the load balancing loss (Mixtral's)


class Data(_Section, frozen=True):
    """Real text as bytes, the demo's corpus unless files are named."""

    files: tuple[str, ...] = ()  # globs; none: this Python's standard library
    by_kind: bool = False  # not i.i.d.: each node reads its own kind of text
    mixed: bool = False  # with by_kind, the control: the same text, but each node reads all kinds in turn
    evaluation_tokens: Positive = 65_536  # held out, the same for every evaluation


class Inner(_Section, frozen=True):
    """algorithm.md 2. `pass_s` 0: as long as `inner_steps` take a node of speed 1."""

    inner_steps: Positive = 30  # H
    pass_s: Seconds = 0.0
    sequences_per_step: Positive = 4
    lr: Annotated[float, Meta(gt=0, le=1)] = 2e-3
    lr_min_share: Share = 0.1
    warmup_share: Share = 0.02  # of the target's tokens
    moments_warmup_steps: Count = 10
    weight_decay: Share = 0.1
    clip_norm: Annotated[float, Meta(gt=0)] = 1.0


class Outer(_Section, frozen=True):
    """algorithm.md 3, 4, 6, 7. `eta` 0: by the number of nodes, from `eta_alone` to `eta_eight`."""

    policy: Literal["quorum", "immediate", "barrier", "data_parallel"] = "quorum"
    dylu: bool = True  # lab only if off: a pass is H steps however long they take
    optimizer: Literal["nesterov", "delayed_nesterov", "adamw", "lion", "textbook"] = "nesterov"
    mu: Share = 0.5  # 0: plain SGD
    eta: Annotated[float, Meta(ge=0, le=100)] = 0.0
    eta_alone: Annotated[float, Meta(gt=0, le=2)] = 0.5
    eta_eight: Annotated[float, Meta(gt=0, le=2)] = 0.65
    beta2: Share = 0.95  # adamw, lion
    delay: Positive = 4  # delayed_nesterov: deltas between two momentum steps
    decay: Literal["exponential", "polynomial", "constant"] = "exponential"
    lambda_: Annotated[float, Meta(ge=0, le=10)] = 0.07
    staleness_max: Positive = 16
    closing_share: Share = 0.25  # of the live part of T_full that makes a quorum
    grace: Annotated[float, Meta(ge=0, le=10)] = 1.0  # factor on the adaptive grace window
    deadline_passes: Annotated[float, Meta(gt=0, le=100)] = 1.5
    codec: str = "fp16"  # a codec of the product: fp16, int4, topk32, topk64, topk128
    dense_rounds: Count = 0  # lab only: fp16 until so many full rounds are merged, then `codec`
    error_feedback: bool = True
    error_feedback_beta: Share = 1.0
    feedback_after_absence: Literal["kept", "dropped"] = "dropped"
    average_over: Literal["senders", "all"] = "senders"  # topk: each coordinate's divisor
    merge: Literal["mean", "rda"] = "mean"
    expert_weights: bool = False  # MoE: an expert's tensors by its own tokens
    direction_correction: bool = False  # HeLoCo, for stale deltas
    align: bool = True  # lab only if off: a pass is as long whether something is adopted in it or not
    carry: Share = 1.0  # own work kept at an adoption; below 1 lab only
    in_flight_max: Annotated[int, Meta(ge=1, le=128)] = 2
    fragments: Annotated[int, Meta(ge=1, le=64)] = 1


class Run(_Section, frozen=True):
    """How long, and how often the held-out loss is measured."""

    rounds: Positive = 200  # full rounds of `nodes` at `round_steps` inner steps each: the target's tokens
    round_steps: Annotated[float, Meta(ge=0)] = 0.0  # mean inner steps of a node in a round; 0: inner_steps
    hours: Annotated[float, Meta(ge=0, le=100_000)] = 0.0  # virtual; ends the run earlier; 0: never
    evaluations: Count = 12  # on the way, at equal distances in tokens


class Experiment(_Section, frozen=True):
    """One arm. A file may hold several: each table under [arms] overrides keys of the rest."""

    name: Annotated[str, Meta(max_length=80)] = "experiment"
    swarm: Swarm = Swarm()
    model: Model = Model()
    data: Data = Data()
    inner: Inner = Inner()
    outer: Outer = Outer()
    run: Run = Run()

    @property
    def tokens_per_step(self) -> int:
        return self.inner.sequences_per_step * self.model.seq_len

    @property
    def round_steps(self) -> float:
        return self.run.round_steps or float(self.inner.inner_steps)

    @property
    def target_tokens(self) -> int:
        return max(1, round(self.run.rounds * self.swarm.nodes * self.round_steps)) * self.tokens_per_step

    @property
    def pass_s(self) -> float:
        return self.inner.pass_s or self.inner.inner_steps * self.swarm.step_s

    def speed(self, node: int) -> float:
        return self.swarm.speeds[node % len(self.swarm.speeds)]


def check_experiment(e: Experiment) -> None:
    """What types alone cannot say. Raises: OperatorError with the key and what to do."""

    def refuse(text: str) -> None:
        raise OperatorError(f"experiment {e.name!r}: {text}", exit_code=2)

    if e.outer.optimizer == "textbook" and e.outer.policy != "immediate":
        refuse('outer.optimizer "textbook" takes each delta by itself: set outer.policy = "immediate".')
    if e.outer.policy == "data_parallel" and e.model.kind == "none":
        refuse('outer.policy "data_parallel" is the reference for loss: choose a model.kind other than none.')
    if e.outer.expert_weights and e.model.kind != "mixtral":
        refuse('outer.expert_weights needs model.kind = "mixtral".')
    if e.outer.expert_weights and e.outer.fragments > 1:
        refuse("outer.expert_weights and outer.fragments do not go together: tokens are counted by the pass.")
    if e.outer.direction_correction and e.outer.mu == 0:
        refuse("outer.direction_correction turns deltas towards the momentum: set outer.mu above 0.")
    if e.model.hidden_size % e.model.heads:
        refuse("model.hidden_size must be a multiple of model.heads.")
    if e.model.experts_per_token > e.model.experts:
        refuse("model.experts_per_token is above model.experts.")
    if e.outer.fragments > 1 and e.outer.policy == "barrier":
        refuse('fragments are staggered: set outer.policy to "quorum" or "immediate".')
    for start, node, _ in e.swarm.absences:
        if node >= e.swarm.nodes:
            refuse(
                f"swarm.absences names node {node} (from {start}); the first {e.swarm.nodes} have 0 and up."
            )
    staying = e.swarm.nodes + sum(n for _, n in e.swarm.joins) - sum(n for _, n in e.swarm.leaves)
    if staying < 1:
        refuse("swarm.leaves takes everybody away: somebody has to stay.")
