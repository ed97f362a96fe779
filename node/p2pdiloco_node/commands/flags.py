"""What the commands' flags have in common: kinds of values, and what a slip in one is called."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import UNSET, App, ArgumentCollection, Parameter, Token

from p2pdiloco.errors import OperatorError
from p2pdiloco.exit_codes import USAGE

NUMBER = re.compile(r"\d+(\.\d+)?(?=\s*[A-Za-z/%]+$)")  # in front of a unit
# A text of no letters is one, too; a list of no peers is refused where it is said what to do instead.
MAY_BE_EMPTY = ("--prompt", "--peers")


def refuse_empty(_app: App, _command: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """An unset variable in quotes is a word without letters, and as a folder it would be the current one.

    Raises: OperatorError (usage).
    """
    for argument in arguments:
        typed = [token.value for token in argument.tokens if token.implicit_value is UNSET]
        if argument.name not in MAY_BE_EMPTY and not all(value.strip() for value in typed):
            raise OperatorError(f"{argument.name} is empty (an unset variable?): say which is meant.", USAGE)


def _whole(_kind: Any, tokens: Sequence[Token]) -> int:
    """Cyclopts would round: three and a half nodes are a slip, not four."""
    try:
        return int(tokens[0].value)
    except ValueError:
        raise ValueError(f"{tokens[0].value!r} is not a whole number") from None


def _number(_kind: Any, tokens: Sequence[Token]) -> float:
    """In the unit that the flag's name says."""
    text = tokens[0].value
    try:
        return float(text)
    except ValueError:
        found = NUMBER.match(text.strip())
        advice = f": give it without a unit, as {found[0]}" if found else ""
        raise ValueError(f"{text!r} is not a number{advice}") from None


def _file_or_dash(_kind: Any, tokens: Sequence[Token]) -> str:
    """A file's name, or `-` alone: another flag in its place is a slip."""
    word = tokens[0].value
    if word.startswith("-") and word != "-":
        raise ValueError(f"a file's name or - is missing before {word}")
    return word


Number = Annotated[float, Parameter(converter=_number)]
Whole = Annotated[int, Parameter(converter=_whole)]
FileOrDash = Annotated[str | None, Parameter(converter=_file_or_dash, allow_leading_hyphen=True)]
ConfigFile = Annotated[Path | None, Parameter(name="--config", help="TOML file with settings.")]
Globs = Annotated[list[str] | None, Parameter(consume_multiple=True, negative_iterable=())]
Words = Annotated[list[str] | None, Parameter(negative_iterable=())]
Hidden = Annotated[bool | None, Parameter(show=False)]
# On or not there: a twin that turns it off is for what a variable or a file may have turned on.
Flag = Annotated[bool, Parameter(negative_bool=(), show_default=False)]
Text = Annotated[str, Parameter(allow_leading_hyphen=True)]  # anything, also what looks like a flag
