"""`p2pdiloco run new`: a corpus and a model become a folder from which a tracker serves a run.

    DIR/witness.key      the witness's key, made first (0600)
    DIR/blobs/DIGEST     data shards, evaluation sets, the tokenizer, version 0 in chunks
    DIR/making/          what is known of the data, and version 0, while they are made; gone when it is signed
    DIR/spec.bin         the signed RunSpec, written last: a folder without it is no run

The owner's key is never in DIR: whoever serves a run must not be able to speak for its owner.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import platformdirs

from p2pdiloco import limits
from p2pdiloco.diloco.global_state import chunks_of
from p2pdiloco.errors import OperatorError
from p2pdiloco.exit_codes import FILES, USAGE
from p2pdiloco.ids import NO_DIGEST, Digest, PeerId, RunId, digest_of
from p2pdiloco.run_spec import (
    FORMAT,
    MATH_VERSION,
    BlobRef,
    CommitteeSpec,
    DataSpec,
    EvaluationSet,
    Genesis,
    InnerSpec,
    ModelSpec,
    OuterSpec,
    RunSpec,
    SampleSpec,
    TokenizerSpec,
    chunk_sizes,
    outer_defaults,
    run_id_of,
    sign_run_spec,
)
from p2pdiloco.wire.codec import encode
from p2pdiloco.wire.log import Committee
from p2pdiloco.words import count_of
from p2pdiloco_node.corpus.making import Planned, Request, check_work, forget_work, make_data, plan_data
from p2pdiloco_node.corpus.token_input import token_bytes_for
from p2pdiloco_node.corpus.tokenizer import BYTES, encode_prompts
from p2pdiloco_node.corpus.work import Taken, Work, claimed
from p2pdiloco_node.ports import Array
from p2pdiloco_node.progress import Quiet, Told
from p2pdiloco_node.run.checks import Declared, check_fields, check_parts, check_run, check_types, replaced
from p2pdiloco_node.run.stopping import stoppable
from p2pdiloco_node.storage.files import TEMPORARY, Files, guarded, make_folder, replace_file
from p2pdiloco_node.storage.keys import check_key, load_or_make_key
from p2pdiloco_node.storage.run_folder import BLOBS, MAKING, SPEC, WITNESS_KEY, others_in
from p2pdiloco_node.training.model_choice import ModelChoice, choose_model
from p2pdiloco_node.training.presets import warmup_tokens
from p2pdiloco_node.training.token_files import open_token_files
from p2pdiloco_node.training.version_0 import look_at_model, make_version_0

VERSION_0, TOKENS, TUNING = "version-0", "opened", "tuning"  # in MAKING
OF_A_CALL = re.compile(rf"[0-9a-f]{{64}}({re.escape(TEMPORARY)})?")  # a blob, or half of one
VERSION_0_BYTES = 8  # of disk for each parameter: float32 as it is made, and in chunks
TRUSTED_PASSES, BOOTSTRAP_PASSES = 16, 64  # full ones; of an open run


class Draft(NamedTuple):
    """A run that is complete but for its timings and targets: what `tune` may measure with."""

    spec: RunSpec
    params: Array  # (params,) version 0
    shards: tuple[Path, ...]  # raw tokens, there while `tune` runs
    folder: Path  # an empty one, for what it writes; gone with the making


Tune = Callable[[Draft], Awaitable[RunSpec]]


def owner_key_path() -> Path:
    """The owner's key in the user's configuration folder."""
    return platformdirs.user_config_path("p2pdiloco") / "owner.key"


@dataclass(frozen=True, slots=True)
class Order:
    """What a run is to be. Where nothing is said it is the preset's, or the design's default."""

    name: str
    model: str  # as `choose_model` takes it
    data: Sequence[str] | None  # this and the next four: as in making.Request
    target_tokens: int
    text_key: str = "text"
    tokenizer: str | None = None  # None: that of the checkpoint's folder, else bytes
    eval_per_source: bool = False
    jobs: int = 0
    window_shards: int | None = None
    seq_len: int | None = None
    seed: int | None = None  # of version 0 and of the data's order; None: chance, and 0
    admission: str = "open"
    target_version: int = 0
    eval_every: int = 8
    # Fields of parts of the RunSpec that differ; `committee` without `genesis`, which is the witness alone.
    inner: Mapping[str, Any] = field(default_factory=dict)
    outer: Mapping[str, Any] = field(default_factory=dict)
    committee: Mapping[str, Any] = field(default_factory=dict)
    samples: Mapping[str, Any] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)  # of the RunSpec itself: trust_tokens and the like


class Loops(NamedTuple):
    """Parts of the RunSpec that need neither text nor tensors."""

    inner: InnerSpec
    outer: OuterSpec
    committee: CommitteeSpec  # the witness is not known yet
    samples: SampleSpec  # nor are the prompts' tokens


async def create_run(
    order: Order,
    out: Path,
    *,
    owner_key: Path | None = None,
    declared: Declared | None = None,
    tune: Tune | None = None,
    told: Told | None = None,
) -> RunId:
    """Make a run in `out`.

    `owner_key`: made there if missing; None: `owner_key_path()`. `declared`: the nodes that are expected, for
    what is checked (run/checks.py). `tune` has the last word on timings and targets, with everything there to
    measure. `told` hears how far it is.

    SIGTERM ends it as Ctrl-C does.

    Raises: OperatorError: `out` holds something, the corpus cannot be used, torch is missing, a value is
    out of range. What was written so far stays and is taken up by the next call; it is no run.
    """
    told = told or Quiet()
    with stoppable(out, told):
        return await _create_run(
            order, out, owner_key or owner_key_path(), declared or Declared(), tune, told
        )


async def _create_run(
    order: Order, out: Path, key: Path, declared: Declared, tune: Tune | None, told: Told
) -> RunId:  # fmt: skip
    files = Files()
    choice, loops = check_order(order, declared)
    check_folder(out)
    check_key(key)
    words = order.tokenizer or (str(choice.tokenizer) if choice.tokenizer else BYTES)
    request = Request(
        order.data, order.text_key, words, order.eval_per_source, order.seed or 0, order.jobs, choice.seq_len
    )
    # A call that is refused leaves no folder and no key behind, and whoever is refused has not waited for it.
    with claimed(Work(out / MAKING)):
        planned = await asyncio.to_thread(plan_data, request)
        params = 0
        known: tuple[str, ...] = ()
        check_work(planned, out)

        def check_model(model: ModelSpec) -> None:
            check_draft(order, choice, loops, model, declared)
            check_work(planned, out, VERSION_0_BYTES * model.params)

        if tune is None:
            model, known = await look_at_model(
                choice,
                vocab_size=planned.plan.vocab_size,
                check=check_model,
                at=lambda doing: told.progress("Looking at the model", 0.0, doing=doing),
            )
            told.progress("Looking at the model", 1.0)
            for note in known:
                told.say(note)
            params = model.params
    shards = await make_data_for(request, out, told, planned=planned, beside_bytes=VERSION_0_BYTES * params)
    shards = _windowed(shards, order)
    make_folder(files, out / BLOBS)
    witness = load_or_make_key(out / WITNESS_KEY, files)
    is_new = not key.exists()  # noqa: ASYNC240 - a look at one name
    owner = load_or_make_key(key, files)
    told.say(
        f"{'Your key was made, it' if is_new else 'Your key'} is {key}: whoever has it speaks for this run, "
        "and without it nobody can. Keep a copy."
    )

    def put(digest: Digest, blob: bytes | memoryview) -> None:
        replace_file(files, out / BLOBS / digest.hex(), blob)

    # The data's lock was free for a moment: another call may have made its run here.
    check_folder(out)
    with Taken(Work(out / MAKING)):
        check_folder(out)

        def at(doing: str) -> None:
            told.progress("Making version 0", 0.0, doing=doing)

        spec_model, params_0, notes = await make_version_0(
            choice,
            secrets.randbits(62) if order.seed is None else order.seed,
            vocab_size=shards.tokenizer.vocab_size,
            folder=out / MAKING / VERSION_0,
            tried=tune is None,
            at=at,
        )
        for note in notes:
            if note not in known:
                told.say(note)
        encoded = await asyncio.to_thread(
            encode_prompts,
            shards.tokenizer,
            lambda digest: (out / BLOBS / digest.hex()).read_bytes(),
            loops.samples.prompts,
        )
        at("writing its blobs")
        genesis = await asyncio.to_thread(_write_genesis, params_0, put)
        told.progress("Making version 0", 1.0)
        seats = Committee(witness.peer_id, ())
        spec = _spec(order, choice, loops, spec_model, shards, genesis, owner.public_key, seats, encoded)
        check_types(spec)
        if tune is not None:
            opened, tuning = out / MAKING / TOKENS, out / MAKING / TUNING
            for folder in (opened, tuning):
                make_folder(files, folder)
            paths = await asyncio.to_thread(
                open_token_files,
                shards.shards,
                lambda digest: (out / BLOBS / digest.hex()).read_bytes(),
                opened,
                Path.write_bytes,
                token_bytes=shards.token_bytes,
            )
            spec = await tune(Draft(spec, params_0, tuple(paths), tuning))
            if "warmup_tokens" not in order.inner:
                # It follows the target, which may be another now.
                warmup = warmup_tokens(spec.target_tokens, spec.tokens_per_inner_step)
                spec = msgspec.structs.replace(
                    spec, inner=msgspec.structs.replace(spec.inner, warmup_tokens=warmup)
                )
            check_types(spec)
        for warning in check_run(spec, declared):
            told.say(warning)
        signed = sign_run_spec(spec, owner)
        await asyncio.to_thread(drop_others, out / BLOBS, spec)
        await asyncio.to_thread(replace_file, files, out / SPEC, signed)
    await asyncio.to_thread(forget_work, out)
    return run_id_of(encode(spec))


def check_order(order: Order, declared: Declared) -> tuple[ModelChoice, Loops]:
    """What neither the text nor the model's tensors are needed for. Raises: OperatorError."""
    declared.check()
    top = {
        "name": order.name, "admission": order.admission, "target_tokens": order.target_tokens,
        "target_version": order.target_version, "eval_every": order.eval_every, **order.run,
    }  # fmt: skip
    check_fields(RunSpec, top, "run")
    if order.window_shards is not None:
        check_fields(DataSpec, {"window_shards": order.window_shards}, "data")
    if order.seed is not None and not 0 <= order.seed <= limits.seed_max:
        raise OperatorError(f"--seed is a whole number from 0 to {limits.seed_max:,}.", USAGE)
    choice = choose_model(order.model, seq_len=order.seq_len)
    inner = replaced(choice.inner_spec(order.target_tokens), order.inner, "inner")
    step_tokens = choice.seq_len * inner.sequences_per_step
    if "warmup_tokens" not in order.inner:
        # It follows the batch, which may be another than the ladder's.
        warmup = warmup_tokens(order.target_tokens, step_tokens)
        inner = msgspec.structs.replace(inner, warmup_tokens=warmup)
    outer = outer_defaults(str(order.outer.get("codec", ""))) | dict(order.outer)
    loops = Loops(
        inner,
        replaced(OuterSpec(), outer, "outer"),
        replaced(CommitteeSpec(genesis=Committee(PeerId(bytes(32)), ())), order.committee, "committee"),
        replaced(SampleSpec(), order.samples, "samples"),
    )
    check_parts(
        inner, loops.outer, loops.committee, order.target_tokens, order.target_version, step_tokens
    )  # fmt: skip
    return choice, loops


