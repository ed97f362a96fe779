"""What `--data` names, by kind, in a fixed order."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco_node.corpus.planning import source_names
from p2pdiloco_node.corpus.sources import find_files, find_inputs, kind_of


def write(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("text")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.txt", ("text", "")),
        ("a.py", ("text", "")),
        ("a", ("text", "")),
        ("a.JSONL", ("jsonl", "")),
        ("a.json.gz", ("jsonl", "gz")),
        ("a.jsonl.zst", ("jsonl", "zst")),
        ("a.txt.zstd", ("text", "zst")),
        ("a.gz", ("text", "gz")),
        ("a.parquet", ("parquet", "")),
        ("a.bin", ("tokens", "")),
        ("a.npy", ("tokens", "")),
    ],
)
def test_kinds_by_name(name: str, kind: tuple[str, str]) -> None:
    assert kind_of(Path(name)) == kind


@pytest.mark.parametrize("name", ["a.parquet.gz", "a.npy.zst"])
def test_tables_and_tokens_are_not_compressed(name: str) -> None:
    with pytest.raises(OperatorError, match="unpack it first"):
        kind_of(Path(name))


def test_a_folder_is_what_is_surely_text_in_it(tmp_path: Path) -> None:
    write(
        tmp_path, "b.txt", "a/c.md", "a/d.jsonl.gz", "a/e.bin", "a/f.png", ".git/g.txt", "a/.h.txt", "i.html"
    )
    found = [Path(entry.path) for entry in find_inputs([str(tmp_path)], text_key="text")]
    assert found == [tmp_path / "a/c.md", tmp_path / "a/d.jsonl.gz", tmp_path / "b.txt"]
    write(tmp_path / "pictures", "a.png")
    with pytest.raises(OperatorError, match="holds no text, JSON lines or Parquet by their names"):
        find_inputs([str(tmp_path / "pictures")], text_key="text")


def test_a_file_belongs_to_the_first_argument_that_names_it(tmp_path: Path) -> None:
    write(tmp_path, "a.txt", "b.txt", "c.txt")
    found = find_inputs([f"{tmp_path}/b.txt", f"{tmp_path}/*.txt"], text_key="text")
    assert [(Path(entry.path).name, entry.source) for entry in found] == [
        ("b.txt", 0),
        ("a.txt", 1),
        ("c.txt", 1),
    ]
    assert find_files([f"{tmp_path}/*.txt", f"{tmp_path}/[ab].txt"]) == sorted(tmp_path.iterdir())


def test_a_name_with_a_bracket_is_a_file_first(tmp_path: Path) -> None:
    write(tmp_path, "a[1].txt")
    assert [Path(e.path).name for e in find_inputs([f"{tmp_path}/a[1].txt"], text_key="text")] == ["a[1].txt"]


def test_a_dataset_is_taken_as_it_is_named() -> None:
    (entry,) = find_inputs(["hf:some/name:en:train"], text_key="text")
    assert (entry.path, entry.kind, entry.text_bytes) == ("some/name:en:train", "hf", 0)
    with pytest.raises(OperatorError, match="is no file"):
        find_files(["hf:some/name"])


def test_the_standard_library_is_the_default() -> None:
    files = find_files(None)
    assert len(files) > 200
    assert all(p.suffix == ".py" for p in files)
    assert not any("test" in p.parts or "site-packages" in p.parts for p in files)
    assert [Path(entry.path) for entry in find_inputs(None, text_key="text")] == files == sorted(files)


def test_a_name_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"\xff\xfe.txt")).write_text("text")
    with pytest.raises(OperatorError, match=r"fe\.txt' is no UTF-8; give the file another name") as caught:
        find_inputs([str(tmp_path)], text_key="text")
    str(caught.value).encode()


def test_what_cannot_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "a.txt", "b.txt")
    with pytest.raises(OperatorError, match="list of data files is empty") as caught:
        find_inputs([], text_key="text")
    assert caught.value.exit_code == 3
    with pytest.raises(OperatorError, match=r"\*\.md'; check the path, and quote it for the shell\.$"):
        find_inputs([f"{tmp_path}/*.md"], text_key="text")
    with pytest.raises(OperatorError, match=r"no file matches 'bok'; check the path\.$"):
        find_inputs(["bok"], text_key="text")
    for empty in ("", " "):
        with pytest.raises(OperatorError, match="data files is empty"):
            find_inputs([f"{tmp_path}/a.txt", empty], text_key="text")
    monkeypatch.setattr(limits, "corpus_arguments_max", 1)
    with pytest.raises(OperatorError, match="--data is given 2 times"):
        find_inputs([f"{tmp_path}/a.txt", f"{tmp_path}/b.txt"], text_key="text")
    monkeypatch.setattr(limits, "corpus_files_max", 1)
    with pytest.raises(OperatorError, match="more than 1 files"):
        find_inputs([f"{tmp_path}/?.txt"], text_key="text")


def test_evaluation_sets_have_public_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are signed and shown to everybody: no folder of the owner's machine is in them."""
    monkeypatch.chdir(tmp_path)
    for name in ("secret/poems", "other/poems", "lang=en"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "a.txt").write_text(f"words of {name}")
    given = [
        str(tmp_path / "secret/poems"), f"{tmp_path}/other/poems/", "secret/*/*.txt",
        "verse=secret/poems/a.txt", "hf:owner/set", "lang=en", "lang=en/*.txt",
    ]  # fmt: skip
    assert list(source_names(given).values()) == [
        "poems", "poems (2)", "*.txt", "verse", "hf:owner/set", "lang=en", "*.txt (7)",
    ]  # fmt: skip
    assert [p.name for p in find_files(["verse=secret/poems", "lang=en/*.txt"])] == ["a.txt", "a.txt"]
