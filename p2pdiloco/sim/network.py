"""The network between machines: which links work, how long a thing takes, what gets lost or said twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from p2pdiloco.ids import PeerId
from p2pdiloco.sim.chance import Chance

Link = tuple[PeerId, PeerId]
Deliver = Callable[[], None]


class Weather(NamedTuple):
    """How the network behaves. Delays in seconds; the rest are probabilities of one message."""

    delay_s_min: float = 0.02
    delay_s_max: float = 0.1
    loss: float = 0.0
    duplicate: float = 0.0
    transfer_s_max: float = 0.5  # a blob of this run
    transfer_loss: float = 0.0


CALM = Weather()


class Network:
    """Decides the fate of each message; who is up is the world's business."""

    def __init__(self, chance: Chance, at: Callable[[float, Deliver], None]) -> None:
        """`at(delay_s, deliver)` runs `deliver` that much later."""
        self._chance = chance
        self._at = at
        self.weather = CALM
        self._cut: set[Link] = set()
        self._clogged: dict[Link, list[Deliver]] = {}
        self.slow: dict[Link, tuple[float, float]] = {}  # seconds of a delta, of a snapshot, on such a link
        self.sent = 0

    # Faults

    def cut(self, links: Iterable[Link]) -> None:
        """These directed links lose everything, what is on its way included."""
        self._cut.update(links)

    def mend(self) -> None:
        self._cut.clear()

    def clog(self, link: Link) -> None:
        """Nothing arrives over this link until it is released; nothing is lost either."""
        self._clogged.setdefault(link, [])

    def release(self) -> None:
        """All clogged links deliver what they kept, in another order."""
        clogged, self._clogged = self._clogged, {}
        for link in sorted(clogged):
            kept = clogged[link]
            for deliver in self._chance.sample(kept, len(kept)):
                self._at(self._chance.uniform(0.0, 0.5), deliver)

    def split(self, some: Iterable[PeerId], others: Iterable[PeerId], *, one_way: bool = False) -> None:
        """`some` and `others` are apart; `one_way`: others' messages still reach `some`."""
        theirs = list(others)
        for a in list(some):
            self.cut((a, b) for b in theirs)
            if not one_way:
                self.cut((b, a) for b in theirs)

    # Traffic

    def works(self, source: PeerId, target: PeerId) -> bool:
        return (source, target) not in self._cut

    def send(self, source: PeerId, target: PeerId, deliver: Deliver) -> None:
        """A small message: it may be lost, late, twice, or overtaken by a later one."""
        self.sent += 1
        chance, weather = self._chance, self.weather
        if not self.works(source, target) or chance.happens(weather.loss):
            return
        link = (source, target)
        if self._clogged and link in self._clogged:
            self._clogged[link].append(deliver)
            return
        self._at(chance.uniform(weather.delay_s_min, weather.delay_s_max), deliver)
        if chance.happens(weather.duplicate):
            self._at(chance.uniform(weather.delay_s_min, 3 * weather.delay_s_max), deliver)

    def transfer(
        self, source: PeerId, target: PeerId, deliver: Callable[[bool], None], *, snapshot: bool = False
    ) -> None:
        """A blob: ends in `deliver(arrived)`, always, as a transport with time limits does."""
        chance, weather = self._chance, self.weather
        link = (source, target)
        lost = chance.happens(weather.transfer_loss) or link in self._clogged

        def end() -> None:
            deliver(not lost and self.works(source, target) and self.works(target, source))

        seconds = chance.uniform(weather.delay_s_min, weather.transfer_s_max)
        if link in self.slow:
            seconds = self.slow[link][snapshot]
        self._at(seconds * (3 if lost else 1), end)
