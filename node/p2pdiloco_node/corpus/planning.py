"""What will be read and written, before anything is: inputs, tokenizer, disk; and whether a half-made folder
is of the same command.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.exit_codes import RESOURCES, USAGE
from p2pdiloco.run_spec import DataSpec
from p2pdiloco.words import count_of
from p2pdiloco_node.corpus.held_out import WHOLE
from p2pdiloco_node.corpus.sources import HUB, HUB_PREFIX, PARQUET, TOKENS, find_inputs, named
from p2pdiloco_node.corpus.tables import hub_parts
from p2pdiloco_node.corpus.token_input import count_tokens, token_bytes_for
from p2pdiloco_node.corpus.tokenizer import (
    BPE,
    BYTES,
    ByteTokens,
    Choice,
    JsonTokens,
    Vocabulary,
    read_file,
)
from p2pdiloco_node.corpus.work import Command, Plan
from p2pdiloco_node.progress import Told, amount
from p2pdiloco_node.storage.run_folder import MAKING

# Bytes on disk for each byte of text. Cleaned text compressed lightly; tokens by their width: a byte each, or
# about one for four bytes of text, and some more for other languages; shards are never larger than tokens.
SEGMENTS_SHARE = 0.55
TOKENS_SHARE = {1: 1.0, 2: 0.8, 4: 1.6}
SHARDS_SHARE = {1: 0.45, 2: 0.6, 4: 0.8}


class Asked(Protocol):
    """What of a request the plan depends on."""

    @property
    def data(self) -> Sequence[str] | None: ...
    @property
    def text_key(self) -> str: ...
    @property
    def eval_per_source(self) -> bool: ...
    @property
    def seed(self) -> int: ...


def make_plan(asked: Asked, choice: Choice) -> tuple[Plan, bytes | None]:
    """The plan, and the tokenizer's file where it was given. Looks at every file, reads none.

    Raises: OperatorError: something that was asked for cannot be.
    """
    if not 0 <= asked.seed <= limits.seed_max:
        raise OperatorError(f"--seed is a whole number from 0 to {limits.seed_max:,}.", exit_code=USAGE)
    tokenizer: bytes | None = None
    end: str | None = None
    vocabulary: Vocabulary | None = None
    name = choice.kind
    if choice.kind == BPE:
        name = f"{BPE}:{choice.vocab_size}"
    elif choice.kind == BYTES:
        vocabulary = ByteTokens.vocabulary
    else:
        assert choice.path is not None
        tokenizer, end = read_file(choice.path)
        name, vocabulary = hashlib.sha256(tokenizer).hexdigest(), JsonTokens(tokenizer, end).vocabulary
    inputs = find_inputs(asked.data, text_key=asked.text_key)
    for entry in inputs:
        if entry.kind == HUB:
            hub_parts(entry.path)
        if entry.kind == TOKENS:
            if vocabulary is None:
                raise OperatorError(
                    f"{entry.path} holds tokens: name the tokenizer that made them with --tokenizer FILE.",
                    exit_code=USAGE,
                )
            count_tokens(Path(entry.path), vocabulary.token_bytes)
    data = tuple(asked.data or ())
    if asked.eval_per_source and len(data) > limits.evaluation_sources_max:
        raise OperatorError(
            f"--eval-per-source makes a set for each --data, {limits.evaluation_sources_max} at most: join "
            "some with a glob or a folder.",
            exit_code=USAGE,
        )
    command = Command(data, asked.text_key, name, end or "", asked.eval_per_source, asked.seed)
    plan = Plan(command, inputs, vocabulary)
    if plan.text_bytes > limits.corpus_bytes_max:
        raise OperatorError(
            f"the corpus has about {amount(plan.text_bytes)} of text, more than "
            f"{limits.corpus_bytes_max >> 30} GiB; name fewer files with --data."
        )
    if not plan.text_bytes:
        raise OperatorError(
            f"the corpus is empty: {count_of(len(inputs), 'file')} without a byte; choose others with --data."
        )
    return plan, tokenizer


def check_enough(plan: Plan, seq_len: int) -> None:
    """Before anything is read, as far as can be told then. Raises: OperatorError."""
    if any(entry.packed or entry.kind in {HUB, PARQUET} for entry in plan.inputs):
        return  # what is inside may be more
    # A token is a byte of text at least, and each document has an end.
    if plan.text_bytes + len(plan.inputs) < 2 * (seq_len + 1):
        raise OperatorError(
            f"the corpus is too small ({plan.text_bytes} bytes): a sequence takes {seq_len + 1} tokens, and "
            "one is needed to train on and one held out; name more files with --data."
        )


def check_size(data: DataSpec, seq_len: int) -> None:
    """Raises: OperatorError: no shard, or not every evaluation set, holds a sequence and its targets."""
    longest = max(shard.tokens for shard in data.shards)
    sets = {f"evaluation set {s.name!r}": s.shard.tokens for s in data.evaluations}
    for what, tokens in {"training side": longest, **sets}.items():
        if tokens <= seq_len:
            raise OperatorError(
                f"the corpus is too small: the {what} has {tokens} tokens, and a sequence takes "
                f"{seq_len + 1}; name more files with --data, or leave --eval-per-source out."
            )


def check_same(old: Plan, new: Plan, out: Path) -> None:
    """Raises: OperatorError: the folder holds another command's half-made data, or the input has changed."""
    where = f"remove {out / MAKING} to start anew, or choose another folder with --out"
    if old.command != new.command:
        given = _words(old.command)
        wanted = _words(new.command)
        differing = next((key for key in given if given[key] != wanted[key]), "")
        raise OperatorError(
            f"{out} holds the beginning of another run, with {differing} {given.get(differing, '')}: give "
            f"that command to go on with it; {where}."
        )
    if old.inputs != new.inputs:
        before = {entry.path: entry for entry in old.inputs}
        after = {entry.path: entry for entry in new.inputs}
        names = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
        raise OperatorError(
            f"the input has changed since {out} was begun ({names[0]}, "
            f"{count_of(len(names), 'file')} in all): {where}."
        )


