"""The whole Hugging Face folder of a certified version: weights, config, tokenizer, card, provenance."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from p2pdiloco_node.export.card import model_card
from p2pdiloco_node.export.config_files import Config, generation_config, model_config
from p2pdiloco_node.export.facts import Facts, Heard, Origin, facts_of
from p2pdiloco_node.export.names import published
from p2pdiloco_node.export.tokenizer_files import tokenizer_files
from p2pdiloco_node.export.weights import Chunk, Written, json_bytes, write_file, write_weights
from p2pdiloco_node.storage.files import Files, guarded

FACTS = "p2pdiloco.json"
CARD = "README.md"
CONFIG = "config.json"


class Content(NamedTuple):
    """What goes into the folder besides the weights."""

    origin: Origin
    heard: Heard
    tokenizer_json: bytes  # empty where tokens are bytes
    dtype: str  # float32, bfloat16


class Folder(NamedTuple):
    """What was written."""

    files: tuple[Written, ...]
    facts: Facts


def write_folder(
    files: Files,
    folder: Path,
    content: Content,
    chunks: Callable[[], Iterator[Chunk]],
    told: Callable[[int], None],
    *,
    fill_in: Callable[[Config], Config | None] = lambda _config: None,
) -> Folder:
    """Fill the new, empty `folder`, weights first. `told`: values written so far.

    `fill_in` may add to config.json what only transformers knows; None: it stays as the RunSpec says.

    Raises: OperatorError; then the folder is of no use.
    """
    spec = content.origin.spec
    model, tokenizer = spec.model, spec.data.tokenizer
    config = model_config(model, tokenizer, content.dtype)
    small = tokenizer_files(tokenizer, content.tokenizer_json, model.seq_len)
    pieces = published(model.family, model.tensors)
    weights = write_weights(files, folder, pieces, chunks(), content.dtype, told)
    facts = facts_of(content.origin, content.heard, content.dtype, weights)
    small |= {
        CONFIG: json_bytes(fill_in(config) or config),
        "generation_config.json": json_bytes(generation_config(model, tokenizer)),
        CARD: model_card(facts).encode(),
        FACTS: json_bytes(facts),
    }
    written = [write_file(files, folder / name, data) for name, data in small.items()]
    guarded(lambda: files.sync_folder(folder), folder)
    return Folder((*weights, *written), facts)
