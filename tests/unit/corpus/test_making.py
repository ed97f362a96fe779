"""From files to a DataSpec: the same for the same input, resumable, clear where it refuses."""

from __future__ import annotations

import errno
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.ids import digest_of
from p2pdiloco.run_spec import BlobRef, DataSpec
from p2pdiloco.wire.frames import open_frame
from p2pdiloco_node.corpus import making, packing, readers, reading, streams, tokenising
from p2pdiloco_node.corpus.held_out import HeldSet, Split
from p2pdiloco_node.corpus.making import Request, check_work, forget_work, make_data, plan_data
from p2pdiloco_node.corpus.processes import Stopped
from p2pdiloco_node.corpus.readers import Batch, Format, Part, read_part
from p2pdiloco_node.corpus.sources import Input
from p2pdiloco_node.corpus.streams import cannot_read
from p2pdiloco_node.corpus.tokenizer import ByteTokens, JsonTokens
from p2pdiloco_node.corpus.work import Taken, Work, claimed
from p2pdiloco_node.progress import Quiet

from .conftest import text


class Said(Quiet):
    """What a person would read. Sets `stop` at the `number`th word about the step `what`."""

    def __init__(self, stop: threading.Event | None = None, what: str = "", number: int = 0) -> None:
        self.said: list[str] = []
        self.steps: list[tuple[str, float, float, str]] = []
        self._stop, self._what, self._left = stop, what, number

    def say(self, text: str) -> None:
        self.said.append(text)

    def progress(
        self, what: str, done: float, total: float = 1.0, unit: str = "", doing: str = ""
    ) -> None:  # fmt: skip
        self.steps.append((what, done, total, unit))
        self._left -= what == self._what
        if self._stop is not None and self._left == 0:
            self._stop.set()


STOPS = [("Reading", 2), ("Reading", 3), ("Looking for copies", 2), ("Tokenising", 3), ("Tokenising", 4),
         ("Writing shards", 2)]  # fmt: skip


def opened(out: Path, data: DataSpec, ref: BlobRef) -> np.ndarray:
    frame = (out / "blobs" / ref.digest.hex()).read_bytes()
    assert digest_of(frame) == ref.digest
    assert len(frame) == ref.size
    return np.frombuffer(open_frame(frame, ref.tokens * data.token_bytes), f"<u{data.token_bytes}")


def documents(out: Path, data: DataSpec, refs: tuple[BlobRef, ...]) -> list[list[int]]:
    tokens = np.concatenate([opened(out, data, ref) for ref in refs])
    ends = np.flatnonzero(tokens == data.tokenizer.end_token)
    assert ends[-1] == len(tokens) - 1
    return [part[:-1].tolist() for part in np.split(tokens, ends + 1)[:-1]]


