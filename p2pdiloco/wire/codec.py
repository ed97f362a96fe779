"""MessagePack with limits, then typed validation. Opening gives a typed value or raises PeerError."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import msgpack
import msgspec

from p2pdiloco import limits
from p2pdiloco.errors import PeerError

T = TypeVar("T")


class Struct(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of everything on the wire: an array without keys, so nothing can be given twice."""


def encode(value: object) -> bytes:
    """The one encoding of a typed value: MessagePack arrays, shortest forms."""
    plain = msgspec.to_builtins(value, builtin_types=(bytes,))
    return bytes(msgpack.packb(plain, use_bin_type=True))


def decode(data: bytes, kind: type[T], *, bytes_max: int = limits.message_bytes_max) -> T:
    """Open untrusted bytes as a value of `kind`.

    Raises:
        PeerError: TOO_BIG, or MALFORMED with what is wrong (depth, length, type, range, not finite).
    """
    if len(data) > bytes_max:
        raise PeerError("TOO_BIG", f"{len(data)} bytes, at most {bytes_max}")
    try:
        plain = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            max_str_len=limits.string_bytes_max,
            max_bin_len=bytes_max,
            max_array_len=max(limits.array_items_max, bytes_max // 32),
            max_map_len=64,
            max_ext_len=0,
        )
        check_plain(plain, 0)
        # bytes as they are: otherwise text would pass for bytes as base64, a second encoding of one value
        return msgspec.convert(plain, kind, strict=True, builtin_types=(bytes,))
    except (ValueError, TypeError, msgspec.ValidationError, RecursionError, msgpack.UnpackException) as error:
        raise PeerError("MALFORMED", str(error)[:200]) from None


def check_plain(value: Any, depth: int) -> None:
    """Refuse what MessagePack lets through: depth, NaN and infinity."""
    if depth > limits.nesting_max:
        raise ValueError("nested too deeply")
    if isinstance(value, list):
        for item in value:
            check_plain(item, depth + 1)
    elif isinstance(value, dict):
        for item in value.values():
            check_plain(item, depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a number that is not finite")
