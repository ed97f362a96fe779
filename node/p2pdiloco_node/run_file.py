"""The run owner's file (run.example.toml): fields of the RunSpec that differ from the defaults."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from p2pdiloco.errors import OperatorError
from p2pdiloco_node.config import SETTINGS, USAGE, nearest

PARTS = ("inner", "outer", "committee")
UNITS = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def read_run_file(path: Path | None) -> dict[str, dict[str, Any]]:
    """Tables `[inner]`, `[outer]` and `[committee]`; their fields are checked where the run is made.

    Raises: OperatorError.
    """
    parts: dict[str, dict[str, Any]] = {part: {} for part in PARTS}
    if path is None:
        return parts
    try:
        with path.open("rb") as file:
            found = tomllib.load(file)
    except OSError as error:
        raise OperatorError(f"The run file {path} cannot be read: {error.strerror}.", SETTINGS) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OperatorError(f"The run file {path} is not valid TOML: {error}.", SETTINGS) from None
    for name, table in found.items():
        if name not in PARTS or not isinstance(table, dict):
            raise OperatorError(f"{path}: unknown table [{name}]{nearest(name, PARTS)}.", SETTINGS)
        parts[name] |= table
    return parts


def parse_tokens(text: str) -> int:
    """`20M` and the like. Raises: OperatorError (usage)."""
    number, unit = text.strip(), 1
    if number[-1:].upper() in UNITS:
        number, unit = number[:-1], UNITS[number[-1:].upper()]
    try:
        tokens = int(float(number) * unit)
    except (ValueError, OverflowError):
        tokens = 0
    if not 1 <= tokens <= 2**53:
        raise OperatorError(f"--tokens {text!r} is not a number of tokens: write it like 20M.", USAGE)
    return tokens