def check_disk(plan: Plan, out: Path, told: Told, beside_bytes: int = 0) -> None:
    """Says what will be needed. `beside_bytes`: of version 0, which is made when the data are there.

    Raises: OperatorError: it is not there.
    """
    known = sum(entry.text_bytes for entry in plan.inputs)
    # Of a tokenizer that is trained here two bytes for a token, as long as its ids fit.
    width = token_bytes_for(plan.vocab_size)
    text, tokens, shards = SEGMENTS_SHARE, TOKENS_SHARE[width], SHARDS_SHARE[width]
    stays = int(known * shards) + beside_bytes
    needed = max(int(known * max(text + tokens, tokens + shards)), stays)
    model = f", of which version 0 of the model takes {amount(beside_bytes)}" if beside_bytes else ""
    place = out
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    unknown = [entry.path for entry in plan.inputs if entry.kind == HUB]
    more = f", and more for hf:{unknown[0]}, whose size is unknown" if unknown else ""
    if needed > free:
        raise OperatorError(
            f"making the run needs about {amount(needed)} of disk at {out}{model}{more}, and {amount(free)} "
            "are free: make room, or choose a folder on another disk with --out.",
            exit_code=RESOURCES,
        )
    told.say(
        f"About {amount(known)} of text in {count_of(len(plan.inputs), 'file')}. The run needs about "
        f"{amount(needed)} of disk while it is made, and {amount(stays)} then{model}{more}; "
        f"{amount(free)} are free."
    )


def source_names(arguments: Sequence[str]) -> dict[int, str]:
    """Public names of evaluation sets: as given, else the last part of the path; no two alike.

    They are signed and shown to everybody: folders of the owner's machine are nobody's business.
    """
    names: dict[int, str] = {}
    for number, argument in enumerate(arguments):
        given, place = named(argument)
        name = given or (place if place.startswith(HUB_PREFIX) else Path(os.path.abspath(place)).name)  # noqa: PTH100  # a link keeps its own name
        name = "".join(c for c in name if c.isprintable()) or "set"
        name = name if len(name) <= limits.name_chars_max else "…" + name[1 - limits.name_chars_max :]
        if name in {*names.values(), WHOLE}:
            mark = f" ({number + 1})"
            name = name[: limits.name_chars_max - len(mark)] + mark
        names[number] = name
    return names


def _words(command: Command) -> dict[str, str]:
    """The command's flags, as a person would give them."""
    return {
        "--data": " ".join(command.data) or "left out",
        "--text-key": command.text_key,
        "--tokenizer": command.tokenizer,
        "--eval-per-source": "given" if command.eval_per_source else "left out",
        "--seed": str(command.seed),
        "an end token": command.end_token,
    }
