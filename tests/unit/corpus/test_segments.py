"""Segments and buckets: how the work is divided changes neither what comes out nor the memory it takes."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from p2pdiloco import limits
from p2pdiloco_node.corpus import segments, tokenising
from p2pdiloco_node.corpus.making import Request, make_data
from p2pdiloco_node.corpus.segments import Segment, Slice
from p2pdiloco_node.corpus.work import Plan
from p2pdiloco_node.progress import Quiet


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_processes_portions_and_buckets_do_not_matter(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: str
) -> None:
    monkeypatch.setattr(limits, "document_bytes_max", 16 << 10)
    sources = [f"{folder}/c.parquet", f"{folder}/[abl]*"]
    request = Request(sources, tokenizer=tokenizer, eval_per_source=True)
    whole = make_data(request._replace(jobs=1), tmp_path / "1", Quiet())
    monkeypatch.setattr(limits, "portion_bytes", 64 << 10)
    monkeypatch.setattr(limits, "bucket_bytes", 40 << 10)
    assert make_data(request._replace(jobs=1), tmp_path / "2", Quiet()) == whole


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_more_text_than_files_looked_like_does_not_take_more_memory(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: str
) -> None:
    """An archive of logs may hold twenty times its size, and the buckets were counted by four."""
    monkeypatch.setattr(limits, "document_bytes_max", 16 << 10)
    whole = make_data(Request([str(folder)], tokenizer=tokenizer), tmp_path / "as it looks", Quiet())
    sizes: list[int] = []

    def seen(parts: Sequence[Segment], bucket: int) -> Iterator[tuple[Slice, Any]]:
        for part, places in segments.read_bucket(parts, bucket):
            sizes.append(sum(map(len, part.texts)))
            yield part, places

    unpacked: list[Path] = []
    texts = Segment.texts

    def unpack(segment: Segment, bucket: int) -> Generator[bytes]:
        unpacked.append(segment.path)
        return texts(segment, bucket)

    monkeypatch.setattr(tokenising, "read_bucket", seen)
    monkeypatch.setattr(Segment, "texts", unpack)
    monkeypatch.setattr(Plan, "buckets", property(lambda _: 1))
    monkeypatch.setattr(limits, "bucket_bytes", 64 << 10)
    assert make_data(Request([str(folder)], tokenizer=tokenizer), tmp_path / "as it is", Quiet()) == whole
    assert len(sizes) > 10
    assert max(sizes) < 2 * limits.bucket_bytes
    # Nor is a text unpacked again for each part: a thousandfold archive has a thousand of them.
    assert len(unpacked) <= (2 if tokenizer == "bpe:300" else 1) * len(set(unpacked))


def test_copies_do_not_count_as_text_that_is_there(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six thousand copies of one document are one part, not six thousand."""
    copies = folder / "copies.jsonl"
    copies.write_bytes(msgspec.json.encode({"text": "again and again " * 200}) + b"\n")
    copies.write_bytes(copies.read_bytes() * 600)
    parts: list[int] = []

    def seen(all_of: Sequence[Segment], bucket: int) -> Iterator[tuple[Slice, Any]]:
        for part, places in segments.read_bucket(all_of, bucket):
            parts.append(len(places))
            yield part, places

    monkeypatch.setattr(tokenising, "read_bucket", seen)
    monkeypatch.setattr(Plan, "buckets", property(lambda _: 1))
    monkeypatch.setattr(limits, "bucket_bytes", 1 << 20)
    make_data(Request([str(copies)]), tmp_path / "made", Quiet())
    assert parts == [1]