def check_draft(
    order: Order, choice: ModelChoice, loops: Loops, model: ModelSpec, declared: Declared
) -> None:  # fmt: skip
    """Everything that the text is not needed for, of a run as it will be. Raises: OperatorError."""
    text = BlobRef(NO_DIGEST, 1, model.seq_len + 1)  # what every text must have, and is checked for itself
    data = DataSpec(
        TokenizerSpec("json", model.vocab_size, 0), token_bytes_for(model.vocab_size), (text,),
        (EvaluationSet("all", text, 1),),
    )  # fmt: skip
    nobody, chunks = Committee(PeerId(bytes(32)), ()), (NO_DIGEST,) * len(chunk_sizes(model.params))
    encoded = ((),) * len(loops.samples.prompts)
    spec = _spec(
        order, choice, loops, model, _windowed(data, order), Genesis(chunks, chunks), bytes(32), nobody,
        encoded,
    )  # fmt: skip
    check_types(spec)
    check_run(spec, declared)


def _windowed(data: DataSpec, order: Order) -> DataSpec:
    if order.window_shards is None:
        return data
    made: DataSpec = replaced(data, {"window_shards": order.window_shards}, "data")
    return made


def _spec(
    order: Order, choice: ModelChoice, loops: Loops, model: ModelSpec, data: DataSpec, genesis: Genesis,
    owner_key: bytes, seats: Committee, encoded: tuple[tuple[int, ...], ...],
) -> RunSpec:  # fmt: skip
    of_a_pass = loops.inner.inner_steps * loops.inner.sequences_per_step * model.seq_len
    spec = RunSpec(
        format=FORMAT,
        math_version=MATH_VERSION,
        name=order.name,
        owner_key=owner_key,
        model=model,
        data=data,
        inner=loops.inner,
        outer=loops.outer,
        committee=msgspec.structs.replace(loops.committee, genesis=seats),
        genesis=genesis,
        admission=order.admission,
        # Open runs: a newcomer is trusted after some full passes; everybody is for the first ones.
        trust_tokens=0 if order.admission == "local" else TRUSTED_PASSES * of_a_pass,
        bootstrap_tokens=0 if order.admission == "local" else BOOTSTRAP_PASSES * of_a_pass,
        target_tokens=order.target_tokens,
        target_version=order.target_version,
        eval_every=order.eval_every,
        nonce=secrets.token_bytes(16),
        samples=msgspec.structs.replace(loops.samples, encoded=encoded),
        origin=choice.origin,
    )
    made: RunSpec = replaced(spec, order.run, "run")
    return made


