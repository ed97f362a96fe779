"""Own deltas survive a crash at every write, and settle as algorithm.md 6 says (protocol.md 7)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from p2pdiloco.diloco.compress import decode, origin_of
from p2pdiloco.errors import OperatorError, PeerError, TransportError
from p2pdiloco.ids import Digest, digest_of
from p2pdiloco.protocol.actions import Settled
from p2pdiloco.sim.keys import FastSigner, verify_fast
from p2pdiloco.sim.tiny_run import PARAMS, TENSORS, TinyRun, tiny_run
from p2pdiloco.wire.messages import DeltaHeader
from p2pdiloco.wire.signing import delta_statement
from p2pdiloco_node.ports import BlobStore, Contributor, Purpose
from p2pdiloco_node.training.contributor import DiskContributor
from p2pdiloco_node.training.frames import PassDone

Floats = npt.NDArray[np.float32]
OWNER, NODE = FastSigner("owner"), FastSigner("node")
RUN = tiny_run(OWNER, OWNER.peer_id, codec="int4")
SPARSE = tiny_run(OWNER, OWNER.peer_id, codec="topk64")
G: Floats = RUN.params


class Crash(BaseException):
    """The process ends here."""


class MemoryBlobs:
    """Enough of a blob store; each put may be the last thing that happens."""

    def __init__(self, before_write: Callable[[], None]) -> None:
        self.blobs: dict[Digest, bytes] = {}
        self._before_write = before_write

    def put(self, digest: Digest, data: bytes, purpose: Purpose = Purpose.DELTA) -> None:
        self._before_write()
        assert digest_of(data) == digest
        self.blobs[digest] = data

    def read(self, digest: Digest) -> bytes:
        if digest not in self.blobs:
            raise TransportError("not here")
        return self.blobs[digest]


class Disk:
    """A folder and a blob store that outlive the contributor, and a crash at a chosen write."""

    def __init__(self, folder: Path, run: TinyRun = RUN) -> None:
        self.folder = folder
        self.run = run
        self.writes_left = 10**9
        self.error: BaseException = Crash()
        self.store = MemoryBlobs(self._count)

    def _count(self) -> None:
        if self.writes_left == 0:
            raise self.error
        self.writes_left -= 1

    def write(self, path: Path, data: bytes | memoryview) -> None:
        self._count()
        path.write_bytes(data)

    def start(self) -> DiskContributor:
        blobs: BlobStore = self.store  # type: ignore[assignment]  # the methods that a contributor calls
        return DiskContributor(self.folder, self.run.run, self.run.spec, NODE, blobs, self.write)


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


def raw(seed: int, params: int = PARAMS) -> Floats:
    return (np.random.default_rng(seed).standard_normal(params) * 0.01).astype(np.float32)


def done(sequence: int, first: int = 0) -> PassDone:
    return PassDone(
        sequence=sequence, delta="", base_version=3, steps=4, data_first=first, data_count=4, loss=2.5
    )


def finished(mine: DiskContributor, seed: int, sequence: int, first: int = 0) -> DeltaHeader:
    header = mine.finish_pass(raw(seed, mine._feedback.e.size), done(sequence, first))
    assert header is not None
    return header


def test_a_finished_pass_is_a_signed_header_and_a_blob(disk: Disk) -> None:
    mine = disk.start()
    as_the_port_says: Contributor = mine
    assert as_the_port_says.in_flight() == []
    assert (mine.next_sequence, mine.cursor) == (1, 0)
    header = finished(mine, 1, 1)
    assert (header.sequence, header.steps, header.base_version) == (1, 4, 3)
    assert (header.data_first, header.data_count, header.codec) == (0, 4, "int4")
    blob = disk.store.blobs[Digest(header.delta)]
    assert len(blob) == header.size
    assert origin_of(blob) == (NODE.peer_id, 1)
    statement = delta_statement(RUN.run, Digest(header.delta), 0, 3, 1, 4)
    assert verify_fast(NODE.public_key, header.signature, statement)
    assert (mine.next_sequence, mine.cursor, mine.in_flight()) == (2, 4, [header])
    view = mine.view(G)
    np.testing.assert_array_equal(view.anchor, G - decode("int4", blob, TENSORS))
    assert (view.sequence, view.unmerged_tokens) == (1, 4 * RUN.spec.tokens_per_inner_step)


def same(a: DiskContributor, b: DiskContributor) -> bool:
    params = np.zeros_like(a._feedback.e)
    return (
        a.in_flight() == b.in_flight()
        and a.next_sequence == b.next_sequence
        and a.cursor == b.cursor
        and bool((a.anchor(params) == b.anchor(params)).all())
        and bool((a._feedback.e == b._feedback.e).all())
    )


def test_a_restart_goes_on_exactly(disk: Disk) -> None:
    mine = disk.start()
    mine.finish_pass(raw(1), done(1))
    second = finished(mine, 2, 2, 4)
    mine.settle(Digest(mine.in_flight()[0].delta), Settled.PASSED_OVER)
    again = disk.start()
    assert same(mine, again)
    assert again.in_flight() == [second]
    assert again.cursor == 8


@pytest.mark.parametrize("run", [RUN, SPARSE], ids=["int4", "topk64"])
@pytest.mark.parametrize("how", [*Settled, "finish", "reset"])
def test_a_crash_at_every_write_leaves_before_or_after(
    tmp_path: Path, how: Settled | str, run: TinyRun
) -> None:
    """kill -9 between any two writes (target R4): the record is old or new, never mixed."""

    def prepared(folder: Path) -> tuple[Disk, DiskContributor, DeltaHeader]:
        folder.mkdir()
        disk = Disk(folder, run)
        mine = disk.start()
        mine.settle(Digest(finished(mine, 1, 1).delta), Settled.LISTED)
        return disk, mine, finished(mine, 2, 2, 4)

    def act(mine: DiskContributor, header: DeltaHeader) -> None:
        if how == "finish":
            finished(mine, 3, 3, 8)
        elif how == "reset":
            mine.reset()
        else:
            mine.settle(Digest(header.delta), Settled(how))

    _, before, _ = prepared(tmp_path / "before")
    _, after, header = prepared(tmp_path / "after")
    act(after, header)
    assert not same(before, after)
    outcomes = set()
    for writes in range(10):
        disk, mine, header = prepared(tmp_path / str(writes))
        disk.writes_left = writes
        try:
            act(mine, header)
        except Crash:
            restarted = disk.start()
            disk.writes_left = 10**9
            assert same(restarted, before)
            outcomes.add("old")
            # And it works on: the number is free, so the same pass can be made again.
            assert finished(restarted, 3, 3, 8).sequence == 3
        else:
            assert same(disk.start(), after)
            outcomes.add("new")
            break
    assert outcomes == {"old", "new"}


def test_a_full_disk_loses_nothing_that_was_there(disk: Disk) -> None:
    mine = disk.start()
    mine.finish_pass(raw(1), done(1))
    anchor, e = mine.anchor(G), mine._feedback.e.copy()
    disk.error, disk.writes_left = OperatorError("full", 6), 1
    with pytest.raises(OperatorError):
        mine.finish_pass(raw(2), done(2, 4))
    np.testing.assert_array_equal(mine.anchor(G), anchor)
    np.testing.assert_array_equal(mine._feedback.e, e)
    disk.writes_left = 10**9
    assert finished(mine, 2, 2, 4).sequence == 2


def test_not_finite_changes_nothing(disk: Disk) -> None:
    mine = disk.start()
    mine.finish_pass(raw(1), done(1))
    bad = raw(2)
    bad[7] = np.nan
    with pytest.raises(PeerError, match="NOT_FINITE"):
        mine.finish_pass(bad, done(2, 4))
    assert same(mine, disk.start())
    assert mine.cursor == 4


@pytest.mark.parametrize("run", [RUN, SPARSE], ids=["int4", "topk64"])
def test_everything_sent_or_settled_or_kept_is_the_sum_of_the_deltas(tmp_path: Path, run: TinyRun) -> None:
    """algorithm.md 7, beta = 1, through restarts: nothing is lost and nothing is sent twice."""
    disk, model, codec = Disk(tmp_path, run), run.spec.model, run.spec.outer.codec
    rng = np.random.default_rng(5)
    mine = disk.start()
    raws, listed = np.zeros(model.params), np.zeros(model.params)
    for sequence in range(1, 30):
        while len(mine.in_flight()) == 2 or (mine.in_flight() and rng.random() < 0.5):
            delta = Digest(mine.in_flight()[0].delta)
            how = Settled.PASSED_OVER if rng.random() < 0.3 else Settled.LISTED
            if how is Settled.LISTED:
                listed += decode(codec, disk.store.read(delta), model.tensors)
            mine.settle(delta, how)
            mine.settle(delta, how)  # said twice: counts once
        finished(mine, sequence, sequence)
        raws += raw(sequence, model.params)
        if rng.random() < 0.3:
            mine = disk.start()
    pending = sum(mine._feedback.pending.values(), start=np.zeros(model.params))
    np.testing.assert_allclose(listed + pending + mine._feedback.e, raws, atol=1e-5)


@pytest.mark.parametrize(
    ("how", "e_after"),
    [
        (Settled.LISTED, "kept"),
        (Settled.PASSED_OVER, "returned"),
        (Settled.REFUSED, "kept"),
        (Settled.TOO_LATE, "kept"),
        (Settled.NOT_FINITE, "zero"),
    ],
)
def test_the_table_of_settling(disk: Disk, how: Settled, e_after: str) -> None:
    mine = disk.start()
    header = finished(mine, 1, 1)
    e = mine._feedback.e.copy()
    q = decode("int4", disk.store.read(Digest(header.delta)), TENSORS)
    mine.settle(Digest(header.delta), how)
    expected = {"kept": e, "returned": e + q, "zero": np.zeros_like(e)}[e_after]
    np.testing.assert_array_equal(mine._feedback.e, expected)
    np.testing.assert_array_equal(mine.anchor(G), G)
    assert mine.in_flight() == []


def test_an_own_record_that_was_lost_goes_on_after_the_log(disk: Disk) -> None:
    """A lost `work/` or a key in a new folder: from sequence 1 on every voter would answer DUPLICATE."""
    mine = disk.start()
    mine.go_on_after(40)
    assert mine.next_sequence == 41
    again = disk.start()
    assert again.next_sequence == 41  # durable: the next life needs no log for it
    again.go_on_after(12)  # an older state says nothing new
    assert finished(again, 2, 41).sequence == 41


def test_a_pass_on_its_way_under_a_number_of_the_past_is_given_up(disk: Disk) -> None:
    mine = disk.start()
    mine.go_on_after(40)
    assert mine.finish_pass(raw(1), done(1)) is None
    assert (mine.in_flight(), mine.next_sequence, mine.cursor) == ([], 41, 0)
    np.testing.assert_array_equal(mine._feedback.e, np.zeros(PARAMS))
    finished(mine, 1, 41)
    with pytest.raises(AssertionError, match="made already"):
        mine.finish_pass(raw(2), done(41))


@pytest.mark.parametrize("refused", [True, False])
def test_not_finite_leaves_the_other_delta_in_flight_without_its_content(disk: Disk, refused: bool) -> None:
    """algorithm.md 6: theta <- anchor <- G, e and pending cleared; the log still settles the other one."""
    mine = disk.start()
    first, second = finished(mine, 1, 1), finished(mine, 2, 2, 4)
    if refused:
        mine.settle(Digest(first.delta), Settled.NOT_FINITE)
    else:  # a third pass could not be encoded
        mine.settle(Digest(first.delta), Settled.LISTED)
        mine.go_back()
    for life in (mine, disk.start()):
        assert life.in_flight() == [second]
        view = life.view(G)
        np.testing.assert_array_equal(view.anchor, G)
        assert (view.sequence, view.unmerged_tokens) == (2, 0)
        np.testing.assert_array_equal(life._feedback.e, np.zeros(PARAMS))
    # Later work counts as ever, and the emptied one brings nothing back.
    again = disk.start()
    third = finished(again, 3, 3, 8)
    e = again._feedback.e.copy()
    with pytest.raises(AssertionError, match="two deltas"):
        again.finish_pass(raw(4), done(4, 12))
    again.settle(Digest(second.delta), Settled.PASSED_OVER)
    np.testing.assert_array_equal(again._feedback.e, e)
    assert again.in_flight() == [third]
    assert np.abs(disk.start().view(G).anchor - G).max() > 0


def test_what_was_evaluated_is_known_to_the_next_life(disk: Disk) -> None:
    assert disk.start().evaluated_version == -1
    disk.start().evaluated(0)
    mine = disk.start()
    assert mine.evaluated_version == 0
    header = finished(mine, 1, 1)
    mine.evaluated(16)
    mine.evaluated(32)  # twice in a row: both records name what is in flight
    again = disk.start()
    assert (again.evaluated_version, again.in_flight(), again.cursor) == (32, [header], 4)
    again.settle(Digest(header.delta), Settled.LISTED)
    assert disk.start().evaluated_version == 32
    again.reset()  # the owner dropped it, perhaps: another state may have its number
    assert disk.start().evaluated_version == -1


def test_a_damaged_record_is_skipped_for_the_one_before(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    mine = disk.start()
    first = finished(mine, 1, 1)
    mine.finish_pass(raw(2), done(2, 4))
    newest = max(disk.folder.glob("record.*"), key=lambda p: int(p.suffix[1:]))
    newest.write_bytes(newest.read_bytes()[:-5])
    again = disk.start()
    assert again.in_flight() == [first]
    assert again.cursor == 4  # repeats the lost pass, skips nothing
    assert again.next_sequence > 3  # a number that was perhaps used is not used again
    assert "damaged" in caplog.text
    # What it writes now is newer than the damaged one.
    again.finish_pass(raw(3), done(again.next_sequence, 4))
    assert len(disk.start().in_flight()) == 2


def test_a_damaged_error_feedback_counts_as_a_damaged_record(disk: Disk) -> None:
    mine = disk.start()
    mine.finish_pass(raw(1), done(1))
    mine.finish_pass(raw(2), done(2, 4))
    newest = max(disk.folder.glob("e.*"), key=lambda p: int(p.suffix[1:]))
    data = bytearray(newest.read_bytes())
    data[9] ^= 1
    newest.write_bytes(data)
    assert disk.start().cursor == 4


def test_an_own_delta_whose_blob_is_gone_is_no_longer_in_flight(disk: Disk) -> None:
    mine = disk.start()
    mine.finish_pass(raw(1), done(1))
    second = finished(mine, 2, 2, 4)
    del disk.store.blobs[Digest(mine.in_flight()[0].delta)]
    assert disk.start().in_flight() == [second]


@pytest.mark.parametrize(("run", "files"), [(RUN, 4), (SPARSE, 5)], ids=["int4", "topk64"])
def test_the_folder_does_not_grow(tmp_path: Path, run: TinyRun, files: int) -> None:
    mine = Disk(tmp_path, run).start()
    for sequence in range(1, 12):
        mine.settle(Digest(finished(mine, sequence, sequence).delta), Settled.LISTED)
    assert len(list(tmp_path.iterdir())) <= files


@pytest.fixture
def sparse(tmp_path: Path) -> Disk:
    return Disk(tmp_path, SPARSE)


def test_in_flight_of_a_sparse_codec_is_raw_and_survives(sparse: Disk) -> None:
    """algorithm.md 3: the blob does not hold what the anchor lacks, so it lies beside the record."""
    params = SPARSE.spec.model.params
    mine = sparse.start()
    first, second = finished(mine, 1, 1), finished(mine, 2, 2, 4)
    for life in (mine, sparse.start()):
        np.testing.assert_array_equal(
            life.anchor(SPARSE.params), SPARSE.params - raw(1, params) - raw(2, params)
        )
    again = sparse.start()
    e = again._feedback.e.copy()
    q = decode("topk64", sparse.store.read(Digest(first.delta)), SPARSE.spec.model.tensors)
    again.settle(Digest(first.delta), Settled.PASSED_OVER)
    for life in (again, sparse.start()):
        np.testing.assert_array_equal(life._feedback.e, e + q)
        np.testing.assert_array_equal(life.anchor(SPARSE.params), SPARSE.params - raw(2, params))
        assert life.in_flight() == [second]


def test_a_sparse_delta_that_was_emptied_stays_so(sparse: Disk) -> None:
    mine = sparse.start()
    header = finished(mine, 1, 1)
    mine.go_back()
    for life in (mine, sparse.start()):
        assert life.in_flight() == [header]
        np.testing.assert_array_equal(life.anchor(SPARSE.params), SPARSE.params)


@pytest.mark.parametrize("harm", ["changed", "shorter", "gone"])
def test_a_damaged_raw_file_costs_its_own_delta_alone(
    sparse: Disk, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Both records list the same flight: to reject them would lose e, headers and sequence for one array."""
    params, model = SPARSE.spec.model.params, SPARSE.spec.model
    mine = sparse.start()
    first, second = finished(mine, 1, 1), finished(mine, 2, 2, 4)
    e = mine._feedback.e.copy()
    path = sparse.folder / "raw.2"
    data = bytearray(path.read_bytes())
    data[9] ^= 1
    path.unlink()
    if harm != "gone":
        path.write_bytes(data if harm == "changed" else data[:-4])
    q = decode("topk64", sparse.store.read(Digest(second.delta)), model.tensors)
    again = sparse.start()
    assert again.in_flight() == [first, second]
    assert (again.cursor, again.next_sequence) == (8, 3)
    np.testing.assert_array_equal(again._feedback.e, e)
    np.testing.assert_array_equal(again.anchor(SPARSE.params), SPARSE.params - raw(1, params) - q)
    assert "raw.2 is damaged or gone" in caplog.text
    # Its own settling is that of any other, and the records that follow are whole.
    again.settle(Digest(first.delta), Settled.LISTED)
    later = sparse.start()
    assert later.in_flight() == [second]
    later.settle(Digest(second.delta), Settled.PASSED_OVER)
    finished(later, 3, 3, 8)
    caplog.clear()
    last = sparse.start()
    assert same(later, last)
    assert not caplog.text
    np.testing.assert_allclose(
        last._feedback.e + sum(last._feedback.pending.values()), e + q + raw(3, params), atol=1e-6
    )


def test_a_third_delta_in_flight_is_our_own_fault(disk: Disk) -> None:
    mine = disk.start()
    mine.finish_pass(raw(1), done(1))
    mine.finish_pass(raw(2), done(2))
    with pytest.raises(AssertionError):
        mine.finish_pass(raw(3), done(3))
