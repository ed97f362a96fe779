"""Bounds on what strangers may cost this machine: rates, strikes, replays (targets H2, scenario X2).

All of it is local opinion with monotonic time; nothing here ever enters a weight. Each table is bounded;
what was idle longest is forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

from p2pdiloco import limits

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
Clock = Callable[[], float]

# Opening these costs many signatures or much memory.
HEAVY_KINDS = frozenset({"Entries", "Peers", "SnapshotOffer", "SnapshotWanted", "EntriesWanted"})


class Recent(Generic[K, V]):
    """A table of bounded size: the least recently used is forgotten."""

    def __init__(self, items_max: int) -> None:
        self._items: OrderedDict[K, V] = OrderedDict()
        self._items_max = items_max

    def get(self, key: K) -> V | None:
        value = self._items.get(key)
        if value is not None:
            self._items.move_to_end(key)
        return value

    def put(self, key: K, value: V) -> None:
        self._items[key] = value
        self._items.move_to_end(key)
        if len(self._items) > self._items_max:
            self._items.popitem(last=False)

    def items(self) -> list[tuple[K, V]]:
        return list(self._items.items())


class Rate(NamedTuple):
    """A token bucket: `per_s` in the long run, `burst` at once."""

    per_s: float
    burst: float


ADDRESS_RATE = Rate(limits.messages_per_address_per_s, limits.messages_per_address_burst)
PEER_RATE = Rate(limits.messages_per_peer_per_s, limits.messages_per_peer_burst)
HEAVY_RATE = Rate(limits.heavy_messages_per_peer_per_s, limits.heavy_messages_per_peer_burst)
# A household shares an address: as much as eight peers of one kind.
HEAVY_ADDRESS_RATE = Rate(8 * HEAVY_RATE.per_s, 8 * HEAVY_RATE.burst)


class Rates:
    """Token buckets by any key."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._buckets: Recent[Hashable, tuple[float, float]] = Recent(limits.rate_buckets_max)

    def allow(self, key: Hashable, rate: Rate) -> bool:
        """Take one token of `key`; False if there is none."""
        now = self._clock()
        tokens, at = self._buckets.get(key) or (rate.burst, now)
        tokens = min(rate.burst, tokens + (now - at) * rate.per_s)
        allowed = tokens >= 1
        self._buckets.put(key, (tokens - 1 if allowed else tokens, now))
        return allowed


class Struck(NamedTuple):
    weight: float  # strikes not forgiven yet, at `at`
    at: float
    total: int
    last_reason: str
    banned_until: float


class Strikes:
    """Faults by peer (32 bytes) or address (text). At `limits.strikes_max` the key is refused for a while.

    Strikes are forgiven one by one with time, so that an honest peer with a bad hour comes back.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._struck: Recent[Hashable, Struck] = Recent(limits.rate_buckets_max)

    def strike(self, key: Hashable, reason: str) -> None:
        now = self._clock()
        old = self._struck.get(key) or Struck(0, now, 0, "", 0)
        weight = max(0.0, old.weight - (now - old.at) / limits.strike_forgiven_s) + 1
        until = old.banned_until
        if weight >= limits.strikes_max:
            until, weight = now + limits.strike_ban_s, 0.0
        self._struck.put(key, Struck(weight, now, old.total + 1, reason, until))

    def refused_for_s(self, key: Hashable) -> float:
        """Seconds for which the key is refused; 0 if it is not."""
        struck = self._struck.get(key)
        return max(0.0, struck.banned_until - self._clock()) if struck else 0.0

    def total(self, key: Hashable) -> int:
        struck = self._struck.get(key)
        return struck.total if struck else 0

    def listed(self) -> dict[Hashable, Struck]:
        """For the local status."""
        return dict(self._struck.items())


class Replays:
    """Which messages of a sender were seen: its numbers of one boot, in a sliding window.

    An envelope recorded by somebody must not make a dead peer look alive. Order does not matter inside
    the window. Several boots of a key are kept apart: a restored disk image is told by the rules.
    """

    WINDOW = 1024  # messages

    def __init__(self) -> None:
        self._seen: Recent[tuple[bytes, int], tuple[int, int]] = Recent(limits.rate_buckets_max)

    def fresh(self, sender: bytes, boot: int, n: int) -> bool:
        """Whether (boot, n) of `sender` is new; from now on it is not."""
        top, bits = self._seen.get((sender, boot)) or (n, 0)
        if n > top:
            bits = (bits << min(n - top, self.WINDOW)) & ((1 << self.WINDOW) - 1)
            top = n
        behind = top - n
        if behind >= self.WINDOW or bits >> behind & 1:
            return False
        self._seen.put((sender, boot), (top, bits | 1 << behind))
        return True
