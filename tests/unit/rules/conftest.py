"""A RunSpec by keyword, and a swarm of numbers: who delivers what, and the log that follows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from p2pdiloco.ids import NO_DIGEST, Digest, PeerId
from p2pdiloco.rules.outer_step import Candidate, check_outer_step, plan_outer_step
from p2pdiloco.rules.state import RulesState, after_outer_step, genesis_state, last_sequence
from p2pdiloco.run_spec import (
    BYTES,
    FORMAT,
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
)
from p2pdiloco.wire.log import Committee, Left, OuterStep

MakeSpec = Callable[..., RunSpec]
INNER_STEPS = 10  # and one token per inner step in these tests


def peer(number: int) -> PeerId:
    return PeerId(hashlib.sha256(b"peer %d" % number).digest())


def delta_name(who: bytes, sequence: int) -> Digest:
    return Digest(hashlib.sha256(who + b"%d" % sequence).digest())


def candidate(
    who: PeerId, sequence: int, base: int, steps: int = INNER_STEPS, norm: float = 1.0
) -> Candidate:
    return Candidate(delta_name(who, sequence), who, base, sequence, steps, norm, bytes(32), bytes(64))


def _make_spec(*, outer: Mapping[str, Any] | None = None, **changes: Any) -> RunSpec:
    blob = BlobRef(NO_DIGEST, 1024, 1024)
    spec = RunSpec(
        format=FORMAT,
        math_version=1,
        name="numbers",
        owner_key=bytes(32),
        model=ModelSpec(
            family="llama", preset="none", config=b"{}", vocab_size=256, seq_len=1,
            tensors=(TensorSpec("matrix", (64, 64)),),
        ),
        data=DataSpec(BYTES, 1, (blob,), (EvaluationSet("all", blob, 1024),)),
        inner=InnerSpec(
            inner_steps=INNER_STEPS, pass_s=10.0, sequences_per_step=1, lr=1e-3, lr_min_share=0.1,
            warmup_tokens=0, moments_warmup_steps=0, beta1=0.9, beta2=0.95, weight_decay=0.1, clip_norm=1.0,
        ),
        outer=OuterSpec(**(outer or {})),
        committee=CommitteeSpec(genesis=Committee(peer(0), ())),
        genesis=Genesis((NO_DIGEST,), (NO_DIGEST,)),
        admission="local",
        trust_tokens=0,
        bootstrap_tokens=0,
        target_tokens=2**50,
        target_version=0,
        eval_every=10,
        nonce=bytes(16),
    )  # fmt: skip
    return replace(spec, **changes)


class Log:
    """The rules state of a run, moved by who delivers what; each step is checked as a voter checks it."""

    def __init__(self, spec: RunSpec, state: RulesState | None = None) -> None:
        self.spec = spec
        self.state = state or genesis_state(spec)
        self.steps: list[OuterStep] = []

    def next_candidate(
        self, number: int, *, base: int | None = None, steps: int = INNER_STEPS, norm: float = 1.0
    ) -> Candidate:
        who = peer(number)
        sequence = last_sequence(self.state, who) + 1
        return candidate(who, sequence, self.state.version if base is None else base, steps, norm)

    def plan(self, candidates: list[Candidate], left: tuple[int, ...] = ()) -> OuterStep | None:
        gone = [Left(peer(n), NO_DIGEST) for n in left]
        step = plan_outer_step(self.state, self.spec, candidates, gone)
        if step is not None:
            norms = {c.delta: c.norm for c in candidates}
            assert check_outer_step(self.state, self.spec, step, norms) is None
        return step

    def apply(self, candidates: list[Candidate], left: tuple[int, ...] = ()) -> OuterStep:
        step = self.plan(candidates, left)
        assert step is not None
        self.state = after_outer_step(self.state, step, self.spec)
        self.steps.append(step)
        return step

    def deliver(self, *numbers: int, steps: int = INNER_STEPS, left: tuple[int, ...] = ()) -> OuterStep:
        return self.apply([self.next_candidate(n, steps=steps) for n in numbers], left)


@pytest.fixture
def make_spec() -> MakeSpec:
    return _make_spec


@pytest.fixture
def spec() -> RunSpec:
    return _make_spec()


@pytest.fixture
def make_log() -> Callable[..., Log]:
    return lambda **changes: Log(_make_spec(**changes))


@pytest.fixture
def log() -> Log:
    return Log(_make_spec())


@pytest.fixture
def name_peer() -> Callable[[int], PeerId]:
    return peer


@pytest.fixture
def make_candidate() -> Callable[..., Candidate]:
    return candidate
