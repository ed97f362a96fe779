"""Bounds of a RunSpec's fields in words, under the names by which its owner gives them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec import inspect

# What has a flag of its own; everything else is given with --set, or in the run file.
FLAGS = {
    "run.name": "--name",
    "run.target_tokens": "--tokens",
    "run.target_version": "--outer-steps",
    "run.admission": "--admission",
    "run.eval_every": "--eval-every",
    "model.seq_len": "--seq-len",
    "inner.inner_steps": "--inner-steps",
    "inner.pass_s": "--pass-s",
    "inner.sequences_per_step": "--batch",
    "inner.lr": "--lr",
    "outer.codec": "--codec",
    "committee.size_max": "--committee",
    "samples.prompts": "--prompt",
}
# Patterns as a person would say them.
CHOICES = {
    "^(fp16|int4|topk(32|64|128))$": "int4, fp16, topk32, topk64 or topk128",
    "^(exponential|constant)$": "exponential or constant",
    "^(local|open)$": "open or local",
    "^quorum$": "quorum",
}
GIVEN_CHARS_MAX = 60  # of a value that is said back


def faults(kind: type[msgspec.Struct], values: Mapping[str, Any], table: str) -> Iterator[str]:
    """A sentence for each of `values` that no RunSpec may have. `kind`: the struct whose fields they are.

    `table`: of the run file, as in `TABLE.KEY`.
    """
    for field in msgspec.structs.fields(kind):
        value = values.get(field.name, msgspec.UNSET)
        if value is msgspec.UNSET:
            continue
        if isinstance(value, msgspec.Struct):
            own = {name: getattr(value, name) for name in value.__struct_fields__}
            yield from faults(type(value), own, field.name)
        elif not _fits(value, field.type):
            name = f"{table}.{field.name}"
            flag = FLAGS.get(name, f"--set {name}")
            yield f"{flag} is {in_words(field.type)}; {_given(value)} is not possible."


def in_words(kind: Any) -> str:
    """What a value of this type may be."""
    return _words(inspect.type_info(kind))


def _fits(value: Any, kind: Any) -> bool:
    if isinstance(value, float) and not math.isfinite(value):
        return False
    try:
        plain = msgspec.to_builtins(value, builtin_types=(bytes,))
        msgspec.convert(plain, kind, strict=True, builtin_types=(bytes,))
    except (msgspec.ValidationError, TypeError, OverflowError):
        return False
    return True


def _given(value: Any) -> str:
    if isinstance(value, list | tuple):
        longest = max((len(item) for item in value if isinstance(item, str)), default=0)
        return f"a list of {len(value)}" + (f", the longest of {longest:,} characters," if longest else "")
    text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else repr(value)
    return text if len(text) <= GIVEN_CHARS_MAX else f"{text[:GIVEN_CHARS_MAX]}... ({len(text):,} characters)"


def _words(info: inspect.Type) -> str:
    match info:
        case inspect.IntType():
            bounded = any(bound is not None for bound in (info.ge, info.gt, info.le, info.lt))
            return f"a whole number {_between(info)}" if bounded else "a whole number"
        case inspect.FloatType():
            return f"a number {_between(info)}"
        case inspect.StrType():
            if info.pattern in CHOICES:
                return CHOICES[info.pattern]
            most = f" to {info.max_length:,}" if info.max_length is not None else " or more"
            return f"text of {info.min_length or 0}{most} characters"
        case inspect.BoolType():
            return "true or false"
        case inspect.VarTupleType() | inspect.ListType():
            most = f" of at most {info.max_length:,}" if info.max_length is not None else ""
            return f"a list{most}, each {_words(info.item_type)}"
        case inspect.UnionType():
            return " or ".join(map(_words, info.types))
        case _:
            return "of another form"


def _between(info: inspect.IntType | inspect.FloatType) -> str:
    most = info.le if info.le is not None else info.lt
    if info.gt is not None:
        return f"above {info.gt:,}" + (f" and at most {most:,}" if most is not None else "")
    least = info.ge if info.ge is not None else 0
    return f"from {least:,} to {most:,}" if most is not None else f"from {least:,} on"
