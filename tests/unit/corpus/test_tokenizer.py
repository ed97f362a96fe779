"""Tokenizers: what `--tokenizer` may say, the same BPE for the same texts, and no special tokens in text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.ids import digest_of
from p2pdiloco.run_spec import BYTES as BYTES_SPEC
from p2pdiloco.run_spec import BlobRef, TokenizerSpec
from p2pdiloco.wire.frames import make_frame
from p2pdiloco_node.corpus.tokenizer import (
    BPE,
    BYTES,
    END_OF_TEXT,
    FILE,
    ByteTokens,
    Choice,
    JsonTokens,
    encode_prompts,
    parse_choice,
    read_file,
    train_bpe,
)

TEXTS = [f"the swarm number {i} trains one model together {END_OF_TEXT} — über {i % 7}\n" for i in range(200)]
TRAIN = """
import sys
from p2pdiloco_node.corpus.tokenizer import train_bpe
sys.stdout.buffer.write(train_bpe(sys.stdin.buffer.read().decode().split("\\0"), 300))
"""


@pytest.fixture(scope="module")
def trained() -> bytes:
    return train_bpe(TEXTS, 300)


def test_bytes_are_tokens() -> None:
    tokens = ByteTokens()
    assert (tokens.vocabulary.size, tokens.vocabulary.end_token, tokens.vocabulary.token_bytes) == (256, 0, 1)
    assert [t.tolist() for t in tokens.encode([b"ab", "é".encode()])] == [[97, 98], [195, 169]]
    assert tokens.text_bytes(np.zeros(5, np.uint8)) == 5


def test_a_trained_tokenizer_gives_every_text_back(trained: bytes) -> None:
    tokens = JsonTokens(trained)
    assert (tokens.vocabulary.size, tokens.vocabulary.end_token, tokens.vocabulary.token_bytes) == (300, 0, 2)
    texts = [text.encode() for text in [*TEXTS, "日本語 😀\r\n\t  x", "\x01\x7f"]]
    encoded = tokens.encode(texts)
    assert [tokens.text_bytes(one) for one in encoded] == [len(text) for text in texts]
    assert all(one.dtype == np.dtype("<u2") for one in encoded)
    assert sum(map(len, encoded)) < sum(map(len, texts)) / 2


def test_text_cannot_spell_the_end_token(trained: bytes) -> None:
    (tokens,) = JsonTokens(trained).encode([f"a{END_OF_TEXT}b".encode()])
    assert 0 not in tokens.tolist()


def test_groups_do_not_change_tokens(trained: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = JsonTokens(trained)
    texts = [text.encode() for text in TEXTS]
    whole = [one.tolist() for one in tokens.encode(texts)]
    monkeypatch.setattr("p2pdiloco_node.corpus.tokenizer.ENCODED_BYTES", 100)
    assert [one.tolist() for one in tokens.encode(texts)] == whole


@pytest.mark.parametrize("threads", [1, 3])
def test_training_does_not_depend_on_threads_or_hash_seeds(trained: bytes, threads: int) -> None:
    found = subprocess.run(
        [sys.executable, "-c", TRAIN], input="\0".join(TEXTS).encode(), capture_output=True, check=True,
        env=os.environ | {"RAYON_NUM_THREADS": str(threads), "PYTHONHASHSEED": str(threads)},
    )  # fmt: skip
    assert found.stdout == trained


def test_a_small_text_has_fewer_pairs() -> None:
    assert JsonTokens(train_bpe(["abab"], 1000)).vocabulary.size == 256 + 1 + 1


def test_a_file_s_end_token_is_known_by_name_or_from_beside_it(trained: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    other = trained.replace(b"<|endoftext|>", b"<mine>")
    path.write_bytes(other)
    with pytest.raises(
        OperatorError, match=r"no token that ends a document .*: name it as eos_token in a tok"
    ):
        JsonTokens(*read_file(path))
    for named in ("<mine>", {"content": "<mine>", "special": True}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": named}))
        assert JsonTokens(*read_file(path)).vocabulary.end_token == 0
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(OperatorError, match="is not JSON"):
        read_file(path)


def test_a_file_s_own_truncation_and_padding_do_not_hold_here(trained: bytes) -> None:
    opened = json.loads(trained)
    opened["truncation"] = {"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    tokens = JsonTokens(json.dumps(opened).encode())
    assert len(tokens.encode([b"abcdefgh", b"a"])[0]) > 3


def words_only(*words: str, **parts: object) -> bytes:
    """A tokenizer.json that knows these words, and neither bytes nor an unknown token."""
    vocabulary = {END_OF_TEXT: 0, **{word: n for n, word in enumerate(words, 1)}}
    model = {"type": "BPE", "vocab": vocabulary, "merges": [], "unk_token": None, "byte_fallback": False}
    return json.dumps({"version": "1.0", "added_tokens": [], "model": model, **parts}).encode()


def test_letters_that_have_no_tokens_are_counted_as_lost(trained: bytes) -> None:
    assert JsonTokens(words_only("a", "b", " ")).lost_share([b"ab ba", b"axbx"]) == pytest.approx(2 / 8)
    assert JsonTokens(words_only("x")).lost_share([b"ab"]) == 1.0
    assert JsonTokens(trained).lost_share([text.encode() for text in TEXTS]) == 0.0
    assert JsonTokens(trained).lost_share([]) == 0.0


def test_blanks_capitals_and_accents_are_no_loss() -> None:
    known = words_only(*"abe", normalizer={"type": "BertNormalizer", "clean_text": True,
        "handle_chinese_chars": False, "strip_accents": True, "lowercase": True})  # fmt: skip
    assert JsonTokens(known).lost_share(["A b\n\u00e9 B".encode()]) == 0.0


def test_what_is_no_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OperatorError, match=r"tokenizer\.json cannot be used"):
        JsonTokens(b"{}")
    path = tmp_path / "tokenizer.json"
    path.write_bytes(bytes(100))
    monkeypatch.setattr(limits, "tokenizer_bytes_max", 99)
    with pytest.raises(OperatorError, match="has more than"):
        read_file(path)


def test_ids_are_bounded(trained: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "tokenizer_ids_max", 299)
    with pytest.raises(OperatorError, match="number 299; they go up to 298"):
        JsonTokens(trained)


def test_choices(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    assert parse_choice("bytes") == Choice(BYTES)
    assert parse_choice("bpe:4096") == Choice(BPE, vocab_size=4096)
    assert parse_choice(str(file)) == Choice(FILE, path=file)
    assert parse_choice(str(tmp_path)) == Choice(FILE, path=file)


@pytest.mark.parametrize(
    "text", ["bpe", "bpe:", "bpe:x", "bpe:257", "bpe:9999999", "bpe:-4", "wordpiece", "none.json"]
)
def test_choices_that_there_are_not(text: str) -> None:
    with pytest.raises(OperatorError) as caught:
        parse_choice(text)
    assert caught.value.exit_code == 2


def spec_of(data: bytes) -> tuple[TokenizerSpec, dict[bytes, bytes]]:
    """Cut in two, as one that is larger than a frame."""
    pieces = {
        digest_of(frame): (frame, len(part)) for part in (data[:99], data[99:]) if (frame := make_frame(part))
    }
    refs = tuple(BlobRef(digest, len(frame), size) for digest, (frame, size) in pieces.items())
    return TokenizerSpec("json", 300, 0, refs), {digest: frame for digest, (frame, _) in pieces.items()}


def test_prompts_become_tokens_when_the_run_is_made(trained: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = ("the swarm", "", f"a{END_OF_TEXT}b", "über 日本語")
    assert encode_prompts(BYTES_SPEC, lambda _: b"", prompts) == tuple(tuple(p.encode()) for p in prompts)
    spec, blobs = spec_of(trained)
    encoded = encode_prompts(spec, blobs.__getitem__, prompts)
    texts = [text.encode() for text in prompts]
    assert encoded == tuple(tuple(one.tolist()) for one in JsonTokens(trained).encode(texts))
    assert 0 not in encoded[2]
    monkeypatch.setattr(limits, "sample_prompt_tokens_max", 2)
    assert encode_prompts(spec, blobs.__getitem__, prompts)[0] == encoded[0][-2:]


def test_a_file_that_could_eat_memory_is_refused_before_text_is_read(trained: bytes) -> None:
    opened = json.loads(trained)
    ten = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
    opened["normalizer"] = {"type": "Sequence", "normalizers": [ten] * 6}
    with pytest.raises(OperatorError, match="normalizer and pre_tokenizer may make text 2,000,000 times"):
        JsonTokens(json.dumps(opened).encode())
    spec, blobs = spec_of(json.dumps(opened).encode())
    with pytest.raises(OperatorError, match="times as long"):
        encode_prompts(spec, blobs.__getitem__, ["a"])


A_TOKENS = {END_OF_TEXT: 0, "a": 1, "b": 2}
LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
BREAKS = {  # the library raises, or panics, where this is opened or meets text
    "no token for what it does not know": {
        "model": {"type": "WordLevel", "vocab": A_TOKENS, "unk_token": "[UNK]"}, "pre_tokenizer": None,
    },
    "an expression that goes back without end": {
        "pre_tokenizer": {
            "type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False,
        }
    },
    "a beginning of nothing": {"normalizer": {"type": "Prepend", "prepend": ""}, "pre_tokenizer": LEVEL},
    "a prefix that is longer than its words": {
        "model": {
            "type": "BPE", "vocab": A_TOKENS | {"ab": 3}, "merges": ["a b"],
            "continuing_subword_prefix": "#" * 99,
        }
    },
}  # fmt: skip


@pytest.mark.parametrize("case", BREAKS)
def test_what_its_library_cannot_do_is_the_files_fault(trained: bytes, case: str) -> None:
    data = json.dumps(json.loads(trained) | BREAKS[case]).encode()
    with pytest.raises(OperatorError, match=r"the tokenizer\.json cannot be used"):
        JsonTokens(data).encode([b"a" * 60 + b" b"])


def test_a_decoder_that_panics_is_the_files_fault(trained: bytes) -> None:
    strip = {"type": "Strip", "content": "a", "start": 9, "stop": 9}
    tokens = JsonTokens(json.dumps(json.loads(trained) | {"decoder": strip}).encode())
    (encoded,) = tokens.encode([b"a"])
    with pytest.raises(OperatorError, match=r"the tokenizer\.json cannot be used"):
        tokens.text_bytes(encoded)


def test_text_becomes_the_same_tokens_whatever_chance_or_template_a_file_asks_for(trained: bytes) -> None:
    opened = json.loads(trained)
    opened["model"]["dropout"] = 0.5
    opened["post_processor"] = {
        "type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {},
    }  # fmt: skip
    texts = [text.encode() for text in TEXTS]
    found = JsonTokens(json.dumps(opened).encode()).encode(texts)
    assert [one.tolist() for one in found] == [one.tolist() for one in JsonTokens(trained).encode(texts)]


@pytest.mark.parametrize("beside", [b"[" * 100_000, b" " * 101])
def test_a_file_beside_a_tokenizer_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: bytes
) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    (tmp_path / "tokenizer_config.json").write_bytes(beside)
    monkeypatch.setattr(limits, "tokenizer_bytes_max", 100_000 if beside[:1] == b"[" else 100)
    with pytest.raises(OperatorError, match=r"tokenizer_config\.json (is not JSON|has more than)"):
        read_file(tmp_path / "tokenizer.json")
