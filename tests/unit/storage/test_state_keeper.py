"""The global state over steps, crashes and snapshots: always the bits of an uninterrupted run (F3, S11)."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from msgspec.structs import replace

from p2pdiloco import limits
from p2pdiloco.diloco.compress import Origin, encode
from p2pdiloco.diloco.global_state import GlobalState, roots_of
from p2pdiloco.errors import OperatorError, P2PDiLoCoError, PeerError, TransportError
from p2pdiloco.ids import Digest, PeerId, digest_of
from p2pdiloco.rules.outer_step import Candidate, plan_outer_step
from p2pdiloco.rules.state import after_outer_step, genesis_state
from p2pdiloco.sim.keys import FastSigner
from p2pdiloco.sim.tiny_run import PARAMS, tiny_run
from p2pdiloco.wire import codec
from p2pdiloco.wire.log import OuterStep
from p2pdiloco.wire.messages import DeltaHeader, Outcome
from p2pdiloco_node.ports import Purpose, Roots, StateKeeper
from p2pdiloco_node.storage.blob_store import DiskBlobStore
from p2pdiloco_node.storage.files import Files
from p2pdiloco_node.storage.state_keeper import DiskStateKeeper

NODE = FastSigner("node")
RUN = tiny_run(FastSigner("owner"), FastSigner("witness").peer_id)
STEPS = 6


class Made(NamedTuple):
    """One entry of the log: what the rules would order."""

    ticket: Digest
    step: OuterStep
    rules: bytes
    roots: Roots
    deltas: dict[Digest, bytes]


def blob(sequence: int, peer: PeerId = NODE.peer_id) -> bytes:
    values = np.random.default_rng(sequence).normal(0, 0.01, PARAMS).astype(np.float32)
    return encode("fp16", values, RUN.spec.model.tensors, Origin(peer, sequence))


def genesis_blobs(folder: Path, files: Files | None = None) -> DiskBlobStore:
    blobs = DiskBlobStore(folder / "blobs", files)
    for array in (RUN.params, RUN.momentum):
        blobs.put(digest_of(array.tobytes()), array.tobytes(), Purpose.SNAPSHOT)
    return blobs


def opened(folder: Path, files: Files | None = None) -> tuple[DiskStateKeeper, DiskBlobStore]:
    blobs = genesis_blobs(folder, files)
    # A clock that stands still: saving costs nothing, so every outer step is saved.
    return DiskStateKeeper(folder, RUN.spec, blobs, files, clock=lambda: 0.0), blobs


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> list[Made]:
    """STEPS outer steps, applied without interruption."""
    folder = tmp_path_factory.mktemp("history")
    keeper, blobs = opened(folder)
    rules = genesis_state(RUN.spec)
    made = []
    for n in range(1, STEPS + 1):
        data = blob(n)
        delta = digest_of(data)
        blobs.put(delta, data)
        checked = keeper.check_delta(None, delta)
        assert checked.outcome is Outcome.HELD
        candidate = Candidate(
            delta, NODE.peer_id, n - 1, n, 4, checked.norm, NODE.public_key, bytes(64)
        )  # fmt: skip
        step = plan_outer_step(rules, RUN.spec, [candidate], [])
        assert step is not None
        ticket = digest_of(b"ticket %d" % n)
        roots = keeper.prepare(ticket, step)
        rules = after_outer_step(rules, step, RUN.spec)
        made.append(Made(ticket, step, codec.encode(rules), roots, {delta: data}))
        keeper.install(n, n, ticket, made[-1].rules)
    return made


def apply(keeper: StateKeeper, blobs: DiskBlobStore, made: Made, index: int) -> None:
    for digest, data in made.deltas.items():
        blobs.put(digest, data)
    assert keeper.prepare(made.ticket, made.step) == made.roots
    keeper.install(index, index, made.ticket, made.rules)


def test_genesis_then_steps_then_a_restart(tmp_path: Path, history: list[Made]) -> None:
    keeper, blobs = opened(tmp_path)
    assert (keeper.restored.index, keeper.restored.rules) == (0, b"")
    assert keeper.restored.roots.params == RUN.spec.genesis.params_root
    before = keeper.params()
    for n, made in enumerate(history[:3], 1):
        apply(keeper, blobs, made, n)
    assert np.array_equal(before, RUN.params), "an array that was handed out never changes"
    again, _ = opened(tmp_path)
    kept = again.restored
    assert 1 <= kept.index <= 3
    assert kept.rules == history[kept.index - 1].rules
    assert (kept.version, kept.roots) == (kept.index, history[kept.index - 1].roots)
    assert kept.clock == 32 * kept.index


def test_states_and_snapshots_of_entries_that_were_cut_off_are_never_found(
    tmp_path: Path, history: list[Made]
) -> None:
    keeper, blobs = opened(tmp_path)
    for n, made in enumerate(history[:3], 1):
        apply(keeper, blobs, made, n)
        if n != 2:
            keeper.take_snapshot(n, n)
    keeper.cut(2)
    assert [offer.index for offer in keeper.snapshots] == [1]
    for _ in range(2):
        again, _ = opened(tmp_path)
        assert again.restored.index <= 2
        assert [offer.index for offer in again.snapshots] == [1]
    # The snapshot that is left is whole, and is what a node goes back to.
    (offer,) = keeper.snapshots
    keeper.install_snapshot(offer, 1)
    assert (keeper.index, roots_of(GlobalState(keeper.params(), keeper.momentum()))) == (1, history[0].roots)
    apply(keeper, blobs, history[1], 2)


def test_other_entries_leave_the_arrays_alone(tmp_path: Path, history: list[Made]) -> None:
    keeper, blobs = opened(tmp_path)
    apply(keeper, blobs, history[0], 1)
    before = keeper.params()
    keeper.install(2, 1, None, b"other rules")
    assert keeper.params() is before
    with pytest.raises(AssertionError):
        keeper.install(4, 1, None, b"a gap")


def test_candidates_of_others_do_not_cost_the_one_that_is_certified(
    tmp_path: Path, history: list[Made]
) -> None:
    keeper, blobs = opened(tmp_path)
    blobs.put(*next(iter(history[0].deltas.items())))
    keeper.prepare(history[0].ticket, history[0].step)
    for n in range(5):
        keeper.prepare(digest_of(b"other %d" % n), history[0].step)
    assert len(keeper._prepared) == limits.prepared_steps_max
    keeper.install(1, 1, history[0].ticket, history[0].rules)
    roots = roots_of(GlobalState(keeper.params(), keeper.momentum()))
    assert Roots(*roots) == history[0].roots


def test_at_every_crash_the_next_life_gets_the_same_bits(
    tmp_path: Path, history: list[Made], crash_everywhere: Callable[..., int]
) -> None:
    folder = tmp_path / "run"
    certified = 0

    def reset() -> None:
        nonlocal certified
        shutil.rmtree(folder, ignore_errors=True)
        opened(folder)
        certified = 0

    def work(files: Files) -> None:
        nonlocal certified
        keeper, blobs = opened(folder, files)
        for n, made in enumerate(history[:3], 1):
            for digest, data in made.deltas.items():
                blobs.put(digest, data)
            certified = n  # in the log, durable
            apply(keeper, blobs, made, n)
            if n % 2 == 0:
                keeper.take_snapshot(n, n)

    def check() -> None:
        keeper, blobs = opened(folder)
        assert keeper.restored.index <= certified
        for n in range(keeper.restored.index + 1, certified + 1):
            assert keeper.prepare(history[n - 1].ticket, history[n - 1].step) == history[n - 1].roots
            keeper.install(n, n, history[n - 1].ticket, history[n - 1].rules)
        for offer in keeper.snapshots:
            assert all(blobs.read(Digest(c)) for c in (*offer.params, *offer.momentum))

    assert crash_everywhere(work, check, reset) > 80


def test_files_take_a_tenth_of_the_time_and_follow_within_eight_versions(
    tmp_path: Path, history: list[Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "state_write_versions_max", 4)
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1  # a second for each look, so a save takes one
        return now

    blobs = genesis_blobs(tmp_path)
    keeper = DiskStateKeeper(tmp_path, RUN.spec, blobs, clock=clock)
    saved = []
    for n, made in enumerate(history, 1):
        apply(keeper, blobs, made, n)
        saved.append(opened(tmp_path)[0].restored.index)
    assert saved == [1, 1, 1, 1, 5, 5]
    now += 10
    keeper.install(STEPS + 1, STEPS, None, b"other rules")
    assert opened(tmp_path)[0].restored.index == 5


def test_version_0_of_another_size_is_its_owners_to_mend(tmp_path: Path) -> None:
    """Its digests are signed: whoever gave the blobs did as the RunSpec says."""
    blobs = genesis_blobs(tmp_path)
    short = RUN.params.tobytes()[:-4]
    blobs.put(digest_of(short), short, Purpose.SNAPSHOT)
    genesis = replace(RUN.spec.genesis, params=(digest_of(short),))
    spec = replace(RUN.spec, genesis=genesis)
    with pytest.raises(OperatorError, match="the run's owner has to make the run anew") as caught:
        DiskStateKeeper(tmp_path, spec, blobs)
    assert caught.value.exit_code == 5


def test_a_damaged_state_costs_time_only(
    tmp_path: Path, history: list[Made], caplog: pytest.LogCaptureFixture
) -> None:
    keeper, blobs = opened(tmp_path)
    for n, made in enumerate(history, 1):
        apply(keeper, blobs, made, n)
    keeper.save(STEPS)
    newest = max((tmp_path / "state").iterdir())
    assert opened(tmp_path)[0].restored.index == STEPS
    (newest / "params").write_bytes(b"short")
    with caplog.at_level(logging.WARNING):
        kept = opened(tmp_path)[0].restored
    assert kept.index < STEPS
    assert "skipped" in caplog.text
    shutil.rmtree(tmp_path / "state")
    assert opened(tmp_path)[0].restored.index == 0


def test_a_log_that_lost_its_end_starts_from_an_older_state(tmp_path: Path, history: list[Made]) -> None:
    keeper, blobs = opened(tmp_path)
    for n, made in enumerate(history, 1):
        apply(keeper, blobs, made, n)
        if n in (2, 5):
            keeper.take_snapshot(n, n)
    kept = DiskStateKeeper(tmp_path, RUN.spec, blobs, index_max=3).restored
    assert kept.index == 2
    assert kept.roots == history[1].roots


def test_snapshots_travel_and_two_are_kept(tmp_path: Path, history: list[Made]) -> None:
    keeper, blobs = opened(tmp_path / "one")
    offers = []
    for n, made in enumerate(history, 1):
        apply(keeper, blobs, made, n)
        if n % 2 == 0:
            offers.append(keeper.take_snapshot(n, n))
    assert keeper.snapshots == tuple(offers[1:])
    assert not blobs.has(Digest(offers[0].params[0]))
    other, other_blobs = opened(tmp_path / "two")
    with pytest.raises(TransportError):
        other.install_snapshot(offers[1], 4)
    for chunk in (*offers[1].params, *offers[1].momentum):
        other_blobs.put(Digest(chunk), blobs.read(Digest(chunk)), Purpose.SNAPSHOT)
    other.install_snapshot(offers[1], 4)
    for n in (5, 6):
        apply(other, other_blobs, history[n - 1], n)
    assert np.array_equal(other.params(), keeper.params())
    assert other.snapshots == (offers[1],)
    shutil.rmtree(tmp_path / "two" / "state")
    again, _ = opened(tmp_path / "two")
    assert (again.restored.index, again.restored.roots) == (4, history[3].roots)
    other_blobs.delete(Digest(offers[1].params[0]))
    assert opened(tmp_path / "two")[0].restored.index == 0


def test_a_snapshot_of_another_shape_changes_nothing(tmp_path: Path, history: list[Made]) -> None:
    keeper, blobs = opened(tmp_path)
    apply(keeper, blobs, history[0], 1)
    offer = keeper.take_snapshot(1, 1)
    before = keeper.params()
    for data in (bytes(4), np.full(PARAMS, np.nan, np.float32).tobytes(), bytes(8 * PARAMS)):
        blobs.put(digest_of(data), data, Purpose.SNAPSHOT)
        bad = type(offer)(3, (digest_of(data),), offer.momentum, offer.rules)
        with pytest.raises(PeerError):
            keeper.install_snapshot(bad, 3)
    with pytest.raises(PeerError):
        keeper.install_snapshot(type(offer)(3, offer.params * 2, offer.momentum, offer.rules), 3)
    assert keeper.params() is before
    assert (keeper.index, keeper.snapshots) == (1, (offer,))


def test_deltas_are_checked_before_anybody_hears_of_them(tmp_path: Path) -> None:
    keeper, blobs = opened(tmp_path)
    good = blob(7)
    blobs.put(digest_of(good), good)
    header = DeltaHeader(
        digest_of(good), len(good), "fp16", 0, 0, 7, 4, 0, 4, 1.0, bytes(64)
    )  # fmt: skip
    checked = keeper.check_delta(header, digest_of(good), NODE.peer_id)
    assert checked.outcome is Outcome.HELD
    values = np.random.default_rng(7).normal(0, 0.01, PARAMS)
    assert checked.norm == pytest.approx(np.linalg.norm(values), rel=1e-3)
    lowered = DeltaHeader(digest_of(good), len(good), "fp16", 0, 0, 6, 4, 0, 4, 1.0, bytes(64))
    assert keeper.check_delta(lowered, digest_of(good)).outcome is Outcome.BAD_SHAPE
    other = FastSigner("other").peer_id
    assert keeper.check_delta(header, digest_of(good), other).outcome is Outcome.BAD_SHAPE
    nan = bytearray(good)
    nan[-2:] = np.array([np.nan], "<f2").tobytes()
    bad = {bytes(nan): Outcome.NOT_FINITE, good[:-2]: Outcome.BAD_SHAPE, good + b"xx": Outcome.TOO_BIG}
    bad[b"x"] = Outcome.BAD_SHAPE
    for data, outcome in bad.items():
        blobs.put(digest_of(data), data)
        assert keeper.check_delta(None, digest_of(data)) == (outcome, 0.0)
    with pytest.raises(TransportError):
        keeper.check_delta(None, digest_of(b"nowhere"))


def test_a_full_disk_does_not_stop_the_state(
    tmp_path: Path, history: list[Made], caplog: pytest.LogCaptureFixture
) -> None:
    class Full(Files):
        full = False

        def write(self, fd: int, data: bytes | memoryview) -> None:
            if self.full and len(data) > 32:
                raise OSError(28, "No space left on device")
            super().write(fd, data)

    files = Full()
    keeper, blobs = opened(tmp_path, files)
    for made in history:
        for digest, data in made.deltas.items():
            blobs.put(digest, data)
    files.full = True
    for n, made in enumerate(history, 1):
        apply(keeper, blobs, made, n)
    assert "full" in caplog.text
    with pytest.raises(OperatorError, match="full"):
        keeper.take_snapshot(STEPS, STEPS)
    assert keeper.snapshots == ()
    files.full = False
    assert keeper.take_snapshot(STEPS, STEPS).index == STEPS
    assert opened(tmp_path)[0].restored.index == STEPS


def test_no_version_0_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="fetched"):
        DiskStateKeeper(tmp_path, RUN.spec, DiskBlobStore(tmp_path / "blobs"))


def test_a_missing_delta_leaves_the_state(tmp_path: Path, history: list[Made]) -> None:
    keeper, blobs = opened(tmp_path)
    before = keeper.params()
    with pytest.raises(P2PDiLoCoError):
        keeper.prepare(history[0].ticket, history[0].step)
    theirs = blob(1, FastSigner("other").peer_id)
    blobs.put(digest_of(theirs), theirs)
    listed = history[0].step.contributions[0]
    stolen = replace(listed, delta=digest_of(theirs))
    step = replace(history[0].step, contributions=(stolen,))
    with pytest.raises(PeerError, match="another peer"):
        keeper.prepare(history[0].ticket, step)
    assert np.array_equal(keeper.params(), before)
