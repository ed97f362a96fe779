"""Whom a fetch asks, and in which order (scenarios L2, L3, L4)."""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import ExitStack
from typing import Any

import pytest

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError, TransportError
from p2pdiloco.ids import digest_of, short
from p2pdiloco_node.ports import Purpose
from p2pdiloco_node.transport import fetching

DATA = hashlib.shake_128(b"a blob").digest(1_500_000)
NAME = digest_of(DATA)


async def test_a_donor_that_does_not_answer_is_asked_behind_the_others(ends: Any) -> None:
    """A dead peer costs one try, not one for each of a thousand shards; it may come back."""
    one, two, three = await ends(3)
    for end in (two, three):
        end.blobs.put(NAME, DATA, Purpose.SHARD)
    other = digest_of(b"other")
    three.blobs.put(other, b"other", Purpose.SHARD)
    await two.listener.__aexit__(None, None, None)
    asked = []
    read = one.client._fetcher._read

    async def watched(url: str, donor: Any, *rest: Any) -> None:
        asked.append(donor)
        await read(url, donor, *rest)

    one.client._fetcher._read = watched
    await one.client.fetch(NAME, len(DATA), [two.peer, three.peer], Purpose.SHARD)
    await one.client.fetch(other, 5, [two.peer, three.peer], Purpose.SHARD)
    assert asked == [two.peer, three.peer, three.peer]


async def test_deltas_on_their_way_are_known(ends: Any, until: Any) -> None:
    """So that data shards can give way to them."""
    one, two = await ends(2)
    one.blobs.put(NAME, DATA)
    two.server.allow(NAME, len(DATA), one.peer)
    assert not one.client.deltas_on_the_way
    upload = asyncio.create_task(one.client.upload(two.peer, NAME, len(DATA)))
    await until(lambda: one.client.deltas_on_the_way)
    await upload
    assert not one.client.deltas_on_the_way
    two.blobs.put(digest_of(b"shard"), b"shard", Purpose.SHARD)
    with pytest.raises(TransportError):
        await one.client.fetch(digest_of(b"nowhere"), 9, [two.peer])
    shard = asyncio.create_task(one.client.fetch(digest_of(b"shard"), 9, [two.peer], Purpose.SHARD))
    await asyncio.sleep(0)
    assert not one.client.deltas_on_the_way
    await shard


async def test_a_fetch_goes_on_at_another_donor(ends: Any) -> None:
    one, two, three = await ends(3)
    for donor in (two, three):
        donor.blobs.put(NAME, DATA, Purpose.SHARD)
    one.blobs.append_part(NAME, 0, DATA[:1_000_000], len(DATA), Purpose.SHARD)
    await two.listener.__aexit__(None, None, None)
    await one.client.fetch(NAME, len(DATA), [two.peer, three.peer], Purpose.SHARD)
    assert one.blobs.read(NAME) == DATA
    assert one.client.traffic.down_data == 500_000


async def test_busy_donors_name_others(ends: Any) -> None:
    one, two, three = await ends(3)
    for donor in (two, three):
        donor.blobs.put(NAME, DATA, Purpose.SHARD)
    two.named = [three.peer]
    with ExitStack() as places:
        for _ in range(limits.uploads_per_node_max):
            places.enter_context(two.server._blob_routes._outlet.held("192.0.2.1"))
        await one.client.fetch(NAME, len(DATA), [two.peer], Purpose.SHARD)
    assert three.server.traffic.up_data == len(DATA)
    assert one.client.strikes.listed() == {}


async def test_what_a_donor_did_that_gave_nothing_is_told_before_the_others_are_asked_again(
    ends: Any,
) -> None:
    """A busy donor was asked again for half a minute before anything was known of it."""
    one, busy, damaged, silent = await ends(4)
    busy.blobs.put(NAME, DATA, Purpose.SHARD)
    damaged.blobs.put(NAME, DATA, Purpose.SHARD)
    damaged.blobs.path(NAME).write_bytes(bytes(len(DATA)))
    await silent.listener.__aexit__(None, None, None)
    told: asyncio.Queue[str] = asyncio.Queue()
    with ExitStack() as places:
        for _ in range(limits.uploads_per_node_max):
            places.enter_context(busy.server._blob_routes._outlet.held("192.0.2.1"))
        for donor, words in (
            (busy, f"peer {short(busy.peer)} is busy"),
            (damaged, f"it came damaged, last from peer {short(damaged.peer)}"),
            (silent, f"peer {short(silent.peer)} at {one.client.urls(silent.peer)[0]}: refused"),
        ):
            fetch = asyncio.create_task(
                one.client.fetch(NAME, len(DATA), [donor.peer], Purpose.SHARD, tell=told.put_nowait)
            )
            async with asyncio.timeout(10):
                assert await told.get() == words
            fetch.cancel()
            await asyncio.gather(fetch, return_exceptions=True)
    with pytest.raises(TransportError):
        await one.client.fetch(digest_of(b"x"), 1, [], Purpose.SHARD, tell=told.put_nowait)
    assert told.get_nowait() == "nobody is known who may have it"


