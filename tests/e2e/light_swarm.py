"""A swarm in this process on loopback: real sockets, files, brains, tracker; trainers that only keep time.

Nothing of torch is loaded, so a whole life takes seconds. A node that is killed loses what it had not
written, like a process: its tasks are cancelled, and nothing is said.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import numpy as np

from p2pdiloco.diloco.compress import Origin, encode
from p2pdiloco.ids import Digest, RunId, digest_of
from p2pdiloco.protocol import actions as do
from p2pdiloco.protocol import events as fact
from p2pdiloco.protocol.actions import Settled
from p2pdiloco.run_spec import BlobRef, EvaluationSet, RunSpec, run_id_of, sign_run_spec
from p2pdiloco.sim.tiny_run import Timings, tiny_run
from p2pdiloco.wire import codec
from p2pdiloco.wire.frames import make_frame
from p2pdiloco.wire.messages import DeltaHeader
from p2pdiloco.wire.signing import delta_statement
from p2pdiloco_node import __version__
from p2pdiloco_node.config import HostPort, JoinLink, TrackerConfig
from p2pdiloco_node.ports import Array, Purpose
from p2pdiloco_node.process.lifetime import Leaving
from p2pdiloco_node.storage.files import Files
from p2pdiloco_node.storage.keys import load_or_make_key
from p2pdiloco_node.taking_part.announcer import Announcer
from p2pdiloco_node.taking_part.participant import Participant, Setting
from p2pdiloco_node.telemetry import Telemetry
from p2pdiloco_node.tracker import Tracker
from p2pdiloco_node.transport.http_session import make_session

TIMINGS = Timings(1.5, 0.4, 1.6, 3.2, voter_standing_s=1.0, voter_lease_s=8.0)


def make_light_run(folder: Path, **changes: object) -> tuple[RunId, RunSpec]:
    """A run of a few hundred params in `folder`/run, its owner's key in `folder`/owner.key."""
    files = Files()
    blobs = folder / "run" / "blobs"
    blobs.mkdir(parents=True)
    witness = load_or_make_key(folder / "run" / "witness.key", files)
    owner = load_or_make_key(folder / "owner.key", files)
    tiny = tiny_run(owner, witness.peer_id, timings=TIMINGS, rotation=3)
    frame = make_frame(bytes(range(256)) * 16)
    shard = BlobRef(digest_of(frame), len(frame), 4096)
    for data in (tiny.params.tobytes(), tiny.momentum.tobytes(), frame):
        (blobs / digest_of(data).hex()).write_bytes(data)
    spec = msgspec.structs.replace(
        tiny.spec, name="light",
        data=msgspec.structs.replace(
            tiny.spec.data, shards=(shard,), evaluations=(EvaluationSet("all", shard, 4096),)
        ),
        **changes,
    )  # fmt: skip
    (folder / "run" / "spec.bin").write_bytes(sign_run_spec(spec, owner))
    return run_id_of(codec.encode(spec)), spec


class LightDesk:
    """A trainer that only keeps time: a pass ends after `pass_s` with a small random delta."""

    def __init__(self, node: LightNode) -> None:
        self._node = node
        self._version: int | None = None
        self._allowed = 0
        self._rng = np.random.default_rng(1)
        self.why = ""
        self.resets = 0
        self.outcomes: list[Settled] = []
        self.over: int | None = None

    def known(self, sequence: int) -> None: ...

    def settle(self, delta: Digest, how: Settled) -> None:
        self.outcomes.append(how)

    def adopt(self, order: do.AdoptState, params: Awaitable[Array]) -> None:
        asyncio.ensure_future(params)  # noqa: RUF006 - nobody waits for it
        self._version = order.version
        self._node.sequence = max(self._node.sequence, order.last_sequence)
        self.resets += order.reset
        self.target_tokens = order.target_tokens

    def allow(self, allowed: int, why: str, *, prolong: bool) -> None:
        self._allowed, self.why = allowed, why

    def evaluate(self, version: int, state_root: Digest, params: Awaitable[Array]) -> None:
        asyncio.ensure_future(params)  # noqa: RUF006

    def run_ended(self, version: int) -> None:
        self.over = version

    async def train(self) -> None:
        node = self._node
        spec, participant, signer = node.spec, node.participant, node.participant.setting.signer
        while True:
            base = self._version
            await asyncio.sleep(spec.inner.pass_s * self._rng.uniform(0.9, 1.1))
            if base is None or self._allowed <= 0 or self.over is not None:
                continue
            node.sequence += 1
            values = self._rng.normal(0, 0.01, spec.model.params).astype(np.float32)
            origin = Origin(participant.me, node.sequence)
            blob = encode(spec.outer.codec, values, spec.model.tensors, origin)
            delta = digest_of(blob)
            await asyncio.to_thread(participant.blobs.put, delta, blob, Purpose.DELTA)
            steps = spec.inner.inner_steps
            signature = signer.sign(delta_statement(node.run, delta, 0, base, node.sequence, steps))
            self._allowed -= 1
            header = DeltaHeader(
                delta=delta, size=len(blob), codec=spec.outer.codec, fragment=0, base_version=base,
                sequence=node.sequence, steps=steps, data_first=0, data_count=steps, loss=1.0,
                signature=signature,
            )  # fmt: skip
            assert participant.driver is not None
            participant.driver.put(fact.PassFinished(header))


