"""A corpus that no disk holds: nodes read it in windows and feed each other when the data seed is gone
(scenarios S12, F4)."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import msgspec
import pytest

from p2pdiloco.ids import Digest, RunId, digest_of
from p2pdiloco.run_spec import BlobRef, RunSpec, open_run_spec, run_id_of, sign_run_spec
from p2pdiloco.wire.codec import decode, encode
from p2pdiloco.wire.frames import make_frame, open_frame
from p2pdiloco.wire.signing import verify_ed25519
from p2pdiloco_node.demo.command import TIMINGS
from p2pdiloco_node.run.new import Order, create_run
from p2pdiloco_node.storage.files import Files
from p2pdiloco_node.storage.keys import load_or_make_key
from p2pdiloco_node.training.contributor import Record
from p2pdiloco_node.training.shard_plan import costs_of, least_bytes

from .swarm_kit import WORDS, Process, Swarm, free_port, swarm_in, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.long]

SHARDS, WINDOW, SHARD_BYTES = 40, 2, 16_000
START_S, STEP_S = 150.0, 90.0
NAMES = ("one", "two", "three")


def make_run(folder: Path) -> tuple[RunId, RunSpec]:
    """A run of 40 small shards: those of `run new`, cut again and signed again."""
    texts = folder / "texts"
    texts.mkdir()
    lines = SHARDS * SHARD_BYTES // len(f"1000 {WORDS}") // 19
    for number in range(22):
        text = "".join(f"{1000 + number * 20 + i} {WORDS}" for i in range(lines))
        (texts / f"{number}.txt").write_text(text)
    out, key = folder / "run", folder / "owner.key"
    asyncio.run(
        create_run(
            Order(
                "tiny", "llama:tiny", [f"{texts}/*.txt"], 2**40, admission="local", target_version=10**6,
                eval_every=4, seed=1, inner={"inner_steps": 2**20, "pass_s": 1.5}, committee=TIMINGS,
            ),
            out, owner_key=key,
        )
    )  # fmt: skip
    _, spec = open_run_spec((out / "spec.bin").read_bytes(), verify_ed25519)

    def put(content: bytes) -> BlobRef:
        frame = make_frame(content)
        (out / "blobs" / digest_of(frame).hex()).write_bytes(frame)
        return BlobRef(digest_of(frame), len(frame), len(content))

    whole = b""
    for ref in spec.data.shards:
        path = out / "blobs" / Digest(ref.digest).hex()
        whole += open_frame(path.read_bytes(), ref.tokens)
        path.unlink()
    assert len(whole) >= SHARDS * SHARD_BYTES
    shards = tuple(put(whole[i * SHARD_BYTES : (i + 1) * SHARD_BYTES]) for i in range(SHARDS))
    data = msgspec.structs.replace(spec.data, shards=shards, window_shards=WINDOW)
    spec = msgspec.structs.replace(spec, data=data)
    (out / "spec.bin").write_bytes(sign_run_spec(spec, load_or_make_key(key, Files())))
    return run_id_of(encode(spec)), spec


class Disk:
    """What a node holds of the run's data, seen from outside."""

    def __init__(self, swarm: Swarm, name: str) -> None:
        self.folder = swarm.folder / name / "runs" / swarm.run.hex()[:16]

    @property
    def blobs(self) -> set[bytes]:
        found = (self.folder / "blobs" / "shard").glob("??/*")
        return {bytes.fromhex(p.name) for p in found if len(p.name) == 64}

    @property
    def opened(self) -> dict[bytes, Path]:
        found = (self.folder / "tokens").glob("*")
        return {bytes.fromhex(p.name): p for p in found if len(p.name) == 64}

    @property
    def bytes_used(self) -> int:
        """Of finished files: one that is about to take another's place may be there beside it."""
        total = 0
        for path in (*self.opened.values(), *(self.folder / "blobs" / "shard").glob("??/*")):
            try:
                total += path.stat().st_size
            except FileNotFoundError:
                continue
        return total

    def record(self) -> Record:
        """The newest whole one; older ones are removed while this looks."""
        while True:
            found = [p for p in (self.folder / "work").glob("record.*") if p.suffix[1:].isdecimal()]
            newest = max(found, key=lambda p: int(p.suffix[1:]))
            try:
                return decode(newest.read_bytes()[32:], Record)
            except FileNotFoundError:
                continue


