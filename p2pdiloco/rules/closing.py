"""When the aggregator closes an outer step: policy `quorum` (algorithm.md 4).

Its own judgement, on its own clock; voters check what is in an entry, not when it was closed. What is late
enters the next one, so closing early costs a little staleness and closing late costs everybody's time.
Seconds here are of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from p2pdiloco import limits
from p2pdiloco.ids import PeerId
from p2pdiloco.rules.full_round import effective_nodes
from p2pdiloco.run_spec import RunSpec


class Arrival(NamedTuple):
    """The delta of one peer that may be listed now: its capped tokens, when it arrived, trust."""

    peer: PeerId
    tokens: int
    at: float
    trusted: bool


class ClosingView(NamedTuple):
    """What the decision is taken from.

    `live`: each admitted training peer heard from within two passes, with its latest tokens in T_full, 0
    where it has none yet (`full_round.latest_tokens`). `trusted`: those of them that the log trusts.
    `spreads`: seconds, from `after_closing`.
    """

    last_step_at: float  # when the last outer step was certified, or the run was joined
    first_step: bool  # no outer step is certified yet
    arrivals: Sequence[Arrival]  # at most one per peer
    live: Mapping[PeerId, int]
    trusted: frozenset[PeerId]
    spreads: Sequence[float]


class Knobs(NamedTuple):
    """How eager a quorum is. The product has the defaults; the lab measures others."""

    share: float = 0.25  # of the live part of T_full, held by trusted contributors
    share_many: float = 0.75  # the same from 16 effective nodes up
    grace: float = 1.0  # factor on the grace window


KNOBS = Knobs()


class Decision(NamedTuple):
    """Close now or not, why (for log and page), and when to ask again at the latest (None: on news)."""

    close: bool
    reason: str
    wake_at: float | None


def decide_closing(view: ClosingView, spec: RunSpec, *, now: float, knobs: Knobs = KNOBS) -> Decision:
    """Whether to close the outer step now.

    - nobody delivered: never
    - every live node delivered, or 32 deltas are here: at once, for there is nobody to wait for
    - a quorum of tokens by trusted contributors, or every live trusted node: after a grace window
    - at the deadline, with whoever is there
    """
    if not view.arrivals:
        return Decision(close=False, reason="no delta yet", wake_at=None)
    here = {a.peer for a in view.arrivals}
    if len(view.arrivals) >= limits.contributions_max:
        return Decision(close=True, reason=f"{limits.contributions_max} deltas are here", wake_at=None)
    if here >= view.live.keys():
        return Decision(close=True, reason=f"all {len(here)} live nodes delivered", wake_at=None)
    deadline = view.last_step_at + spec.outer.deadline_passes * spec.inner.pass_s
    if now >= deadline:
        return Decision(
            close=True,
            reason=f"deadline, {len(here)} of {len(here | view.live.keys())} delivered",
            wake_at=None,
        )
    if view.first_step:
        # T_full is not known yet, so there is no share to measure: everybody, or the deadline.
        return Decision(
            close=False,
            reason=f"first outer step: {len(here)} of {len(view.live)} delivered",
            wake_at=deadline,
        )
    reached, why, at = _quorum(view, knobs)
    if not reached:
        return Decision(close=False, reason=why, wake_at=deadline)
    # The window starts when the quorum was complete, not at every look.
    until = min(deadline, at + knobs.grace * grace_s(view.spreads, spec.inner.pass_s))
    if now >= until:
        return Decision(close=True, reason=why, wake_at=None)
    return Decision(close=False, reason=f"{why}; grace for the others", wake_at=until)


def grace_s(spreads: Sequence[float], pass_s: float) -> float:
    """Seconds to wait for the rest after a quorum: median + 3 MAD of recent spreads.

    At most half a pass, which is what a node that just missed it loses by waiting for the next one; half a
    pass also while nothing is known.
    """
    if not spreads:
        return pass_s / 2
    middle = median(spreads)
    mad = median(abs(s - middle) for s in spreads)
    return min(pass_s / 2, max(0.0, middle + 3 * mad))


def after_closing(
    spreads: Sequence[float], arrivals: Sequence[Arrival], late: Sequence[float], *, pass_s: float
) -> tuple[float, ...]:
    """The spread history after an outer step: how long after the first delta each one came, seconds.

    `arrivals` were listed; `late` are arrival times of deltas that came after the step was closed, up to
    half a pass later and from peers that were not in it: without them the window could only ever shrink.
    What is further apart belongs to another round and is left out.
    """
    if not arrivals:
        return tuple(spreads)
    first = min(a.at for a in arrivals)
    apart = sorted(at - first for at in [*(a.at for a in arrivals), *late])
    # The first one is the origin, not an observation.
    new = [s for s in apart[1:] if s <= pass_s]
    return (*spreads, *new)[-limits.spreads_kept_max :]


class Spreads(NamedTuple):
    """How far apart the deltas of a round come, learnt one outer step later, when those that just missed it
    are here: without them the grace window could only shrink.
    """

    seconds: tuple[float, ...] = ()
    previous: tuple[Arrival, ...] = ()  # listed by the last outer step

    def learn(
        self, arrivals: Sequence[Arrival], listed: Collection[PeerId], *, last_step_at: float, pass_s: float
    ) -> Spreads:
        """After an outer step that lists `listed` of `arrivals`; the one before it was at `last_step_at`."""
        had = {a.peer for a in self.previous}
        late = [a.at for a in arrivals if a.peer not in had and a.at <= last_step_at + pass_s / 2]
        seconds = after_closing(self.seconds, self.previous, late, pass_s=pass_s)
        return Spreads(seconds, tuple(a for a in arrivals if a.peer in listed))


def _quorum(view: ClosingView, knobs: Knobs) -> tuple[bool, str, float]:
    """Whether enough is here, in words, and since when (seconds)."""
    trusted_here = sorted((a for a in view.arrivals if a.trusted), key=lambda a: a.at)
    if not trusted_here:
        return False, "no trusted contributor yet", 0.0
    share = knobs.share_many if effective_nodes(view.live) >= 16 else knobs.share
    needed = share * sum(view.live.values())
    waiting = set(view.trusted & view.live.keys())
    held = 0
    for a in trusted_here:
        held += a.tokens
        waiting.discard(a.peer)
        if held >= needed:
            return True, f"{share:.0%} of a full round's tokens are here", a.at
        if not waiting:
            return True, f"all {len(trusted_here)} trusted live nodes delivered", a.at
    return False, f"{held} of {needed:.0f} tokens that make a quorum", 0.0
