"""The run's data on a node's disk: begun early, within the quota, never in the trainer's way (S12, F4)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError, PeerError, TransportError
from p2pdiloco.ids import Digest, PeerId, RunId, digest_of, tagged_digest
from p2pdiloco.run_spec import BlobRef, DataSpec, EvaluationSet, TokenizerSpec
from p2pdiloco.wire.frames import make_frame
from p2pdiloco_node.data.opened_shards import OpenedShards
from p2pdiloco_node.data.shards import Disk, Shards
from p2pdiloco_node.ports import Purpose
from p2pdiloco_node.storage.blob_store import DiskBlobStore
from p2pdiloco_node.storage.files import Files
from p2pdiloco_node.training.data import DataFeed, DataOrder, ShardReader
from p2pdiloco_node.training.shard_plan import costs_of, least_bytes

SEQ, BLOCKS, WINDOW = 8, 4, 2
RUN, PEER = RunId(tagged_digest("test-run")), PeerId(tagged_digest("test-peer"))


def content(number: int) -> bytes:
    return np.random.default_rng(number).integers(0, 200, SEQ * BLOCKS + 1, np.uint8).tobytes()


class World:
    """A swarm that has blobs, or has them not; and a node's disk that outlives the node's lives."""

    def __init__(self, folder: Path, shards: int) -> None:
        self.folder = folder
        self.frames: dict[Digest, bytes] = {}
        refs = [self.make(content(i)) for i in range(shards)]
        held_out = EvaluationSet("all", self.make(content(900)), 33)
        piece = self.make(b'{"a": "tokenizer"}')
        self.data = DataSpec(TokenizerSpec("json", 256, 0, (piece,)), 1, tuple(refs), (held_out,), WINDOW)
        self.sizes = [ref.tokens for ref in refs]
        self.asked: list[Digest] = []
        self.now_fetching = 0
        self.most_fetching = 0
        self.gate: asyncio.Event | None = None  # fetches wait for it
        self.fails: Exception | None = None
        self.deltas_on_the_way = False
        self.files = Files()

    def make(self, tokens: bytes) -> BlobRef:
        frame = make_frame(tokens)
        self.frames[digest_of(frame)] = frame
        return BlobRef(digest_of(frame), len(frame), len(tokens))

    def hide(self, *shards: int) -> dict[Digest, bytes]:
        """Nobody has them any more."""
        digests = [Digest(self.data.shards[s].digest) for s in shards]
        return {d: self.frames.pop(d) for d in digests}

    def order(self) -> DataOrder:
        return DataOrder(RUN, PEER, self.sizes, seq_len=SEQ, window_shards=WINDOW)

    @property
    def least(self) -> int:
        return least_bytes(self.data)


class Node:
    """One life of a node, with a clock of the test's own."""

    def __init__(self, world: World, *, quota: int = 2**40, cursor: int = 0, free: int = 2**40) -> None:
        self.world = world
        self.now = 1000.0
        self.free = free
        self.said: list[str] = []
        self.note = ""
        self.fetched: list[tuple[int, int]] = []
        self.changes: list[list[int]] = []
        self.store = DiskBlobStore(world.folder / "blobs", world.files)
        self.opened = OpenedShards(world.folder / "tokens", self.store.read, world.files)
        self.shards = Shards(
            world.data, world.order(), self.store, self.opened, self, self, Disk(quota, lambda: self.free),
            cursor=cursor, clock=lambda: self.now,
        )  # fmt: skip
        self.shards.changed = lambda gone: self.changes.append(list(gone))
        self._arranging = True
        arrange = self.shards._arrange

        async def watched(group: asyncio.TaskGroup) -> None:
            self._arranging = True
            await arrange(group)
            self._arranging = False

        self.shards._arrange = watched  # type: ignore[method-assign]

    # Said
    def say(self, _kind: str, text: str) -> None:
        self.said.append(text)

    def fetching(self, _what: str, done: int, total: int) -> None:
        self.fetched.append((done, total))

    def lacks(self, what: str) -> None:
        self.note = what

    # Source
    @property
    def deltas_on_the_way(self) -> bool:
        return self.world.deltas_on_the_way

    async def fetch_shard(self, ref: BlobRef) -> None:
        world, digest = self.world, Digest(ref.digest)
        world.asked.append(digest)
        world.now_fetching += 1
        world.most_fetching = max(world.most_fetching, world.now_fetching)
        try:
            if world.gate is not None:
                await world.gate.wait()
            await asyncio.sleep(0)
            if world.fails is not None:
                raise world.fails
            if digest not in world.frames:
                raise TransportError("nobody has it")
            self.store.put(digest, world.frames[digest], Purpose.SHARD)
        finally:
            world.now_fetching -= 1

    # What a test looks at.
    @property
    def here(self) -> set[int]:
        return {s for s, ref in enumerate(self.world.data.shards) if self.store.has(Digest(ref.digest))}

    @property
    def readable(self) -> set[int]:
        return {s for s, path in enumerate(self.shards.paths) if path.is_file()}

    @property
    def on_disk(self) -> int:
        """Bytes of blobs and of tokens, without the checksums."""
        files = [p for p in self.world.folder.rglob("*") if p.is_file() and p.suffix != ".sum"]
        return sum(p.stat().st_size for p in files)

    async def settled(self) -> None:
        """Until nothing is under way that would go on without the clock."""
        await self.until(lambda: not (self._arranging or self._fetching or self.shards._woken.is_set()))

    @property
    def _fetching(self) -> bool:
        return bool(self.shards._coming) and self.world.gate is None

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not true():  # noqa: ASYNC110 - the code under test has no event for it
                await asyncio.sleep(0.002)

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.shards._woken.set()


