"""Bytes that went up and down, for the traffic figure (targets P3): bodies and HTTP heads, not TCP's own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass
class Traffic:
    """Bytes since the start. Control: messages and small answers. Data: blobs."""

    up_control: int = 0
    up_data: int = 0
    down_control: int = 0
    down_data: int = 0

    @property
    def up(self) -> int:
        return self.up_control + self.up_data

    @property
    def down(self) -> int:
        return self.down_control + self.down_data


def head_bytes(first_line: int, headers: Iterable[tuple[bytes | str, bytes | str]]) -> int:
    """Size of an HTTP head: its first line, and each field with colon, blank and line end."""
    return first_line + 4 + sum(len(name) + len(value) + 4 for name, value in headers)
