"""What the simulated driver needs of a node's brain; `protocol.node.Node` is the real one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from p2pdiloco.protocol.actions import Action
from p2pdiloco.protocol.context import Identity, Restored
from p2pdiloco.protocol.events import Event
from p2pdiloco.wire.log import Committee


class Brain(Protocol):
    """Events in, actions out; the properties are what checkers read."""

    def handle(self, event: Event, now: float) -> list[Action]: ...

    def deadline(self) -> float: ...

    @property
    def index(self) -> int: ...

    @property
    def version(self) -> int: ...

    @property
    def term(self) -> int: ...

    @property
    def epoch(self) -> int: ...

    @property
    def committee(self) -> Committee: ...

    @property
    def leading(self) -> bool: ...


MakeBrain = Callable[[Identity, Restored, Callable[[], float]], Brain]
