"""The run's history by version: rates, the loss curve, and how long ago in rounds a version was."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from p2pdiloco import limits
from p2pdiloco.status.names import finite
from p2pdiloco.status.read_model import Curve, VersionPoint
from p2pdiloco.wire.log import Contribution

RATE_STEPS = 8  # outer steps over which "now" is averaged: a full round of eight nodes
DAY_S = 86400.0
LATE_ROUNDS = 0.5  # a contribution this stale is counted as stale on the page


class History:
    """Points in order of version; beyond limits.points_kept the older half is thinned."""

    def __init__(self) -> None:
        self.points: list[VersionPoint] = []

    def add(self, point: VersionPoint) -> None:
        assert not self.points or point.version > self.points[-1].version
        self.points.append(point)
        if len(self.points) > limits.points_kept:
            half = len(self.points) // 2
            self.points[:half] = self.points[:half:2]

    def at(self, version: int) -> VersionPoint | None:
        """The newest kept point at or before `version`."""
        i = bisect_right(self.points, version, key=lambda p: p.version)
        return self.points[i - 1] if i else None

    def rounds_since(self, version: int) -> float:
        """How many full rounds the token clock has moved since `version` (algorithm.md 1)."""
        if not self.points or self.points[-1].t_full == 0:
            return 0.0
        then = self.at(version)
        newest = self.points[-1]
        return (newest.tokens - (then.tokens if then else 0)) / newest.t_full

    def seconds_per_step(self) -> float | None:
        """Mean over the last outer steps."""
        recent = _timed(self.points[-RATE_STEPS - 1 :])
        if len(recent) < 2:
            return None
        (t0, first), (t1, last) = recent[0], recent[-1]
        return max(0.0, t1 - t0) / (last.version - first.version)

    def tokens_per_s(self, now: float) -> float | None:
        """Merged tokens per second over the last outer steps; falls when no step comes."""
        step_s = self.seconds_per_step()
        recent = _timed(self.points[-RATE_STEPS - 1 :])
        if step_s is None:
            return None
        (t0, first), (t1, last) = recent[0], recent[-1]
        # Between two steps in time the rate stands; once the next one is overdue, waiting counts.
        end = now if now - t1 > 2 * step_s else t1
        return finite((last.tokens - first.tokens) / (end - t0)) if end > t0 else None

    def tokens_per_s_day(self, now: float) -> float | None:
        """Over the last 24 h, or since the first outer step of a younger run; pauses count."""
        timed = _timed(self.points)
        day = [(t, p) for t, p in timed if t >= now - DAY_S]
        if not day:
            return 0.0 if timed else None
        # The last point before the day began says where the clock stood then.
        before = timed[len(timed) - len(day) - 1] if len(timed) > len(day) else None
        start, clock = (now - DAY_S, before[1].tokens) if before else (day[0][0], day[0][1].tokens)
        return (day[-1][1].tokens - clock) / (now - start) if now > start else None

    def curve(self, membership_changes: Iterable[int]) -> Curve:
        """At most limits.chart_points_max points; each the token-weighted mean of its stretch."""
        known: list[tuple[int, float, int]] = []
        clock = 0
        for p in self.points:
            if p.loss is not None:
                known.append((p.version, p.loss, max(1, p.tokens - clock)))
            clock = p.tokens
        stretch = -(-len(known) // limits.chart_points_max) or 1
        parts = [known[i : i + stretch] for i in range(0, len(known), stretch)]
        return Curve(
            versions=tuple(part[-1][0] for part in parts),
            losses=tuple(
                sum(loss * tokens for _, loss, tokens in part) / sum(tokens for _, _, tokens in part)
                for part in parts
            ),
            membership_changes=tuple(sorted(set(membership_changes)))[-limits.chart_points_max :],
        )


def weighted_loss(contributions: Sequence[Contribution], losses: dict[bytes, float]) -> float | None:
    """Token-weighted mean of the senders' losses (nats per token); None where no header is known.

    Weighted, so that who comes and goes does not move the curve (scenario S22). A loss of 0 is "none",
    and one that is absurd or not finite is left out: a sender's word must not bend the page.
    """
    known = [
        (c.tokens, losses[c.delta])
        for c in contributions
        if c.tokens > 0 and 0 < losses.get(c.delta, 0.0) <= limits.loss_shown_max
    ]
    tokens = sum(n for n, _ in known)
    return sum(n * loss for n, loss in known) / tokens if tokens else None


def _timed(points: Sequence[VersionPoint]) -> list[tuple[float, VersionPoint]]:
    """Points whose time is known: the log itself carries no wall clock."""
    return [(p.when_unix, p) for p in points if p.when_unix is not None]
