"""What the tracker's page is made from: the log from its beginning, and what the database knows besides.

The log of the rules is cut at once where the owner's recovery drops entries; page and database follow within
a second, and after a crash in between at the next start.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError, PeerError
from p2pdiloco.protocol.actions import InstallEntry
from p2pdiloco.protocol.run_log import RunLog
from p2pdiloco.rules.state import genesis_state, rules_digest
from p2pdiloco.run_spec import RunSpec
from p2pdiloco.status import StatusBuilder
from p2pdiloco.status.builder import Unsaved
from p2pdiloco.wire.log import Content, OuterStep, state_root
from p2pdiloco.wire.messages import DeltaHeader
from p2pdiloco_node.storage.tracker_db import TrackerDb

SLICE_S = 0.02  # of replaying at a time: meanwhile the witness has to vote


class PageFeed:
    """`begin` once, then `installed` for each entry that is installed and `look` once a second."""

    def __init__(
        self,
        spec: RunSpec,
        db: TrackerDb,
        *,
        log: Callable[[], RunLog],
        new_builder: Callable[[], StatusBuilder],
        entry: Callable[[int, Content, float], None],
        went_back: Callable[[int], None],
        say: Callable[[str, str], None],
    ) -> None:
        """`log()`: of the rules. `entry(index, content, when_unix)`: once each, from the first on again after
        `went_back(version)`: what came after it was dropped. `say(kind, text)`: for the page."""
        self._spec = spec
        self._db = db
        self._log = log
        self._new_builder = new_builder
        self._tell = entry
        self._went_back = went_back
        self._say = say
        self.builder = new_builder()
        # version -> certified state roots: entries that change no version change the rules state
        self._roots: dict[int, set[bytes]] = {}
        self._losses: dict[bytes, float] = {}  # delta -> mean loss of its pass, from its header
        self._version = 0  # of the newest entry that the builder has seen
        self._fed = 0  # entries that it has seen
        self._epoch = 0  # of the newest of them
        self._replaying = True  # it has not seen all that came before it

    async def begin(self) -> None:
        """A builder that has seen the log as it is now, and what the database knows of it."""
        self._replaying = True
        builder = self._new_builder()
        try:
            await self._restore(builder)
        except OperatorError as error:
            self._say("history", f"The page begins its history anew: {error}")
        self.builder = builder
        self._fed = self._version = self._epoch = 0
        genesis = self._spec.genesis
        root = state_root(genesis.params_root, genesis.momentum_root, rules_digest(genesis_state(self._spec)))
        self._roots = {0: {root}}
        await self._replay()

    async def _restore(self, builder: StatusBuilder) -> None:
        """The database's rows, but for what a recovery dropped. Raises: OperatorError."""
        log = self._log()
        began = log.recovery_after((await self._db.load()).epoch)
        await self._db.forget_after(log.version_at(log.index if began is None else began - 1))
        kept = await self._db.load()
        builder.restore(
            versions=kept.versions,
            earned=kept.contributions,
            evaluations=kept.evaluations,
            samples=kept.samples,
            events=kept.events,
        )

    async def _replay(self) -> None:
        """Entries from before this builder, which takes their times from the database."""
        log = self._log()
        before, until = log.index, time.monotonic() + SLICE_S
        while self._fed < log.index:
            index = self._fed + 1
            self._entry(index, None if index <= before else time.time())
            if time.monotonic() >= until:
                await asyncio.sleep(0)
                until = time.monotonic() + SLICE_S
                if self._dropped_after() is not None:
                    return  # `look` begins anew
        self._replaying = False

    async def look(self) -> None:
        """Begin anew where entries that the builder has seen were dropped."""
        dropped_after = self._dropped_after()
        if dropped_after is not None:
            self._went_back(self._log().version_at(dropped_after))
            await self.save()
            await self.begin()

    def installed(self, action: InstallEntry) -> None:
        """The witness has come to this entry."""
        if self._replaying or self._dropped_after() is not None:
            return  # `begin` comes to it
        for index in range(self._fed + 1, min(action.index, self._log().index) + 1):
            self._entry(index, time.time())

    def _dropped_after(self) -> int | None:
        """The last entry that the builder has seen and the log still has; None where it has all of them."""
        log = self._log()
        began = log.recovery_after(self._epoch)
        kept = log.index if began is None else began - 1
        return kept if kept < self._fed else None

    def _entry(self, index: int, when_unix: float | None) -> None:
        log = self._log()
        content = log.content(index)
        if isinstance(content, OuterStep):
            self._version = content.version
        self._roots.setdefault(self._version, set()).add(content.state_root)
        self.builder.entry_applied(log.entry(index), when_unix=when_unix, losses=self._losses)
        self._fed, self._epoch = index, log.epoch_at(index)
        points = self.builder.history.points
        made_unix = when_unix or (points[-1].when_unix if points else None) or time.time()
        self._tell(index, content, made_unix)

    def note_loss(self, header: DeltaHeader) -> None:
        self._losses[header.delta] = header.loss
        while len(self._losses) > limits.peers_max:
            del self._losses[next(iter(self._losses))]

    def root_of(self, version: int, said: bytes) -> bytes | None:
        """`said`, if it is a certified state root of `version`; another of them, or None, if not.

        Raises: PeerError TOO_EARLY: nobody knows yet.
        """
        if self._replaying:
            raise PeerError("TOO_EARLY", "the log is being read")
        roots = self._roots.get(version, set())
        return said if said in roots else next(iter(roots), None)

    async def save(self) -> Unsaved:
        """What is new into the database. Returns: it; nothing while the builder is being fed."""
        if self._replaying:
            return Unsaved((), (), (), (), ())  # its epoch is not known yet
        new = self.builder.take_unsaved()
        try:
            await self._db.save(
                versions=new.versions,
                contributions=new.credits,
                evaluations=new.evaluations,
                samples=new.samples,
                events=new.events,
                epoch=self._epoch,
            )
        except OperatorError as error:
            self._say("history", f"The page's history is not saved: {error}")
        return new
