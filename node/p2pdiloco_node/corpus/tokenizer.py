"""Text to tokens: bytes as they are, a BPE trained here, or a tokenizer.json.

Special tokens are never found in text: a document that spells `<|endoftext|>` out does not end there.
"""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.exit_codes import USAGE
from p2pdiloco.ids import Digest
from p2pdiloco.run_spec import TokenizerSpec
from p2pdiloco.wire.frames import open_frame
from p2pdiloco_node.corpus.documents import batches
from p2pdiloco_node.corpus.token_input import token_bytes_for
from p2pdiloco_node.tokenizer_json import check_tokenizer, library_asked

BYTES, BPE, FILE = "bytes", "bpe", "file"
END_OF_TEXT = "<|endoftext|>"
# How the tokenizers of today's models call it.
END_TOKENS = (
    END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|end▁of▁sentence|>", "<|im_end|>",
)  # fmt: skip
CONFIG_FILE = "tokenizer_config.json"  # beside a tokenizer.json it says which token ends a text
BPE_VOCAB_MIN = 256 + 1 + 1  # bytes, the end token and one merge
ENCODED_BYTES = 1 << 20  # of text at a time: an encoding takes some hundred bytes a token
TOKEN_CHARS_MAX = 64  # of a token trained here: rulers of dashes are no words
BYTES_PER_TOKEN = 4  # of English text by a vocabulary of tens of thousands

Tokens = npt.NDArray[np.unsignedinteger]


class Choice(NamedTuple):
    """What `--tokenizer` says."""

    kind: str  # BYTES, BPE or FILE
    vocab_size: int = 0  # of BPE
    path: Path | None = None  # of FILE


class Vocabulary(msgspec.Struct, frozen=True, array_like=True):
    """What the rest of the making needs to know of a tokenizer."""

    size: int
    end_token: int

    @property
    def token_bytes(self) -> int:
        return token_bytes_for(self.size)


class Tokenizer(Protocol):
    vocabulary: Vocabulary

    def encode(self, texts: Sequence[bytes]) -> list[Tokens]:
        """Tokens of each text, without an end token, in the vocabulary's width. Raises: OperatorError."""
        ...

    def text_bytes(self, tokens: Tokens) -> int:
        """UTF-8 bytes of the text that these stand for. Raises: OperatorError."""
        ...


class ByteTokens:
    """Each byte is a token; 0 ends a document, which holds none."""

    vocabulary = Vocabulary(256, 0)

    def encode(self, texts: Sequence[bytes]) -> list[Tokens]:
        return [np.frombuffer(text, np.uint8) for text in texts]

    def text_bytes(self, tokens: Tokens) -> int:
        return len(tokens)


class JsonTokens:
    """A tokenizer.json."""

    def __init__(self, data: bytes, end_token: str | None = None) -> None:
        """`end_token`: its text; None: one of END_TOKENS.

        Raises: OperatorError: it is no tokenizer, or no token of it ends a document.
        """
        self._tokenizer = _opened(data)
        names: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        wanted = END_TOKENS if end_token is None else (end_token,)
        found = next((name for name in wanted if name in names), None)
        if found is None:
            raise OperatorError(
                f"the tokenizer has no token that ends a document (looked for {', '.join(wanted)}): name it "
                f"as eos_token in a {CONFIG_FILE} beside it."
            )
        size = max(names.values()) + 1
        self.vocabulary = Vocabulary(size, names[found])

    def encode(self, texts: Sequence[bytes]) -> list[Tokens]:
        width = f"<u{self.vocabulary.token_bytes}"
        tokens: list[Tokens] = []
        for group in batches(texts, ENCODED_BYTES):
            with library_asked():
                encoded = self._tokenizer.encode_batch_fast(
                    [text.decode() for text in group], add_special_tokens=False
                )
            tokens += [np.array(one.ids, width) for one in encoded]
        return tokens

    def text_bytes(self, tokens: Tokens) -> int:
        return len(self._decode(tokens).encode())

    def lost_share(self, texts: Sequence[bytes]) -> float:
        """Of the letters of these texts, those that do not come back from their tokens.

        What many a tokenizer changes on purpose is no loss: blanks, capitals, accents.
        """
        there = lost = 0
        for text, tokens in zip(texts, self.encode(texts), strict=True):
            before, after = _letters(text.decode()), _letters(self._decode(tokens))
            there += before.total()
            lost += (before - after).total()
        return lost / there if there else 0.0

    def _decode(self, tokens: Tokens) -> str:
        with library_asked():
            return str(self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True))