def test_every_document_is_on_one_side_once(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    said = Said()
    data = make_data(Request([str(folder)]), out, said)
    trained = [bytes(d).decode() for d in documents(out, data, data.shards)]
    held_out = [bytes(d).decode() for d in documents(out, data, (data.evaluation,))]
    numbers = [*range(400), *range(1000, 1300), *range(2100, 2250)]
    long_text = (folder / "long.txt").read_text()
    assert {t for t in trained + held_out if t not in long_text} == {text(i) for i in numbers}
    assert len(trained) + len(held_out) == len(set(trained + held_out)) == 850 + 2
    parts = sorted((t for t in trained + held_out if t in long_text), key=long_text.index)
    assert "".join(parts) == long_text
    assert data.evaluations[0].text_bytes == sum(len(t.encode()) for t in held_out)
    assert 0.05 < data.evaluation.tokens / sum(s.tokens for s in data.shards) <= 0.12
    assert any("100 exact copies" in sentence for sentence in said.said)
    assert any("empty: 1; broken and passed over: 1" in s and "a.jsonl, line 402" in s for s in said.said)


def test_the_order_is_the_seed_s_and_mixes_files(folder: Path, tmp_path: Path) -> None:
    one = make_data(Request([str(folder)], seed=1), tmp_path / "1", Quiet())
    two = make_data(Request([str(folder)], seed=2), tmp_path / "2", Quiet())
    assert one.shards != two.shards
    assert one.evaluations == two.evaluations, "what is held out is not the seed's"
    first, second = (documents(tmp_path / n, d, d.shards) for n, d in (("1", one), ("2", two)))
    assert first != second
    assert sorted(first) == sorted(second)
    numbers = [int(bytes(d[5:10]).split(b".")[0]) for d in first[:200] if len(d) < 5000]
    assert {n // 1000 for n in numbers} == {0, 1, 2}


def test_of_a_document_that_is_cut_the_text_that_is_there_counts(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its bits per byte would look better than they are."""
    monkeypatch.setattr(packing.limits, "frame_content_bytes_max", 1001)
    work = Work(tmp_path)
    for name in ("tokens", "blobs"):
        (tmp_path / name).mkdir()
    held = [tokenising.Held(b"d", b"x" * 3000, 3000)]
    work.write(work.held_of(0), [msgspec.msgpack.encode(held)])
    split = Split(1, 3000, 0, (HeldSet("all", (b"d",)),), (3000,))
    (made,) = packing.evaluation_sets(work, tmp_path / "blobs", split, 1, ByteTokens())
    assert (made.shard.tokens, made.text_bytes) == (1001, 1001)


def test_on_several_processes(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request([str(folder)], tokenizer="bpe:300")
    whole = make_data(request, tmp_path / "1", Quiet())
    monkeypatch.setattr(making, "INLINE_BYTES", 0)
    assert make_data(request._replace(jobs=2), tmp_path / "2", Quiet()) == whole


def test_a_trained_tokenizer_travels_with_the_run(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    data = make_data(Request([str(folder)], tokenizer="bpe:320"), out, Quiet())
    assert (data.tokenizer.kind, data.tokenizer.vocab_size, data.token_bytes) == ("json", 320, 2)
    (piece,) = data.tokenizer.pieces
    frame = (out / "blobs" / piece.digest.hex()).read_bytes()
    tokenizer = JsonTokens(open_frame(frame, piece.tokens))
    held_out = documents(out, data, (data.evaluation,))
    assert data.evaluations[0].text_bytes == sum(tokenizer.text_bytes(np.array(d)) for d in held_out)
    forget_work(out)
    again = make_data(
        Request([str(folder)], tokenizer=str(_saved(tmp_path, frame, piece))), tmp_path / "2", Quiet()
    )
    assert again == data, "a file makes the same as the training of it"


def _saved(folder: Path, frame: bytes, piece: BlobRef) -> Path:
    path = folder / "tokenizer.json"
    path.write_bytes(open_frame(frame, piece.tokens))
    return path


def test_shards_are_even_and_no_larger_than_a_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "frame_content_bytes_max", 256 << 10)
    (tmp_path / "x.txt").write_text("\n\n".join(text(i, 400) for i in range(250)))
    data = make_data(Request([f"{tmp_path}/x.txt"], jobs=1), tmp_path / "out", Quiet())
    sizes = [s.tokens for s in data.shards]
    assert len(sizes) == 3
    assert max(sizes) <= limits.frame_content_bytes_max
    assert max(sizes) - min(sizes) < 10
    wide = make_data(Request([f"{tmp_path}/x.txt"], tokenizer="bpe:300", jobs=1), tmp_path / "wide", Quiet())
    assert all(s.tokens * 2 <= limits.frame_content_bytes_max for s in wide.shards)


def test_a_set_for_each_source(folder: Path, tmp_path: Path) -> None:
    data_arguments = [f"{folder}/c.parquet", f"{folder}/*.jsonl*"]
    out = tmp_path / "out"
    data = make_data(Request(data_arguments, eval_per_source=True), out, Quiet())
    assert data.evaluations[0].name == "all"
    assert [s.name for s in data.evaluations[1:]] == ["c.parquet", "*.jsonl*"]
    parquet, lines = (documents(out, data, (s.shard,)) for s in data.evaluations[1:])
    numbers = [int(bytes(d[5:10]).split(b".")[0]) for d in parquet]
    assert all(n < 100 or n >= 2000 for n in numbers), "copies belong to the first source"
    assert all(100 <= int(bytes(d[5:10]).split(b".")[0]) < 2000 for d in lines)
    trained = documents(out, data, data.shards)
    assert not {bytes(d) for d in trained} & {bytes(d) for d in [*parquet, *lines]}
    alone = make_data(Request(data_arguments), tmp_path / "2", Quiet())
    assert len(alone.evaluations) == 1


def test_the_key_is_the_one_that_was_asked_for(tmp_path: Path) -> None:
    lines = [json.dumps({"text": text(i), "body": text(5000 + i)}) for i in range(50)]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    one = make_data(Request([f"{tmp_path}/x.jsonl"]), tmp_path / "1", Quiet())
    two = make_data(Request([f"{tmp_path}/x.jsonl"], text_key="body"), tmp_path / "2", Quiet())
    assert bytes(documents(tmp_path / "1", one, one.shards)[0]).decode() in {text(i) for i in range(50)}
    assert bytes(documents(tmp_path / "2", two, two.shards)[0]).decode() in {
        text(5000 + i) for i in range(50)
    }


def test_ready_tokens_are_taken_as_they_are(folder: Path, tmp_path: Path) -> None:
    made = make_data(Request([str(folder)], tokenizer="bpe:320"), tmp_path / "1", Quiet())
    tokens = np.concatenate([opened(tmp_path / "1", made, ref) for ref in made.shards])
    (piece,) = made.tokenizer.pieces
    tokenizer = _saved(tmp_path, (tmp_path / "1/blobs" / piece.digest.hex()).read_bytes(), piece)
    tokens.tofile(tmp_path / "x.bin")
    np.save(tmp_path / "y.npy", tokens.astype(np.uint32))
    out = tmp_path / "2"
    data = make_data(
        Request([f"{tmp_path}/x.bin", f"{tmp_path}/y.npy"], tokenizer=str(tokenizer)), out, Quiet()
    )
    found = documents(out, data, (*data.shards, data.evaluation))
    assert sorted(found) == sorted(documents(tmp_path / "1", made, made.shards)), "the second file is a copy"
    words = JsonTokens(tokenizer.read_bytes())
    held_out = documents(out, data, (data.evaluation,))
    assert data.evaluations[0].text_bytes == sum(words.text_bytes(np.array(d)) for d in held_out)


def test_a_making_that_was_stopped_goes_on_where_it_was(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "document_bytes_max", 16 << 10)
    monkeypatch.setattr(limits, "portion_bytes", 100 << 10)
    monkeypatch.setattr(limits, "bucket_bytes", 100 << 10)
    monkeypatch.setattr(limits, "frame_content_bytes_max", 128 << 10)
    request = Request([str(folder)], tokenizer="bpe:300", jobs=1)
    whole = make_data(request, tmp_path / "whole", Quiet())
    out = tmp_path / "out"
    seen: dict[Path, int] = {}
    for what, number in STOPS:
        stop = threading.Event()
        with pytest.raises(Stopped):
            make_data(request, out, Said(stop, what, number), stop)
        now = {path: path.stat().st_ino for path in (out / "making").rglob("*") if path.is_file()}
        now |= {path: path.stat().st_ino for path in (out / "blobs").iterdir()}
        assert {path: now[path] for path in seen.keys() & now.keys()}.items() <= seen.items(), "made twice"
        seen |= now
    assert len(seen) > 30
    assert make_data(request, out, Quiet()) == whole
    left = {path: path.stat().st_ino for path in (out / "blobs").iterdir()}
    assert len(left.items() & seen.items()) >= 1
    assert make_data(request, out, Quiet()) == whole
    forget_work(out)
    assert not (out / "making").exists()


def test_a_compressed_file_is_gone_on_with_from_its_last_segment(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "portion_bytes", 32 << 10)
    monkeypatch.setattr(readers, "BATCH_BYTES", 8 << 10)
    monkeypatch.setattr(streams, "READ_BYTES", 8 << 10)
    request = Request([f"{folder}/b.jsonl.gz"], jobs=1)
    whole = make_data(request, tmp_path / "whole", Quiet())
    out = tmp_path / "out"
    stop = threading.Event()
    with pytest.raises(Stopped):
        make_data(request, out, Said(stop, "Reading", 2), stop)
    segments = sorted((out / "making/read").iterdir())
    assert len(segments) > 5
    for path in segments[4:]:
        path.unlink()
    kept = [path.stat().st_ino for path in segments[:4]]
    stop = threading.Event()
    with pytest.raises(Stopped):
        make_data(request, out, Said(stop, "Reading", 2), stop)
    assert [path.stat().st_ino for path in segments[:4]] == kept
    assert [path.exists() for path in segments] == [True] * len(segments)
    assert make_data(request, out, Quiet()) == whole


def test_another_command_in_the_same_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    request = Request([str(folder)])
    make_data(request, out, Quiet())
    for other, flag in (
        (request._replace(seed=3), "--seed 0"),
        (request._replace(text_key="body"), "--text-key text"),
        (request._replace(tokenizer="bpe:300"), "--tokenizer bytes"),
        (request._replace(eval_per_source=True), "--eval-per-source left out"),
        (request._replace(data=[f"{folder}/*.txt"]), "--data"),
    ):
        if other.text_key == "body":
            shutil.copy(folder / "long.txt", folder / "more.txt")
            other = other._replace(data=[f"{folder}/*.txt"])
        with pytest.raises(
            OperatorError, match=f"beginning of another run, with .*{flag}|with {flag}|--data"
        ):
            make_data(other, out, Quiet())
        with pytest.raises(OperatorError, match="beginning of another run"):
            check_work(plan_data(other), out)
    (folder / "more.txt").unlink()
    check_work(plan_data(request), out)
    (folder / "long.txt").write_text(text(1))
    with pytest.raises(
        OperatorError, match=r"the input has changed since .* was begun \(.*long\.txt, 1 file in all"
    ):
        make_data(request, out, Quiet())


@pytest.mark.parametrize("held", [Taken, claimed])
def test_one_process_at_a_time(folder: Path, tmp_path: Path, held: Any) -> None:
    work = Work(tmp_path / "out/making")
    with held(work):
        with pytest.raises(OperatorError, match="Another p2pdiloco makes a run"):
            make_data(Request([str(folder)]), tmp_path / "out", Quiet())
        with pytest.raises(OperatorError, match="Another p2pdiloco makes a run"), claimed(work):
            pass
    with claimed(work):
        pass


def test_a_claim_leaves_no_folder_that_it_made(tmp_path: Path) -> None:
    with claimed(Work(tmp_path / "deep/out/making")):
        assert (tmp_path / "deep/out").is_dir()
    assert not list(tmp_path.iterdir())
    (tmp_path / "out/making").mkdir(parents=True)
    with claimed(Work(tmp_path / "out/making")):
        pass
    assert (tmp_path / "out/making").is_dir(), "somebody else's"
    with claimed(Work(tmp_path / "mine/making")):
        (tmp_path / "mine/making/fetched").write_bytes(b"an hour of work")
    assert (tmp_path / "mine/making/fetched").exists()


def test_what_stands_in_the_way_is_seen_without_a_trace(folder: Path, tmp_path: Path) -> None:
    planned = plan_data(Request([str(folder)]))
    check_work(planned, tmp_path / "out")
    with pytest.raises(OperatorError, match="making the run needs about"):
        check_work(planned, tmp_path / "out", beside_bytes=1 << 60)
    assert not (tmp_path / "out").exists()


def test_a_plan_that_came_while_the_disk_was_looked_at_is_not_written_over(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else this call would get the data of the other one's command."""
    request = Request([str(folder)], jobs=1)

    def meanwhile(*_: object) -> None:
        monkeypatch.undo()
        make_data(request, tmp_path / "out", Quiet())

    monkeypatch.setattr(making, "check_disk", meanwhile)
    with pytest.raises(OperatorError, match="beginning of another run, with"):
        make_data(request._replace(seed=7), tmp_path / "out", Quiet())


def test_a_disk_that_is_too_small_is_said_before_anything_is_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1_000_000))
    with pytest.raises(
        OperatorError, match=r"needs about 1\.\d MB of disk at .*, and 1\.0 MB are free"
    ) as caught:
        make_data(Request([str(folder)]), tmp_path / "out", Quiet())
    assert caught.value.exit_code == 6
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("request_", "sentence", "code"),
    [
        (Request(["in/*.txt"], seq_len=10**7), "the corpus is too small", 3),
        (Request(["in/*.parquet"], seq_len=10**6), "the corpus is too small: the training side has", 3),
        (Request(["in/a.jsonl", "in/[a].jsonl"], eval_per_source=True), "has no text of its own", 3),
        (Request(["in/*.jsonl"], text_key="body"), "there is no text 'body'; it has id, text", 3),
        (Request(["in/*.txt"], tokenizer="bpe:4"), "write bpe:N", 2),
        (Request(["in/x.bin"], tokenizer="bpe:300"), "holds tokens: name the tokenizer", 2),
        (Request(["in/*.txt"], seed=-1), "--seed is a whole number from 0 to", 2),
        (Request(["in/*.txt"], jobs=-1), "--jobs is 0 to 64", 2),
        (Request(["in/*.txt"] * 16, eval_per_source=True), "15 at most", 2),
        (Request(["in/blank.md"]), "no document has any text", 3),
        (Request(["in/empty.md"]), "the corpus is empty: 1 file without a byte", 3),
        (
            Request(["in/latin.md", "in/blank.md"]),
            r"there is no text: 1 of 2 documents are broken \(.*latin\.md, line 1: it is not U.*1 empty",
            3,
        ),
        (Request(["in/wide.txt"]), r"wide\.txt is text in UTF-16.*convert it \(iconv", 3),
        (
            Request(["in/half.jsonl"]),
            r"20 of 120 documents are broken \(.*half\.jsonl, line 1: .*more than 10",
            3,
        ),
    ],
)
def test_what_is_refused_leaves_nothing_behind(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request_: Request, sentence: str, code: int
) -> None:
    monkeypatch.chdir(tmp_path)
    (folder / "x.bin").write_bytes(bytes(100))
    (folder / "blank.md").write_text("\n \n")
    (folder / "empty.md").write_text("")
    (folder / "latin.md").write_bytes("café".encode("latin-1"))
    (folder / "wide.txt").write_text("the swarm trains one model\n" * 40_000, encoding="utf-16")
    good = [json.dumps({"text": text(i)}) for i in range(100)]
    (folder / "half.jsonl").write_text("\n".join(["{"] * 20 + good))
    with pytest.raises(OperatorError, match=sentence) as caught:
        make_data(request_, tmp_path / "out", Quiet())
    assert caught.value.exit_code == code
    assert not (tmp_path / "out").exists()