def trained_on(process: Process) -> int:
    status = process.status()
    return status.inner_steps_done if status is not None else 0


def test_nodes_feed_each_other_when_the_data_seed_is_gone(tmp_path: Path) -> None:
    run, spec = make_run(tmp_path)
    costs = costs_of(spec.data)
    quota = least_bytes(spec.data) + 24 * max(costs.blobs)
    assert quota < costs.all // 2
    flag = f"{quota / 1000}KB"
    contents = {
        ref.digest: open_frame((tmp_path / "run/blobs" / Digest(ref.digest).hex()).read_bytes(), ref.tokens)
        for ref in spec.data.blobs
    }
    shards = {bytes(ref.digest) for ref in spec.data.shards}
    with swarm_in(tmp_path, run, free_port()) as swarm:
        swarm.start_tracker()
        for name in NAMES:
            swarm.node(name, "--data-disk", flag)
        disks = {name: Disk(swarm, name) for name in NAMES}
        wait_for(lambda: all(map(swarm.listed, NAMES)), START_S, "every node has a delta in the model")
        wait_for(
            lambda: all(len(d.blobs & shards) >= 12 for d in disks.values()), STEP_S, "data are fetched ahead"
        )
        for name, disk in disks.items():
            # Trained long before the corpus was here, which never will be.
            assert len(disk.blobs & shards) < SHARDS, swarm.nodes[name].text()
        swarm.tracker.kill()
        steps = {name: trained_on(swarm.nodes[name]) for name in NAMES}
        version = swarm.version()

        def goes_on() -> bool:
            for name, disk in disks.items():
                assert disk.bytes_used <= quota, f"{name} holds {disk.bytes_used} of {quota}"
            return swarm.version() >= version + 3

        wait_for(goes_on, STEP_S, "versions without the tracker")
        for name, disk in disks.items():
            assert trained_on(swarm.nodes[name]) > steps[name]
            check_opened(disk, contents)
        # F4: killed in mid-pass; meanwhile what it had of the data was lost, or damaged where it was opened.
        # Only the other two nodes have any now. It goes on at its cursor, and reads nothing that is damaged.
        victim, disk = swarm.nodes["two"], disks["two"]
        victim.kill()
        record = disk.record()
        assert record.cursor > 0
        shutil.rmtree(disk.folder / "blobs" / "shard")
        for path in disk.opened.values():
            content = bytearray(path.read_bytes())
            content[100] ^= 1
            path.write_bytes(content)
        swarm.node("two")
        trains_again(disk, record)
        check_opened(disk, contents)
        wait_for(lambda: len(disk.blobs & shards) >= 12, STEP_S, "nodes feed each other")
        assert disk.bytes_used <= quota


def check_opened(disk: Disk, contents: dict[bytes, bytes]) -> None:
    """What the trainer reads is what the run's owner signed."""
    opened = disk.opened
    assert opened
    for digest, path in opened.items():
        try:
            assert path.read_bytes() == contents[digest]
        except FileNotFoundError:
            continue  # its window is over


def trains_again(disk: Disk, before: Record) -> None:
    """From the saved cursor on: nothing is skipped, at most the lost pass is repeated (F4)."""

    def passed() -> bool:
        record = disk.record()
        for header in record.in_flight:
            if header.sequence == before.sequence + 1:
                assert header.data_first == before.cursor
        return record.sequence >= before.sequence + 2

    wait_for(passed, START_S, "two more passes")
    assert disk.record().cursor > before.cursor
