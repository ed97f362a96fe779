"""The owner's words in a live swarm on loopback: each is certified, and does what it says (protocol.md 3)."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from p2pdiloco.errors import OperatorError
from p2pdiloco.ids import Digest
from p2pdiloco.protocol.delivery import REVOKED
from p2pdiloco.run_spec import open_run_spec
from p2pdiloco.wire.signing import verify_ed25519
from p2pdiloco_node import __version__
from p2pdiloco_node.owner.fork import fork
from p2pdiloco_node.owner.ledger import Ledger, Signed
from p2pdiloco_node.owner.rescue import recover
from p2pdiloco_node.owner.seen_run import SeenRun, link_of, open_run
from p2pdiloco_node.owner.words import Followed, Wanted, say_word
from p2pdiloco_node.progress import Quiet
from p2pdiloco_node.run.checks import Declared
from p2pdiloco_node.run.file import read_run_file, set_values
from p2pdiloco_node.transport.http_session import make_session
from p2pdiloco_node.verify import verify_run

from .light_swarm import LightSwarm, light_swarm, until

pytestmark = [pytest.mark.e2e, pytest.mark.timed]
WAIT_S = 180.0  # generous: the machine may be busy


@contextlib.asynccontextmanager
async def seen(swarm: LightSwarm, where: str | None = None) -> AsyncIterator[SeenRun]:
    async with make_session(connections_max=32, per_host_max=0, build=__version__) as session:
        link = swarm.link if where is None else link_of(where)
        yield await open_run(session, link, [], Quiet())


async def say(swarm: LightSwarm, wanted: Wanted, wait_s: float = WAIT_S) -> Followed:
    async with seen(swarm) as run:
        said = await say_word(run, wanted, swarm.owner_key, wait_s=wait_s)
    assert isinstance(said, Followed), said
    return said


async def test_pause_resume_extend_revoke_finish(tmp_path: Path) -> None:
    async with light_swarm(tmp_path, 3) as swarm:
        await until(lambda: len(swarm.committee()) == 3, WAIT_S, "a committee of three")
        await until(lambda: swarm.version >= 2, WAIT_S, "two versions")
        said = await say(swarm, Wanted("pause"))
        assert (said.kind, said.owner_sequence, said.epoch) == ("pause", 1, 0)
        one, two, three = (swarm.nodes[f"node-{n}"] for n in (1, 2, 3))
        await until(lambda: all(n.desk.why == "the owner paused the run" for n in (one, two, three)), WAIT_S,
                    "paused nodes")  # fmt: skip
        paused_at = max(said.version, swarm.version)
        async with seen(swarm) as run:
            again = await say_word(run, Wanted("pause"), swarm.owner_key, wait_s=WAIT_S)
            assert again == "The run is paused already."
            with pytest.raises(OperatorError, match="is no extension"):
                await say_word(run, Wanted("extend", 5), swarm.owner_key, wait_s=WAIT_S)
        # They serve and vote all the same: a newcomer catches up, and the next word is certified.
        newcomer = await swarm.node("node-4")
        await until(lambda: newcomer.version == paused_at, WAIT_S, "a newcomer at the paused version")
        target = 2 * swarm.spec.target_tokens
        assert (await say(swarm, Wanted("extend", target))).index > said.index
        assert swarm.version == paused_at
        assert (await say(swarm, Wanted("resume"))).owner_sequence == 3
        await until(lambda: swarm.version > paused_at + 1, WAIT_S, "versions after the pause")
        await until(lambda: one.desk.target_tokens == target, WAIT_S, "the trainer's new target")

        said = await say(swarm, Wanted("revoke", peer="node-2"))
        assert "node-2" in said.effect
        gone = two.participant.me
        await until(lambda: gone not in swarm.committee(), WAIT_S, "its seat taken")
        await until(lambda: two.desk.why == REVOKED, WAIT_S, "the node says so and trains no more")
        before = swarm.version
        await until(lambda: swarm.version > before + 2, WAIT_S, "versions without it")
        node = one.participant.node
        assert node is not None
        listed = [
            c.peer
            for index in range(said.index + 1, node.index + 1)
            for c in getattr(node.log.content(index), "contributions", ())
        ]
        assert listed
        assert gone not in listed

        over = await say(swarm, Wanted("finish"))
        await until(lambda: one.desk.over == over.version, WAIT_S, "the end of the run")
        async with seen(swarm) as run:
            with pytest.raises(OperatorError, match="nothing can be said to it"):
                await say_word(run, Wanted("resume"), swarm.owner_key, wait_s=WAIT_S)
    assert verify_run(tmp_path / "run").version == over.version


async def test_a_word_that_reaches_one_peer_reaches_the_committee(tmp_path: Path) -> None:
    """Anybody carries it: here the one node that the tool can reach, which has no seat."""
    async with light_swarm(tmp_path, 4) as swarm:
        await until(lambda: len(swarm.committee()) == 3, WAIT_S, "a committee of three")
        outside = next(n for n in swarm.nodes.values() if n.participant.me not in swarm.committee())
        async with seen(swarm, f"{outside.url}/#{swarm.run.hex()}") as run:
            run.hosts = {outside.participant.me: run.hosts[outside.participant.me]}
            said = await say_word(run, Wanted("pause"), swarm.owner_key, wait_s=WAIT_S)
        assert isinstance(said, Followed)


async def test_another_s_key_and_a_lost_committee_are_said(tmp_path: Path) -> None:
    async with light_swarm(tmp_path, 2) as swarm:
        await until(lambda: len(swarm.committee()) == 3, WAIT_S, "a committee of three")
        async with seen(swarm) as run:
            with pytest.raises(OperatorError, match="not the key of this run's owner"):
                await say_word(run, Wanted("pause"), tmp_path / "run" / "witness.key", wait_s=1)
            with pytest.raises(OperatorError, match="No peer 'node-9'"):
                await say_word(run, Wanted("revoke", peer="node-9"), swarm.owner_key, wait_s=1)
            with pytest.raises(OperatorError, match="The witness has no deltas"):
                await say_word(run, Wanted("revoke", peer="witness"), swarm.owner_key, wait_s=1)
        for node in swarm.nodes.values():
            await node.kill()
        async with seen(swarm) as run:
            with pytest.raises(
                OperatorError, match=r"node-1 \(not reached\).*p2pdiloco run recover"
            ) as caught:
                await say_word(run, Wanted("pause"), swarm.owner_key, wait_s=1)
            assert caught.value.exit_code == 4
        # What was signed is not signed again under the same number.
        assert Ledger(swarm.owner_key).of(swarm.run).sequence == 1


async def test_a_run_that_lost_its_majority_goes_on_and_takes_the_dead_back(tmp_path: Path) -> None:
    async with light_swarm(tmp_path, 4) as swarm:
        await until(lambda: len(swarm.committee()) == 3, WAIT_S, "a committee of three")
        await until(lambda: swarm.version >= 2, WAIT_S, "two versions")
        voters = [n for n in swarm.nodes.values() if n.participant.me in swarm.committee()]
        dead, alive = voters[0], [n for n in swarm.nodes.values() if n is not voters[0]]
        await swarm.kill_tracker()
        await dead.kill()
        left = f"{alive[0].url}/#{swarm.run.hex()}"
        asked: list[str] = []

        def refuses(text: str) -> bool:
            asked.append(text)
            return False

        def agrees(text: str) -> bool:
            asked.append(text)
            return True

        async with seen(swarm, left) as run:
            with pytest.raises(OperatorError, match="Nothing was signed"):
                await recover(run, swarm.owner_key, seats=(), force=False, agree=refuses, wait_s=WAIT_S)
            assert "is lost for good" in asked[0]
            done = await recover(
                run, swarm.owner_key, seats=(), force=False, agree=lambda _: True, wait_s=WAIT_S
            )
        assert (done.epoch, len(done.committee)) == (1, 3)
        assert dead.name not in done.committee
        await until(lambda: swarm.version >= done.version + 3, WAIT_S, "versions in the new epoch")
        assert all(n.epoch == 1 for n in alive)
        # Back come those who were dead: they are told, and follow.
        await swarm.start_tracker()
        await dead.start()
        await until(lambda: dead.epoch == 1, WAIT_S, "the dead node in the new epoch")
        await until(lambda: swarm.tracker.participant.epoch == 1, WAIT_S, "the witness in the new epoch")
        await until(lambda: dead.version >= swarm.version - 1, WAIT_S, "the dead node caught up")
        async with seen(swarm) as run:
            with pytest.raises(OperatorError, match="the run goes on by itself"):
                await recover(
                    run, swarm.owner_key, seats=(), force=False, agree=lambda _: True, wait_s=WAIT_S
                )
        said = await say(swarm, Wanted("pause"))
        assert (said.epoch, said.owner_sequence) == (1, 2)
        status = swarm.tracker.builder.build(0.0)
        assert any("another committee" in event.text for event in status.events)
        # Another was signed, and a crash took it from all who were told.
        ledger = Ledger(swarm.owner_key)
        ledger.note(swarm.run, Signed(2, 3))
        async with seen(swarm) as run:
            with pytest.raises(OperatorError, match="began epoch 2 already, and nobody who answers follows"):
                await recover(
                    run, swarm.owner_key, seats=(), force=False, agree=lambda _: True, wait_s=WAIT_S
                )
            again = await recover(run, swarm.owner_key, seats=(), force=True, agree=agrees, wait_s=WAIT_S)
        assert "Epoch 2, which this key began before" in asked[-1]
        assert (again.epoch, ledger.of(swarm.run)) == (3, Signed(3, 4))
        await until(lambda: all(n.epoch == 3 for n in swarm.nodes.values()), WAIT_S, "all in the third epoch")
    assert verify_run(tmp_path / "run").version >= done.version + 3


async def test_a_fork_begins_where_its_parent_is(tmp_path: Path) -> None:
    """From the link, and from the folder that the tracker kept: the same version 0, by the log."""
    parts = read_run_file(None)
    set_values(
        parts, ["inner.lr=1e-4", "outer.mu=0.25", "run.name=fork", "run.tokens=1M", "run.eval_every=5"]
    )
    async with light_swarm(tmp_path, 2) as swarm:
        await until(lambda: swarm.version >= 3, WAIT_S, "three versions")
        slips = read_run_file(None)
        set_values(slips, ["run.tokens=1"])
        with pytest.raises(OperatorError, match="less than one full round"):  # with nothing fetched
            await fork(
                swarm.link, "2", tmp_path / "slips", slips, owner_key=tmp_path / "mine.key",
                declared=Declared(), told=Quiet(),
            )  # fmt: skip
        assert not (tmp_path / "slips").exists()
        made = await fork(
            swarm.link, "2", tmp_path / "linked", parts, owner_key=tmp_path / "mine.key", declared=Declared(),
            told=Quiet(),
        )  # fmt: skip
    parent = swarm.spec
    (tmp_path / "kept/blobs").mkdir(parents=True)
    (tmp_path / "kept/blobs" / ("ab" * 32)).write_bytes(b"of a fork of another version that was killed")
    by_folder = await fork(
        tmp_path / "run", "2", tmp_path / "kept", parts, owner_key=tmp_path / "mine.key", declared=Declared(),
        told=Quiet(),
    )  # fmt: skip
    for fork_, folder in ((made, "linked"), (by_folder, "kept")):
        run, spec = open_run_spec((tmp_path / folder / "spec.bin").read_bytes(), verify_ed25519)
        assert (run, spec) == (fork_.run, fork_.spec)
        assert spec.parent is not None
        assert (spec.parent.run, spec.parent.version) == (swarm.run, 2)
        assert spec.genesis.params_root == spec.parent.params_root
        assert spec.genesis.params_root != parent.genesis.params_root
        assert (spec.inner.lr, spec.outer.mu, spec.name, spec.target_tokens) == (1e-4, 0.25, "fork", 10**6)
        assert (spec.model, spec.data, spec.inner.beta1) == (parent.model, parent.data, parent.inner.beta1)
        assert spec.owner_key != parent.owner_key
        assert spec.committee.genesis.witness != parent.committee.genesis.witness
        blobs = tmp_path / folder / "blobs"
        named = {*spec.genesis.params, *spec.genesis.momentum, *(b.digest for b in spec.data.blobs)}
        assert {p.name for p in blobs.iterdir()} == {Digest(d).hex() for d in named}
        assert {p.name for p in (tmp_path / folder).iterdir()} == {"blobs", "spec.bin", "witness.key"}
    assert made.run != by_folder.run  # each has a nonce and a witness of its own
    assert made.spec.genesis == by_folder.spec.genesis
    with pytest.raises(OperatorError, match="already holds a run"):
        await fork(
            tmp_path / "run", "2", tmp_path / "kept", parts, owner_key=tmp_path / "mine.key",
            declared=Declared(), told=Quiet(),
        )  # fmt: skip
    # It can be served and trained.
    fresh = LightSwarm(tmp_path / "served", made.run, made.spec, made_in=tmp_path / "linked")
    try:
        await fresh.start_tracker()
        await fresh.node("node-1")
        await until(lambda: fresh.version >= 1, WAIT_S, "a version of the fork")
    finally:
        for node in fresh.nodes.values():
            await node.kill()
        await fresh.kill_tracker()
