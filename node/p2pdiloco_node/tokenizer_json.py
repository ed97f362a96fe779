"""What a tokenizer.json may be made of, looked at before its library opens it. Plain JSON: no library here.

The file may be a stranger's: it travels with a run, and whoever trains or generates has it. Its library
trusts it. Five parts can be made to take any memory or time: a replacement that lengthens text, six times
over, makes a million letters of one; a table of replacements (`Precompiled`) may do the same; a regular
expression may take years over one line, or all memory to be read; a token may be megabytes of text; a
WordPiece model tries all parts of a word, however long that may be. So here is a list of what may be in it,
with bounds. GPT-2's, Llama's, Qwen's, Mistral's, Gemma's and their like are within them.

A node has less to fear: it only decodes what its model writes, so it gets the tokens and the decoder alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.exit_codes import FILES

# Pieces of a regular expression, as the library reads it. What opens a group in another way than here is in
# doubt, and so is what may hide the sign behind it; flags with an x among them make comments possible.
PIECES = re.compile(
    r"(?P<doubt>\\[cCM]|\[\^?\])|(?P<one>\\x\{[0-9A-Fa-f]+\}|\\.|\[:\^?[a-z]+:\]|\(\?[ims-]+\))"
    r"|(?P<open>\((?:\?(?:[:=!>]|<[=!]|<\w+>|[ims-]+:)|(?![?*])))|(?P<repeat>\{(?=,?[0-9])[0-9]*,?[0-9]*\})|.",
    re.DOTALL,
)
NUMBER = re.compile("[0-9]+")
# A group that stands for another one, or for itself, is written out once more at each: doubling sixty times
# takes sixty lines. No tokenizer's expression has it.
CALL = re.compile(r"\\g|\(\?(?:R|&|P>|[+-]?[0-9])")

Growth = Callable[[Mapping[str, Any]], int]
"""How many times longer a part may make any text, in bytes; raises TypeError, KeyError or ValueError."""


class TokenizerRefused(OperatorError):
    """A tokenizer.json that is not opened here."""

    def __init__(self, why: str) -> None:
        super().__init__(f"the tokenizer.json cannot be used: {why}.", FILES)


@contextmanager
def library_asked() -> Iterator[None]:
    """Around each call of the tokenizers' library: what it raises, and its panics, as a sentence.

    Raises: OperatorError.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError, GeneratorExit):
        raise
    except BaseException as error:  # noqa: BLE001 - the library raises Exception itself, and panics are none
        raise OperatorError(f"the tokenizer.json cannot be used ({str(error)[:200]}).", FILES) from None


def _times(most: int) -> Growth:
    return lambda _: most


def _bytes(text: Any) -> int:
    if not isinstance(text, str):
        raise TypeError("no text")
    return len(text.encode(errors="replace"))


