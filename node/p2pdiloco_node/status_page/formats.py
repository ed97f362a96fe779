"""Numbers for people. What is not known yet is an en dash, never 0, "None" or "nan"."""

from __future__ import annotations

import math
from datetime import UTC, datetime

DASH = "–"
NBSP = "\u00a0"  # a number and its unit stay on one line
_BIG = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def count(n: float | None) -> str:
    """1234 -> 1,234."""
    return DASH if _unknown(n) else f"{n:,.0f}"


def big(n: float | None) -> str:
    """12,345,678 -> 12.3 M."""
    return DASH if n is None or _unknown(n) else _scaled(n, _BIG, "")


def size(n: float | None) -> str:
    """Bytes, in powers of ten as links are sold: 1,350,000 -> 1.35 MB."""
    return DASH if n is None or _unknown(n) else _scaled(n, _BYTES, "B")


def number(x: float | None, digits: int = 3) -> str:
    """A loss and the like."""
    return DASH if x is None or _unknown(x) else f"{x:,.{digits}f}" if abs(x) < 1e6 else f"{x:.2e}"


def times(x: float | None) -> str:
    """A ratio: 172.3 -> 172×."""
    return DASH if x is None or _unknown(x) else f"{x:,.0f}×" if x >= 10 else f"{x:.1f}×"


def percent(share: float) -> str:
    """Never 100 % before the end."""
    return f"{min(share, 0.999) * 100:.1f}{NBSP}%" if share < 1 else f"100{NBSP}%"


def duration(seconds: float | None) -> str:
    """3725 -> 1 h 2 min."""
    if seconds is None or _unknown(seconds):
        return DASH
    s = round(seconds)
    if s < 60:
        text = f"{s} s"
    elif s < 3600:
        text = f"{s // 60} min {s % 60} s" if s < 600 else f"{s // 60} min"
    elif s < 2 * 86400:
        text = f"{s // 3600} h {s % 3600 // 60} min"
    else:
        text = f"{s // 86400:,} days {s % 86400 // 3600} h"
    return text.replace(" ", NBSP)


def ago(seconds: float | None) -> str:
    """Coarse on purpose: a figure that changes each second would make every row news."""
    if seconds is None or _unknown(seconds):
        return DASH
    if seconds < 10:
        return "now"
    if seconds < 60:
        return f"{int(seconds // 10) * 10} s ago"
    if seconds < 5400:
        return f"{int(seconds // 60)} min ago"
    return f"{int(seconds // 3600)} h ago" if seconds < 2 * 86400 else f"{int(seconds // 86400)} days ago"


def clock(unix: float | None) -> str:
    """12:03:05 (UTC)."""
    return DASH if unix is None else datetime.fromtimestamp(unix, UTC).strftime("%H:%M:%S")


def moment(unix: float | None) -> str:
    """2026-11-29 12:03:05 UTC."""
    return DASH if unix is None else datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def iso(unix: float | None) -> str:
    """For machines, in `datetime` attributes."""
    return "" if unix is None else datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _unknown(x: float | None) -> bool:
    return x is None or not math.isfinite(x)


def _scaled(n: float, units: tuple[tuple[float, str], ...], unit: str) -> str:
    for step, name in units:
        # 999,950 would print as "1000 k": the next unit begins where rounding reaches it.
        if abs(n) >= step * 0.9995:
            digits = 2 if abs(n) < 9.995 * step else 1 if abs(n) < 99.95 * step else 0
            return f"{n / step:,.{digits}f}{NBSP}{name}"
    return f"{n:,.0f}{NBSP}{unit}".rstrip()
