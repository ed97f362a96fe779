"""Places for bodies on their way. Without shares, who comes first and sends slowly keeps everybody out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import IPv6Address, ip_address

from p2pdiloco import limits


class Slots:
    """At most `places` in all. Strangers leave the last `kept` to peers that the log knows, and nobody has
    more than a share for one address. Called on the event loop only.

    `local`: every peer is trusted and all may be on one machine, so there are no shares.
    """

    def __init__(
        self, places: int, *, kept: int, local: bool, per_address: int = limits.slots_per_address_max
    ) -> None:
        self._places = places
        self._kept = 0 if local else kept
        self._per_address = places if local else per_address
        self._taken: Counter[str] = Counter()

    def is_free(self, address: str, *, known: bool) -> bool:
        """Whether a peer at `address` may have a place now. `known`: the log knows it."""
        places = self._places if known else self._places - self._kept
        return self._taken.total() < places and self._taken[household(address)] < self._per_address

    @contextmanager
    def held(self, address: str) -> Iterator[None]:
        """A place taken for as long as the block runs; ask `is_free` first, in the same step of the loop."""
        home = household(address)
        self._taken[home] += 1
        try:
            yield
        finally:
            self._taken[home] -= 1
            if not self._taken[home]:
                del self._taken[home]


def household(address: str) -> str:
    """What one line is given: an IPv4 address, or the upper half of an IPv6 address."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return address
    return str(int(parsed) >> 64) if isinstance(parsed, IPv6Address) else address
