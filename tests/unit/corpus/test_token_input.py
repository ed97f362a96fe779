"""Ready tokens: documents between end tokens, the same however the file is divided."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco_node.corpus.token_input import count_tokens, read_tokens, token_bytes_for

END = 9


def read(path: Path, *parts: tuple[int, int], vocab_size: int = 1000) -> list[list[int]]:
    found = []
    for first, stop in parts or ((0, 1 << 60),):
        for documents, _ in read_tokens(
            path, first, stop, aligned=False, token_bytes=2, vocab_size=vocab_size, end_token=END
        ):
            found += [np.frombuffer(document, "<u2").tolist() for document in documents]
    return found


@pytest.mark.parametrize(("size", "width"), [(1, 1), (256, 1), (257, 2), (65536, 2), (65537, 4)])
def test_the_least_width_that_fits(size: int, width: int) -> None:
    assert token_bytes_for(size) == width


@given(tokens=st.lists(st.integers(0, 12), max_size=300), step=st.integers(1, 5))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
def test_documents_do_not_depend_on_the_parts(tmp_path: Path, tokens: list[int], step: int) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(np.array(tokens, "<u2").tobytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "document_bytes_max", 32)  # 16 tokens
        whole = read(path)
        parts = read(path, *((at, at + 16 * step) for at in range(0, len(tokens), 16 * step)))
        resumed: list[list[int]] = []
        at = 0
        while at < len(tokens):
            documents, at = next(
                read_tokens(path, at, 1 << 60, aligned=True, token_bytes=2, vocab_size=1000, end_token=END)
            )
            resumed += [np.frombuffer(document, "<u2").tolist() for document in documents]
    assert parts == resumed == whole
    assert [t for document in whole for t in document] == [t for t in tokens if t != END]
    assert all(document and END not in document for document in whole)


def test_only_documents_that_are_too_long_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "document_bytes_max", 200)  # 100 tokens
    path = tmp_path / "x.npy"
    np.save(path, np.array(([1] * 30 + [END]) * 10 + [2] * 250, np.uint16))
    assert [len(d) for d in read(path)] == [30] * 10 + [90, 100, 60]


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.uint32])
def test_npy_of_any_width_becomes_the_run_s(tmp_path: Path, kind: type[np.unsignedinteger]) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.array([1, 2, END, 3], kind))
    assert read(path) == [[1, 2], [3]]
    assert count_tokens(path, 2) == 4


def test_tokens_outside_the_vocabulary_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(np.array([1, 2, END, 1000], "<u2").tobytes())
    with pytest.raises(OperatorError, match=r"x\.bin: token 3 is 1000, but the tokenizer has 1000"):
        read(path)


def test_what_is_no_file_of_tokens(tmp_path: Path) -> None:
    odd = tmp_path / "x.bin"
    odd.write_bytes(bytes(3))
    with pytest.raises(OperatorError, match="has 3 bytes, which are no whole tokens of 2 bytes"):
        count_tokens(odd, 2)
    path = tmp_path / "x.npy"
    for array, sentence in (
        (np.zeros(3), "holds float64"),
        (np.zeros((2, 2), np.uint8), r"holds uint8 of shape \(2, 2\)"),
        (np.zeros(3, np.int64), "holds int64"),
    ):
        np.save(path, array)
        with pytest.raises(OperatorError, match=sentence):
            count_tokens(path, 2)
    path.write_bytes(b"nonsense")
    with pytest.raises(OperatorError, match=r"is no \.npy file of tokens"):
        count_tokens(path, 2)
    with pytest.raises(OperatorError, match="cannot be read"):
        count_tokens(tmp_path / "none.bin", 2)
    odd.write_bytes(b"")
    assert count_tokens(odd, 2) == 0
    assert read(odd) == []