def _letters(text: str) -> Counter[str]:
    plain = unicodedata.normalize("NFKD", text.casefold())
    return Counter(letter for letter in plain if not letter.isspace() and not unicodedata.combining(letter))


def parse_choice(text: str) -> Choice:
    """`bytes`, `bpe:N`, or a tokenizer.json FILE. Raises: OperatorError (usage)."""
    if text == BYTES:
        return Choice(BYTES)
    name, colon, number = text.partition(":")
    if name == BPE and (not colon or not Path(text).exists()):
        size = int(number) if number.isascii() and number.isdecimal() else 0
        if not BPE_VOCAB_MIN <= size <= limits.tokenizer_vocab_max:
            raise OperatorError(
                f"--tokenizer {text!r}: write bpe:N with a vocabulary N of {BPE_VOCAB_MIN} to "
                f"{limits.tokenizer_vocab_max}, such as bpe:4096.",
                exit_code=USAGE,
            )
        return Choice(BPE, vocab_size=size)
    path = Path(text).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise OperatorError(
            f"--tokenizer {text!r} is neither bytes, nor bpe:N, nor a tokenizer.json that is there.",
            exit_code=USAGE,
        )
    return Choice(FILE, path=path)


def read_file(path: Path) -> tuple[bytes, str | None]:
    """A tokenizer.json, and the end token that a file beside it names. Raises: OperatorError."""
    try:
        with path.open("rb") as file:
            data = file.read(limits.tokenizer_bytes_max + 1)
        config, beside = path.with_name(CONFIG_FILE), b"{}"
        if config.is_file():
            with config.open("rb") as file:
                beside = file.read(limits.tokenizer_bytes_max + 1)
    except OSError as error:
        raise OperatorError(f"{path} cannot be read ({error.strerror}).") from None
    for name, content in ((path, data), (config, beside)):
        if len(content) > limits.tokenizer_bytes_max:
            raise OperatorError(f"{name} has more than {limits.tokenizer_bytes_max >> 20} MiB.")
    try:
        end = json.loads(beside).get("eos_token")
    except (ValueError, AttributeError, RecursionError):
        raise OperatorError(f"{config} is not JSON: mend it, or remove it.") from None
    # Either its text, or an object that has it.
    end = end.get("content") if isinstance(end, dict) else end
    return data, end if isinstance(end, str) else None


def train_bpe(texts: Iterable[str], vocab_size: int) -> bytes:
    """A byte-level BPE as a tokenizer.json; the same for the same texts. Raises: OperatorError.

    Its vocabulary is smaller where the texts have no more pairs that occur twice.
    """
    lib = _library()
    tokenizer = lib.Tokenizer(lib.models.BPE())
    tokenizer.pre_tokenizer = lib.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = lib.decoders.ByteLevel()
    trainer = lib.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(lib.pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=TOKEN_CHARS_MAX,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return str(tokenizer.to_str()).encode()


def encode_prompts(
    spec: TokenizerSpec, read: Callable[[Digest], bytes], prompts: Sequence[str]
) -> tuple[tuple[int, ...], ...]:
    """What a RunSpec holds of its prompts: each one's tokens, the last of them if there are very many.

    `read` gives a blob of the run. Raises: OperatorError: the tokenizer cannot be used. TransportError: a
    blob is not there.
    """
    texts = [prompt.encode(errors="replace") for prompt in prompts]
    if spec.kind == BYTES:
        encoded = [list(text) for text in texts]
    else:
        data = b"".join(open_frame(read(Digest(piece.digest)), piece.tokens) for piece in spec.pieces)
        tokenizer = _opened(data)
        with library_asked():
            encoded = [tokenizer.encode(text.decode(), add_special_tokens=False).ids for text in texts]
    return tuple(tuple(tokens[-limits.sample_prompt_tokens_max :]) for tokens in encoded)


def _opened(data: bytes) -> Any:
    """Raises: OperatorError: it is no tokenizer, or has parts that are not let near text."""
    check_tokenizer(data)
    lib = _library()
    with library_asked():
        tokenizer = lib.Tokenizer.from_buffer(data)
    # What a file asks for in other uses: here text is neither cut off nor filled up, put into a template, nor
    # taken apart by chance.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.post_processor = None
    if isinstance(tokenizer.model, lib.models.BPE):
        tokenizer.model.dropout = None
    tokenizer.encode_special_tokens = True
    return tokenizer


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise OperatorError(
            "tokenizers other than bytes need a library: pip install 'p2pdiloco[node]'.", exit_code=USAGE
        ) from None
    return tokenizers
