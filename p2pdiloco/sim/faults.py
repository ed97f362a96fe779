"""What goes wrong in a random world, and how it is mended.

Faults of architecture.md 5: loss, delay, duplication, reorder (weather), partitions, clogged links, crash
between any two actions and restart, freezing, clock drift, full disks, late joiners, leavers, a tracker
that is away. Rates are drawn for each world, so that some worlds are calm in all but one thing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from p2pdiloco.sim.network import CALM, Weather

if TYPE_CHECKING:
    from p2pdiloco.sim.chance import Chance
    from p2pdiloco.sim.machine import Machine
    from p2pdiloco.sim.world import World

CLOCK_OFFSET_S = 288.0  # target R6
CLOCK_DRIFT = 0.02


class Rates(NamedTuple):
    """Of one world. Probabilities are per machine, or per world for the network, and second."""

    crash: float
    restart: float
    freeze: float
    split: float
    clog: float
    full_disk: float
    tracker: float
    leave: float
    weather: Weather


def draw_rates(chance: Chance) -> Rates:
    """The character of a world."""
    pick = chance.choice
    return Rates(
        crash=pick((0.0, 0.004, 0.01, 0.03)),
        restart=pick((0.1, 0.3)),
        freeze=pick((0.0, 0.004, 0.015)),
        split=pick((0.0, 0.02, 0.06)),
        clog=pick((0.0, 0.0, 0.04)),
        full_disk=pick((0.0, 0.0, 0.005)),
        tracker=pick((0.0, 0.03)),
        leave=pick((0.0, 0.0, 0.004)),
        weather=Weather(
            delay_s_min=0.01,
            delay_s_max=pick((0.05, 0.3, 1.5)),
            loss=pick((0.0, 0.0, 0.05, 0.2)),
            duplicate=pick((0.0, 0.05)),
            transfer_s_max=pick((0.2, 1.0, 3.0)),
            transfer_loss=pick((0.0, 0.0, 0.1, 0.3)),
        ),
    )


class Faults:
    """Rolls the dice once a second until `stop`."""

    def __init__(self, world: World, rates: Rates) -> None:
        self._world = world
        self._rates = rates
        self._running = False

    def start(self) -> None:
        chance = self._world.chance
        self._world.network.weather = self._rates.weather
        for machine in self._world.machines.values():
            if not machine.up:
                machine.clock_offset_s = chance.uniform(-CLOCK_OFFSET_S, CLOCK_OFFSET_S)
                machine.clock_rate = chance.uniform(1 - CLOCK_DRIFT, 1 + CLOCK_DRIFT)
        self._running = True
        self._world.at(1.0, self._second)

    def stop(self) -> None:
        """Mend everything; who is dead or has left stays so."""
        self._running = False
        world = self._world
        world.network.weather = CALM
        world.network.mend()
        world.network.release()
        world.tracker_up = True
        for machine in world.machines.values():
            machine.disk.full = False
            machine.doom = None
            machine.thaw()

    def _second(self) -> None:
        if not self._running:
            return
        world, rates = self._world, self._rates
        happens = world.chance.happens
        for machine in world.machines.values():
            if machine.up:
                self._living(machine)
            elif not machine.gone and happens(rates.restart):
                machine.start()
        if happens(rates.split):
            self._split()
        elif happens(0.12):
            world.network.mend()
        if happens(rates.clog):
            links = world.chance.sample(list(world.machines), 2)
            if len(links) == 2:
                world.network.clog((links[0], links[1]))
        elif happens(0.15):
            world.network.release()
        if happens(rates.tracker):
            world.tracker_up = not world.tracker_up
        world.at(1.0, self._second)

    def _living(self, machine: Machine) -> None:
        rates, chance = self._rates, self._world.chance
        happens = chance.happens
        # Whoever leads is hit three times as often: that is where the interesting moments are.
        risk = 3.0 if machine.brain is not None and machine.brain.leading else 1.0
        if happens(rates.crash * risk):
            if happens(0.3):
                machine.crash()
            else:  # in the middle of what it is about to do
                machine.doom = (chance.below(12), "crash", 0.0)
        elif happens(rates.freeze * risk):
            machine.doom = (chance.below(12), "freeze", chance.uniform(0.5, 20.0))
        elif happens(rates.full_disk):
            machine.disk.full = True
        elif happens(rates.leave) and machine.role == "node":
            machine.leave()
        if machine.disk.full and happens(0.3):
            machine.disk.full = False

    def _split(self) -> None:
        world = self._world
        everybody = list(world.machines)
        some = world.chance.sample(everybody, 1 + world.chance.below(max(1, len(everybody) // 2)))
        others = [p for p in everybody if p not in some]
        if world.chance.happens(0.4):  # a partial one: some links only
            others = world.chance.sample(others, 1 + world.chance.below(max(1, len(others))))
        world.network.split(some, others, one_way=world.chance.happens(0.25))
