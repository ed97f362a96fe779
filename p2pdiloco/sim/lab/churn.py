"""Who dies, comes and goes, as an experiment says. Randomness is the lab's own stream."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from p2pdiloco.errors import OperatorError
from p2pdiloco.exit_codes import USAGE
from p2pdiloco.sim.lab.node import LabNode

if TYPE_CHECKING:
    from p2pdiloco.sim.lab.engine import Lab


class Churn:
    """Failures come by the clock, joins, leaves and absences by the tokens that are merged."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        swarm, target = lab.e.swarm, lab.e.target_tokens
        self._joins = sorted((share * target, count) for share, count in swarm.joins)
        self._leaves = sorted((share * target, count) for share, count in swarm.leaves)
        self._absences = sorted((share * target, node, passes) for share, node, passes in swarm.absences)

    def start(self, node: LabNode, *, fresh: bool) -> None:
        """The node trains from now on, until it fails."""
        node.start(fresh=fresh)
        self._arm(node)
        self._lab.swarm_changed()

    def tokens_merged(self, tokens: int) -> None:
        while self._joins and self._joins[0][0] <= tokens:
            for _ in range(self._joins.pop(0)[1]):
                self._join()
        while self._leaves and self._leaves[0][0] <= tokens:
            for _ in range(self._leaves.pop(0)[1]):
                self._leave()
        while self._absences and self._absences[0][0] <= tokens:
            _, node, passes = self._absences.pop(0)
            self._away(self._lab.nodes[node], passes * self._lab.e.pass_s)

    def _join(self) -> None:
        lab = self._lab
        node = lab.make_node(len(lab.nodes))
        lab.nodes.append(node)

        lab.clock.at(lab.catch_up_s(node, fresh=True), partial(self.start, node, fresh=True))

    def _leave(self) -> None:
        """The newest says goodbye; what it delivered still counts."""
        lab = self._lab
        members = lab.members()
        if len(members) < 2:
            raise OperatorError(
                f"experiment {lab.e.name!r}: swarm.leaves takes everybody away at {lab.tokens} tokens: "
                "let fewer leave, or others join before.",
                exit_code=USAGE,
            )
        node = members[-1]
        if node.up:
            lab.aggregator_may_be_gone(node)
        node.stop(left=True)
        for ledger in lab.ledgers:
            ledger.said_goodbye(node.peer)
        lab.swarm_changed()

    def _arm(self, node: LabNode) -> None:
        """The next failure of this life, exponentially distributed."""
        lab = self._lab
        mtbf_s = lab.e.swarm.mtbf_s
        if not mtbf_s:
            return
        life = node.life
        wait_s = -mtbf_s * math.log(1.0 - lab.chance.random())

        def fails() -> None:
            if node.life == life and node.up:
                node.failures += 1
                self._away(node, lab.e.swarm.repair_s)

        lab.clock.at(wait_s, fails)

    def _away(self, node: LabNode, seconds: float) -> None:
        """kill -9; the process is back after `seconds` and then downloads what it missed."""
        lab = self._lab
        if not node.up:
            return
        lab.aggregator_may_be_gone(node)
        node.stop()
        life = node.life

        def restarted() -> None:
            if node.life == life and node.member:
                lab.clock.at(lab.catch_up_s(node, fresh=False), back)

        def back() -> None:
            if node.life == life and node.member:
                self.start(node, fresh=False)

        lab.clock.at(seconds, restarted)
        # Its silence may complete a round that waits for everybody who is live.
        lab.clock.at(2 * lab.e.pass_s, lab.swarm_changed)
