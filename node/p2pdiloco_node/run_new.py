"""`p2pdiloco run new`: a corpus and a model become a folder from which a tracker serves a run.

    DIR/witness.key      the witness's key, made first (0600)
    DIR/blobs/DIGEST     data shards, the held-out shard, version 0 in chunks
    DIR/spec.bin         the signed RunSpec, written last: a folder without it is no run

The owner's key is never in DIR: whoever serves a run must not be able to speak for its owner.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import platformdirs

from p2pdiloco import limits
from p2pdiloco.diloco.global_state import chunks_of
from p2pdiloco.errors import OperatorError, PeerError
from p2pdiloco.ids import Digest, PeerId, RunId, digest_of
from p2pdiloco.run_spec import (
    FORMAT,
    MATH_VERSION,
    CommitteeSpec,
    Genesis,
    ModelSpec,
    OuterSpec,
    RunSpec,
    TensorSpec,
    outer_spec,
    run_id_of,
    sign_run_spec,
)
from p2pdiloco.wire.codec import decode, encode
from p2pdiloco.wire.log import Committee
from p2pdiloco_node.ports import Array
from p2pdiloco_node.storage.files import Files, guarded, make_folder, replace_file
from p2pdiloco_node.storage.keys import load_or_make_key
from p2pdiloco_node.training.arrays import read_array
from p2pdiloco_node.training.corpus import Corpus, Progress, find_files, read_corpus, write_shards
from p2pdiloco_node.training.presets import inner_spec, model_spec, warmup_tokens
from p2pdiloco_node.training.supervisor import trainer_environment
from p2pdiloco_node.training.token_files import open_token_files

SPEC_FILE = "spec.bin"
BLOBS = "blobs"
WITNESS_KEY = "witness.key"
VERSIONS_MAX = 2**53
GENESIS = (sys.executable, "-P", "-m", "p2pdiloco_node.training.genesis")


class Draft(NamedTuple):
    """A run that is complete but for its timings and targets: what `tune` may measure with."""

    spec: RunSpec
    params: Array  # (params,) version 0
    shards: tuple[Path, ...]  # raw tokens, there while `tune` runs


def owner_key_path() -> Path:
    """The owner's key in the user's configuration folder."""
    return platformdirs.user_config_path("p2pdiloco") / "owner.key"


async def create_run(
    name: str,
    model: str,
    data: Sequence[str] | None,
    target_tokens: int,
    out: Path,
    *,
    owner_key: Path | None = None,
    admission: str = "open",
    target_version: int = 0,
    eval_every: int = 8,
    inner: Mapping[str, Any] | None = None,
    outer: Mapping[str, Any] | None = None,
    committee: Mapping[str, Any] | None = None,
    seed: int | None = None,
    tune: Callable[[Draft], Awaitable[RunSpec]] | None = None,
    progress: Progress = lambda _what, _share: None,
) -> RunId:
    """Make a run in `out`.

    `data`: globs, or None for this interpreter's standard library. `owner_key`: made there if missing;
    None: `owner_key_path()`. `inner`, `outer`, `committee`: fields of the RunSpec's parts that differ from
    the preset's and the design's defaults; `committee` without `genesis`, which is the witness alone.
    `seed`: of version 0. `tune` has the last word on timings and targets, with everything there to measure.

    Raises: OperatorError: `out` holds something, the corpus cannot be used, torch is missing, a value is
    out of range. What was written so far stays and is taken up by the next call; it is no run.
    """
    files = Files()
    if not 1 <= len(name) <= limits.name_chars_max:
        raise OperatorError(f"a run's name has 1 to {limits.name_chars_max} characters.", exit_code=2)
    if admission not in {"local", "open"}:
        raise OperatorError(f"admission is local or open, not {admission!r}.", exit_code=2)
    if not 0 <= target_version <= VERSIONS_MAX:
        raise OperatorError(f"--outer-steps is 0 to {VERSIONS_MAX}.", exit_code=2)
    inner_loop = _replaced(inner_spec(model, target_tokens), inner or {}, "inner")
    _known(OuterSpec, outer or {}, "outer")
    outer_step = outer_spec(outer or {})
    _check(outer_step, "the outer part: ")
    seats = _replaced(CommitteeSpec(genesis=Committee(PeerId(bytes(32)), ())), committee or {}, "committee")
    _check_folder(out)
    corpus = await asyncio.to_thread(_read_corpus, data, model, progress)
    # Nothing is written before this line: a call that is refused leaves no folder and no key behind.
    make_folder(files, out / BLOBS)
    witness = load_or_make_key(out / WITNESS_KEY, files)
    owner = load_or_make_key(owner_key or owner_key_path(), files)

    def put(digest: Digest, blob: bytes | memoryview) -> None:
        replace_file(files, out / BLOBS / digest.hex(), blob)

    shards = await asyncio.to_thread(write_shards, corpus, put, progress)
    progress("making version 0", 0.0)
    spec_model, params = await make_version_0(model, secrets.randbits(62) if seed is None else seed)
    step_tokens = spec_model.seq_len * inner_loop.sequences_per_step
    spec = RunSpec(
        format=FORMAT,
        math_version=MATH_VERSION,
        name=name,
        owner_key=owner.public_key,
        model=spec_model,
        data=shards,
        inner=inner_loop,
        outer=outer_step,
        committee=msgspec.structs.replace(seats, genesis=Committee(witness.peer_id, ())),
        genesis=await asyncio.to_thread(_write_genesis, params, put),
        admission=admission,
        # Open runs: a newcomer is trusted after sixteen full passes; everybody is for the first sixty-four.
        trust_tokens=0 if admission == "local" else 16 * inner_loop.inner_steps * step_tokens,
        bootstrap_tokens=0 if admission == "local" else 64 * inner_loop.inner_steps * step_tokens,
        target_tokens=target_tokens,
        target_version=target_version,
        eval_every=eval_every,
        nonce=secrets.token_bytes(16),
    )
    _check(spec)
    if tune is not None:
        with tempfile.TemporaryDirectory(prefix="p2pdiloco-tokens-") as opened:
            paths = await asyncio.to_thread(
                open_token_files,
                shards.shards,
                lambda digest: (out / BLOBS / digest.hex()).read_bytes(),
                Path(opened),
                Path.write_bytes,
            )
            spec = await tune(Draft(spec, params, tuple(paths)))
        if "warmup_tokens" not in (inner or {}):
            # It follows the target, which may be another now.
            warmup = warmup_tokens(spec.target_tokens, spec.tokens_per_inner_step)
            spec = msgspec.structs.replace(
                spec, inner=msgspec.structs.replace(spec.inner, warmup_tokens=warmup)
            )
        _check(spec)
    progress("signing the run", 1.0)
    signed = sign_run_spec(spec, owner)
    await asyncio.to_thread(replace_file, files, out / SPEC_FILE, signed)
    return run_id_of(encode(spec))


async def make_version_0(model: str, seed: int) -> tuple[ModelSpec, Array]:
    """The RunSpec's model and its initial params (params,), by a process that has torch.

    Raises: OperatorError: it failed; says why.
    """
    with tempfile.TemporaryDirectory(prefix="p2pdiloco-genesis-") as folder:
        path = Path(folder) / "params.f32"
        process = await asyncio.create_subprocess_exec(
            *GENESIS,
            model,
            str(path),
            str(seed),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=trainer_environment(1),
        )
        try:
            layout, said = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode != 0:
            last = (said.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
            hint = "pip install 'p2pdiloco[node]'" if "No module named" in last else "free memory, try again"
            raise OperatorError(f"version 0 could not be made ({last[:300]}): {hint}.", exit_code=6)
        spec = model_spec(model, decode(layout, tuple[TensorSpec, ...], bytes_max=limits.run_spec_bytes_max))
        return spec, await asyncio.to_thread(read_array, path, spec.params)


def _read_corpus(data: Sequence[str] | None, model: str, progress: Progress) -> Corpus:
    """Raises: OperatorError: it cannot be used, or is too small for the model."""
    corpus = read_corpus(find_files(data), progress)
    needed = model_spec(model, ()).seq_len + 1
    if min(corpus.training_tokens, corpus.held_out_tokens) < needed:
        size = corpus.training_tokens + corpus.held_out_tokens
        raise OperatorError(
            f"the corpus is too small ({size} bytes): {model} needs {needed} bytes to train on and "
            f"{needed} held out; name more files with --data."
        )
    return corpus


def _write_genesis(params: Array, put: Callable[[Digest, memoryview], None]) -> Genesis:
    """Version 0 as chunks; the momentum's are all zero, so most of them are one blob."""

    def chunks(array: Array) -> tuple[Digest, ...]:
        digests = []
        for chunk in chunks_of(array):
            digests.append(digest_of(chunk))
            put(digests[-1], chunk)
        return tuple(digests)

    return Genesis(chunks(params), chunks(np.zeros_like(params)))


