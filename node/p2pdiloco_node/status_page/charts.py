"""Line charts as SVG, drawn here so that the page needs no script and no library.

Only numbers go in, so nothing from outside can become markup; colours and sizes are the style sheet's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from p2pdiloco_node.status_page.formats import count, number

WIDTH, HEIGHT = 560, 250  # user units; the style sheet scales them
LEFT, RIGHT, TOP, BOTTOM = 50, 14, 12, 34
SPREAD_MIN = 0.01  # nats: less than this on the whole axis is noise drawn large
DOTS_MAX = 40  # more points than this are drawn as a line alone


def line_chart(
    xs: Sequence[int], ys: Sequence[float], *, name: str, marks: Sequence[int] = (), kind: str = "loss"
) -> Markup:
    """A curve of `ys` (nats per token) over `xs` (versions), rising.

    Args:
        name: what it shows, for those who listen to it; ours, never a stranger's.
        marks: versions at which membership changed.
        kind: class for the style sheet.
    """
    if not xs:
        return Markup(
            '<svg class="chart" viewBox="0 0 {w} {h}" role="img" aria-label="{name}: no data yet">'
            '<text class="empty" x="{x}" y="{y}">no data yet</text></svg>'
        ).format(w=WIDTH, h=HEIGHT, name=name, x=WIDTH // 2, y=HEIGHT // 2)
    x_ticks, y_ticks = _ticks(min(xs[0], 0), xs[-1], 5), _ticks(min(ys), max(ys), 4)
    x0, x1 = min(xs[0], 0), max(xs[-1], xs[0] + 1)
    y0, y1 = y_ticks[0], y_ticks[-1]

    def at_x(x: float) -> float:
        return round(LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT), 1)

    def at_y(y: float) -> float:
        return round(HEIGHT - BOTTOM - (y - y0) / (y1 - y0) * (HEIGHT - TOP - BOTTOM), 1)

    digits = max(0, math.ceil(-math.log10(y_ticks[1] - y_ticks[0]) - 1e-9), int(y1 - y0 < 10))
    parts = []
    for y in y_ticks:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at_y(y)}" y2="{at_y(y)}"/>')
        parts.append(f'<text class="y" x="{LEFT - 8}" y="{at_y(y) + 4}">{y:.{digits}f}</text>')
    shown = [x for x in x_ticks if x0 <= x <= x1 and x == int(x)]  # there is no version 1.5
    parts += [f'<text class="x" x="{at_x(x)}" y="{HEIGHT - BOTTOM + 20}">{count(x)}</text>' for x in shown]
    for x in marks:
        if x0 <= x <= x1:
            parts.append(
                f'<line class="mark" x1="{at_x(x)}" x2="{at_x(x)}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
            )
    points = [(at_x(x), at_y(y)) for x, y in zip(xs, ys, strict=True)]
    parts.append(f'<polyline class="line" points="{" ".join(f"{x},{y}" for x, y in points)}"/>')
    if len(points) <= DOTS_MAX:
        parts += [f'<circle class="dot" cx="{x}" cy="{y}" r="3"/>' for x, y in points]
    parts.append(f'<circle class="end" cx="{points[-1][0]}" cy="{points[-1][1]}" r="4.5"/>')
    label = (
        f"{name}: from {number(ys[0])} at version {count(xs[0])} to {number(ys[-1])} at version "
        f"{count(xs[-1])}, lowest {number(min(ys))}"
    )
    # Every part above is made of numbers.
    return Markup(
        '<svg class="chart {kind}" viewBox="0 0 {w} {h}" role="img" aria-label="{label}">{body}</svg>'
    ).format(
        kind=kind,
        w=WIDTH,
        h=HEIGHT,
        label=label,
        body=Markup("".join(parts)),  # noqa: S704
    )


def _ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers from at or below `low` to at or above `high`, roughly `about` steps."""
    if high - low < SPREAD_MIN:
        middle = (low + high) / 2
        low, high = middle - SPREAD_MIN / 2, middle + SPREAD_MIN / 2
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 10) for i in range(first, last + 1)]