LARGE = 1000  # bytes that a RunSpec allows where its owner named DATA


async def test_a_blob_larger_than_its_run_spec_says_is_the_owner_s_fault(ends: Any) -> None:
    """Whoever served it was struck as a liar, and the node waited for ever."""
    one, two = await ends(2)
    two.blobs.put(NAME, DATA, Purpose.SNAPSHOT)
    with pytest.raises(OperatorError, match="the run's owner has to make the run anew") as caught:
        await one.client.fetch(NAME, LARGE, [two.peer], Purpose.SNAPSHOT, of_spec=True)
    assert caught.value.exit_code == 5
    assert one.client.strikes.listed() == {}
    assert not one.blobs.has(NAME)
    assert one.blobs.used(Purpose.SNAPSHOT) == 0


async def test_who_says_so_without_its_bytes_is_a_liar(ends: Any) -> None:
    one, liar = await ends(2)
    liar.blobs.put(NAME, DATA, Purpose.SNAPSHOT)
    liar.blobs.path(NAME).write_bytes(bytes(len(DATA)))
    with pytest.raises(TransportError, match="TOO_BIG"):
        await one.client.fetch(NAME, LARGE, [liar.peer], Purpose.SNAPSHOT, of_spec=True)
    assert one.client.strikes.listed()[liar.peer].last_reason == "TOO_BIG"


async def test_what_would_cost_too_much_to_see_is_held_against_nobody(
    ends: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = await ends(2)
    two.blobs.put(NAME, DATA, Purpose.SNAPSHOT)
    monkeypatch.setattr(limits, "oversize_bytes_max", len(DATA) - LARGE - 1)
    with pytest.raises(TransportError, match="it lies, or the run's owner has to"):
        await one.client.fetch(NAME, LARGE, [two.peer], Purpose.SNAPSHOT, of_spec=True)
    assert one.client.strikes.listed() == {}
    assert one.client.traffic.down_data == 0


@pytest.mark.parametrize("lies", [False, True])
async def test_what_is_too_large_is_judged_from_its_first_byte_and_a_part_here_stays(
    ends: Any, lies: bool
) -> None:
    """Bytes from the middle on show nothing; and a lie made a node throw away what it had."""
    one, two = await ends(2)
    two.blobs.put(NAME, DATA, Purpose.SNAPSHOT)
    if lies:
        two.blobs.path(NAME).write_bytes(bytes(len(DATA)))
    one.blobs.append_part(NAME, 0, DATA[:500], LARGE, Purpose.SNAPSHOT)
    with pytest.raises(TransportError if lies else OperatorError, match="TOO_BIG" if lies else "run's owner"):
        await one.client.fetch(NAME, LARGE, [two.peer], Purpose.SNAPSHOT, of_spec=True)
    assert list(one.client.strikes.listed()) == ([two.peer] if lies else [])
    assert one.blobs.part_size(NAME) == 500


async def test_who_tells_two_sizes_is_a_liar(ends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = await ends(2)
    two.blobs.put(NAME, DATA, Purpose.SNAPSHOT)
    one.blobs.append_part(NAME, 0, DATA[:500], LARGE, Purpose.SNAPSHOT)
    told = iter([(500, len(DATA)), (0, LARGE)])
    monkeypatch.setattr(fetching, "_extent", lambda _: next(told))
    with pytest.raises(TransportError, match="it told two sizes"):
        await one.client.fetch(NAME, LARGE, [two.peer], Purpose.SNAPSHOT, of_spec=True)
    assert list(one.client.strikes.listed()) == [two.peer]
    assert one.blobs.part_size(NAME) == 500
