"""T_full, the tokens of a full round, and what follows from it (algorithm.md 1).

A full round is a pass of everybody. Nobody counts heads: the log's own token counts say who takes part
and how fast, so a swarm may shrink or grow at any moment and the figure follows within a few rounds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from p2pdiloco import limits
from p2pdiloco.ids import PeerId
from p2pdiloco.rules.state import RulesState


def latest_tokens(state: RulesState) -> dict[PeerId, int]:
    """Each peer's latest token count in the entries on which the next T_full looks back.

    That is the shortest run of entries that holds twice the present T_full, at least 4, at most 64, or all
    there are; without those who said goodbye or were revoked.
    """
    gone = {*state.departed, *state.revoked}
    counts: dict[PeerId, int] = {}
    held = 0
    for place, entry in enumerate(reversed(state.recent)):
        if place >= limits.recent_entries_min and held >= 2 * state.t_full:
            break
        for peer, tokens in entry:
            held += tokens
            if peer not in gone:
                counts.setdefault(PeerId(peer), tokens)
    return counts


def tokens_after(
    state: RulesState, listed: Iterable[tuple[PeerId, int]], left: Collection[PeerId]
) -> dict[PeerId, int]:
    """Each peer's token count in T_full after an entry that lists `listed`; T_full is their sum.

    `left` said goodbye in that entry: out, unless the same entry lists a delta of theirs.
    """
    counts = {peer: tokens for peer, tokens in latest_tokens(state).items() if peer not in left}
    counts.update(listed)
    return counts


def effective_nodes(counts: Mapping[PeerId, int]) -> float:
    """n_eff = (sum n)^2 / sum n^2 over the counts in T_full: nodes, counted by tokens (algorithm.md 4).

    Exact integers divided once, so every replica has the same float. 0.0 where nothing is counted.
    """
    squares = sum(n * n for n in counts.values())
    return sum(counts.values()) ** 2 / squares if squares else 0.0
