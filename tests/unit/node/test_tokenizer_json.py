"""What a stranger's tokenizer.json may hold, and that those of today's models are let through."""

from __future__ import annotations

import json
from typing import Any

import pytest

from p2pdiloco import limits
from p2pdiloco_node.tokenizer_json import TokenizerRefused, check_tokenizer, for_decoding

GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
BACK = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {},
}
FALLBACK, FUSE = {"type": "ByteFallback"}, {"type": "Fuse"}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def sequence(key: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", key: list(parts)}


def added(number: int, content: str, *, special: bool = True) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, "special": special, **flags}


def made(**parts: Any) -> bytes:
    bpe = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": bpe,
    }
    return json.dumps(whole | parts).encode()


# As these models' own files have them.
KNOWN = {
    "gpt2": made(
        pre_tokenizer=LEVEL | {"use_regex": True},
        decoder=LEVEL,
        model={"vocab": {"a": 0}, "merges": [], "dropout": None},  # without a type
        added_tokens=[added(1, "<|endoftext|>")],
    ),
    "llama2": made(
        normalizer=sequence("normalizers", {"type": "Prepend", "prepend": "▁"}, SPACES),
        decoder=sequence("decoders", BACK, FALLBACK, FUSE, STRIP),
    ),
    "mistral": made(
        pre_tokenizer={"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False},
        decoder=sequence("decoders", BACK, FALLBACK, FUSE, STRIP),
    ),
    "llama3": made(
        pre_tokenizer=sequence("pretokenizers", split(LLAMA3_SPLIT), LEVEL),
        decoder=LEVEL,
        post_processor=sequence("processors", LEVEL, TEMPLATE),
        added_tokens=[added(3 + n, f"<|reserved_special_token_{n}|>") for n in range(256)],
    ),
    "qwen": made(
        normalizer={"type": "NFC"},
        pre_tokenizer=sequence("pretokenizers", split(GPT2_SPLIT), LEVEL),
        decoder=LEVEL,
    ),
    "gemma": made(
        normalizer=SPACES,
        pre_tokenizer={
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
        decoder=sequence("decoders", BACK, FALLBACK, FUSE),
        added_tokens=[added(3 + n, "\n" * (n + 1), special=False) for n in range(31)],
    ),
    "deepseek": made(
        normalizer=sequence("normalizers"),
        pre_tokenizer=sequence(
            "pretokenizers", split(r"\p{N}{1,3}"), split("[一-龥]+"), split(GPT2_SPLIT), LEVEL
        ),
        decoder=LEVEL,
    ),
    "smollm": made(
        pre_tokenizer=sequence("pretokenizers", {"type": "Digits", "individual_digits": True}, LEVEL),
        decoder=LEVEL,
    ),
    "falcon": made(
        pre_tokenizer=sequence(
            "pretokenizers",
            {"type": "Punctuation", "behavior": "Contiguous"},
            LEVEL,
            {"type": "Digits", "individual_digits": False},
            split("[0-9][0-9][0-9]"),
        ),
        decoder=LEVEL,
    ),
    "unigram": made(
        normalizer=sequence("normalizers", {"type": "NFKC"}, SPACES),
        model={"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["▁a", -1.5]]},
        decoder={"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_tokenizers_of_todays_models_are_let_through(name: str) -> None:
    check_tokenizer(KNOWN[name])
    for_decoding(KNOWN[name])


@pytest.mark.parametrize(
    "pattern",
    [
        "a{1000}b{1000}", r"\p{N}{1,999}|\p{L}{,1000}", "(a{1000})|(b{1000})c{9}", "(?:a{30}b{30}){30}",
        "[{1000}]{1000}", r"\x{1000}{1000}", r"\{1000}{1000}", r"(a{1000}\))(b){1000}",
        "([)]a{1000})(b){1000}",
        "(?i:a{1000})(?i)(?=b{1000})(?<!c{9})(?<n>d){1000}", "[[:alpha:])]{1000}(b){1000}",
        "[:(]{1000}(b){1000}",
        "a{1000}+b{1000}?", "(a{1000}|b){1}", r"\\g<a>", "(?-i:a)(?<n>b)",
    ],
)  # fmt: skip
def test_repeats_beside_each_other_do_not_multiply(pattern: str) -> None:
    check_tokenizer(made(pre_tokenizer=split(pattern)))


@pytest.mark.parametrize(
    "pattern",
    [
        "a{1001}", "(a{1000}){1000}", "a{1000}{1000}", "a{1000}+{1000}", "((a{40}b)c{9}|d){40}",
        "a{1000,2}{2}",
        "(?<n>a{,1000})*{2,}", r"(\\x{1000}){1000}", r"(\(a{1000}){1000}", "([(]a{1000}){1000}",
        # What only seems to be beside each other: comments, signs that are hidden, sets that are none.
        "(?x)(a{1000}#)(\n){1000}", "(?ix:(a{1000}#)(\n){1000})", "(a{1000}(?#)(?#)(?#(){1000}",
        "(a{1000}[])(]){1000}", "(a{1000}[^])(]){1000}", r"(a{1000}\c)\c(){1000}", "(a{1000}[[:)(:a]]){1000}",
        "(a{1000})){1000}", "((a{1000}){1000}", "(a{1000}[){1000}",
    ],
)  # fmt: skip
def test_repeats_inside_each_other_multiply(pattern: str) -> None:
    with pytest.raises(TokenizerRefused, match="repeats a part more than 1000 times"):
        check_tokenizer(made(pre_tokenizer=split(pattern)))


def grows(text: str, times: int) -> dict[str, Any]:
    part = {"type": "Replace", "pattern": {"String": text}, "content": text * 10}
    return sequence("normalizers", *[part] * times)


NEVER = {
    "a bomb of replacements": ({"normalizer": grows("a", 6)}, "1,000,000 times as long"),
    "one in an expression": (
        {"normalizer": {"type": "Replace", "pattern": {"Regex": ""}, "content": "b" * 99}},
        "100 times",
    ),
    "one in an empty text": (
        {"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "b" * 99}},
        "100 times",
    ),
    "a long beginning": ({"normalizer": {"type": "Prepend", "prepend": "x" * 500}}, "501 times"),
    "a table of replacements": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        "'Precompiled'",
    ),
    "hidden in a sequence": (
        {"normalizer": sequence("normalizers", sequence("normalizers", {"type": "Precompiled"}))},
        "'Precompiled'",
    ),
    "many parts": ({"pre_tokenizer": sequence("pretokenizers", *[LEVEL] * 17)}, "16 parts"),
    "deep parts": (
        {"normalizer": json.loads('{"type":"Sequence","normalizers":[' * 9 + "null" + "]}" * 9)},
        "16 parts",
    ),
    "a long expression": ({"pre_tokenizer": split("a" * 2001)}, "longer than any"),
    "an expression of billions of letters": (
        {"pre_tokenizer": split("((a{99}){9,99}){,99}")},
        "repeats a part",
    ),
    "a group that calls another, sixty times two": (
        {
            "pre_tokenizer": split(
                "".join(f"(?<a{i}>\\g<a{i + 1}>\\g<a{i + 1}>)" for i in range(60)) + "(?<a60>a)"
            )
        },
        "calls a group",
    ),
    "a group in itself": ({"pre_tokenizer": split("(a(?0)?b)")}, "calls a group"),
    "words of any length": (
        {"model": {"type": "WordPiece", "vocab": {"a": 0}, "max_input_chars_per_word": 10**9}},
        "words of more than 1000",
    ),
    "an unknown model": ({"model": {"type": "Python", "vocab": {}}}, "known are BPE"),
    "no vocabulary": ({"model": {"type": "BPE", "vocab": 7}}, "no vocabulary"),
    "a part without what it needs": ({"normalizer": {"type": "Replace"}}, "lacks something"),
    "a part without a kind": ({"normalizer": {"type": []}}, "has \\[\\]"),
    "a part that is a number": ({"normalizer": 7}, "normalizer is none"),
}
NEVER_DECODED = {
    "a decoder's bomb": (
        {"decoder": sequence("decoders", *grows("a", 6)["normalizers"])},
        "decoder may make text 1,000,000 times",
    ),
    "a decoder's expression": (
        {"decoder": {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}},
        "regular expressions",
    ),
    "an unknown decoder": ({"decoder": {"type": "CTC"}}, "'CTC'"),
    "a token of megabytes": ({"model": {"type": "BPE", "vocab": {"a" * 5000: 0}, "merges": []}}, "token 0"),
    "a piece of megabytes": ({"model": {"type": "Unigram", "vocab": [["ü" * 1025, 0.0]]}}, "token 0"),
    "an added token of megabytes": ({"added_tokens": [{"id": 3, "content": "x" * 2049}]}, "token 3"),
    "many added tokens": (
        {"added_tokens": [{"id": n, "content": "x" * 2000} for n in range(600)]},
        "added tokens have more",
    ),
    "a number of no token": ({"added_tokens": [{"id": 2**40, "content": "x"}]}, "has the number"),
    "a token without text": ({"added_tokens": [{"id": 3}]}, "no text"),
    "added tokens that are none": ({"added_tokens": {"a": 1}}, "are none"),
}


@pytest.mark.parametrize("case", [*NEVER, *NEVER_DECODED])
def test_what_could_eat_memory_or_time_is_refused_where_text_is_encoded(case: str) -> None:
    parts, why = (NEVER | NEVER_DECODED)[case]
    with pytest.raises(TokenizerRefused, match=why):
        check_tokenizer(made(**parts))


@pytest.mark.parametrize("case", NEVER_DECODED)
def test_what_could_eat_memory_in_decoding_is_refused_by_nodes(case: str) -> None:
    parts, why = NEVER_DECODED[case]
    with pytest.raises(TokenizerRefused, match=why):
        for_decoding(made(**parts))


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"\xff", b"[" * 100_000, b'{"model": 1}', b'{"a": NaN}'])
def test_what_is_none_is_said(data: bytes) -> None:
    for look in (check_tokenizer, for_decoding):
        with pytest.raises(TokenizerRefused, match="cannot be used"):
            look(data)


def test_a_node_gets_nothing_that_is_run_over_text() -> None:
    bomb = made(normalizer=grows("a", 9), pre_tokenizer=split("(((a{99}){99}){99}){99}"), decoder=LEVEL)
    opened = json.loads(for_decoding(bomb))
    assert {key for key, value in opened.items() if value} == {"version", "decoder", "model"}
    assert opened["model"]["type"] == "WordLevel"


def test_pieces_that_are_kept_letter_by_letter_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "tokenizer_pieces_bytes_max", 4)
    with pytest.raises(TokenizerRefused, match="more than 4 bytes"):
        check_tokenizer(KNOWN["unigram"])


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_opened_for_decoding_decodes_the_same(name: str) -> None:
    from tokenizers import Tokenizer

    whole = Tokenizer.from_buffer(KNOWN[name])
    part = Tokenizer.from_buffer(for_decoding(KNOWN[name]))
    for tokens in ([0], [1, 0, 2], [3, 1, 4, 33], [2] * 5, [77]):
        for skip in (True, False):
            assert part.decode(tokens, skip_special_tokens=skip) == whole.decode(
                tokens, skip_special_tokens=skip
            )
