"""The run's first params, made by a process that has torch: initialised, or read from a local checkpoint."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.exit_codes import NO, RESOURCES
from p2pdiloco.run_spec import ModelSpec, TensorSpec
from p2pdiloco.wire.codec import Struct, decode, encode
from p2pdiloco_node.training.arrays import Floats, read_array
from p2pdiloco_node.training.model_choice import ModelChoice
from p2pdiloco_node.training.presets import config_bytes
from p2pdiloco_node.training.supervisor import trainer_environment

GENESIS = (sys.executable, "-P", "-m", "p2pdiloco_node.training.genesis")
KNOWN_WHY = 64  # genesis ends with this and an exit code: its last line is a sentence for people
KNOWN = range(KNOWN_WHY + NO, KNOWN_WHY + RESOURCES + 1)  # Python itself ends with others, such as 120
DOING = "p2pdiloco is at: "  # begins a line of genesis that says what goes on, and no more
HEARD_BYTES = 1 << 16  # read at once of what it says, and most that is kept of a line
LENGTH_BYTES = 4  # in front of its first answer
HINTS = {  # by what the last line says
    "No module named": "pip install 'p2pdiloco[node]'",
    "No space left": "make room on the disk, or choose a folder on another disk with --out",
    "quota exceeded": "make room in your disk quota, or choose a folder on another disk with --out",
}


At = Callable[[str], None]
Check = Callable[[ModelSpec], None]


def unheard(_: str) -> None:
    """Nobody listens."""


class GenesisOrder(Struct, frozen=True):
    """What the process is told, on its standard input."""

    family: str
    config: bytes  # JSON arguments of the family's class, as the owner gave them
    vocab_size: int  # of the tokenizer
    seq_len: int  # tokens of a training sequence
    checkpoint: str  # folder; empty: initialise
    seed: int
    params: str  # file to write: raw little-endian float32; empty: none, the model is only tried
    tried: bool = False  # by a look before: minutes for a large model


class GenesisMade(Struct, frozen=True):
    """What it answers on its standard output."""

    config: bytes  # every argument, in the form of a RunSpec
    tensors: Annotated[tuple[TensorSpec, ...], Meta(max_length=limits.array_items_max)]
    notes: tuple[str, ...]  # for people
    made_with: str  # releases of its libraries


async def look_at_model(
    choice: ModelChoice, *, vocab_size: int, check: Check, at: At = unheard
) -> tuple[ModelSpec, tuple[str, ...]]:
    """The RunSpec's model, without params, and what the owner should know: before anything is made.

    `check` refuses it by its size, before it is made and tried, which may take minutes. `at` hears what goes
    on.

    Raises: OperatorError: it cannot be made or computed with, or its checkpoint cannot be read.
    """
    made = await _made(choice, 0, vocab_size, "", at, tried=False, check=check)
    return _spec(choice, vocab_size, made), made.notes


async def make_version_0(
    choice: ModelChoice, seed: int, *, vocab_size: int, folder: Path, tried: bool = False, at: At = unheard
) -> tuple[ModelSpec, Floats, tuple[str, ...]]:
    """The RunSpec's model, its params (params,) and what the owner should know.

    `vocab_size`: of the tokenizer. `folder`: of the params for a moment; what a killed call left there goes.
    `tried`: `look_at_model` has let it compute. `at` hears what is going on.

    Raises: OperatorError: it failed; says why.
    """
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir()  # noqa: ASYNC240 - one call
    except OSError as error:
        raise OperatorError(f"{folder} cannot be made: {error.strerror}.", RESOURCES) from None
    try:
        path = folder / "params.f32"
        made = await _made(choice, seed, vocab_size, str(path), at, tried=tried)
        spec = _spec(choice, vocab_size, made)
        return spec, await asyncio.to_thread(read_array, path, spec.params), made.notes
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _made(
    choice: ModelChoice, seed: int, vocab_size: int, params: str, at: At, *, tried: bool,
    check: Check | None = None,
) -> GenesisMade:  # fmt: skip
    order = GenesisOrder(
        family=choice.family,
        config=config_bytes(choice.arguments(vocab_size)),
        vocab_size=vocab_size,
        seq_len=choice.seq_len,
        checkpoint=str(choice.checkpoint.resolve()) if choice.checkpoint else "",
        seed=seed,
        params=params,
        tried=tried,
    )

    def laid_out(answer: bytes) -> None:
        if check is not None:
            check(_spec(choice, vocab_size, _opened(answer)))

    return _opened(await _run(encode(order), at, laid_out))


def _opened(answer: bytes) -> GenesisMade:
    return decode(answer, GenesisMade, bytes_max=limits.run_spec_bytes_max)


def _spec(choice: ModelChoice, vocab_size: int, made: GenesisMade) -> ModelSpec:
    return ModelSpec(
        family=choice.family,
        preset=choice.name,
        config=made.config,
        vocab_size=vocab_size,
        seq_len=choice.seq_len,
        tensors=made.tensors,
        made_with=made.made_with[: limits.made_with_chars_max],
    )


async def _run(order: bytes, at: At, laid_out: Callable[[bytes], None]) -> bytes:
    at("starting torch")
    process = await asyncio.create_subprocess_exec(
        *GENESIS,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=trainer_environment(1),
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None  # noqa: PT018
    try:
        process.stdin.write(order)
        process.stdin.close()
        try:
            async with asyncio.TaskGroup() as group:
                answer = group.create_task(_answer(process.stdout, laid_out))
                words = group.create_task(last_words(process.stderr, at))
        except ExceptionGroup as failed:  # what one raises ends both
            raise failed.exceptions[0] from None
        made, last = answer.result(), words.result()
        code = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if code == 0:
        return made
    if code in KNOWN:
        raise OperatorError(f"version 0 is not made: {last[:1000]}", code - KNOWN_WHY)
    hint = next((hint for sign, hint in HINTS.items() if sign in last), "free memory, try again")
    raise OperatorError(f"version 0 could not be made ({last[:300]}): {hint}.", RESOURCES)


async def _answer(said: asyncio.StreamReader, laid_out: Callable[[bytes], None]) -> bytes:
    try:
        first = await said.readexactly(int.from_bytes(await said.readexactly(LENGTH_BYTES), "big"))
    except asyncio.IncompleteReadError:
        return b""  # it failed: its last words say why
    laid_out(first)
    return await said.read()


async def last_words(said: asyncio.StreamReader, at: At) -> str:
    """The last line for people; those of what goes on are told meanwhile."""
    rest, last, doing = b"", "", ""
    while True:
        chunk = await said.read(HEARD_BYTES)
        *lines, rest = (rest + (chunk or b"\n")).split(b"\n")
        rest = rest[-HEARD_BYTES:]
        for line in lines:
            text = line.decode(errors="replace").strip()
            if text.startswith(DOING):
                doing = text.removeprefix(DOING)
                at(doing)
            else:
                last = text or last
        if not chunk:
            return last or f"it said nothing, at: {doing}"
