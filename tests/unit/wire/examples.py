"""Values of any wire type, for property tests: one strategy for each constraint that a type can carry."""

from __future__ import annotations

from typing import Any

import msgspec.inspect as types
from hypothesis import strategies as st


def values_of(cls: type[Any]) -> st.SearchStrategy[Any]:
    return _value(types.type_info(cls))


def _value(kind: types.Type) -> st.SearchStrategy[Any]:
    match kind:
        case types.StructType():
            return st.builds(kind.cls, **{f.name: _value(f.type) for f in kind.fields})
        case types.UnionType():
            return st.one_of([_value(t) for t in kind.types])
        case types.NoneType():
            return st.none()
        case types.VarTupleType():
            least = kind.min_length or 0
            return st.lists(_value(kind.item_type), min_size=least, max_size=least + 2).map(tuple)
        case types.TupleType():
            return st.tuples(*(_value(t) for t in kind.item_types))
        case types.BytesType():
            least = kind.min_length or 0
            most = least + 8 if kind.max_length is None else min(kind.max_length, least + 8)
            return st.binary(min_size=least, max_size=most)
        case types.StrType():
            if kind.pattern:
                return st.from_regex(kind.pattern, fullmatch=True)
            least = kind.min_length or 0
            return st.text(min_size=least, max_size=min(kind.max_length or 12, least + 12))
        case types.IntType():
            return st.integers(
                min_value=-(2**63) if kind.ge is None else int(kind.ge),
                max_value=2**63 - 1 if kind.le is None else int(kind.le),
            )
        case types.FloatType():
            return st.floats(
                min_value=kind.ge if kind.gt is None else kind.gt, exclude_min=kind.gt is not None,
                max_value=kind.le, allow_nan=False, allow_infinity=False,
            )  # fmt: skip
        case types.BoolType():
            return st.booleans()
        case types.EnumType():
            return st.sampled_from(list(kind.cls))
    raise AssertionError(f"no strategy for {kind}")
