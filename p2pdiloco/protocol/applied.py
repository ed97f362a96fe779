"""The state behind the certified log: which entry it stands at, its roots, and the way to the next one.

Certified entries are applied in order. An outer step needs its deltas and its arrays (`PrepareOuterStep`);
every replica must find the root that the entry names (algorithm.md 5).
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from p2pdiloco import limits
from p2pdiloco.ids import NO_DIGEST, Digest, PeerId, tagged_digest
from p2pdiloco.protocol.actions import InstallEntry, PrepareOuterStep
from p2pdiloco.protocol.context import Context, Restored
from p2pdiloco.protocol.delta_pool import DeltaPool
from p2pdiloco.protocol.run_log import RunLog
from p2pdiloco.rules.state import RulesState, after_entry, genesis_state, rules_digest
from p2pdiloco.wire.codec import decode, encode
from p2pdiloco.wire.log import Content, OuterStep, state_root


class Applied:
    """What the arrays on this machine are."""

    def __init__(self, ctx: Context, log: RunLog, pool: DeltaPool, restored: Restored) -> None:
        self._ctx = ctx
        self._log = log
        self._pool = pool
        self.index = restored.state_index
        self.rules: RulesState = (
            decode(restored.rules, RulesState) if restored.rules else genesis_state(ctx.spec)
        )
        at_genesis = not restored.rules
        self._roots = (
            (ctx.spec.genesis.params_root, ctx.spec.genesis.momentum_root)
            if at_genesis
            else (restored.params_root, restored.momentum_root)
        )
        self._prepared: dict[Digest, tuple[Digest, Digest]] = {}
        self._preparing: dict[Digest, OuterStep] = {}
        self._retry_at: dict[Digest, float] = {}  # candidates that could not be computed here
        self.diverged = False  # a majority certified another root: this state is damaged
        for index in range(1, self.index + 1):
            content = log.content(index)
            if isinstance(content, OuterStep):
                pool.contains(content)
        if self.index and self.root != log.content(self.index).state_root:
            self.diverged = True  # files of an epoch that the owner ended, or damaged ones

    @property
    def root(self) -> Digest:
        return state_root(*self._roots, rules_digest(self.rules))

    @property
    def roots(self) -> tuple[Digest, Digest]:
        """Of params and momentum."""
        return self._roots

    @property
    def current(self) -> bool:
        """True if every certified entry is applied."""
        return self.index == self._log.index

    def root_after(self, content: Content) -> Digest | None:
        """The root that `content` must name on top of this state; None while its arrays are on their way."""
        if isinstance(content, OuterStep):
            ticket = self._ticket(content)
            roots = self._prepared.get(ticket)
            if roots is None:
                self._prepare(ticket, content)
                return None
        else:
            roots = self._roots
        return state_root(*roots, rules_digest(after_entry(self.rules, content, self._ctx.spec)))

    def prepared(self, ticket: Digest, params_root: Digest, momentum_root: Digest) -> None:
        if ticket in self._preparing:
            del self._preparing[ticket]
            while len(self._prepared) >= limits.prepared_max:
                del self._prepared[next(iter(self._prepared))]
            self._prepared[ticket] = (params_root, momentum_root)

    def not_prepared(self, ticket: Digest) -> None:
        """A blob is gone or the disk failed: have the deltas looked at again, and try after a heartbeat."""
        step = self._preparing.pop(ticket, None)
        if step is not None:
            self._retry_at[ticket] = self._ctx.now + self._ctx.spec.committee.heartbeat_s
            self._pool.check_again(step)

    def advance(self, donors: Callable[[OuterStep], list[PeerId]]) -> Content | None:
        """Apply the next certified entry if everything for it is here; its content, or None."""
        if self.diverged or self.index >= self._log.index:
            return None
        content = self._log.content(self.index + 1)
        if isinstance(content, OuterStep):
            for delta in self._pool.missing(content):
                self._pool.fetch(delta, donors(content))
            if self._pool.missing(content):
                return None
        root = self.root_after(content)
        if root is None:
            return None
        if root != content.state_root:
            self.diverged = True
            self._ctx.say(
                "diverged",
                f"entry {self.index + 1} was certified with another state than this machine computes: the "
                "state here is damaged and is fetched again",
            )
            return None
        ticket: Digest | None = None
        if isinstance(content, OuterStep):
            ticket = self._ticket(content)
            self._roots = self._prepared[ticket]
        self.rules = after_entry(self.rules, content, self._ctx.spec)
        self.index += 1
        self._forget_candidates()
        step = content if isinstance(content, OuterStep) else None
        self._ctx.emit(InstallEntry(self.index, self.rules.version, ticket, encode(self.rules), step))
        return content

    def went_back(self, index: int, rules: RulesState, params: Digest, momentum: Digest) -> None:
        """The entries of the state here were cut off; arrays of an earlier one are on their way."""
        self.snapshot_installed(index, rules, params, momentum)
        self.diverged = True

    def snapshot_installed(self, index: int, rules: RulesState, params: Digest, momentum: Digest) -> None:
        self.index = index
        self.rules = rules
        self._roots = (params, momentum)
        self.diverged = False
        self._forget_candidates()

    def _forget_candidates(self) -> None:
        self._prepared.clear()
        self._preparing.clear()
        self._retry_at.clear()

    def _prepare(self, ticket: Digest, step: OuterStep) -> None:
        if ticket in self._preparing or self._retry_at.get(ticket, self._ctx.now) > self._ctx.now:
            return
        if len(self._preparing) >= limits.prepared_max:
            self._preparing.clear()  # candidates that never came to anything; their results are ignored
        self._preparing[ticket] = step
        self._ctx.emit(PrepareOuterStep(ticket, self.index, step))

    def _ticket(self, step: OuterStep) -> Digest:
        plain = msgspec.structs.replace(step, state_root=NO_DIGEST)
        return tagged_digest("ticket", self._log.head_at(self.index), encode(plain))
