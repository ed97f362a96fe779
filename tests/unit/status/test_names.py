from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdiloco import limits
from p2pdiloco.status import clean_name, clean_text


@pytest.mark.parametrize(
    ("hostile", "shown"),
    [
        ("attic-3090", "attic-3090"),
        ("Mu\u0308ller", "Müller"),
        ("abc\u202egnp.exe", "abcgnp.exe"),  # right-to-left override
        ("a\u200bb\u200d\ufeffc\u00add", "abcd"),
        ("two\nlines\tand  blanks ", "two lines and blanks"),
        ("\u2066isolate\u2069", "isolate"),
        ("\x00\x1b[31mred", "[31mred"),
        ("Z\u0353\u0354\u0355\u0351\u0352a", "Z\u0353\u0354a"),
        ("\u3164\u115f", "unnamed"),
        ("", "unnamed"),
        ("日本語のノード", "日本語のノード"),
        ("x" * 10_000, "x" * 31 + "…"),
    ],
)
def test_names_become_one_visible_cell(hostile: str, shown: str) -> None:
    assert clean_name(hostile) == shown


@given(st.text())
def test_no_name_is_empty_long_invisible_or_changes_when_cleaned_again(text: str) -> None:
    name = clean_name(text)
    assert 1 <= len(name) <= limits.name_chars_max
    assert not any(unicodedata.category(c)[0] == "C" for c in name)
    assert clean_name(name) == name


def test_a_long_text_costs_no_more_than_a_short_one() -> None:
    assert len(clean_text("a" * 10**7)) == limits.text_chars_max
