"""An experiment: all that a lab run depends on besides its seed. Sections and keys are those of the file.

Time is virtual: `step_s` seconds are one inner step of a node of speed 1. Keys marked "lab only" have no
counterpart in a RunSpec: they are here to be compared with, and what does not win stays here.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from p2pdiloco.errors import OperatorError
from p2pdiloco.exit_codes import USAGE
from p2pdiloco.words import count_of

YEAR_S = 31_536_000
Share = Annotated[float, Meta(ge=0, le=1)]
Seconds = Annotated[float, Meta(ge=0, le=YEAR_S)]
Positive = Annotated[int, Meta(ge=1, le=2**40)]
Count = Annotated[int, Meta(ge=0, le=2**40)]
PassesAway = Annotated[int, Meta(ge=1, le=1_000_000)]
Nodes = Annotated[int, Meta(ge=1, le=1024)]
Mbit = Annotated[float, Meta(ge=0, le=1e6)]  # Mbit/s; a terabit a second

# Limits of one run. The first four count without a model, too.
NODES_MAX = 1024  # with those who join: each is told of everybody's deltas
PASSES_MAX = 2_000_000  # of all nodes, times fragments, if nobody fails: without a model half an hour
FAILURES_MAX = 5_000_000  # of all nodes in the time of those passes: each is a few events
TOKENS_MAX = 10**15  # of the target: the rules count in 2**53 (terms.ENDLESS)
STEP_S_MIN = 1e-4  # of the fastest node: 100 times what node.EPSILON_S forgives
MBIT_MIN = 1e-3  # 125 bytes a second; slower, a run would last longer than its clock is exact
MODEL_PARAMS_MAX = 200_000_000  # of a model with arrays: 5 GB for each node in one process
MODEL_STEPS_MAX = 100_000_000  # inner steps that are really computed: at 5 ms each six days
BATCH_TOKENS_MAX = 2**20  # of an inner step that is really computed: its logits alone are 1 GiB
VOCABULARY = 256  # tokens are bytes


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Swarm(_Section, frozen=True):
    """Who trains, over which links, and what goes wrong."""

    nodes: Nodes = 4
    speeds: Annotated[
        tuple[Annotated[float, Meta(ge=0.001, le=1000)], ...], Meta(min_length=1, max_length=1024)
    ] = (1.0,)
    # ^ inner steps in `step_s` seconds; node i has speeds[i % len]
    step_s: Annotated[float, Meta(ge=0.001, le=3600)] = 1.0
    jitter: Annotated[float, Meta(ge=0, le=0.9)] = 0.05  # each pass is so much slower or faster, at most
    stagger: Share = 1.0  # nodes start within this share of a pass, so that their deltas do not come at once
    up_mbit: Mbit = 0.0  # of each node, Mbit/s; 0: as fast as you like
    down_mbit: Mbit = 0.0
    latency_s: Annotated[float, Meta(ge=0, le=10)] = 0.1  # one way
    committee: Annotated[int, Meta(ge=1, le=7)] = 3  # voters: each gets every delta
    commit_s: Seconds = 0.5  # from closing an outer step to its certificate
    failover_s: Seconds = 20.0  # no outer step for so long when the aggregator dies
    delta_loss: Share = 0.0  # of offers of a delta that arrive nowhere; it is offered again each pass
    delta_lost_for_good: Share = 0.0  # lab only: deltas that never arrive and are never offered again
    delta_delay_passes: Annotated[float, Meta(ge=0, le=64)] = 0.0  # lab only: controlled staleness
    mtbf_s: Seconds = 0.0  # mean time between failures of one node (exponential); 0: never
    repair_s: Seconds = 60.0  # from the death of a process until it trains again, downloads apart
    joins: Annotated[tuple[tuple[Share, Nodes], ...], Meta(max_length=1024)] = ()
    # ^ (share of the target's tokens, nodes that join then)
    leaves: Annotated[tuple[tuple[Share, Nodes], ...], Meta(max_length=1024)] = ()
    # ^ the same for nodes that say goodbye, newest first
    absences: Annotated[tuple[tuple[Share, Count, PassesAway], ...], Meta(max_length=1024)] = ()
    # ^ (from, node, passes away)


class Model(_Section, frozen=True):
    """`kind` none: no arrays at all, for questions about traffic and goodput."""

    kind: Literal["none", "llama", "mixtral"] = "llama"
    params: Positive = 1_000_000  # of kind none; the others count their own
    hidden_size: Positive = 88
    intermediate_size: Positive = 240
    layers: Annotated[int, Meta(ge=1, le=256)] = 2
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
    evaluation_tokens: Annotated[int, Meta(ge=1, le=2**26)] = 65_536  # held out, the same for every one


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
    clip_norm: Annotated[float, Meta(gt=0, le=1e6)] = 1.0


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
    codec: Literal["fp16", "int4", "topk32", "topk64", "topk128"] = "int4"  # rules/delta_layout.CODECS
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
    round_steps: Annotated[float, Meta(ge=0, le=2**40)] = 0.0
    # ^ mean inner steps of a node in a round; 0: inner_steps
    hours: Annotated[float, Meta(ge=0, le=100_000)] = 0.0  # virtual; ends the run earlier; 0: never
    evaluations: Annotated[int, Meta(ge=0, le=10_000)] = 12  # on the way, at equal distances in tokens


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


def params_of(model: Model) -> int:
    """Parameters of kinds llama and mixtral: their head is the embedding, they have no biases."""
    mlp = 3 * model.hidden_size * model.intermediate_size
    if model.kind == "mixtral":
        mlp = model.experts * (mlp + model.hidden_size)
    block = 4 * model.hidden_size**2 + mlp + 2 * model.hidden_size
    return VOCABULARY * model.hidden_size + model.layers * block + model.hidden_size


def check_experiment(e: Experiment) -> None:
    """What types alone cannot say. Raises: OperatorError with the key and what to do."""
    slips = chain(_outer_slips(e), _swarm_slips(e), _model_slips(e), _too_much(e))
    if slip := next(slips, None):
        raise OperatorError(f"experiment {e.name!r}: {slip}", exit_code=USAGE)


def _outer_slips(e: Experiment) -> Iterator[str]:
    if e.outer.optimizer == "textbook" and e.outer.policy != "immediate":
        yield 'outer.optimizer "textbook" takes each delta by itself: set outer.policy = "immediate".'
    if e.outer.policy == "data_parallel" and e.model.kind == "none":
        yield 'outer.policy "data_parallel" is the reference for loss: choose a model.kind other than none.'
    if e.outer.expert_weights and e.model.kind != "mixtral":
        yield 'outer.expert_weights needs model.kind = "mixtral".'
    if e.outer.expert_weights and e.outer.fragments > 1:
        yield "outer.expert_weights and outer.fragments do not go together: tokens are counted by the pass."
    if e.outer.direction_correction and not 0 < e.outer.mu < 1:
        yield "outer.direction_correction turns deltas towards momentum: set outer.mu above 0 and below 1."
    if e.outer.fragments > 1 and e.outer.policy == "barrier":
        yield 'fragments are staggered: set outer.policy to "quorum" or "immediate".'


def _swarm_slips(e: Experiment) -> Iterator[str]:
    for start, node, _ in e.swarm.absences:
        if node >= e.swarm.nodes:
            yield f"swarm.absences names node {node} (from {start}); the first {e.swarm.nodes} have 0 and up."
    everybody = e.swarm.nodes + sum(n for _, n in e.swarm.joins)
    if everybody > NODES_MAX:
        yield f"swarm.nodes and swarm.joins make {everybody} nodes; {NODES_MAX} are the most."
    if everybody - sum(n for _, n in e.swarm.leaves) < 1:
        yield "swarm.leaves takes everybody away: somebody has to stay."
    for key, mbit in (("up_mbit", e.swarm.up_mbit), ("down_mbit", e.swarm.down_mbit)):
        if 0 < mbit < MBIT_MIN:
            yield f"swarm.{key} is {mbit:g}: give {MBIT_MIN:g} or more, or 0 for as fast as you like."
    step_s = e.swarm.step_s / max(e.swarm.speeds)
    if step_s < STEP_S_MIN:
        yield (
            f"swarm.speeds and swarm.step_s make the fastest node's inner step {step_s:g} s long; "
            f"{STEP_S_MIN:g} is the least: set a longer swarm.step_s."
        )
    if 0 < e.inner.pass_s < step_s:
        yield (
            f"inner.pass_s is {e.inner.pass_s:g}, and the fastest node's inner step takes {step_s:g} s: give "
            "that or more, or 0 for as long as inner_steps take."
        )
    if e.pass_s > YEAR_S:
        yield "inner.inner_steps at swarm.step_s make a pass of more than a year: take fewer."


def _model_slips(e: Experiment) -> Iterator[str]:
    shape = e.model
    if shape.hidden_size % shape.heads:
        yield "model.hidden_size must be a multiple of model.heads."
    if shape.experts_per_token > shape.experts:
        yield "model.experts_per_token is above model.experts."
    tensors = (
        9 * shape.layers + 2 if shape.kind == "llama" else None
    )  # mixtral's are counted when it is built
    if shape.kind == "none":
        tensors = (shape.params >= 128) + (shape.params % 128 > 0)  # engine.py: a matrix and the rest
    if tensors is not None and e.outer.fragments > tensors:
        yield (
            f"outer.fragments is {e.outer.fragments} and the model has {count_of(tensors, 'tensor')}, never "
            f"to be cut: set outer.fragments to {tensors} or less."
        )
    if shape.kind == "none":
        return
    if shape.hidden_size // shape.heads % 2:
        yield (
            f"model.hidden_size / model.heads is {shape.hidden_size // shape.heads}, and rotary positions "
            "turn pairs: make it even."
        )
    if (params := params_of(shape)) > MODEL_PARAMS_MAX:
        yield (
            f"this model has {params:.3g} parameters, and {MODEL_PARAMS_MAX:.3g} are the most: take a "
            'smaller shape, or model.kind = "none" with model.params for questions about traffic and time.'
        )
    if e.tokens_per_step > BATCH_TOKENS_MAX:
        yield (
            f"inner.sequences_per_step times model.seq_len is {e.tokens_per_step} tokens; {BATCH_TOKENS_MAX} "
            "are the most in one inner step."
        )


def _too_much(e: Experiment) -> Iterator[str]:
    """Work that would not end. Counted as if nobody failed, waited or joined."""
    steps = e.run.rounds * e.swarm.nodes * e.round_steps
    if e.target_tokens > TOKENS_MAX:
        yield f"a target of {e.target_tokens:.3g} tokens; {TOKENS_MAX:.0e} are the most: fewer run.rounds."
    if e.model.kind != "none" and steps > MODEL_STEPS_MAX:
        yield f"{steps:.3g} steps with a model; {MODEL_STEPS_MAX:.0e} are the most: set fewer run.rounds."
    paces = [e.swarm.step_s / e.speed(node) for node in range(e.swarm.nodes)]  # seconds of an inner step
    seconds = steps / sum(1 / pace for pace in paces)
    if e.run.hours:
        seconds = min(seconds, e.run.hours * 3600)
    passes = sum(seconds / (pace * _steps_of_pass(e, pace)) for pace in paces) * e.outer.fragments
    if passes > PASSES_MAX:
        yield (
            f"about {passes:.3g} passes of all nodes; {PASSES_MAX:.0e} are the most: set fewer run.rounds, "
            "or longer passes (inner.inner_steps, inner.pass_s)."
        )
    failures = e.swarm.nodes * seconds / e.swarm.mtbf_s if e.swarm.mtbf_s else 0.0
    if failures > FAILURES_MAX:
        yield f"about {failures:.3g} failures; {FAILURES_MAX:.0e} are the most: set a longer swarm.mtbf_s."


def _steps_of_pass(e: Experiment, pace: float) -> float:
    """Inner steps that a node takes between two deltas, at `pace` seconds each."""
    fitting = e.pass_s / pace if e.outer.dylu else e.inner.inner_steps
    return max(1.0, min(fitting, e.inner.inner_steps))