async def make_data_for(
    request: Request, out: Path, told: Told, *, planned: Planned | None = None, beside_bytes: int = 0
) -> DataSpec:
    """`make_data` in a thread, which ends soon after this is cancelled. Raises: OperatorError."""
    stop = threading.Event()
    try:
        return await asyncio.to_thread(
            make_data, request, out, told, stop, planned=planned, beside_bytes=beside_bytes
        )
    except asyncio.CancelledError:
        stop.set()
        raise


def drop_others(blobs: Path, spec: RunSpec) -> None:
    """What calls that were killed, or had another model, left among the run's blobs. Nobody else's files.

    Raises: OperatorError: a blob of the run is not there: another call took it for such a leftover.
    """
    wanted = {ref.digest.hex() for ref in spec.data.blobs}
    wanted |= {digest.hex() for digest in (*spec.genesis.params, *spec.genesis.momentum)}
    for path in blobs.iterdir():
        if path.name not in wanted and OF_A_CALL.fullmatch(path.name):
            path.unlink(missing_ok=True)
        wanted.discard(path.name)
    if wanted:
        raise OperatorError(
            f"{blobs} lacks {count_of(len(wanted), 'blob')} of this run, which another call in the same "
            "folder must have removed: give the same command again.",
            FILES,
        )


