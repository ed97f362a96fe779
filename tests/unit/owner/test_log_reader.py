"""A stranger's log: checked while it comes, read on from where it was, over a recovery that cut it."""

from __future__ import annotations

import asyncio
import hashlib
from io import BytesIO

import pytest
from aiohttp import web

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.ids import NO_DIGEST
from p2pdiloco.rules.state import after_entry, genesis_state
from p2pdiloco.wire.codec import encode
from p2pdiloco.wire.log import Committee, OwnerEntry, OwnerWord
from p2pdiloco_node.export.log_reader import LogReader
from p2pdiloco_node.progress import Quiet
from p2pdiloco_node.storage import journal
from tests.unit.protocol.builders import NODES, Chain, certify, make_run, recover

from .conftest import Served, Swarm

A, B = NODES[:2]
RUN = make_run(A)


def reader_of(swarm: Swarm, host: Served) -> LogReader:
    return LogReader(swarm.session, RUN.id, RUN.spec, host.url, Quiet().progress, advice="--there")


def frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "big") + hashlib.sha256(payload).digest()[:8] + payload


async def test_it_goes_on_from_the_newest_entry(swarm: Swarm) -> None:
    chain = Chain(RUN)
    host = (await swarm.serve(RUN, A)).has(chain)
    reader = reader_of(swarm, host)
    for count in (0, 3, 0, 4):
        chain.steps(count)
        host.has(chain)
        await reader.catch_up()
        assert (reader.log.index, reader.log.head) == (chain.log.index, chain.log.head)
        assert reader.rules == chain.state


@pytest.mark.parametrize("more", [0, 2, 6], ids=["shorter", "still shorter", "longer than before"])
async def test_a_log_that_a_recovery_cut_is_read_anew(swarm: Swarm, more: int) -> None:
    chain = Chain(RUN)
    chain.steps(6)
    host = (await swarm.serve(RUN, A)).has(chain)
    reader = reader_of(swarm, host)
    await reader.catch_up()
    host.journal.load_entries()
    host.journal.cut(2)
    after = Chain(RUN)
    after.steps(2)
    entry = recover(after.log, after.state, 2, Committee(NO_DIGEST, (A.peer_id,)))
    after.log.append(entry)
    after.state = after_entry(after.state, after.log.content(3), RUN.spec)
    after.entries.append(entry)
    after.steps(more)
    host.has(after)
    await reader.catch_up()
    assert (reader.log.epoch, reader.log.index, reader.log.head) == (1, 3 + more, after.log.head)
    assert reader.rules == after.state


async def test_an_entry_that_is_being_written_is_read_the_next_time(swarm: Swarm) -> None:
    chain = Chain(RUN)
    chain.steps(3)
    host = (await swarm.serve(RUN, A)).has(chain)
    whole = host.path.read_bytes()
    host.path.write_bytes(whole[:-5])
    reader = reader_of(swarm, host)
    await reader.catch_up()
    assert reader.log.index == 2
    host.path.write_bytes(whole)
    await reader.catch_up()
    assert reader.log.index == 3


@pytest.mark.parametrize("bad", ["junk", "forged"])
async def test_the_first_bad_entry_ends_it_whatever_would_come(swarm: Swarm, bad: str) -> None:
    """The host sends so much and then nothing for ever, of a megabyte that it announced."""
    chain = Chain(RUN)
    chain.steps(2)
    host = await swarm.serve(RUN, A, slow=True)
    host.has(chain)
    word = OwnerEntry(OwnerWord("pause", 1, 0, b"", bytes(64)), NO_DIGEST)
    tail = frame(b"no entry at all" if bad == "junk" else encode(certify(chain.log, word, [A])))
    with host.path.open("ab") as file:
        file.write(tail)
    reader = reader_of(swarm, host)
    async with asyncio.timeout(20):
        with pytest.raises(OperatorError, match=r"does not verify: entry 3.*--there"):
            await reader.catch_up()
    assert reader.log.index == 2


async def test_what_stands_before_damage_can_be_read_by_who_asks_for_it(swarm: Swarm) -> None:
    chain = Chain(RUN)
    chain.steps(2)
    host = await swarm.serve(RUN, A, slow=True)
    host.has(chain)
    with host.path.open("ab") as file:
        file.write(bytes([0, 0, 0, 9]) + bytes(17))
    async with asyncio.timeout(20):
        reader = reader_of(swarm, host)
        await reader.read()
        assert (reader.log.index, reader.damaged) == (2, True)
        with pytest.raises(OperatorError, match="what follows entry 2 is damaged"):
            await reader_of(swarm, host).catch_up()


@pytest.mark.parametrize("cut", [False, True], ids=["goes on", "was cut meanwhile"])
async def test_a_log_that_broke_off_is_gone_on_with_if_it_is_the_same(swarm: Swarm, cut: bool) -> None:
    chain = Chain(RUN)
    chain.steps(6)
    host = (await swarm.serve(RUN, A)).has(chain)
    end = host.path.stat().st_size - 10  # within the last entry
    asked: list[str | None] = []

    def broken(request: web.Request, data: bytes) -> bytes:
        asked.append(request.headers.get("Range"))
        if len(asked) > 1:
            return data
        if cut:
            host.journal.load_entries()
            host.journal.cut(1)
            host.has_entries(branch.entries[1:])
        return data[:end]

    branch = Chain(RUN)
    branch.steps(1)
    branch.steps(7, NODES[1])
    host.change = broken
    reader = reader_of(swarm, host)
    await reader.catch_up()
    assert reader.log.head == (branch if cut else chain).log.head
    assert asked[0] is None
    assert asked[1] is not None
    assert asked[1].startswith("bytes=")


async def test_it_stops_at_the_entry_that_is_wanted(swarm: Swarm) -> None:
    chain = Chain(RUN)
    chain.steps(5)
    host = await swarm.serve(RUN, A, slow=True)
    host.has(chain)
    reader = reader_of(swarm, host)
    async with asyncio.timeout(20):
        await reader.catch_up(to=4)
    assert reader.log.index == 4


async def test_few_rules_states_are_kept_and_all_can_be_had(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "rules_kept_entries", 4)
    chain = Chain(RUN)
    chain.steps(10)
    reader = reader_of(swarm, (await swarm.serve(RUN, A)).has(chain))
    await reader.catch_up()
    assert len(reader._kept) == 3
    state = genesis_state(RUN.spec)
    for index in range(11):
        assert reader.rules_at(index) == state
        if index < 10:
            state = after_entry(state, chain.log.content(index + 1), RUN.spec)


def test_frames_are_found_one_by_one() -> None:
    data = frame(b"one") + frame(b"two")
    assert journal.next_frame(data, 0) == frame(b"one")
    assert journal.next_frame(data, 15) == frame(b"two")
    assert journal.next_frame(data[:-1], 15) is None
    assert list(journal.frames_of(BytesIO(data).read)) == [b"one", b"two"]
