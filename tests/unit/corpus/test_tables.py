"""Parquet files and datasets: row by row, from any row on."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco_node.corpus import tables
from p2pdiloco_node.corpus.readers import END, Batch, Format, Part, describe, read_part
from p2pdiloco_node.corpus.sources import Input, find_inputs
from p2pdiloco_node.corpus.tables import hub_parts, parquet_text_bytes

FORM = Format("text")


def entry_of(path: Path, table: pa.Table, rows: int = 7) -> Input:
    pq.write_table(table, path, row_group_size=rows, compression="zstd")
    (entry,) = find_inputs([str(path)], text_key="text")
    return entry


def texts(batches: list[Batch]) -> list[bytes]:
    return [text for batch in batches for text in batch.texts]


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string()), pa.binary()]
)
def test_all_rows_in_any_parts_and_from_any_row_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: pa.DataType
) -> None:
    monkeypatch.setattr(tables, "BATCH_ROWS_MAX", 3)
    wanted = [f"row {i}" for i in range(40)]
    column = pa.array([None if i % 9 == 4 else f"row {i}" for i in range(40)]).cast(kind)
    entry = entry_of(tmp_path / "x.parquet", pa.table({"id": list(range(40)), "text": column}))
    assert len(entry.groups) == 6
    kept = [text.encode() for i, text in enumerate(wanted) if i % 9 != 4]
    whole = list(read_part(entry, Part(0, 0, 6), FORM))
    assert texts(whole) == kept
    assert sum(batch.empty for batch in whole) == 40 - len(kept)
    parts = [batch for first in range(6) for batch in read_part(entry, Part(0, first, first + 1), FORM)]
    assert texts(parts) == kept
    for done, batch in enumerate(whole):
        rest = list(read_part(entry, Part(0, 0, 6), FORM, batch.after))
        assert texts(whole[: done + 1]) + texts(rest) == kept


def test_a_part_that_goes_on_in_a_later_group_reads_no_other_part_s_rows(tmp_path: Path) -> None:
    entry = entry_of(tmp_path / "x.parquet", pa.table({"text": [f"{i}" for i in range(21)]}))
    assert texts(list(read_part(entry, Part(0, 1, 3), FORM, 14))) == [b"%d" % i for i in range(14, 21)]


def test_text_that_is_not_utf_8_is_broken_and_named_by_row(tmp_path: Path) -> None:
    column = pa.array([b"a", b"\xff", b"b"], pa.binary())
    entry = entry_of(tmp_path / "x.parquet", pa.table({"text": column}))
    (batch,) = read_part(entry, Part(0, 0, 1), FORM)
    assert batch.texts == [b"a", b"b"]
    assert describe(entry, batch.broken[0]).startswith(f"{entry.path}, row 2: it is not UTF-8")


def test_a_cell_that_is_too_long_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "corpus_line_bytes_max", 200)
    entry = entry_of(tmp_path / "x.parquet", pa.table({"text": [*"abcdef", "g" * 201]}))
    (batch,) = read_part(entry, Part(0, 0, 1), FORM)
    assert (batch.texts, batch.empty, len(batch.broken)) == ([*map(str.encode, "abcdef")], 0, 1)


def test_rows_that_are_all_too_long_are_refused_before_they_are_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = entry_of(tmp_path / "x.parquet", pa.table({"text": ["g" * 4 * 2**20]}))
    monkeypatch.setattr(limits, "corpus_line_bytes_max", 2**20)
    with pytest.raises(OperatorError, match=r"x\.parquet has rows of 4 MiB of text each from row 0 on"):
        list(read_part(entry, Part(0, 0, 1), FORM))


def test_what_is_no_table_of_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    path.write_bytes(b"PAR1 nonsense PAR1")
    with pytest.raises(OperatorError, match=r"x\.parquet is no Parquet file, or is damaged"):
        parquet_text_bytes(path, "text")
    pq.write_table(pa.table({"id": [1], "body": ["a"]}), path)
    with pytest.raises(OperatorError, match=r"no column 'text'; it has id, body: name one with --text-key"):
        parquet_text_bytes(path, "text")
    with pytest.raises(OperatorError, match=r"column 'id' of .* holds int64, no text"):
        parquet_text_bytes(path, "id")
    twice = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(twice, path)
    with pytest.raises(OperatorError, match=r"x\.parquet has 2 columns 'text'"):
        parquet_text_bytes(path, "text")
    with pytest.raises(OperatorError, match=r"none\.parquet cannot be read"):
        parquet_text_bytes(tmp_path / "none.parquet", "text")


def test_damage_behind_the_foot_is_named_by_row(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    entry = entry_of(path, pa.table({"text": [f"row {i} " * 50 for i in range(3000)]}), rows=1000)
    data = bytearray(path.read_bytes())
    data[40:400] = bytes(360)
    path.write_bytes(data)
    with pytest.raises(OperatorError, match=r"x\.parquet is damaged at row 0"):
        list(read_part(entry, Part(0, 0, 3), FORM))


def test_sizes_are_of_the_text_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    table = pa.table({"more": ["x" * 1000] * 40, "text": [f"{i:04}" * 25 for i in range(40)]})
    entry = entry_of(path, table, rows=20)
    assert len(entry.groups) == 2
    assert 4000 <= entry.text_bytes < 6000


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("a/b", ("a/b", None, "train")),
        ("a/b:en", ("a/b", "en", "train")),
        ("a/b:test", ("a/b", None, "test")),
        ("a/b:en:validation", ("a/b", "en", "validation")),
        ("a/b::extra", ("a/b", None, "extra")),
    ],
)
def test_names_of_datasets(name: str, parts: tuple[str, str | None, str]) -> None:
    assert hub_parts(name) == parts


@pytest.mark.parametrize("name", ["", ":en", "a:b:c:d"])
def test_what_is_no_name_of_a_dataset(name: str) -> None:
    with pytest.raises(OperatorError, match="is not hf:NAME"):
        hub_parts(name)


def test_without_the_library_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    entry = Input("some/name", "hf", "", 0, 0, 0)
    with pytest.raises(OperatorError, match="hf:some/name needs the datasets library") as caught:
        list(read_part(entry, Part(0, 0, END), FORM))
    assert caught.value.exit_code == 2
