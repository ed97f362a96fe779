"""Files to shards: the same for the same files, held out by content, and clear about what cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.ids import Digest, digest_of
from p2pdiloco.run_spec import DataSpec
from p2pdiloco.wire.frames import open_frame
from p2pdiloco_node.training import corpus as corpus_module
from p2pdiloco_node.training.corpus import find_files, read_corpus, write_shards


def quiet(what: str, share: float) -> None:
    assert 0 <= share <= 1


def write_files(folder: Path, sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((f"{name} ".encode() * (size // 4 + 1))[:size])


def shards_of(globs: list[str]) -> tuple[DataSpec, dict[Digest, bytes]]:
    blobs: dict[Digest, bytes] = {}
    return write_shards(read_corpus(find_files(globs), quiet), blobs.__setitem__, quiet), blobs


def test_twice_the_same(tmp_path: Path) -> None:
    write_files(tmp_path, {f"d{i % 7}/f{i}.txt": 3000 + 17 * i for i in range(60)})
    spec, blobs = shards_of([f"{tmp_path}/**/*.txt"])
    assert (spec, blobs) == shards_of([f"{tmp_path}/d[3-9]/*.txt", f"{tmp_path}/**/*.txt"])
    assert all(digest_of(blobs[Digest(s.digest)]) == s.digest for s in (*spec.shards, spec.evaluation))


def test_every_byte_is_on_one_side_and_each_file_ends(tmp_path: Path) -> None:
    write_files(tmp_path, {f"f{i:02}.txt": 5000 + i for i in range(40)})
    spec, blobs = shards_of([f"{tmp_path}/*.txt"])
    trained = b"".join(open_frame(blobs[Digest(s.digest)], s.tokens) for s in spec.shards).split(b"\0")
    held_out = open_frame(blobs[Digest(spec.evaluation.digest)], spec.evaluation.tokens).split(b"\0")
    assert trained.pop() == held_out.pop() == b""
    files = {p.read_bytes() for p in tmp_path.iterdir()}
    assert set(trained) | set(held_out) == files
    assert len(trained) + len(held_out) == 40
    assert trained == sorted(trained)  # in the order of their names, which their contents begin with


def test_shards_are_even_and_at_most_four_mebibytes(tmp_path: Path) -> None:
    write_files(tmp_path, {f"f{i}.txt": 1_000_000 + i for i in range(10)})
    spec, blobs = shards_of([f"{tmp_path}/*.txt"])
    sizes = [s.tokens for s in spec.shards]
    assert len(sizes) == 3
    assert max(sizes) <= limits.chunk_bytes
    assert max(sizes) - min(sizes) < 10
    assert all(s.size == len(blobs[Digest(s.digest)]) < s.tokens for s in spec.shards)


def test_a_full_evaluation_is_held_out_where_the_corpus_allows(tmp_path: Path) -> None:
    write_files(tmp_path, {f"f{i}.txt": 9000 + i for i in range(300)})
    spec, _ = shards_of([f"{tmp_path}/*.txt"])
    assert limits.evaluation_tokens_max < spec.evaluation.tokens < 300_000


def test_held_out_stays_held_out_when_files_are_added(tmp_path: Path) -> None:
    write_files(tmp_path, {f"f{i}.txt": 2000 + i for i in range(200)})
    before = read_corpus(find_files([f"{tmp_path}/*"]), quiet)
    write_files(tmp_path, {f"g{i}.txt": 2000 + i for i in range(20)})
    after = read_corpus(find_files([f"{tmp_path}/*"]), quiet)
    moved = {s.digest for s in before.training} & {s.digest for s in after.held_out}
    assert len(moved) <= 4  # the share grew a little; nothing was drawn anew


def test_copies_are_read_once(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.txt": 30_000, "b.txt": 20_000})
    (tmp_path / "copy.txt").write_bytes((tmp_path / "a.txt").read_bytes())
    corpus = read_corpus(find_files([f"{tmp_path}/*"]), quiet)
    assert corpus.training_tokens + corpus.held_out_tokens <= 50_003


@pytest.mark.parametrize("sizes", [[100_000], [90_000, 40], [500_000, 500_001]])
def test_of_few_large_files_a_tail_is_held_out(tmp_path: Path, sizes: list[int]) -> None:
    write_files(tmp_path, {f"f{i}.txt": size for i, size in enumerate(sizes)})
    corpus = read_corpus(find_files([f"{tmp_path}/*"]), quiet)
    (tail,) = corpus.held_out
    (rest,) = [s for s in corpus.training if s.path == tail.path]
    assert (rest.first, rest.stop) == (0, tail.first)
    assert tail.stop == tail.path.stat().st_size
    assert 0.05 * sum(sizes) < tail.size <= 0.11 * sum(sizes)


def test_the_standard_library_is_the_default() -> None:
    files = find_files(None)
    assert len(files) > 200
    assert all(p.suffix == ".py" for p in files)
    assert not any("test" in p.parts or "site-packages" in p.parts for p in files)
    assert files == sorted(files)


def test_bad_corpora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path, {"empty.txt": 0, "a.txt": 100, "b.txt": 101})
    cases = [
        ([], "list of data files is empty"),
        ([f"{tmp_path}/*.md"], "no file matches"),
        ([str(tmp_path)], "is a folder"),
        ([f"{tmp_path}/empty.txt"], "without a byte"),
    ]
    for globs, sentence in cases:
        with pytest.raises(OperatorError, match=sentence) as caught:
            read_corpus(find_files(globs), quiet)
        assert caught.value.exit_code == 3
    monkeypatch.setattr(limits, "corpus_bytes_max", 150)
    with pytest.raises(OperatorError, match="more than"):
        read_corpus(find_files([f"{tmp_path}/?.txt"]), quiet)
    monkeypatch.setattr(limits, "corpus_files_max", 1)
    with pytest.raises(OperatorError, match="more than 1 files"):
        find_files([f"{tmp_path}/?.txt"])


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """A folder in place of the file stands for every reason: root may read whatever it likes."""
    (tmp_path / "bad.txt").mkdir()
    with pytest.raises(OperatorError, match=r"bad\.txt cannot be read") as caught:
        read_corpus([tmp_path / "bad.txt"], quiet)
    assert caught.value.exit_code == 3


def test_a_file_that_changes_meanwhile_is_noticed(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.txt": 50_000, "b.txt": 3000})
    corpus = read_corpus(find_files([f"{tmp_path}/*"]), quiet)
    (tmp_path / "a.txt").write_bytes(b"short")
    with pytest.raises(OperatorError, match=r"a\.txt changed"):
        write_shards(corpus, lambda digest, data: None, quiet)


def test_pieces_do_not_depend_on_the_read_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path, {f"f{i}.txt": 7000 + i for i in range(30)})
    whole = shards_of([f"{tmp_path}/*"])
    monkeypatch.setattr(corpus_module, "READ_BYTES", 999)
    assert shards_of([f"{tmp_path}/*"]) == whole
