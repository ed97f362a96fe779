"""What the trainer is told: which state to adopt, how many deltas it may finish, what to evaluate."""

from __future__ import annotations

import msgspec

from p2pdiloco.ids import PeerId
from p2pdiloco.protocol.actions import AdoptState, EvaluateState
from p2pdiloco.protocol.applied import Applied
from p2pdiloco.protocol.context import Context
from p2pdiloco.protocol.delivery import Delivery
from p2pdiloco.protocol.run_log import RunLog
from p2pdiloco.rules.evaluation import evaluators, is_evaluated, stand_in_after_s
from p2pdiloco.rules.outer_step import too_late
from p2pdiloco.rules.state import last_sequence
from p2pdiloco.wire.log import Content, Membership, OwnerEntry


class _Base(msgspec.Struct, frozen=True):
    base_version: int


class Trainee:
    """The trainer stands on `adopted`; it is given each newer state once everything certified is applied."""

    def __init__(
        self,
        ctx: Context,
        log: RunLog,
        applied: Applied,
        delivery: Delivery,
        adopted_version: int,
        evaluated_version: int = -1,
    ) -> None:
        self._ctx = ctx
        self._log = log
        self._applied = applied
        self._delivery = delivery
        self._stands_on = adopted_version
        self._adopted = -1  # newest version given to this life's trainer
        self._evaluated = evaluated_version  # in an earlier life, too: the same entries are applied again
        self.cut(log.version_at(log.index))  # a crash may have come between a cut and the record of it
        self._due = -1  # newest version whose evaluators were chosen
        self._stands_in = (-1, 0.0)  # (version, from when on) that this node evaluates if nobody did
        self._met_lower = False
        self._lost = False  # the state under the own work is of an epoch that the owner ended

    @property
    def _trains(self) -> bool:
        return self._ctx.identity.role == "node"

    def started(self) -> None:
        if self._trains:
            self._delivery.obey(self._applied.rules)
            self._delivery.allow()

    def met(self, peer: PeerId) -> None:
        """Another training node is known."""
        self._met_lower = self._met_lower or peer < self._ctx.me

    def jumped(self) -> None:
        """A snapshot replaced the state: what was in flight is judged by the clock like everything else."""
        self._adopted = -1

    def cut(self, version: int) -> None:
        """The log ends with `version`: a later one will be another state than the one evaluated."""
        if self._evaluated > version:
            self._evaluated = -1

    def went_back(self) -> None:
        """The owner's recovery dropped entries that were the state here: own work begins afresh."""
        self._adopted = self._due = -1
        self._stands_in = (-1, 0.0)
        self._lost = True

    def adopt_if_current(self) -> None:
        rules = self._applied.rules
        if not self._trains or not self._applied.current or self._applied.diverged:
            return
        self._stand_in()
        if rules.version == self._adopted:
            return
        behind = _Base(min(self._stands_on, rules.version))
        away = too_late(rules, self._ctx.spec, behind)
        # A crash may have come between the loss and the adoption that follows from it.
        bases = [self._stands_on, *(h.base_version for h in self._delivery.in_flight)]
        lost = self._lost or max(bases) > rules.version
        reset = away or lost
        newcomer = self._stands_on == 0 and not self._delivery.in_flight  # it has nothing to begin afresh
        if reset:
            self._delivery.clear()
        if away and not lost and not newcomer:
            self._ctx.say(
                "absence", f"away since version {self._stands_on}: starting afresh from {rules.version}"
            )
        self._lost = False
        self._delivery.obey(rules)
        self._adopted = self._stands_on = rules.version
        known = last_sequence(rules, self._ctx.me)
        self._ctx.emit(AdoptState(rules.version, rules.clock, rules.target_tokens, known, reset))
        self._delivery.allow()
        if rules.version == 0 and not self._met_lower:
            # Version 0 has no contributors to choose from: the lowest name does it, and whoever does not know
            # of a lower one, so that somebody does; the page waits for the log to list its sender.
            self._evaluate()

    def installed(self, content: Content) -> None:
        """Evaluation at the RunSpec's cadence and at the end, by the nodes that the version chooses."""
        if not self._trains:
            return
        rules = self._applied.rules
        if isinstance(content, OwnerEntry) and self._delivery.obey(rules):
            self._delivery.allow()
        if not self._applied.current:
            return
        due = rules.version != self._due and not isinstance(content, Membership)
        if due and is_evaluated(rules, self._ctx.spec):
            # Once: who evaluates a version is not chosen again by what the owner says of it later.
            self._due = rules.version
            chosen, stand_in = evaluators(rules, self._ctx.spec)
            if self._ctx.me in chosen:
                self._evaluate()
            elif self._ctx.me == stand_in:
                self._stands_in = (rules.version, self._ctx.now + stand_in_after_s(self._ctx.spec))

    def _stand_in(self) -> None:
        """A chosen one may be gone, and reports go to the tracker alone, so nobody here knows.

        Only while the version still stands: of an older one the arrays are not at hand any more, and the next
        one's turn comes soon. It matters for the last version.
        """
        version, at = self._stands_in
        if version == self._applied.rules.version and self._ctx.now >= at:
            self._stands_in = (-1, 0.0)
            self._evaluate()

    def _evaluate(self) -> None:
        version = self._applied.rules.version
        if version != self._evaluated:
            self._evaluated = version
            self._ctx.emit(EvaluateState(version, self._applied.index, self._applied.root))
