"""Tokens of a model in training are no text yet: whatever they are, decoding them is harmless."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.ids import digest_of
from p2pdiloco.run_spec import BYTES, BlobRef, TokenizerSpec
from p2pdiloco.wire.frames import make_frame
from p2pdiloco_node.corpus.tokenizer import encode_prompts
from p2pdiloco_node.training.text_codec import ByteText, JsonText, open_codec

TEXT = "def main(): räksmörgås 𝄞\n\treturn 1\n"


def small_bpe() -> bytes:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    made.train_from_iterator([TEXT] * 20, trainer)
    return str(made.to_str()).encode()


def json_spec(*pieces: bytes) -> TokenizerSpec:
    return TokenizerSpec("json", 300, 0, tuple(BlobRef(digest_of(p), len(p), len(p)) for p in pieces))


def test_bytes_come_back_and_broken_letters_are_replaced() -> None:
    codec = open_codec(BYTES, [])
    assert codec.decode(list(TEXT.encode())) == TEXT
    assert codec.decode([0xC3]) == "\ufffd"
    assert codec.decode([300, 65]) == "A"


def test_a_tokenizer_that_travelled_in_pieces(tmp_path: Path) -> None:
    data = small_bpe()
    paths = []
    for n, piece in enumerate((data[:100], data[100:])):
        paths.append(tmp_path / str(n))
        paths[-1].write_bytes(piece)
    codec = open_codec(json_spec(data[:100], data[100:]), paths)
    (tokens,) = encode_prompts(json_spec(data), lambda _: make_frame(data), [TEXT])
    assert len(tokens) < len(TEXT.encode())
    assert codec.decode(tokens) == TEXT


def test_special_tokens_are_no_text() -> None:
    assert JsonText(small_bpe()).decode([0]) == ""


def test_nothing_of_a_strangers_tokenizer_is_run_over_text() -> None:
    """Six replacements make a million letters of one, and an expression may take all memory to be read."""
    opened = json.loads(small_bpe())
    ten = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
    opened["normalizer"] = {"type": "Sequence", "normalizers": [ten] * 8}
    codec = JsonText(json.dumps(opened).encode())
    assert not hasattr(codec, "encode")
    assert codec._tokenizer.normalizer is None
    opened["decoder"] = {"type": "Sequence", "decoders": [ten] * 8}
    with pytest.raises(OperatorError, match="decoder may make text 100,000,000 times as long"):
        JsonText(json.dumps(opened).encode())


codecs = {"bytes": ByteText(), "json": JsonText(small_bpe())}


@pytest.mark.parametrize("kind", codecs)
@given(tokens=st.lists(st.integers(0, 2**31 - 1), max_size=50))
def test_any_tokens_decode_to_some_text(kind: str, tokens: list[int]) -> None:
    assert isinstance(codecs[kind].decode(tokens), str)


def test_what_the_library_cannot_take_is_no_text() -> None:
    assert codecs["json"].decode([-1]) == ""
    assert codecs["json"].decode([2**40]) == ""


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff\xfe", b'{"model": {"type": "BPE"}}', b"[" * 10_000])
def test_what_is_no_tokenizer_is_said(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(data)
    with pytest.raises(OperatorError, match=r"tokenizer\.json cannot be used"):
        open_codec(json_spec(b"x"), [tmp_path / "t"])


def test_a_file_that_is_gone_or_too_large_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OperatorError, match="cannot be read"):
        open_codec(json_spec(b"x"), [tmp_path / "gone"])
    (tmp_path / "t").write_bytes(bytes(11))
    monkeypatch.setattr(limits, "tokenizer_bytes_max", 10)
    with pytest.raises(OperatorError, match="more than"):
        open_codec(json_spec(b"x"), [tmp_path / "t"])