class LightNode:
    """One node; `start` and `kill` as often as one likes."""

    def __init__(self, swarm: LightSwarm, name: str) -> None:
        self.swarm = swarm
        self.name = name
        self.run, self.spec = swarm.run, swarm.spec
        self.folder = swarm.folder / name
        self.sequence = 0  # kept over lives, as the contributor's record does
        self._task: asyncio.Task[None] | None = None

    @property
    def up(self) -> bool:
        return self._task is not None and not self._task.done() and self.participant.node is not None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.participant.listener.port}"

    @property
    def version(self) -> int:
        return self.participant.brain_view().version if self.up else -1

    @property
    def epoch(self) -> int:
        return self.participant.epoch if self.up else -1

    async def start(self) -> LightNode:
        ready = asyncio.Event()
        self._task = asyncio.create_task(self._live(ready))
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait((self._task, waiting), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._task.done():
            self._task.result()
        return self

    async def kill(self) -> None:
        """Without a word."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _live(self, ready: asyncio.Event) -> None:
        signer = load_or_make_key(self.folder / "key")
        telemetry = Telemetry(
            self.name, signer.peer_id, self.run, self.spec.name, role="node", pid=0, inner_steps=4
        )
        setting = Setting(
            run=self.run, spec=self.spec, signed_spec=self.swarm.signed, signer=signer,
            folder=self.folder / "run", role="node", listen=HostPort("127.0.0.1", 0),
        )  # fmt: skip
        async with (
            make_session(connections_max=8, per_host_max=0, build=__version__) as session,
            Participant(setting, telemetry) as participant,
        ):
            self.participant = participant
            participant.own_record = participant.peer_record(self.name)
            announcer = Announcer(
                session, [self.swarm.url], participant.own_record, participant.client, participant.book,
                telemetry, witness=self.swarm.witness, local=True, rng=random.Random(1),
            )  # fmt: skip
            with contextlib.suppress(Exception):
                await announcer.once()
            await announcer.tell_peers()
            await participant.run_blobs.fetch_genesis()
            await participant.open_state()
            self.desk = LightDesk(self)
            await participant.begin(desk=self.desk)
            ready.set()
            async with asyncio.TaskGroup() as group:
                others = [group.create_task(announcer.run()), group.create_task(self.desk.train())]
                await participant.live()
                for task in others:
                    task.cancel()


class LightSwarm:
    def __init__(self, folder: Path, run: RunId, spec: RunSpec, made_in: Path | None = None) -> None:
        """`made_in`: the run's folder; left out: `folder`/run."""
        self.folder, self.run, self.spec = folder, run, spec
        self.run_folder = made_in or folder / "run"
        self.signed = (self.run_folder / "spec.bin").read_bytes()
        self.witness = load_or_make_key(self.run_folder / "witness.key").peer_id
        self.nodes: dict[str, LightNode] = {}
        self.url = ""
        self._tracker: asyncio.Task[None] | None = None

    @property
    def owner_key(self) -> Path:
        return self.folder / "owner.key"

    @property
    def link(self) -> JoinLink:
        return JoinLink(self.url, self.run)

    async def start_tracker(self) -> None:
        ready = asyncio.Event()
        self._tracker = asyncio.create_task(self._serve(ready))
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait((self._tracker, waiting), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._tracker.done():
            self._tracker.result()

    async def _serve(self, ready: asyncio.Event) -> None:
        listen = self.url.removeprefix("http://") or "127.0.0.1:0"
        config = TrackerConfig(run=str(self.run_folder), listen=listen)
        async with Tracker(config, Leaving()) as tracker:
            self.tracker = tracker
            self.url = f"http://127.0.0.1:{tracker.participant.listener.port}"
            ready.set()
            await tracker.run()

    async def kill_tracker(self) -> None:
        if self._tracker is not None:
            self._tracker.cancel()
            await asyncio.gather(self._tracker, return_exceptions=True)

    async def node(self, name: str) -> LightNode:
        node = self.nodes.setdefault(name, LightNode(self, name))
        return await node.start()

    @property
    def version(self) -> int:
        return max((n.version for n in self.nodes.values()), default=-1)

    def committee(self) -> tuple[bytes, ...]:
        """As the node that is furthest sees it."""
        up = [n for n in self.nodes.values() if n.up]
        best = max(up, key=lambda n: (n.epoch, n.participant.brain_view().index))
        assert best.participant.node is not None
        return best.participant.node.committee.members


@contextlib.asynccontextmanager
async def light_swarm(folder: Path, nodes: int, **changes: object) -> AsyncIterator[LightSwarm]:
    run, spec = make_light_run(folder, **changes)
    swarm = LightSwarm(folder, run, spec)
    try:
        await swarm.start_tracker()
        for number in range(1, nodes + 1):
            await swarm.node(f"node-{number}")
        yield swarm
    finally:
        for node in swarm.nodes.values():
            await node.kill()
        await swarm.kill_tracker()


async def until(condition: Callable[[], object], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"after {seconds:.0f} s still not: {what}"
        await asyncio.sleep(0.05)
