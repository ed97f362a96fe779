"""A tokenizer.json that has no tokens for some of the corpus: said, or refused."""

from __future__ import annotations

import json
import string
from pathlib import Path

import pytest

from p2pdiloco.errors import OperatorError
from p2pdiloco_node.corpus.making import Request, make_data
from p2pdiloco_node.progress import Quiet


class Said(Quiet):
    """What a person would read."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def request(folder: Path, *, unknown: str) -> Request:
    """A corpus, and a tokenizer of all its letters but some, without bytes and without an unknown token."""
    text = folder / "text.txt"
    text.write_text("\n\n".join(f"{n} boxes of xenon, each heavier than the one before" for n in range(4000)))
    letters = sorted(set(string.printable) - set(unknown))
    vocabulary = {token: number for number, token in enumerate(["<|endoftext|>", *letters])}
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    return Request([str(text)], tokenizer=str(file))


def test_a_few_letters_that_are_lost_are_told_of(tmp_path: Path) -> None:
    said = Said()
    make_data(request(tmp_path, unknown="x"), tmp_path / "out", said)
    assert any(" % of the letters of the text: the model will never see" in line for line in said.lines)


def test_nothing_is_said_where_nothing_is_lost(tmp_path: Path) -> None:
    said = Said()
    make_data(request(tmp_path, unknown="@"), tmp_path / "out", said)
    assert not any("letters" in line for line in said.lines)


def test_a_tokenizer_that_loses_many_letters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match=r"knows no tokens for \d\d % of the letters"):
        make_data(request(tmp_path, unknown="aeion"), tmp_path / "out", Quiet())
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_is_trained_on_the_one_document_whose_end_is_held_out(tmp_path: Path) -> None:
    said = Said()
    text = request(tmp_path, unknown="").data
    make_data(Request(text, tokenizer="bpe:320"), tmp_path / "out", said)
    assert "The tokenizer has 320 tokens." in said.lines
