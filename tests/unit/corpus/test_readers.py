"""Readers give the same documents however a file is divided, and say what cannot be read, and where."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco_node.corpus import readers, streams
from p2pdiloco_node.corpus.documents import clean
from p2pdiloco_node.corpus.readers import END, Batch, Broken, Format, Part, describe, read_part
from p2pdiloco_node.corpus.sources import Input, find_inputs
from p2pdiloco_node.corpus.streams import pieces

FORM = Format("text")
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": lambda data: (
        gzip.compress(data[:50]) + gzip.compress(data[50:])
    ),  # two members, as pigz makes them
    ".zst": lambda data: zstandard.compress(data[:50]) + zstandard.compress(data[50:]),
}
in_folder = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def entry_of(path: Path, data: bytes) -> Input:
    path.write_bytes(PACKERS.get(path.suffix, bytes)(data))
    (entry,) = find_inputs([str(path)], text_key="text")
    return entry


def read(entry: Input, *parts: tuple[int, int]) -> list[bytes]:
    found: list[bytes] = []
    for first, stop in parts or ((0, END),):
        for batch in read_part(entry, Part(0, first, stop), FORM):
            found += batch.texts
    return found


def resumed(entry: Input, steps: int) -> list[bytes]:
    """As `read`, but begun anew after every `steps` batches."""
    found: list[bytes] = []
    after: int | None = None
    while True:
        batches: list[Batch] = []
        for batch in read_part(entry, Part(0, 0, END), FORM, after):
            batches.append(batch)
            if len(batches) == steps:
                break
        for batch in batches:
            found += batch.texts
        if not batches:
            return found
        after = batches[-1].after


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "READ_BYTES", 7)
    monkeypatch.setattr(streams, "PACKED_BYTES", 5)
    monkeypatch.setattr(readers, "BATCH_BYTES", 40)
    monkeypatch.setattr(readers, "WINDOW_BYTES", 16)
    monkeypatch.setattr(limits, "document_bytes_max", 32)


def ranges(size: int, step: int) -> list[tuple[int, int]]:
    return [(at, at + step) for at in range(0, size, step)]


@pytest.mark.parametrize("packed", PACKERS)
@given(texts=st.lists(st.text(max_size=8), max_size=20), blanks=st.booleans(), last=st.booleans())
@settings(parent=in_folder, max_examples=30)
@pytest.mark.usefixtures("small_pieces")
def test_json_lines(tmp_path: Path, packed: str, texts: list[str], blanks: bool, last: bool) -> None:
    lines = [
        json.dumps({"id": 1, "text": text, "more": {"text": "no"}}, ensure_ascii=False) for text in texts
    ]
    data = ("\n \n" if blanks else "\n").join(lines).encode() + (b"\n" if last else b"")
    entry = entry_of(tmp_path / f"x.jsonl{packed}", data)
    whole = read(entry)
    assert whole == [text for text in (clean(t.encode()) for t in texts) if text is not None]
    assert resumed(entry, 2) == whole
    if not packed:
        for step in (1, 3, 50):
            assert read(entry, *ranges(len(data), step)) == whole


@pytest.mark.parametrize("packed", PACKERS)
@given(text=st.text(alphabet="ab \n€😀", max_size=600))
@settings(parent=in_folder, max_examples=30)
@pytest.mark.usefixtures("small_pieces")
def test_text(tmp_path: Path, packed: str, text: str) -> None:
    data = text.encode()
    entry = entry_of(tmp_path / f"x.txt{packed}", data)
    whole = read(entry)
    blank = {ord(c): None for c in " \n"}
    assert b"".join(whole).decode().translate(blank) == text.translate(blank), "only blank parts are dropped"
    assert resumed(entry, 1) == whole
    if not packed:
        for cells in (1, 2, 5):
            assert read(entry, *ranges(len(data), 32 * cells)) == whole


def test_a_small_file_is_one_document(tmp_path: Path) -> None:
    text = b"a paragraph\n\n" * 1000
    assert read(entry_of(tmp_path / "x.md", text)) == [text]


def test_a_large_file_is_cut_at_paragraphs(tmp_path: Path) -> None:
    text = b"".join(b"paragraph %d of many\n\n" % i for i in range(60_000))
    parts = read(entry_of(tmp_path / "x.txt", text))
    assert b"".join(parts) == text
    assert len(parts) == -(-len(text) // limits.document_bytes_max)
    assert all(part.endswith(b"\n\n") for part in parts)


@pytest.mark.parametrize(
    ("data", "broken"),
    [
        (b'{"text": "a"}\nnonsense\n{"text": 7}\n{"other": "b"}\n["c"]\n{"text": "d"}\n', [2, 3, 4, 5]),
        (b'{"text": "a"}\n\n{"text": "\xff"}\n{"text": "b\n', [3, 4]),
        (b'{"text": "a"}\n{"text": "\\ud800"}\n', [2]),
        (b'{"text": "a"}\n{"x": ' + b"[" * 200_000 + b"]" * 200_000 + b', "text": "b"}\n', [2]),
    ],
)
def test_broken_lines_are_named_and_passed_over(tmp_path: Path, data: bytes, broken: list[int]) -> None:
    entry = entry_of(tmp_path / "x.jsonl", data)
    batches = list(read_part(entry, Part(0, 0, END), FORM))
    said = [describe(entry, fault) for batch in batches for fault in batch.broken]
    assert [int(text.partition("line ")[2].partition(":")[0]) for text in said] == broken
    assert all(text.startswith(f"{tmp_path}/x.jsonl, line ") for text in said)
    assert b"a" in [text for batch in batches for text in batch.texts]


def test_null_and_blank_are_empty(tmp_path: Path) -> None:
    entry = entry_of(tmp_path / "x.jsonl", b'{"text": null}\n{"text": " "}\n{"text": "a"}\n')
    (batch,) = read_part(entry, Part(0, 0, END), FORM)
    assert (batch.texts, batch.empty, batch.broken) == ([b"a"], 2, [])


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (
            b'{"content": "a", "id": 1}\n',
            r"x\.jsonl, line 1: .* it has content, id: name one with --text-key",
        ),
        (b'\n{"text": ["a"]}\n', r"x\.jsonl, line 2: 'text' holds list"),
        (b"[1, 2]\n", r"x\.jsonl, line 1: there is no text 'text'\."),
        (b"{\n" * 200, r"x\.jsonl, line 1: .*200 documents in a row: this file is not what its name says"),
    ],
)
def test_a_file_of_another_kind_or_with_another_key_is_refused(
    tmp_path: Path, data: bytes, sentence: str
) -> None:
    with pytest.raises(OperatorError, match=sentence) as caught:
        read(entry_of(tmp_path / "x.jsonl", data))
    assert caught.value.exit_code == 3


def test_the_key_is_the_one_that_was_asked_for(tmp_path: Path) -> None:
    entry = entry_of(tmp_path / "x.jsonl", b'{"text": "a", "body": "b"}\n')
    (batch,) = read_part(entry, Part(0, 0, END), Format("body"))
    assert batch.texts == [b"b"]


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "corpus_line_bytes_max", 1 << 20)
    entry = entry_of(tmp_path / "x.jsonl", b'{"text": "a"}\n' + b"x" * (3 << 20))
    with pytest.raises(OperatorError, match=r"x\.jsonl, line 2: it is longer than 1 MiB: is it JSON lines"):
        read(entry)


def test_text_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    entry = entry_of(tmp_path / "x.txt", b"fine\n" * 70_000 + b"caf\xe9\n" + b"fine\n" * 70_000)
    (batch,) = read_part(entry, Part(0, 0, END), FORM)
    assert len(batch.texts) == 2
    (fault,) = batch.broken
    assert "line 52430: it is not UTF-8" in describe(entry, fault)


@pytest.mark.parametrize("name", ["x.txt", "x.txt.gz", "x.txt.zst", "x.jsonl", "x.jsonl.gz"])
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_another_encoding_is_refused_by_its_mark(tmp_path: Path, name: str, encoding: str) -> None:
    entry = entry_of(tmp_path / name, f"\ufeffΤο σμήνος\n{'the swarm ' * 40}\n".encode(encoding))
    with pytest.raises(OperatorError, match=rf"{name} is text in {encoding[:6].upper()}.*iconv") as caught:
        read(entry)
    assert caught.value.exit_code == 3


@pytest.mark.usefixtures("small_pieces")
def test_the_mark_is_seen_in_small_pieces(tmp_path: Path) -> None:
    entry = entry_of(tmp_path / "x.txt.gz", "\ufefftext".encode("utf-32-be"))
    with pytest.raises(OperatorError, match="is text in UTF-32"):
        read(entry)


@pytest.mark.parametrize("packed", [".gz", ".zst"])
@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_damaged_compressed_files_are_refused(tmp_path: Path, packed: str, damage: str) -> None:
    entry = entry_of(tmp_path / f"x.txt{packed}", bytes(range(33, 120)) * 300)
    path = Path(entry.path)
    data = path.read_bytes()
    path.write_bytes(data[:-9] if damage == "cut" else b"nonsense" + data[8:])
    with pytest.raises(OperatorError, match=r"is damaged or cut off: [\d,]+ bytes"):
        read(entry)


def test_a_file_that_went_away_is_named(tmp_path: Path) -> None:
    entry = entry_of(tmp_path / "x.txt", b"text")
    Path(entry.path).unlink()
    with pytest.raises(OperatorError, match=r"x\.txt cannot be read \(No such file") as caught:
        read(entry)
    assert caught.value.exit_code == 6, "what is read of the others is worth keeping"


def test_where_a_fault_is_in_a_compressed_file(tmp_path: Path) -> None:
    entry = entry_of(tmp_path / "x.jsonl.gz", b'{"text": "a"}\n' * 5)
    assert describe(entry, Broken(28, "why")) == f"{entry.path}, line 3: why"


def test_of_a_file_that_is_cut_off_it_is_said_how_much_was_there(tmp_path: Path) -> None:
    path = tmp_path / "x.txt.gz"
    whole = gzip.compress(bytes(i * 7919 % 251 for i in range(200_000)))
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(OperatorError, match=r"cut off: [1-9][\d,]* bytes of text could be unpacked"):
        list(pieces(str(path), "gz", 0))