@asynccontextmanager
async def living(node: Node) -> AsyncIterator[Node]:
    task = asyncio.create_task(node.shards.run())
    try:
        await node.settled()
        yield node
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        node.store.close()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "node", 10)


async def test_the_trainer_may_begin_with_its_first_window_and_the_rest_follows_in_order(
    world: World,
) -> None:
    world.gate = asyncio.Event()
    named = [s for w in world.order().windows(0) for s in w]
    async with living(Node(world)) as node:
        assert not node.shards.ready.is_set()
        world.gate.set()
        await node.until(node.shards.ready.is_set)
        assert set(named[:WINDOW]) <= node.readable
        await node.until(lambda: len(node.here) == 10)
        await node.settled()
        assert node.readable == set(named[: 2 * WINDOW])  # only the window in use and the next are opened
    numbers = {Digest(ref.digest): s for s, ref in enumerate(world.data.shards)}
    assert [numbers[d] for d in world.asked if d in numbers] == named
    assert world.most_fetching == limits.shard_fetches_max
    assert node.fetched[0] == (0, WINDOW)


async def test_what_is_evaluated_with_is_fetched_first_and_always_kept(world: World) -> None:
    async with living(Node(world, quota=world.least)) as node:
        await node.settled()
        assert node.shards.evaluation_paths[0].read_bytes() == content(900)
        assert node.shards.tokenizer_paths[0].read_bytes() == b'{"a": "tokenizer"}'
    assert set(world.asked[:2]) == {
        world.data.evaluations[0].shard.digest,
        world.data.tokenizer.pieces[0].digest,
    }


def trained(node: Node, cursor: int, count: int) -> tuple[list[bytes], int]:
    """Sequences as a trainer reads them from what is on this disk."""
    reader = ShardReader(node.shards.paths, node.world.sizes, seq_len=SEQ)
    feed = DataFeed(node.world.order(), reader, lambda: node.now, lambda _which, _why: None)
    batch, behind = feed.next_batch(cursor, count)
    return [row.astype(np.uint8).tobytes() for row in batch], behind


