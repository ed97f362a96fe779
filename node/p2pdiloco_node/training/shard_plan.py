"""Which data shards a node wants on its disk, within its quota, and which give way. Plain numbers, no file.

A shard costs its blob, as it travels and is served, and while it is read also its tokens, as the trainer maps
them. Wanted are, in this order: the window in use; what is here of the window in which a trainer that starts
again would begin; the next window; then blobs ahead, in the order in which they will be read, as far as the
quota goes. What is not wanted stays until room is needed: the longest unused goes first.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.exit_codes import FILES
from p2pdiloco.run_spec import DataSpec
from p2pdiloco.words import count_of
from p2pdiloco_node.training.data import DataOrder


class Costs(NamedTuple):
    """Bytes on disk."""

    blobs: tuple[int, ...]  # of each shard as it travels
    tokens: tuple[int, ...]  # of each shard opened
    fixed: int  # evaluation sets and tokenizer, both ways: always here

    @property
    def all(self) -> int:
        """The whole corpus, every shard opened: more than this is never used."""
        return self.fixed + sum(self.blobs) + sum(self.tokens)


def costs_of(data: DataSpec) -> Costs:
    width = data.token_bytes
    sets = [e.shard for e in data.evaluations]
    fixed = sum(ref.size + width * ref.tokens for ref in sets)
    fixed += sum(ref.size + ref.tokens for ref in data.tokenizer.pieces)
    return Costs(tuple(s.size for s in data.shards), tuple(width * s.tokens for s in data.shards), fixed)


def least_bytes(data: DataSpec) -> int:
    """Two windows of the largest shards, and what is always here: less is refused."""
    costs = costs_of(data)
    each = sorted((a + b for a, b in zip(costs.blobs, costs.tokens, strict=True)), reverse=True)
    return costs.fixed + sum(each[: 2 * data.window_shards])


def check_quota(data: DataSpec, quota: int) -> None:
    """Raises: OperatorError: `quota` bytes (--data-disk) are too few to train with; says how many are not."""
    least = least_bytes(data)
    if quota < least:
        shards = min(2 * data.window_shards, len(data.shards))
        unit, name = (10**6, "MB") if least >= 10**6 else (10**3, "KB")
        # Tenths, one down and one up: so they differ whenever the sizes do. A byte more than the least,
        # because a fraction that is read again may lose one.
        allowed, needed = quota * 10 // unit, -(-(least + 1) * 10 // unit)
        raise OperatorError(
            f"--data-disk allows {_tenths(allowed)} {name} for the run's data, and a node needs at least "
            f"{_tenths(needed)} {name}: "
            f"{shards} of its {count_of(len(data.shards), 'shard')}, as they travel and opened, and what it "
            f"evaluates with. Give --data-disk {_tenths(needed).replace(',', '')}{name} or more.",
            FILES,
        )


class Plan(NamedTuple):
    in_use: tuple[int, ...]  # the window that is read now
    read: tuple[int, ...]  # to be here and opened, most wanted first: `in_use`, and of the next window
    ahead: tuple[int, ...]  # to be here as blobs, most wanted first


def make_plan(
    order: DataOrder, costs: Costs, *, live: int, durable: int, here: Collection[int], room: int
) -> Plan:
    """What a node wants whose trainer is at `live` and would start again at `durable` (cursors).

    `here`: shards whose blobs are on this disk; `room`: bytes for all of the data. What a new trainer would
    read again is kept, but never fetched for that alone.
    """
    windows = order.windows(live)
    in_use = next(windows)
    following = next(windows, ())
    again = [s for s in order.window(durable) if s in here and s not in in_use]
    each = [a + b for a, b in zip(costs.blobs, costs.tokens, strict=True)]
    # What a trainer reads now, or after a crash, is never given up, however full the disk is.
    bound = sum(each[s] for s in in_use) + sum(costs.blobs[s] for s in again)
    left = max(room - costs.fixed, bound) - bound
    read = list(in_use)
    for shard in sorted(following, key=lambda s: s not in here):
        left -= costs.tokens[shard] if shard in again else each[shard]
        if left < 0:
            return Plan(in_use, tuple(read), tuple(s for s in again if s not in read))
        read.append(shard)
    ahead = [s for s in again if s not in read]
    for shard in (s for window in windows for s in window if s not in again):
        left -= costs.blobs[shard]
        if left < 0:
            break
        ahead.append(shard)
    return Plan(in_use, tuple(read), tuple(ahead))


def gives_way(order: DataOrder, plan: Plan, here: Collection[int], *, live: int) -> list[int]:
    """Shards that are here and not wanted, the longest unused first."""
    wanted = {*plan.read, *plan.ahead}
    used = order.last_used(live)
    return sorted((s for s in here if s not in wanted), key=lambda s: (int(used[s]), s))


def shortfall(costs: Costs, *, read: Collection[int], here: Collection[int], room: int) -> int:
    """Bytes by which what is `here`, with the tokens of those that are `read`, is more than `room`."""
    used = costs.fixed + sum(costs.blobs[s] for s in here)
    used += sum(costs.tokens[s] for s in read if s in here)
    return used - room


def data_bytes(data: DataSpec, *, quota: int, free: int) -> int:
    """What the data of a run will take of a disk with `free` bytes: all of it, less where `quota` or the disk
    is smaller, never less than it needs."""
    return max(least_bytes(data), min(costs_of(data).all, quota, free - limits.data_disk_reserve_bytes))


def _tenths(count: int) -> str:
    return f"{count / 10:,.1f}".removesuffix(".0")
