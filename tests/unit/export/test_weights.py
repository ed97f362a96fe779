"""Weights: the safetensors library reads them, cut in any place, and rounds as torch does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file

from p2pdiloco.ids import digest_of
from p2pdiloco_node.export.names import Piece
from p2pdiloco_node.export.weights import INDEX, WEIGHTS, to_bfloat16, write_weights
from p2pdiloco_node.storage.files import Files

PIECES = [Piece("a.weight", (3, 4), 0), Piece("b.weight", (5,), 12), Piece("c.weight", (2, 2, 2), 17)]
VALUES = np.arange(25, dtype=np.float32) / 7


def chunks_of(size: int) -> Iterator[bytes]:
    data = VALUES.tobytes()
    return (data[i : i + size] for i in range(0, len(data), size))


def told_nothing(_values: int) -> None:
    """Nobody watches."""


@pytest.mark.parametrize("chunk", [4, 12, 40, 100])
@pytest.mark.parametrize(("most", "count"), [(1 << 20, 1), (70, 2), (1, 3)])
def test_the_library_reads_what_was_written(tmp_path: Path, chunk: int, most: int, count: int) -> None:
    told: list[int] = []
    written = write_weights(
        Files(), tmp_path, PIECES, chunks_of(chunk), "float32", told.append, file_bytes_max=most
    )
    weights = [file for file in written if file.name.endswith(".safetensors")]
    assert len(weights) == count
    found: dict[str, Any] = {}
    for file in weights:
        data = (tmp_path / file.name).read_bytes()
        assert (len(data), digest_of(data).hex()) == (file.size, file.sha256)
        found |= load_file(tmp_path / file.name)
        with safe_open(tmp_path / file.name, "np") as opened:
            assert opened.metadata() == {"format": "pt"}, "transformers refuses others"
    for piece in PIECES:
        assert found[piece.name].tolist() == VALUES[piece.start :][: piece.size].reshape(piece.shape).tolist()
    assert told == sorted(told)
    assert told[-1] == 25
    if count == 1:
        assert weights[0].name == WEIGHTS
        return
    index = json.loads((tmp_path / INDEX).read_bytes())
    assert index["metadata"]["total_size"] == 100
    for name, file_name in index["weight_map"].items():
        assert name in load_file(tmp_path / file_name)


@pytest.mark.parametrize("size", [96, 104])
def test_another_number_of_bytes_is_our_fault(tmp_path: Path, size: int) -> None:
    with pytest.raises(AssertionError, match="bytes"):
        write_weights(Files(), tmp_path, PIECES, [bytes(size)], "float32", told_nothing)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=64))
def test_bfloat16_rounds_as_torch_does(values: list[float]) -> None:
    array = np.array(values, "<f4")
    ours = np.frombuffer(to_bfloat16(array.tobytes()), "<i2")
    theirs = torch.from_numpy(array.copy()).to(torch.bfloat16).view(torch.int16).numpy()
    assert ours.tolist() == theirs.tolist()


def test_bfloat16_ties_go_to_even() -> None:
    ties = np.array([0x3F808000, 0x3F818000], "<u4").tobytes()
    assert np.frombuffer(to_bfloat16(ties), "<u2").tolist() == [0x3F80, 0x3F82]