def _write_genesis(params: Array, put: Callable[[Digest, memoryview], None]) -> Genesis:
    """Version 0 as chunks; the momentum's are all zero, so most of them are one blob."""

    def chunks(array: Array) -> tuple[Digest, ...]:
        digests = []
        for chunk in chunks_of(array):
            digests.append(digest_of(chunk))
            put(digests[-1], chunk)
        return tuple(digests)

    return Genesis(chunks(params), chunks(np.zeros_like(params)))


def check_folder(out: Path) -> None:
    """A run is never overwritten; what an interrupted call left behind is taken up. Raises: OperatorError."""
    if (out / SPEC).exists():
        raise OperatorError(f"{out} already holds a run; choose another folder with --out.")
    if not out.exists():
        return
    if not out.is_dir():
        raise OperatorError(f"{out} is not a folder; choose another with --out.")
    if others := guarded(lambda: others_in(out), out):
        raise OperatorError(f"{out} holds other things ({others[0]} ...); choose an empty folder with --out.")


def when_over(target_tokens: int, target_version: int) -> str:
    """When a run that was just made ends, and what sets that."""
    if not target_version:
        return (
            f"It is over after {target_tokens:,} tokens, and the learning rate falls until then: "
            "--tokens sets both."
        )
    return (
        f"It is over at version {target_version:,} (--outer-steps), or before that after {target_tokens:,} "
        "tokens (--tokens), until which the learning rate falls."
    )