def _check_folder(out: Path) -> None:
    """A run is never overwritten; what an interrupted call left behind is taken up."""
    if (out / SPEC_FILE).exists():
        raise OperatorError(f"{out} already holds a run; choose another folder with --out.")
    if not out.exists():
        return
    if not out.is_dir():
        raise OperatorError(f"{out} is not a folder; choose another with --out.")
    known = {BLOBS, WITNESS_KEY}
    others = sorted(p.name for p in guarded(lambda: list(out.iterdir()), out) if p.name not in known)
    if others:
        raise OperatorError(f"{out} holds other things ({others[0]} ...); choose an empty folder with --out.")


def _known(part: type[Any], fields: Mapping[str, Any], what: str) -> None:
    unknown = sorted(set(fields) - set(part.__struct_fields__))
    if unknown:
        raise OperatorError(f"the run's {what} part has no field {unknown[0]!r}.", exit_code=2)


def _replaced(part: Any, fields: Mapping[str, Any], what: str) -> Any:
    _known(type(part), fields, what)
    replaced = msgspec.structs.replace(part, **fields)
    _check(replaced, f"the {what} part: ")
    return replaced


def _check(part: Any, where: str = "") -> None:
    """Every node will open it with the same types; a value out of range is said here and now."""
    try:
        decode(encode(part), type(part), bytes_max=limits.run_spec_bytes_max)
    except OverflowError:
        raise OperatorError(f"the run cannot be made: {where}a number is too large.", exit_code=2) from None
    except (PeerError, TypeError) as error:
        raise OperatorError(f"the run cannot be made: {where}{error}.", exit_code=2) from None
