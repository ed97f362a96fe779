"""An experiment file becomes a study: arms that differ in a few keys, and the seeds they share.

question = "..."            # one sentence, optional
seeds = "1..3"              # optional
[outer]                     # keys of p2pdiloco/sim/lab/experiment.py, for all arms
codec = "int4"
[arms.quorum]               # the first arm is the one that the others are compared with
[arms.barrier.outer]
policy = "barrier"
"""

from __future__ import annotations

import errno
import json
import reprlib
import stat
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.exit_codes import FILES, USAGE
from p2pdiloco.run_spec import outer_defaults
from p2pdiloco.sim.lab.experiment import Data, Experiment, Inner, Model, Outer, Run, Swarm, check_experiment
from p2pdiloco.words import count_of
from p2pdiloco_node.config import nearest
from p2pdiloco_node.lab.seeds import SEED_MAX, parse_seeds

SECTIONS: Mapping[str, type[msgspec.Struct]] = {
    "swarm": Swarm, "model": Model, "data": Data, "inner": Inner, "outer": Outer, "run": Run,
}  # fmt: skip
TOP = ("name", "question", "seeds", "arms", *SECTIONS)
SPELT = {"lambda": "lambda_"}  # what people write, and what Python lets us call it
QUESTION_CHARS_MAX = 400
CHANGE_CHARS_MAX = 4000  # of one --set: a list of globs fits
PLAIN_WORDS = {  # msgspec's, in this order, for people
    "got str": "not a word", "got array": "not a list", "got float": "not one with a fraction",
    "got int": "not a number", "got bool": "not true or false", "got object": "not a table",
    "array": "a list", " bool": " true or false", " int": " a whole number", " float": " a number",
    " str": " a word",
}  # fmt: skip
LISTS = {
    "speeds": "[1.0, 0.5]", "joins": "[[0.5, 8]]", "leaves": "[[0.5, 2]]", "absences": "[[0.4, 0, 20]]",
    "files": '["novels/*.txt"]',
}  # fmt: skip
SHOWN_CHARS = 80  # of a value or a key in a message
SHORT = reprlib.Repr()
SHORT.maxlevel, SHORT.maxstring, SHORT.maxother = 3, SHOWN_CHARS, SHOWN_CHARS


class Study(msgspec.Struct, frozen=True):
    """What is asked, of which arms, with which seeds. The first arm is the reference of paired gaps."""

    name: str
    question: str
    seeds: tuple[int, ...]
    arms: tuple[Experiment, ...]

    @property
    def learns(self) -> bool:
        """Whether any arm has a model."""
        return any(arm.model.kind != "none" for arm in self.arms)


def read_study(file: Path, *, changes: Sequence[str] = (), seeds: str | None = None) -> Study:
    """A TOML file, with `--set` and `--seeds` on top.

    Raises: OperatorError (2 for a bad flag, 3 for the file) naming file, section, key and what to do.
    """
    try:
        raw = tomllib.loads(read_regular(file, limits.lab_file_bytes_max).decode())
    except OSError as error:
        raise OperatorError(
            f"The experiment {file} cannot be read: {error.strerror}. Ready ones are in docs/experiments.",
            FILES,
        ) from None
    except ValueError as error:  # bad TOML, bad UTF-8, or a number of thousands of digits
        raise OperatorError(f"The experiment {file} is not valid TOML: {error}.", FILES) from None
    except RecursionError:
        raise OperatorError(
            f"The experiment {file} is nested too deep: a table holds sections, and a section keys.", FILES
        ) from None
    raw.setdefault("name", file.stem)
    for change in changes:
        _set(raw, change)
    if seeds is not None:
        raw["seeds"] = list(_seeds(seeds, "--seeds", USAGE))
    return make_study(raw, where=str(file))


def choose_arms(study: Study, arms: str | None, against: str | None) -> Study:
    """`--arms` and `--against`: only those arms (names separated by commas); the reference comes first.

    Raises: OperatorError: no such arm.
    """
    known = {arm.name: arm for arm in study.arms}
    names = [name.strip() for name in arms.split(",")] if arms is not None else list(known)
    for flag, name in [*(("--arms", n) for n in names), *([("--against", against)] if against else [])]:
        if name not in known:
            raise OperatorError(
                f"{flag} {shown(name)}: there is no such arm{nearest(name, known) or '.'} The file has "
                f"{', '.join(known)}.", USAGE,
            )  # fmt: skip
    if against:
        names = [against, *(n for n in names if n != against)]
    return msgspec.structs.replace(study, arms=tuple(known[name] for name in dict.fromkeys(names)))


