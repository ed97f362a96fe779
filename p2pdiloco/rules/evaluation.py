"""Who evaluates a certified state on the held-out tokens: chosen by the log, so nobody chooses itself."""

from __future__ import annotations

from p2pdiloco.ids import PeerId
from p2pdiloco.rules.full_round import latest_tokens
from p2pdiloco.rules.state import RulesState
from p2pdiloco.run_spec import RunSpec


def is_evaluated(state: RulesState, spec: RunSpec) -> bool:
    """Whether the state of this version is due: at the RunSpec's cadence, and the last one."""
    return state.finished or (state.version > 0 and state.version % spec.eval_every == 0)


def evaluation_order(state: RulesState) -> tuple[PeerId, ...]:
    """The peers of the present full round, the chosen one first: they take turns by version.

    The second one stands in where the first is silent (`stand_in_after_s`). Empty before the first outer
    step: version 0 has no contributors to choose from.
    """
    peers = sorted(latest_tokens(state))
    turn = state.version % len(peers) if peers else 0
    return (*peers[turn:], *peers[:turn])


def stand_in_after_s(spec: RunSpec) -> float:
    """Seconds after which the second in order may evaluate as well: two passes."""
    return 2 * spec.inner.pass_s