async def test_epochs_of_a_corpus_that_never_fits(world: World) -> None:
    """Every sequence once an epoch, within the quota all the time, and the tokens are those of the run."""
    quota = world.least + 60
    assert quota < costs_of(world.data).all // 2 + costs_of(world.data).fixed
    expected = sorted(content(s)[o : o + SEQ + 1] for s in range(10) for o in range(0, SEQ * BLOCKS, SEQ))
    async with living(Node(world, quota=quota)) as node:
        await node.until(node.shards.ready.is_set)
        cursor, read = 0, []
        for _ in range(2 * 10 * BLOCKS // 4):
            await node.settled()
            assert node.on_disk <= quota
            got, cursor = trained(node, cursor, 4)
            read += got
            node.shards.at(cursor)
            node.shards.passed(cursor - 2)
    assert sorted(read[:40]) == sorted(read[40:]) == expected
    assert cursor == 80
    dropped = [gone for gone in node.changes if len(gone) == 1]
    assert dropped


async def test_a_shard_that_nobody_has_is_said_and_stops_nothing(world: World) -> None:
    first = world.order().window(0)
    hidden = world.hide(first[0])
    async with living(Node(world)) as node:
        await node.until(lambda: first[1] in node.readable)
        assert not node.shards.ready.is_set()  # with a little patience nothing is passed over
        assert node.said == []
        node.later(limits.window_patience_s)
        await node.until(node.shards.ready.is_set)
        for _ in range(4):
            await node.settled()
            node.later(limits.shard_backoff_s_max)
        await node.until(lambda: len(node.here) == 9)
        await node.until(lambda: bool(node.said))
        (said,) = node.said
        assert said.startswith(f"Nobody gives the data shard {first[0]} (nobody has it); training goes on")
        assert node.note == f"nobody has data shard {first[0]}"
        world.frames |= hidden
        node.later(limits.shard_backoff_s_max)
        await node.until(lambda: first[0] in node.readable)
        await node.until(lambda: node.said[1:] == [f"The data shard {first[0]} is here now."])
        assert [first[0]] in node.changes
        assert node.note == ""


async def test_a_swarm_without_data_is_not_flooded_with_questions(world: World) -> None:
    """Everything ahead is missing: the pauses grow, whatever number of shards is asked for."""
    named = [s for w in world.order().windows(0) for s in w]
    world.hide(*named[2 * WINDOW :])
    async with living(Node(world)) as node:
        await node.until(node.shards.ready.is_set)
        await node.settled()
        before = len(world.asked)
        for _ in range(60):
            node.later(1.0)
            await node.settled()
    assert len(world.asked) - before <= 30


async def test_one_at_a_time_while_a_delta_is_on_its_way(world: World) -> None:
    async with living(Node(world, quota=world.least)) as node:
        await node.until(node.shards.ready.is_set)
        await node.settled()
        world.most_fetching, world.deltas_on_the_way = 0, True
        node.shards.at(2 * WINDOW * BLOCKS)
        await node.until(lambda: set(world.order().window(2 * WINDOW * BLOCKS)) <= node.readable)
        assert world.most_fetching == 1


async def test_a_restart_goes_on_with_what_is_whole(world: World) -> None:
    """Killed at any moment: blobs are kept, opened files are looked at, a damaged one is made anew."""
    async with living(Node(world)) as node:
        await node.until(lambda: len(node.here) == 10)
        await node.settled()
        paths = node.shards.paths
    first = world.order().window(0)
    damaged = bytearray(paths[first[0]].read_bytes())
    damaged[5] ^= 1
    paths[first[0]].write_bytes(damaged)
    asked = len(world.asked)
    async with living(Node(world)) as again:
        await again.until(again.shards.ready.is_set)
        assert again.shards.paths[first[0]].read_bytes() == content(first[0])
        await again.settled()
        assert len(world.asked) == asked


async def test_a_blob_that_was_lost_or_damaged_is_fetched_again(world: World) -> None:
    first = world.order().window(0)
    async with living(Node(world)) as node:
        await node.until(lambda: len(node.here) == 10)
        await node.settled()
        one, two = (node.store.path(Digest(world.data.shards[s].digest)) for s in first)
        assert one is not None and two is not None  # noqa: PT018
        one.unlink()
        two.write_bytes(b"damaged")
        for number in first:
            node.shards.paths[number].unlink()
        node.shards.missed(first)
        await node.until(lambda: set(first) <= node.readable and one.is_file())
        assert two.read_bytes() == world.frames[Digest(world.data.shards[first[1]].digest)]


@pytest.mark.parametrize("when", ["at the start", "while it runs"])
async def test_nothing_damaged_is_left_to_be_read_when_nobody_has_the_shard(world: World, when: str) -> None:
    """Its size is right: only the checksum tells it from what it was."""
    first = world.order().window(0)
    async with living(Node(world)) as node:
        await node.until(lambda: len(node.here) == 10)
        await node.settled()
        ref, path = world.data.shards[first[0]], node.shards.paths[first[0]]
        world.hide(first[0])
        node.store.delete(Digest(ref.digest))
        path.write_bytes(bytes(ref.tokens))
        if when == "while it runs":
            node.shards._here.discard(first[0])
            node.shards.trainer_failed()
            await node.until(lambda: not path.exists())
            assert [first[0]] in node.changes
    if when == "at the start":
        async with living(Node(world)) as again:
            await again.settled()
            assert again.readable & set(first) == {first[1]}
    assert not path.exists()


async def test_a_trainer_that_ended_gets_whole_files_for_where_it_begins_again(world: World) -> None:
    windows = list(world.order().windows(0))
    async with living(Node(world, quota=world.least + 100)) as node:
        await node.until(node.shards.ready.is_set)
        node.shards.at(WINDOW * BLOCKS)
        await node.settled()
        assert not set(windows[0]) & node.readable
        assert set(windows[0]) <= node.here  # a pass that began there is not durable yet
        broken = windows[1][0]
        node.shards.paths[broken].write_bytes(bytes(world.sizes[broken]))
        node.shards.trainer_failed()
        await node.until(lambda: set(windows[0]) <= node.readable)
        await node.until(lambda: broken in node.readable and node.opened.is_whole(world.data.shards[broken]))
        assert node.shards.paths[broken].read_bytes() == content(broken)


async def test_a_smaller_quota_is_kept_from_the_start_on(world: World) -> None:
    async with living(Node(world)) as node:
        await node.until(lambda: len(node.here) == 10)
        await node.settled()
        assert node.on_disk > world.least
    asked = len(world.asked)
    async with living(Node(world, quota=world.least, cursor=3)) as node:
        await node.settled()
        assert node.on_disk <= world.least
        named = [s for w in world.order().windows(3) for s in w]
        assert node.readable == set(named[: 2 * WINDOW])
        assert len(world.asked) == asked


async def test_a_full_disk_is_a_sentence_and_ends_nothing(world: World) -> None:
    async with living(Node(world, quota=world.least)) as node:
        await node.until(node.shards.ready.is_set)
        await node.settled()
        world.fails = OperatorError("The disk is full: make room there.", 6)
        far = world.order().window(8 * BLOCKS)
        node.shards.at(8 * BLOCKS)
        await node.settled()
        asked = len(world.asked)
        for _ in range(20):
            node.later(2.0)
            await node.settled()
        assert node.said == [
            "The disk is full: make room there. Training goes on with the data that are here."
        ]
        assert len(world.asked) == asked
        world.fails = None
        node.later(61.0)
        await node.until(lambda: set(far) <= node.readable)


async def test_data_never_take_the_last_of_the_disk(world: World) -> None:
    """Other files need it more: what is not read is given back."""
    async with living(Node(world)) as node:
        await node.until(lambda: len(node.here) == 10)
        node.free = -10_000
        node.later(31.0)
        await node.until(lambda: node.here == set(world.order().window(0)))
        assert node.readable == node.here


async def test_what_the_owner_made_wrong_ends_it_with_a_sentence(world: World) -> None:
    first = world.order().window(0)[0]
    ref = world.data.shards[first]
    wrong = BlobRef(ref.digest, ref.size, ref.tokens + 1)
    shards = (*world.data.shards[:first], wrong, *world.data.shards[first + 1 :])
    world.data = DataSpec(world.data.tokenizer, 1, shards, world.data.evaluations, WINDOW)
    node = Node(world)
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(node.shards.run(), 5)
    (fault,) = caught.value.exceptions
    assert isinstance(fault, OperatorError)
    assert fault.exit_code == 5
    node.store.close()


async def test_a_shard_larger_than_its_run_says_ends_it_with_a_sentence(world: World) -> None:
    """The disk was blamed for it, and it was fetched again for ever."""
    world.fails = OperatorError("the run's owner has to make the run anew", 5)
    node = Node(world)
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(node.shards.run(), 5)
    assert {getattr(fault, "exit_code", None) for fault in caught.value.exceptions} == {5}
    node.store.close()


async def test_a_part_of_what_is_not_wanted_is_not_kept(world: World) -> None:
    windows: list[Sequence[int]] = list(world.order().windows(0))
    store = DiskBlobStore(world.folder / "blobs", world.files)
    wanted, other = (Digest(world.data.shards[w[0]].digest) for w in (windows[0], windows[-1]))
    for digest in (wanted, other):
        store.append_part(digest, 0, world.frames[digest][:5], len(world.frames[digest]), Purpose.SHARD)
    store.close()
    world.gate = asyncio.Event()
    async with living(Node(world, quota=world.least)) as node:
        assert node.store.unfinished(Purpose.SHARD) == [wanted]


async def test_peers_that_lie_are_only_asked_again(world: World) -> None:
    world.fails = PeerError("TOO_BIG", "a lie")
    async with living(Node(world)) as node:
        await node.settled()
        assert not node.shards.ready.is_set()
        assert node.said == [], "it is nothing that the node's owner can mend"
        asked = len(world.asked)
        assert asked > 0
        world.fails = None
        node.later(5.0)
        await node.until(node.shards.ready.is_set)
        assert len(world.asked) > asked
