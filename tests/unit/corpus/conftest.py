"""A small corpus in all kinds of files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

WORDS = [
    "one",
    "model",
    "is",
    "trained",
    "together",
    "over",
    "the",
    "ordinary",
    "internet",
    "by",
    "whoever",
    "has",
    "a",
    "spare",
    "computer",
]


def text(number: int, words: int = 150) -> str:
    picked = np.random.default_rng(number).choice(WORDS, words)
    return f"Text {number}. " + " ".join(picked.tolist()) + ".\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """About 1 MB in all kinds of files; texts 0 to 99 stand in two of them."""
    root = tmp_path / "in"
    root.mkdir()
    (root / "long.txt").write_text("\n".join(text(10_000 + i) for i in range(300)))
    lines = [json.dumps({"id": i, "text": text(i)}) for i in range(400)]
    (root / "a.jsonl").write_text("\n".join([*lines, json.dumps({"text": " "}), "{nonsense", ""]))
    with gzip.open(root / "b.jsonl.gz", "wt") as file:
        file.write("\n".join(json.dumps({"text": text(1000 + i)}) for i in range(300)))
    table = pa.table(
        {"id": list(range(250)), "text": [text(i) if i < 100 else text(2000 + i) for i in range(250)]}
    )
    pq.write_table(table, root / "c.parquet", row_group_size=100)
    return root
