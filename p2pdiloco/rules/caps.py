"""Caps on token counts: what one node, or a crowd of fresh keys, may weigh at most (protocol.md 8).

Integers in, integers out. The capped figure c_i is what clock, T_full and weights use, so a hundred fresh
keys steer nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from p2pdiloco.ids import PeerId
from p2pdiloco.rules.state import RulesState, is_trusted
from p2pdiloco.run_spec import RunSpec


def capped_tokens(state: RulesState, spec: RunSpec, tokens: Mapping[PeerId, int]) -> dict[PeerId, int]:
    """c_i of each contributor from its n_i, tokens, in one outer step.

    First the half: once there are three contributors, none weighs more than all others together. Where
    trusted and untrusted ones meet this is said of the trusted ones among themselves (the two rules would
    otherwise leave nothing: one trusted node and two newcomers). Then the tenth: untrusted contributors
    together weigh at most a ninth of the trusted ones, shared out in proportion.
    """
    trusted = {peer: n for peer, n in tokens.items() if is_trusted(state, spec, peer)}
    if not trusted:
        return _at_most_half(tokens)
    capped = _at_most_half(trusted)
    newcomers = {peer: n for peer, n in tokens.items() if peer not in trusted}
    together = sum(newcomers.values())
    allowed = min(together, sum(capped.values()) // 9)
    capped.update({peer: n * allowed // together for peer, n in newcomers.items()})
    return capped


def _at_most_half(tokens: Mapping[PeerId, int]) -> dict[PeerId, int]:
    if len(tokens) < 3:
        return dict(tokens)
    total = sum(tokens.values())
    # At most one can hold more than half, so capping each against the uncapped others caps just that one.
    return {peer: min(n, total - n) for peer, n in tokens.items()}
