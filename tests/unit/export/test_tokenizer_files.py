"""Tokenizer files: any text comes back as it was, and the end token has its name where it has one."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from p2pdiloco.errors import OperatorError
from p2pdiloco.run_spec import BYTES, TokenizerSpec
from p2pdiloco_node.export.tokenizer_files import byte_tokenizer, end_text, tokenizer_files

OURS = Tokenizer.from_str(byte_tokenizer().decode())


@given(st.text())
@example(" leading,  and\ttrailing \n")
@example("\x00ĀĠ<|endoftext|>\u2028é\U0001f600")
def test_bytes_are_their_own_ids_and_come_back(text: str) -> None:
    encoded = OURS.encode(text)
    assert encoded.ids == list(text.encode())
    assert OURS.decode(encoded.ids, skip_special_tokens=False) == text
    assert OURS.decode(encoded.ids) == text


def test_it_is_what_the_library_would_make() -> None:
    opened = json.loads(byte_tokenizer())
    alphabet = ByteLevel.alphabet()
    assert set(opened["model"]["vocab"]) == set(alphabet)
    made = Tokenizer(BPE(vocab=opened["model"]["vocab"], merges=[]))
    made.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = ByteLevelDecoder()
    assert json.loads(made.to_str()) == json.loads(OURS.to_str())


def bpe(folder: Path, *, named: bool = True) -> bytes:
    from tokenizers.trainers import BpeTrainer

    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    special = ["<|endoftext|>"] if named else []
    trainer = BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["once upon a time there was a time"] * 20, trainer)
    return tokenizer.to_str().encode()


def test_a_tokenizer_is_written_as_it_came_with_the_name_of_its_end_token(tmp_path: Path) -> None:
    data = bpe(tmp_path)
    end = Tokenizer.from_str(data.decode()).token_to_id("<|endoftext|>")
    assert end is not None
    spec = TokenizerSpec(kind="json", vocab_size=300, end_token=end)
    files = tokenizer_files(spec, data, 64)
    assert files["tokenizer.json"] == data
    assert json.loads(files["special_tokens_map.json"]) == {"eos_token": "<|endoftext|>"}
    config = json.loads(files["tokenizer_config.json"])
    assert (config["eos_token"], config["model_max_length"]) == ("<|endoftext|>", 64)
    unnamed = tokenizer_files(msgspec.structs.replace(spec, end_token=7), data, 64)
    assert "special_tokens_map.json" not in unnamed


def test_bytes_have_no_special_token() -> None:
    files = tokenizer_files(BYTES, b"", 64)
    assert sorted(files) == ["tokenizer.json", "tokenizer_config.json"]
    assert "eos_token" not in json.loads(files["tokenizer_config.json"])


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b'{"added_tokens": 3}', b"[" * 100_000, b"\xff"])
def test_what_is_no_tokenizer_is_the_owner_s_fault(data: bytes) -> None:
    with pytest.raises(OperatorError, match="tell the owner"):
        end_text(data, 0)
