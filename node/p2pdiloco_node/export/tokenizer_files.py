"""The run's tokenizer as files that AutoTokenizer loads.

A tokenizer.json travels with the run and is written as it came. For bytes one is made here: byte-level,
without merges, each byte its own id. The end token of bytes has no name in it: whatever the name, a text that
holds it would no longer come back as it was.
"""

from __future__ import annotations

import json
from typing import Any

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.exit_codes import RUN
from p2pdiloco.run_spec import TokenizerSpec
from p2pdiloco_node.export.weights import json_bytes


def tokenizer_files(spec: TokenizerSpec, tokenizer_json: bytes, seq_len: int) -> dict[str, bytes]:
    """Files by name. `tokenizer_json`: as it travels with the run; empty for bytes.

    Raises: OperatorError: the run's tokenizer is none.
    """
    data = byte_tokenizer() if spec.kind == "bytes" else tokenizer_json
    end = "" if spec.kind == "bytes" else end_text(data, spec.end_token)
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": seq_len,
        "clean_up_tokenization_spaces": False,  # it would change the text
    }
    named = {"eos_token": end} if end else {}
    files = {"tokenizer.json": data, "tokenizer_config.json": json_bytes({**config, **named})}
    return files | ({"special_tokens_map.json": json_bytes(named)} if named else {})


def byte_tokenizer() -> bytes:
    """A tokenizer.json for bytes: id 0 to 255 is the byte; any text comes back as it was."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return json_bytes(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": level,
            "post_processor": None,
            "decoder": {
                **level,
                "add_prefix_space": True,
                "use_regex": True,
            },  # unused: as the library has it
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": {letter: byte for byte, letter in enumerate(_byte_letters())},
                "merges": [],
            },
        }
    )


def end_text(tokenizer_json: bytes, end_token: int) -> str:
    """How a tokenizer.json writes the end token; empty where it is no added token of it.

    Raises: OperatorError: it is no tokenizer.json.
    """
    broken = OperatorError(
        "The run's tokenizer is no tokenizer.json: this machine is fine, tell the owner of the run.", RUN
    )
    if len(tokenizer_json) > limits.tokenizer_bytes_max:
        raise broken
    try:
        opened: Any = json.loads(tokenizer_json)
        added = opened["added_tokens"]
        found = [str(token["content"]) for token in added if token["id"] == end_token]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise broken from None
    return found[0] if found else ""


def _byte_letters() -> list[str]:
    """By byte: the letter that stands for it in a byte-level vocabulary.

    Printable Latin-1 stands for itself, the other 68 bytes take the letters from U+0100 on (GPT-2's table).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters = []
    others = 0x100
    for byte in range(256):
        if byte in printable:
            letters.append(chr(byte))
        else:
            letters.append(chr(others))
            others += 1
    return letters