def read_regular(file: Path, bytes_max: int) -> bytes:
    """A file's content. A device or a pipe, which may have no end, is not opened.

    Raises: OSError, also for more than `bytes_max` bytes.
    """
    mode = file.stat().st_mode
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is a folder" if stat.S_ISDIR(mode) else "it is a pipe or a device")
    with file.open("rb") as opened:
        data = opened.read(bytes_max + 1)
    if len(data) > bytes_max:
        raise OSError(errno.EFBIG, f"it has more than {bytes_max} bytes")
    return data


def make_study(raw: Mapping[str, Any], *, where: str) -> Study:
    """As `read_study`, from tables already parsed; `where` is said in messages."""
    _refuse_unknown(raw, TOP, where, "")
    shared = {section: _section(raw, section, where, "") for section in SECTIONS}
    name = _text(raw.get("name", "experiment"), "name", where, limits.lab_name_chars_max)
    tables = raw.get("arms", {name: {}})
    if not isinstance(tables, Mapping) or not tables:
        raise OperatorError(
            f'{where}: arms is a table of tables: write [arms.NAME.outer] and policy = "barrier" below it.',
            FILES,
        )
    arms = []
    for arm, own in tables.items():
        _text(arm, f"the arm's name {shown(arm)}", where, limits.lab_name_chars_max)
        if not isinstance(own, Mapping):
            raise OperatorError(
                f"{where}: arms.{arm} is a table with sections: write [arms.{arm}.outer].", FILES
            )
        _refuse_unknown(own, SECTIONS, where, f"arms.{arm}.")
        sections = {s: shared[s] | _section(own, s, where, f"arms.{arm}.") for s in SECTIONS}
        sections["outer"] = outer_defaults(sections["outer"].get("codec", "")) | sections["outer"]
        experiment = msgspec.convert({"name": arm, **sections}, Experiment)
        check_experiment(experiment)
        arms.append(experiment)
    seeds = _seeds(raw.get("seeds", "1"), f"{where}: seeds")
    if len(arms) * len(seeds) > limits.lab_runs_max:
        raise OperatorError(
            f"{where}: {count_of(len(arms), 'arm')} with {count_of(len(seeds), 'seed')} make "
            f"{len(arms) * len(seeds):,} runs; "
            f"{limits.lab_runs_max} are the most. Name fewer seeds.", FILES,
        )  # fmt: skip
    question = _text(raw.get("question", ""), "question", where, QUESTION_CHARS_MAX)
    return Study(name, question, seeds, tuple(arms))