def _replacing(part: Mapping[str, Any]) -> int:
    ((kind, pattern),) = part["pattern"].items()
    found, put = _bytes(pattern), _bytes(part["content"])
    if kind == "Regex":
        if len(pattern) > limits.tokenizer_pattern_chars_max:
            raise ValueError("its pattern is longer than any")
        if any(CALL.match(pattern, piece.start()) for piece in PIECES.finditer(pattern)):
            raise ValueError("its pattern calls a group of its own")
        if _repeats(pattern) > limits.tokenizer_repeats_max:
            raise ValueError(f"its pattern repeats a part more than {limits.tokenizer_repeats_max} times")
        found = 0
    # An expression may match between any two letters, and so does an empty text.
    return max(1, -(-put // found)) if found else 1 + put


def _repeats(pattern: str) -> int:
    """Copies of a part that the library writes out in memory: repeats multiply, one inside the other.

    Where it is in doubt what is inside what, all of them do.
    """
    groups, last, together, sets, clear = [1], 1, 1, 0, True
    for piece in PIECES.finditer(pattern):
        kind, text = piece.lastgroup, piece[0]
        times = max(1, *map(int, NUMBER.findall(text))) if kind == "repeat" else 1
        together *= times
        if kind == "doubt" or (sets and text == "[" and pattern.startswith(":", piece.end())):
            clear = False
        elif text == "[":
            sets, last = sets + 1, 1
        elif sets:
            sets -= text == "]"
        elif kind == "repeat":  # of the last part, or of its repeats
            last *= times
            groups[-1] = max(groups[-1], last)
        elif kind == "open" or text == "(":
            clear = clear and kind == "open"
            groups.append(1)
        elif text == ")" and len(groups) > 1:
            last = groups.pop()
            groups[-1] = max(groups[-1], last)
        elif text == ")":
            clear = False
        elif text not in ("*", "+", "?"):
            last = 1
    return groups[0] if clear and len(groups) == 1 and not sets else together


def _replacing_text(part: Mapping[str, Any]) -> int:
    if "String" not in part["pattern"]:
        raise ValueError("nodes run no regular expressions of a run")
    return _replacing(part)


def _splitting(part: Mapping[str, Any]) -> int:
    _replacing({"pattern": part["pattern"], "content": ""})
    return 1


# By the Unicode standard a letter becomes at most three times as long by NFC and NFD, else eleven times.
NORMALIZERS: Mapping[str, Growth] = {
    "NFC": _times(3), "NFD": _times(3), "NFKC": _times(11), "NFKD": _times(11), "Lowercase": _times(2),
    "Strip": _times(1), "StripAccents": _times(1), "Nmt": _times(1), "BertNormalizer": _times(9),
    "ByteLevel": _times(2), "Prepend": lambda part: 1 + _bytes(part["prepend"]), "Replace": _replacing,
}  # fmt: skip
PRE_TOKENIZERS: Mapping[str, Growth] = {
    "ByteLevel": _times(2), "Metaspace": _times(4), "Split": _splitting, "Whitespace": _times(1),
    "WhitespaceSplit": _times(1), "Digits": _times(1), "Punctuation": _times(1),
    "BertPreTokenizer": _times(1), "CharDelimiterSplit": _times(1), "UnicodeScripts": _times(1),
}  # fmt: skip
DECODERS: Mapping[str, Growth] = {
    "ByteLevel": _times(1), "Metaspace": _times(1), "ByteFallback": _times(1), "Fuse": _times(1),
    "Strip": _times(1), "WordPiece": _times(2), "BPEDecoder": _times(2), "Replace": _replacing_text,
}  # fmt: skip
MODELS = ("BPE", "Unigram", "WordPiece", "WordLevel")
INSIDE = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}


def check_tokenizer(data: bytes) -> None:
    """Everything of it: for whoever encodes. Raises: TokenizerRefused."""
    opened = _opened(data)
    _check_tokens(opened)
    grown = _growth(opened, "normalizer", NORMALIZERS) * _growth(opened, "pre_tokenizer", PRE_TOKENIZERS)
    _check_growth("normalizer and pre_tokenizer", grown)
    _check_growth("decoder", _growth(opened, "decoder", DECODERS))
    longest = opened["model"].get("max_input_chars_per_word", 0)
    if not isinstance(longest, int) or longest > limits.tokenizer_word_chars_max:
        raise TokenizerRefused(f"it takes words of more than {limits.tokenizer_word_chars_max} letters")
    vocabulary = opened["model"].get("vocab")
    # Its library keeps these letter by letter.
    if isinstance(vocabulary, list) and sum(_bytes(text) for text, _ in _words(opened)) > (
        limits.tokenizer_pieces_bytes_max
    ):
        raise TokenizerRefused(f"its tokens have more than {limits.tokenizer_pieces_bytes_max} bytes")


def for_decoding(data: bytes) -> bytes:
    """A tokenizer.json of the same tokens and decoder, and of nothing that is run over text.

    Raises: TokenizerRefused.
    """
    opened = _opened(data)
    _check_tokens(opened)
    _check_growth("decoder", _growth(opened, "decoder", DECODERS))
    # Which model wrote the tokens does not matter to a decoder; of this kind nothing is derived.
    model = {"type": "WordLevel", "vocab": dict(_words(opened)), "unk_token": ""}
    parts = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor"))
    return json.dumps(
        {
            "version": "1.0",
            **parts,
            "added_tokens": opened.get("added_tokens") or [],
            "decoder": opened.get("decoder"),
            "model": model,
        }
    ).encode()


def _opened(data: bytes) -> dict[str, Any]:
    try:
        opened = json.loads(data)
    except (ValueError, RecursionError):
        raise TokenizerRefused("it is not JSON") from None
    if not isinstance(opened, dict) or not isinstance(opened.get("model"), dict):
        raise TokenizerRefused("it has no model")
    kind = opened["model"].get("type", "BPE")  # old files do not say
    if kind not in MODELS:
        raise TokenizerRefused(f"its model is {_shown(kind)}; known are {', '.join(MODELS)}")
    return opened


def _words(opened: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Tokens and their numbers; a Unigram model has a list of them. Raises: TokenizerRefused."""
    vocabulary = opened["model"].get("vocab")
    if isinstance(vocabulary, dict):
        yield from vocabulary.items()
    elif isinstance(vocabulary, list):
        for number, entry in enumerate(vocabulary):
            if not isinstance(entry, list) or not entry or not isinstance(entry[0], str):
                raise TokenizerRefused("its vocabulary is none")
            yield entry[0], number
    else:
        raise TokenizerRefused("its model has no vocabulary")


def _check_tokens(opened: Mapping[str, Any]) -> None:
    for text, number in _words(opened):
        _check_token(text, number)
    added = opened.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(token, dict) for token in added):
        raise TokenizerRefused("its added tokens are none")
    size = 0
    for token in added:
        _check_token(token.get("content"), token.get("id"))
        size += _bytes(token["content"])
    if size > limits.tokenizer_added_bytes_max:
        raise TokenizerRefused(f"its added tokens have more than {limits.tokenizer_added_bytes_max} bytes")


def _check_token(text: Any, number: Any) -> None:
    if not isinstance(text, str) or not isinstance(number, int):
        raise TokenizerRefused("a token has no text or no number")
    if len(text) > limits.token_text_bytes_max // 4 and _bytes(text) > limits.token_text_bytes_max:
        raise TokenizerRefused(f"token {number} has more than {limits.token_text_bytes_max} bytes")
    if not 0 <= number < limits.tokenizer_ids_max:
        raise TokenizerRefused(
            f"a token has the number {number}; they go up to {limits.tokenizer_ids_max - 1}"
        )


def _growth(opened: Mapping[str, Any], place: str, known: Mapping[str, Growth]) -> int:
    """How much longer text becomes there at most. Raises: TokenizerRefused: a part that is not known."""
    grown = 1
    parts = list(_parts(opened.get(place), place, 0))
    if len(parts) > limits.tokenizer_parts_max:
        raise TokenizerRefused(f"its {place} has more than {limits.tokenizer_parts_max} parts")
    for part in parts:
        kind = part.get("type")
        if not isinstance(kind, str) or kind not in known:
            raise TokenizerRefused(f"its {place} has {_shown(kind)}; known are {', '.join(sorted(known))}")
        try:
            grown *= known[kind](part)
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            why = str(error) if isinstance(error, ValueError) else "it lacks something"
            raise TokenizerRefused(f"its {place} has a {kind} that is none ({why})") from None
    return grown


def _parts(part: Any, place: str, depth: int) -> Iterator[Mapping[str, Any]]:
    """What stands there, one after the other. Raises: TokenizerRefused."""
    if part is None:
        return
    if not isinstance(part, dict):
        raise TokenizerRefused(f"its {place} is none")
    if part.get("type") != "Sequence":
        yield part
        return
    inside = part.get(INSIDE[place])
    if not isinstance(inside, list):
        raise TokenizerRefused(f"its {place} is none")
    if depth == limits.tokenizer_nesting_max or len(inside) > limits.tokenizer_parts_max:
        raise TokenizerRefused(f"its {place} has more than {limits.tokenizer_parts_max} parts")
    for one in inside:
        yield from _parts(one, place, depth + 1)


def _check_growth(where: str, grown: int) -> None:
    if grown > limits.tokenizer_growth_max:
        raise TokenizerRefused(
            f"its {where} may make text {grown:,} times as long; {limits.tokenizer_growth_max} is the most"
        )


def _shown(kind: Any) -> str:
    return repr(kind)[:60]
