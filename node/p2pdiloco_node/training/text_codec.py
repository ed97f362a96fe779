"""The run's tokens to text, in the trainer process: what samples need of a tokenizer.

A tokenizer.json comes from the run's owner and tokens from a model in training, so neither is trusted: of
the file the tokens and the decoder alone are opened (tokenizer_json.py), what cannot be read as text becomes
replacement characters, and what cannot be decoded no text at all. Text never becomes tokens here: those of
the prompts are in the RunSpec.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.exit_codes import FILES, RESOURCES
from p2pdiloco.run_spec import TokenizerSpec
from p2pdiloco_node.tokenizer_json import for_decoding, library_asked


class TextCodec(Protocol):
    def decode(self, tokens: Sequence[int]) -> str:
        """The text as far as there is one; never raises for any tokens."""
        ...


class ByteText:
    """Each byte is a token."""

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


class JsonText:
    """What a tokenizer.json decodes."""

    def __init__(self, data: bytes) -> None:
        """Raises: OperatorError: it is no tokenizer, not one for here, or its library is not installed."""
        data = for_decoding(data)
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise OperatorError(
                "tokenizers is not installed: pip install 'p2pdiloco[node]'.", FILES
            ) from None
        with library_asked():
            self._tokenizer: Any = Tokenizer.from_buffer(data)

    def decode(self, tokens: Sequence[int]) -> str:
        with suppress(OperatorError), library_asked():
            return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))
        return ""


def open_codec(spec: TokenizerSpec, pieces: Sequence[Path]) -> TextCodec:
    """`pieces`: the opened frames of the tokenizer.json, in the RunSpec's order.

    Raises: OperatorError: it cannot be read or is no tokenizer.
    """
    if spec.kind == "bytes":
        return ByteText()
    try:
        if sum(piece.stat().st_size for piece in pieces) > limits.tokenizer_bytes_max:
            raise OperatorError(f"the run's tokenizer has more than {limits.tokenizer_bytes_max >> 20} MiB.")
        data = b"".join(piece.read_bytes() for piece in pieces)
    except OSError as error:
        raise OperatorError(f"the run's tokenizer cannot be read: {error}.", RESOURCES) from None
    return JsonText(data)
