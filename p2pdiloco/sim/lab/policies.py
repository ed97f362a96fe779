"""When an outer step closes: the product's quorum with its knobs, and two policies to compare it with."""

from __future__ import annotations

from p2pdiloco import limits
from p2pdiloco.rules.closing import ClosingView, Decision, Knobs, decide_closing
from p2pdiloco.run_spec import RunSpec
from p2pdiloco.sim.lab.experiment import Outer


def decide(policy: str, view: ClosingView, spec: RunSpec, *, now: float, outer: Outer) -> Decision:
    """Whether to close the outer step now under `policy`; seconds on the virtual clock.

    - `quorum`: rules/closing.py, with `closing_share` (three times as much from 16 effective nodes up, as
      in the product) and `grace`
    - `immediate`: as soon as one delta is there (asynchronous DiLoCo, arXiv 2401.09135)
    - `barrier`: when every live node has delivered, without a deadline (DiLoCo, arXiv 2311.08105); who is
      live is the view's business, so a node that died holds it up until it is missed
    """
    if policy == "quorum":
        share = outer.closing_share
        knobs = Knobs(share=share, share_many=min(1.0, 3 * share), grace=outer.grace)
        return decide_closing(view, spec, now=now, knobs=knobs)
    assert policy in {"immediate", "barrier"}, f"no outer steps to close under policy {policy!r}"
    here = {a.peer for a in view.arrivals}
    if not here:
        return Decision(close=False, reason="no delta yet", wake_at=None)
    if policy == "immediate":
        return Decision(close=True, reason="a delta is here", wake_at=None)
    if len(here) >= limits.contributions_max:
        # No entry holds more: the others are listed right after it.
        return Decision(close=True, reason=f"{limits.contributions_max} deltas are here", wake_at=None)
    if here >= view.live.keys():
        return Decision(close=True, reason=f"all {len(here)} live nodes delivered", wake_at=None)
    reason = f"barrier: {len(here & view.live.keys())} of {len(view.live)} delivered"
    return Decision(close=False, reason=reason, wake_at=None)
