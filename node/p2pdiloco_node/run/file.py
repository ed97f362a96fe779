"""The run owner's file (run.example.toml): all that nodes of a run agree on, where it is not as usual.

Tables are parts of the RunSpec; the keys of `[run]`, `[model]` and `[data]` are the flags of `run new`. A key
that does not exist is refused with the nearest one that does.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from p2pdiloco.errors import OperatorError
from p2pdiloco.exit_codes import FILES, USAGE
from p2pdiloco.run_spec import CommitteeSpec, InnerSpec, OuterSpec, SampleSpec
from p2pdiloco_node.config import nearest
from p2pdiloco_node.run.fields import in_words

UNITS = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
GROUPED = re.compile(r"\d{1,3}(,\d{3})+[KMGTkmgt]?")  # as every output prints it


def _fields(kind: type[msgspec.Struct], *, without: str = "") -> dict[str, Any]:
    return {f.name: f.type for f in msgspec.structs.fields(kind) if f.name != without}


# Table -> key -> type. Ranges are checked where the part is made.
TABLES: dict[str, dict[str, Any]] = {
    "run": {
        "name": str,
        "tokens": str | int,
        "outer_steps": int,
        "admission": str,
        "trust_tokens": str | int,
        "bootstrap_tokens": str | int,
        "eval_every": int,
        "evaluators_max": int,
    },
    "model": {"model": str, "seq_len": int, "seed": int},
    "data": {
        "data": list[str],
        "text_key": str,
        "tokenizer": str,
        "eval_per_source": bool,
        "window_shards": int,
    },
    "inner": _fields(InnerSpec),
    "outer": _fields(OuterSpec),
    "committee": _fields(CommitteeSpec, without="genesis"),
    "samples": _fields(SampleSpec, without="encoded"),
}
TOKENS = ("tokens", "trust_tokens", "bootstrap_tokens")  # numbers of them may be written like 20M

Parts = dict[str, dict[str, Any]]


def read_run_file(path: Path | None) -> Parts:
    """Each table's values, empty where the file has none. Raises: OperatorError."""
    parts: Parts = {table: {} for table in TABLES}
    if path is None:
        return parts
    try:
        with path.open("rb") as file:
            found = tomllib.load(file)
    except OSError as error:
        raise OperatorError(f"The run file {path} cannot be read: {error.strerror}.", FILES) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OperatorError(f"The run file {path} is not valid TOML: {error}.", FILES) from None
    for name, table in found.items():
        if name not in TABLES or not isinstance(table, dict):
            raise OperatorError(f"{path}: {_unknown_table(name, table)}", FILES)
        for key, value in table.items():
            parts[name][key] = _value(f"{path}: [{name}]", TABLES[name], key, value)
    return parts


def set_values(parts: Parts, words: list[str]) -> None:
    """`TABLE.KEY=VALUE` as on the command line, over what a file says. Raises: OperatorError (usage)."""
    for word in words:
        place, equals, text = word.partition("=")
        table, _, key = place.strip().partition(".")
        if not equals or table not in TABLES or not key:
            hint = nearest(table, TABLES) if table not in TABLES else ""
            raise OperatorError(
                f"--set {word!r} is not TABLE.KEY=VALUE, such as outer.mu=0.4{hint or '.'}", USAGE
            )
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text.strip()  # a word without quotes
        try:
            parts[table][key] = _value(f"--set {table}", TABLES[table], key, value)
        except OperatorError as error:
            raise OperatorError(str(error), USAGE) from None


def _value(where: str, keys: dict[str, Any], key: str, value: Any) -> Any:
    """Raises: OperatorError: no such key, or a value of another kind."""
    if key not in keys:
        raise OperatorError(f"{where}: unknown key {key!r}{nearest(key, keys) or '.'}", FILES)
    if isinstance(value, str) and not value.strip():
        raise OperatorError(f"{where}: {key} is empty: give it a value, or leave it out.", FILES)
    if key in TOKENS and isinstance(value, str):
        return parse_tokens(value, f"{where} {key}")
    try:
        return msgspec.convert(value, keys[key])
    except msgspec.ValidationError:
        name = f"{where} {key}" if where.endswith("]") else f"{where}.{key}"
        raise OperatorError(f"{name} is {in_words(keys[key])}; {value!r} is not possible.", FILES) from None


def _unknown_table(name: str, table: object) -> str:
    if not isinstance(table, dict):
        homes = [home for home, keys in TABLES.items() if name in keys]
        if homes:
            return f"{name} stands outside a table: write it under [{homes[0]}]."
    return f"unknown table [{name}]{nearest(name, TABLES) or '.'}"


def parse_tokens(text: str, what: str = "--tokens") -> int:
    """`20M`, `1,300,000` and the like. Raises: OperatorError (usage)."""
    number, unit = text.strip(), 1
    if GROUPED.fullmatch(number):
        number = number.replace(",", "")
    if number[-1:].upper() in UNITS:
        number, unit = number[:-1], UNITS[number[-1:].upper()]
    try:
        tokens = int(float(number) * unit)
    except (ValueError, OverflowError):
        tokens = 0
    if not 1 <= tokens <= 2**53:
        raise OperatorError(f"{what} {text!r} is not a number of tokens: write it like 20M.", USAGE)
    return tokens