def _set(raw: dict[str, Any], change: str) -> None:
    """One `--set key=value` into the tables. A value is TOML; what is no TOML is a word."""
    # What is no text in the terminal's encoding comes as surrogates, which nothing else takes.
    if len(change) > CHANGE_CHARS_MAX or any("\ud800" <= c <= "\udfff" for c in change):
        raise OperatorError(f"--set {shown(change)}: text of at most {CHANGE_CHARS_MAX} characters.", USAGE)
    key, equals, text = change.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise OperatorError(
            f"--set {change!r} is not understood: write SECTION.KEY=VALUE, such as outer.lambda=0.1.", USAGE
        )
    # Slips are found here, so that the message names the flag and not the file.
    if path[0] == "arms":
        if len(path) != 4 or not isinstance(raw.get("arms"), dict) or path[1] not in raw["arms"]:
            known = sorted(raw["arms"]) if isinstance(raw.get("arms"), dict) else []
            raise OperatorError(
                f"--set {change}: write arms.ARM.SECTION.KEY=VALUE; the file has "
                f"{'the arms ' + ', '.join(known) if known else 'no arms'}.", USAGE,
            )  # fmt: skip
        path_in_base = path[2:]
    else:
        path_in_base = path
    value = _value(text.strip())
    if path_in_base == ["name"]:
        raw["name"] = value
        return
    if len(path_in_base) != 2 or path_in_base[0] not in SECTIONS:
        keys = [f"{s}.{_said(f)}" for s, kind in SECTIONS.items() for f in kind.__struct_fields__]
        close = nearest(key.strip(), keys) or _elsewhere(path_in_base[-1])
        raise OperatorError(f"--set {change}: there is no key {key.strip()!r}{close or '.'}", USAGE)
    section, word = path_in_base
    above, kind = "".join(f"{part}." for part in path[:-1]), SECTIONS[section]
    _refuse_unknown({word: value}, kind.__struct_fields__, "--set", above, code=USAGE)
    _checked(kind, SPELT.get(word, word), value, f"--set {above}{word}", USAGE)
    table: dict[str, Any] = raw
    for part in path[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise OperatorError(f"--set {change}: {part} is no table in the file.", USAGE)
    table.pop(SPELT.get(word, word), None)
    table.pop(_said(word), None)
    table[word] = value


def _value(text: str) -> Any:
    try:
        found = tomllib.loads(f"value = {text}")
    except ValueError:
        return text
    except RecursionError:
        raise OperatorError(f"--set ...={shown(text)} is nested too deep.", USAGE) from None
    return found["value"] if set(found) == {"value"} else text


def _section(raw: Mapping[str, Any], section: str, where: str, above: str) -> dict[str, Any]:
    """One table's keys, each checked by itself so that the message can name it."""
    table = raw.get(section, {})
    if not isinstance(table, Mapping):
        raise OperatorError(f"{where}: {above}{section} is a table: write [{above}{section}].", FILES)
    kind = SECTIONS[section]
    _refuse_unknown(table, kind.__struct_fields__, where, f"{above}{section}.")
    found: dict[str, Any] = {}
    for key, value in table.items():
        field = str(SPELT.get(key, key))
        if field in found:
            raise OperatorError(f"{where}: {above}{section}.{key} stands there twice.", FILES)
        _checked(kind, field, value, f"{where}: {above}{section}.{key}", FILES)
        found[field] = value
    return found


def _checked(kind: type[msgspec.Struct], field: str, value: Any, what: str, code: int) -> None:
    try:
        msgspec.convert({field: value}, kind)
    except msgspec.ValidationError as error:
        reason = str(error).split(" - at ")[0].replace("`", "")
        for theirs, ours in PLAIN_WORDS.items():
            reason = reason.replace(theirs, ours)
        default = json.dumps(_default(kind, field))
        raise OperatorError(
            f"{what} = {shown(value)} is not possible: {reason[:1].lower()}{reason[1:]}"
            f"{_choices(kind, field)}{_shape(field)} (default: {default}).", code,
        ) from None  # fmt: skip


def _shape(field: str) -> str:
    """How a list is written."""
    return f"; write it like {field} = {LISTS[field]}" if field in LISTS else ""


def _choices(kind: type[msgspec.Struct], field: str) -> str:
    """For a word that is one of a few."""
    described = next(f.type for f in msgspec.inspect.type_info(kind).fields if f.name == field)  # type: ignore[attr-defined]
    if isinstance(described, msgspec.inspect.LiteralType):
        return f"; it is one of {', '.join(str(v) for v in described.values)}"
    return ""


def _default(kind: type[msgspec.Struct], field: str) -> object:
    return getattr(kind(), field)


def _refuse_unknown(
    table: Mapping[str, Any], known: Iterable[str], where: str, above: str, *, code: int = FILES
) -> None:
    spelt = [_said(k) for k in known]
    for key in table:
        if key in spelt or key in known:
            continue
        hint = _elsewhere(key) or nearest(key, spelt)
        key = key if key.isprintable() and len(key) <= SHOWN_CHARS else shown(key)
        raise OperatorError(f"{where}: there is no key {above}{key}{hint or '.'}", code)


def _elsewhere(key: str) -> str:
    """A key that stands in the wrong section."""
    for section, kind in SECTIONS.items():
        if key in kind.__struct_fields__ or SPELT.get(key) in kind.__struct_fields__:
            return f"; did you mean '{section}.{key}'?"
    return ""


def _said(field: str) -> str:
    return field.rstrip("_")


def _text(value: object, what: str, where: str, chars_max: int) -> str:
    if not isinstance(value, str) or len(value) > chars_max or not value.isprintable():
        raise OperatorError(f"{where}: {what} is one line of at most {chars_max} characters.", FILES)
    return value


def _seeds(value: object, where: str, code: int = FILES) -> tuple[int, ...]:
    if isinstance(value, int) and not isinstance(value, bool):
        value = [value]
    if isinstance(value, list) and all(type(v) is int and v >= 0 for v in value) and value:
        if max(value) > SEED_MAX:
            raise OperatorError(f"{where}: a seed is at most {SEED_MAX}.", code)
        return tuple(dict.fromkeys(value))
    if isinstance(value, str):
        return tuple(dict.fromkeys(parse_seeds(value, where, code)))
    raise OperatorError(f'{where} = {shown(value)} is not understood: write "1..3" or [1, 2, 3].', code)


def shown(value: object) -> str:
    """A value in a message, however long or deep it is."""
    try:
        return SHORT.repr(value)
    except ValueError:
        return "a number of thousands of digits"
