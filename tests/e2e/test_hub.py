"""Datasets through the `datasets` library, of `p2pdiloco[hub]`: a folder on this disk stands for a hub."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.extras

# In a process of its own: the library starts threads and leaves files open that the warnings filter minds.
READ = """
import sys
from p2pdiloco.errors import OperatorError
from p2pdiloco_node.corpus.readers import END, Format, Part, read_part
from p2pdiloco_node.corpus.sources import Input

name, key, first = sys.argv[1:]
try:
    for batch in read_part(Input(name, "hf", "", 0, 0, 0), Part(0, 0, END), Format(key), int(first) or None):
        print(len(batch.texts), batch.after, batch.texts[0].decode())
except OperatorError as error:
    print(f"{error.exit_code}: {error}")
"""


def read(tmp_path: Path, name: str, key: str = "text", first: int = 0) -> list[str]:
    found = subprocess.run(
        [sys.executable, "-c", READ, name, key, str(first)], capture_output=True, text=True,
        check=True, timeout=300, env=os.environ | {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    return found.stdout.splitlines()


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    folder = tmp_path / "set"
    folder.mkdir()
    for split, rows in (("train", 600), ("test", 10)):
        table = pa.table({"text": [f"{split} {i}" for i in range(rows)], "id": list(range(rows))})
        pq.write_table(table, folder / f"{split}.parquet")
    return folder


def test_rows_in_order_and_from_any_row_on(dataset: Path, tmp_path: Path) -> None:
    assert read(tmp_path, str(dataset)) == ["256 256 train 0", "256 512 train 256", "88 600 train 512"]
    assert read(tmp_path, str(dataset), first=512) == ["88 600 train 512"]
    assert read(tmp_path, f"{dataset}:test") == ["10 10 test 0"]


def test_what_cannot_be_read_is_one_sentence(dataset: Path, tmp_path: Path) -> None:
    (sentence,) = read(tmp_path, str(dataset), key="body")
    assert sentence.startswith("3: hf:")
    assert "has no column 'body'; it has text, id: name one with --text-key" in sentence
    (sentence,) = read(tmp_path, "no/such-set")
    assert sentence.startswith("4: hf:no/such-set could not be read at row 0")
    assert "fetch the files yourself and name them with --data" in sentence
