"""What the commands' flags have in common: kinds of values, and what a slip in one is called."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter, Token


def _whole(_kind: Any, tokens: Sequence[Token]) -> int:
    """Cyclopts would round: three and a half nodes are a slip, not four."""
    try:
        return int(tokens[0].value)
    except ValueError:
        raise ValueError(f"{tokens[0].value!r} is not a whole number") from None


def _file_or_dash(_kind: Any, tokens: Sequence[Token]) -> str:
    """A file's name, or `-` alone: another flag in its place is a slip."""
    word = tokens[0].value
    if word.startswith("-") and word != "-":
        raise ValueError(f"a file's name or - is missing before {word}")
    return word


Whole = Annotated[int, Parameter(converter=_whole)]
FileOrDash = Annotated[str | None, Parameter(converter=_file_or_dash, allow_leading_hyphen=True)]
ConfigFile = Annotated[Path | None, Parameter(name="--config", help="TOML file with settings.")]
Globs = Annotated[list[str] | None, Parameter(consume_multiple=True, negative_iterable=())]
Words = Annotated[list[str] | None, Parameter(negative_iterable=())]
Hidden = Annotated[bool | None, Parameter(show=False)]
# On or not there: a twin that turns it off is for what a variable or a file may have turned on.
Flag = Annotated[bool, Parameter(negative_bool=(), show_default=False)]
Text = Annotated[str, Parameter(allow_leading_hyphen=True)]  # anything, also what looks like a flag
