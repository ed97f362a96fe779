"""Whose evaluation the page believes: the peer's that the rules choose for a version, and no stranger's.

A loss on held-out tokens is a peer's word; nobody else recomputes it. So the one who may give it is chosen by
the certified log (rules/evaluation.py), and a second one only where the first stays silent.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from msgspec.structs import replace

from p2pdiloco import limits
from p2pdiloco.ids import PeerId
from p2pdiloco.rules.evaluation import evaluation_order, is_evaluated, stand_in_after_s
from p2pdiloco.rules.state import after_membership, after_outer_step, after_owner, genesis_state
from p2pdiloco.run_spec import RunSpec
from p2pdiloco.status.read_model import EvalPoint
from p2pdiloco.wire.log import Content, Membership, OuterStep


class _Due(NamedTuple):
    order: tuple[PeerId, ...]
    since_unix: float


class Evaluators:
    """Follows the log from genesis on, as every replica does. All times are Unix seconds."""

    def __init__(self, spec: RunSpec, started_unix: float) -> None:
        """`started_unix` stands for the time of entries from before this life."""
        self._spec = spec
        self._started_unix = started_unix
        self._rules = genesis_state(spec)
        self._due: OrderedDict[int, _Due] = OrderedDict()
        self._of_genesis: dict[PeerId, EvalPoint] = {}  # until the log says who of them takes part

    def entry_applied(self, content: Content, when_unix: float | None) -> EvalPoint | None:
        """The next certified entry. Version 0's evaluation, if it has become known whose counts."""
        match content:
            case OuterStep():
                # Sequences and trust of peers choose nobody: without them following is cheap.
                self._rules = replace(after_outer_step(self._rules, content, self._spec), peers=())
            case Membership(committee=committee):
                self._rules = after_membership(self._rules, committee)
            case _:
                self._rules = after_owner(self._rules, content.word)
        if not isinstance(content, Membership) and is_evaluated(self._rules, self._spec):
            since = self._started_unix if when_unix is None else when_unix
            self._due[self._rules.version] = _Due(evaluation_order(self._rules), since)
            if len(self._due) > limits.evaluations_due_max:
                self._due.popitem(last=False)
        if isinstance(content, OuterStep) and self._of_genesis:
            listed = {PeerId(c.peer) for c in content.contributions}
            for peer, point in self._of_genesis.items():  # in the order in which they came
                if peer in listed:
                    self._of_genesis = {}
                    return point
        return None

    def order(self, version: int) -> tuple[PeerId, ...]:
        """Who may evaluate `version`, the chosen one first; empty where nobody is waited for."""
        due = self._due.get(version)
        return due.order if due is not None else ()

    def accepts(self, by: PeerId, version: int, when_unix: float) -> bool:
        """Whether `by` may say the loss of `version` at this time."""
        due = self._due.get(version)
        if due is None:
            return False
        late = when_unix - due.since_unix >= stand_in_after_s(self._spec)
        return by in due.order[: 2 if late else 1]

    def keep(self, by: PeerId, point: EvalPoint) -> EvalPoint | None:
        """An evaluation of version 0, where nobody is chosen: whoever the log lists, the first of them.

        Returns it where that is known already.
        """
        if any(peer == by for entry in self._rules.recent for peer, _ in entry):
            return point
        if len(self._of_genesis) < limits.peers_max:
            self._of_genesis.setdefault(by, point)
        return None
