"""Texts from strangers, made harmless for a table cell (scenario P4). Escaping is the page's own business.

What goes: control and format characters (bidi overrides, zero-width, byte order marks, soft hyphens),
surrogates, private and unassigned code points, line breaks, and towers of combining marks.
"""

from __future__ import annotations

import math
import unicodedata
from functools import lru_cache

from p2pdiloco import limits

_DROPPED = frozenset({"Cc", "Cf", "Cs", "Co", "Cn"})
_BLANK = frozenset({"Zs", "Zl", "Zp"})
# Letters by category, yet nothing to see: the Hangul fillers and the Braille blank.
_INVISIBLE = frozenset("\u115f\u1160\u3164\uffa0\u2800")
_MARKS_MAX = 2  # on one letter: enough for every living script in NFC, too few for a tower


@lru_cache(maxsize=4 * limits.peers_max)  # the same few texts come again with every page
def clean_text(text: str, chars_max: int = limits.text_chars_max) -> str:
    """NFC, one line, visible characters only, at most `chars_max` of them (an ellipsis says it was cut)."""
    kept: list[str] = []
    marks = 0
    # Cut first: a long text must cost no more than a short one. NFC never shrinks by more than a factor 4.
    for char in unicodedata.normalize("NFC", text[: 8 * chars_max]):
        category = unicodedata.category(char)
        if category in _BLANK or char in "\t\n\r":
            char = " "
        elif category in _DROPPED or char in _INVISIBLE:
            continue
        marks = marks + 1 if category in ("Mn", "Me") else 0
        if marks > _MARKS_MAX or (marks and not kept):
            continue
        if char == " " and (not kept or kept[-1] == " "):
            continue
        kept.append(char)
    clean = "".join(kept).rstrip()
    return clean if len(clean) <= chars_max else clean[: chars_max - 1].rstrip() + "…"


def clean_passage(text: str, chars_max: int) -> str:
    """What a model wrote, line breaks and indents kept: visible characters only, at most `chars_max` of them.

    At most `limits.sample_lines_max` lines; an ellipsis says that it was cut.
    """
    lines: list[str] = []
    kept = 0
    cut = text[: 8 * chars_max].replace("\r\n", "\n").replace("\r", "\n")
    for line in unicodedata.normalize("NFC", cut).split("\n"):
        if len(lines) == limits.sample_lines_max or kept > chars_max:
            lines.append("…")
            break
        lines.append(_visible(line.expandtabs(4)))
        kept += len(lines[-1]) + 1
    clean = "\n".join(lines)
    return clean if len(clean) <= chars_max else clean[: chars_max - 1] + "…"


def _visible(line: str) -> str:
    kept: list[str] = []
    marks = 0
    for char in line:
        category = unicodedata.category(char)
        marks = marks + 1 if category in ("Mn", "Me") else 0
        if marks > _MARKS_MAX or (marks and not kept) or category in _DROPPED or char in _INVISIBLE:
            continue
        kept.append(" " if category in _BLANK else char)
    return "".join(kept)


def clean_name(name: str) -> str:
    """A node's or run's name: never empty, at most `limits.name_chars_max` characters."""
    return clean_text(name, limits.name_chars_max) or "unnamed"


def finite(number: float | None) -> float | None:
    """None for what JSON cannot say and nobody can read (scenario P8)."""
    return number if number is not None and math.isfinite(number) else None