def test_a_disk_that_fails_leaves_what_is_done(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "portion_bytes", 300 << 10)
    request = Request([str(folder)], jobs=1)
    whole = make_data(request, tmp_path / "whole", Quiet())
    out = tmp_path / "out"
    monkeypatch.setattr(reading, "read_part", _failing)
    with pytest.raises(OperatorError, match=r"long\.txt cannot be read \(Input/output error\): mend that"):
        make_data(request, out, Quiet())
    segments = {path: path.stat().st_ino for path in (out / "making/read").iterdir()}
    assert len(segments) > 2
    monkeypatch.undo()
    monkeypatch.setattr(limits, "portion_bytes", 300 << 10)
    stop = threading.Event()
    with pytest.raises(Stopped):
        make_data(request, out, Said(stop, "Looking for copies", 1), stop)
    assert segments.items() <= {path: path.stat().st_ino for path in (out / "making/read").iterdir()}.items()
    assert make_data(request, out, Quiet()) == whole


def _failing(entry: Input, part: Part, form: Format, resume: int | None) -> Iterator[Batch]:
    if entry.path.endswith("long.txt"):
        raise cannot_read(entry.path, OSError(errno.EIO, "Input/output error"))
    return read_part(entry, part, form, resume)


def test_progress_is_counted(folder: Path, tmp_path: Path) -> None:
    said = Said()
    make_data(Request([str(folder)]), tmp_path / "out", said)
    whats = list(dict.fromkeys(what for what, *_ in said.steps))
    assert whats == ["Reading", "Looking for copies", "Tokenising", "Writing shards"]
    for what, unit in (("Reading", "bytes"), ("Tokenising", "bytes"), ("Writing shards", "shards")):
        steps = [step for step in said.steps if step[0] == what]
        assert all(step[3] == unit for step in steps)
        assert [step[1] for step in steps] == sorted(step[1] for step in steps)
        assert steps[-1][1] == pytest.approx(steps[-1][2])
    assert said.said[0].startswith("About 1.")
