"""What is shown of evaluations. Who evaluates: tests of protocol and status."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdiloco import limits
from p2pdiloco.ids import digest_of
from p2pdiloco.rules.evaluation import (
    agreeing,
    bits_per_byte,
    measured_tokens,
    perplexity,
    report_fault,
    shown_loss,
)
from p2pdiloco.run_spec import BlobRef, EvaluationSet, RunSpec
from p2pdiloco.wire.messages import EvalReport, SetLoss
from tests.conftest import made_up_spec

losses = st.floats(0, 100)


@given(honest=st.lists(losses, min_size=2, max_size=2), lie=losses)
def test_of_three_one_that_lies_stays_between_the_others(honest: list[float], lie: float) -> None:
    assert min(honest) <= shown_loss([*honest, lie]) <= max(honest)
    assert shown_loss([lie, *honest]) == shown_loss([*honest, lie])


def test_of_one_or_two_it_is_the_mean() -> None:
    assert shown_loss([2.0]) == 2.0
    assert shown_loss([2.0, 3.0]) == 2.5


def test_devices_differ_a_little_and_still_agree() -> None:
    assert agreeing([2.0, 2.015, 2.03]) == 3
    assert agreeing([2.0, 2.001, 9.0]) == 2
    assert agreeing([2.0, 3.0]) == 0


@pytest.mark.parametrize(("tokens", "text_bytes", "bits"), [(1000, 1000, 2), (1000, 4000, 0.5), (4, 1, 8)])
def test_bits_are_per_byte_of_text_whatever_a_token_is(tokens: int, text_bytes: int, bits: float) -> None:
    held_out = EvaluationSet("all", BlobRef(digest_of(b"e"), 10, tokens), text_bytes)
    assert bits_per_byte(2 * math.log(2), held_out) == pytest.approx(bits)


def run_of(*tokens: int, seq_len: int = 128) -> RunSpec:
    spec = made_up_spec()
    sets = tuple(EvaluationSet(f"{n}", BlobRef(digest_of(b"e"), 10, t), t) for n, t in enumerate(tokens))
    return msgspec.structs.replace(
        spec,
        data=msgspec.structs.replace(spec.data, evaluations=sets),
        model=msgspec.structs.replace(spec.model, seq_len=seq_len),
    )


def test_how_many_tokens_are_measured_is_part_of_the_protocol() -> None:
    """Another number would refuse every honest report of nodes of another release, without a word to them."""
    assert limits.evaluation_tokens_max == 65_536, "raise PROTOCOL_VERSION, and mend docs/spec/wire.md"


def test_every_evaluator_measures_the_same_tokens() -> None:
    most = limits.evaluation_tokens_max
    assert measured_tokens(run_of(4096)) == (31 * 128,)  # the last token is only predicted
    assert measured_tokens(run_of(10**6)) == (most,)
    assert measured_tokens(run_of(10**6, 10**6, 10**6)) == (most, most // 2, most // 2)
    assert measured_tokens(run_of(10**6, seq_len=2 * most)) == (2 * most,), "one sequence at least"
    assert measured_tokens(run_of(100)) == (0,), "it has none"


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        ((31 * 128, 7 * 128), False),
        ((31 * 128,), False),  # not finished
        ((30 * 128, 7 * 128), True),  # another part of the set
        ((31 * 128, 6 * 128), True),
        ((4096,), True),
        ((31 * 128, 7 * 128, 0), True),
    ],
)
def test_a_loss_on_other_tokens_is_no_figure_of_the_run(said: tuple[int, ...], fault: bool) -> None:
    """The median of losses on other parts of a set, or on fewer tokens of it, said nothing."""
    spec = run_of(4096, 1024)
    report = EvalReport(4, bytes(32), tuple(SetLoss(2.0, tokens) for tokens in said))
    assert bool(report_fault(report, spec)) is fault


def test_a_set_without_a_whole_sequence_has_no_loss() -> None:
    assert "where 0 are measured" in report_fault(EvalReport(4, bytes(32), (SetLoss(2.0, 0),)), run_of(100))


def test_perplexity() -> None:
    assert perplexity(0.0) == 1.0
    assert perplexity(math.log(50)) == pytest.approx(50)
