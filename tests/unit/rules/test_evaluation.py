"""What is shown of evaluations. Who evaluates: tests of protocol and status."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdiloco.ids import digest_of
from p2pdiloco.rules.evaluation import agreeing, bits_per_byte, perplexity, shown_loss
from p2pdiloco.run_spec import BlobRef, EvaluationSet

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


def test_perplexity() -> None:
    assert perplexity(0.0) == 1.0
    assert perplexity(math.log(50)) == pytest.approx(50)
