"""`p2pdiloco run fork`: a certified version of a run becomes version 0 of another, with other figures.

The new run is its own: another RunId, witness and owner; it names the parent's RunId, the version and the
root of its params, which anybody can compare. The token clock begins at 0 and the momentum at zero, as in
every run. The data are the parent's, unless other text is named; the tokenizer is the parent's in any case:
the model knows no other.

    OUT/making/fetched   what a link gave, until the run is signed
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError, TransportError
from p2pdiloco.exit_codes import USAGE
from p2pdiloco.ids import NO_DIGEST, Digest, RunId, digest_of, merkle_root
from p2pdiloco.run_spec import (
    FORMAT,
    MATH_VERSION,
    BlobRef,
    DataSpec,
    EvaluationSet,
    Genesis,
    InnerSpec,
    ModelSpec,
    Parent,
    RunSpec,
    run_id_of,
    sign_run_spec,
)
from p2pdiloco.wire.codec import encode
from p2pdiloco.wire.log import Committee
from p2pdiloco_node import __version__
from p2pdiloco_node.config import JoinLink
from p2pdiloco_node.corpus.making import Request, forget_work
from p2pdiloco_node.corpus.sources import find_inputs
from p2pdiloco_node.corpus.tokenizer import BYTES, encode_prompts
from p2pdiloco_node.corpus.work import Taken, Work, claimed
from p2pdiloco_node.export import kept as on_disk
from p2pdiloco_node.export.certified import Certified
from p2pdiloco_node.export.fetched import LinkedRun, read_spec
from p2pdiloco_node.export.sources import Found, from_folder, from_link
from p2pdiloco_node.progress import Quiet, Told, Watch
from p2pdiloco_node.run.checks import Declared, check_run, check_types, replaced
from p2pdiloco_node.run.file import Parts
from p2pdiloco_node.run.new import BOOTSTRAP_PASSES, TRUSTED_PASSES, check_folder, drop_others, make_data_for
from p2pdiloco_node.run.stopping import stoppable
from p2pdiloco_node.storage.files import Files, make_folder, replace_file
from p2pdiloco_node.storage.keys import check_key, load_or_make_key
from p2pdiloco_node.storage.run_folder import BLOBS, FETCHED, MAKING, SPEC, WITNESS_KEY
from p2pdiloco_node.transport.http_session import make_session

# What a fork cannot have otherwise: the model and its tokenizer are the parent's.
FIXED = {"model": ("model", "seed"), "data": ("tokenizer",)}


class Forked(NamedTuple):
    run: RunId
    spec: RunSpec
    warnings: list[str]


async def fork(
    source: JoinLink | Path,
    version: str,
    out: Path,
    parts: Parts,
    *,
    owner_key: Path,
    declared: Declared,
    told: Told,
) -> Forked:
    """Make the run in `out`. `version`: newest, or a number. `parts`: what differs from the parent.

    Raises: OperatorError. What was fetched stays and is taken up by the next call; it is no run.
    """
    for table, keys in FIXED.items():
        for key in keys:
            if key in parts[table]:
                raise OperatorError(f"{key} is the parent's in a fork: leave [{table}] {key} out.", USAGE)
    check_folder(out)
    check_key(owner_key)
    with stoppable(out, told):
        # Whoever is refused has fetched nothing, and no folder is left.
        check_draft(*await _spec_of(source), parts, declared)
        return await _fork(source, version, out, parts, owner_key, declared, told)


async def _fork(
    source: JoinLink | Path, version: str, out: Path, parts: Parts, owner_key: Path, declared: Declared,
    told: Told,
) -> Forked:  # fmt: skip
    files, work = Files(), out / MAKING / FETCHED
    watch = told.progress

    def put(digest: Digest, data: bytes | memoryview) -> None:
        path = out / BLOBS / digest.hex()
        if not path.exists():
            replace_file(files, path, data)

    with claimed(Work(out / MAKING)):
        if isinstance(source, Path):
            found = await asyncio.to_thread(from_folder, source, version, watch, held_out=False)
        else:
            await asyncio.to_thread(make_folder, files, work)
            found = await from_link(source, work, version, watch, value_bytes=4, held_out=False)
        parent = found.origin.spec
        make_folder(files, out / BLOBS)
        told.say(f"Forking version {found.certified.version:,} of {parent.name}.")
        genesis = await asyncio.to_thread(_genesis, found.certified, put)
        if genesis.params_root != found.certified.params_root:
            raise AssertionError("chunks of another size than the parent's")
    if parts["data"].get("data"):
        data = await _other_data(found, parts, out, told)
    else:
        data = await _same_data(source, parent, work, put, watch)
        data = _replaced_data(data, parts["data"])
    # Another call may be at work in this folder, or have made its run here meanwhile.
    check_folder(out)
    with Taken(Work(out / MAKING)):
        check_folder(out)
        witness = load_or_make_key(out / WITNESS_KEY, files)
        owner = load_or_make_key(owner_key, files)
        origin = Parent(found.origin.run, found.certified.version, found.certified.params_root)
        spec = _spec(parent, origin, parts, data, genesis, told)
        prompts = await asyncio.to_thread(
            encode_prompts, data.tokenizer, lambda digest: (out / BLOBS / digest.hex()).read_bytes(),
            spec.samples.prompts,
        )  # fmt: skip
        spec = msgspec.structs.replace(
            spec, owner_key=owner.public_key,
            samples=msgspec.structs.replace(spec.samples, encoded=prompts),
            committee=msgspec.structs.replace(spec.committee, genesis=Committee(witness.peer_id, ())),
        )  # fmt: skip
        check_types(spec)
        warnings = check_run(spec, declared)
        await asyncio.to_thread(drop_others, out / BLOBS, spec)
        await asyncio.to_thread(replace_file, files, out / SPEC, sign_run_spec(spec, owner))
    await asyncio.to_thread(forget_work, out)
    return Forked(run_id_of(encode(spec)), spec, warnings)


async def _spec_of(source: JoinLink | Path) -> tuple[RunId, RunSpec]:
    """Raises: OperatorError: there is no such run, or nobody answers."""
    if isinstance(source, Path):
        return await asyncio.to_thread(lambda: on_disk.open_spec(on_disk.locate(source).spec))
    async with make_session(connections_max=1, per_host_max=0, build=__version__) as session:
        return await read_spec(session, source)


def check_draft(run: RunId, parent: RunSpec, parts: Parts, declared: Declared) -> None:
    """Everything that neither the version nor the text is needed for. Raises: OperatorError."""
    declared.check()
    data = parent.data
    if parts["data"].get("data"):
        find_inputs(parts["data"]["data"], text_key=parts["data"].get("text_key", "text"))
        # What other text must have at least, and is checked for itself.
        text = BlobRef(NO_DIGEST, 1, parts["model"].get("seq_len", parent.model.seq_len) + 1)
        data = msgspec.structs.replace(data, shards=(text,), evaluations=(EvaluationSet("all", text, 1),))
        fields = {key: value for key, value in parts["data"].items() if key == "window_shards"}
    else:
        fields = parts["data"]
    origin = Parent(run, 0, NO_DIGEST)
    spec = _spec(parent, origin, parts, _replaced_data(data, fields), parent.genesis, Quiet())
    encoded = ((),) * len(spec.samples.prompts)  # known when the tokenizer is
    spec = msgspec.structs.replace(spec, samples=msgspec.structs.replace(spec.samples, encoded=encoded))
    check_types(spec)
    check_run(spec, declared)


def _spec(
    parent: RunSpec, origin: Parent, parts: Parts, data: DataSpec, genesis: Genesis, told: Told
) -> RunSpec:  # fmt: skip
    """The parent's figures, but for what `parts` says. Raises: OperatorError."""
    run = parts["run"]
    model = parent.model
    if "seq_len" in parts["model"]:
        model = replaced(model, {"seq_len": parts["model"]["seq_len"]}, "model")
    inner = replaced(parent.inner, parts["inner"], "inner")
    tokens = run.get("tokens", parent.target_tokens)
    if "warmup_tokens" not in parts["inner"] and inner.warmup_tokens >= tokens:
        inner = msgspec.structs.replace(inner, warmup_tokens=tokens // 10)
    admission = run.get("admission", parent.admission)
    trust, bootstrap = _admitted(parent, admission, _tokens_of_a_pass(inner, model), told)
    fields: Mapping[str, Any] = {
        "format": FORMAT,
        "math_version": MATH_VERSION,
        "name": run.get("name", parent.name),
        "model": model,
        "data": data,
        "inner": inner,
        "outer": replaced(parent.outer, parts["outer"], "outer"),
        "committee": replaced(parent.committee, parts["committee"], "committee"),
        "samples": replaced(parent.samples, parts["samples"], "samples"),
        "genesis": genesis,
        "admission": admission,
        "trust_tokens": run.get("trust_tokens", trust),
        "bootstrap_tokens": run.get("bootstrap_tokens", bootstrap),
        "target_tokens": tokens,
        "target_version": run.get("outer_steps", parent.target_version),
        "eval_every": run.get("eval_every", parent.eval_every),
        "evaluators_max": run.get("evaluators_max", parent.evaluators_max),
        "nonce": secrets.token_bytes(16),
        "origin": f"version {origin.version} of {parent.name}"[: limits.origin_chars_max],
        "parent": origin,
    }
    return msgspec.structs.replace(parent, **fields)


def _tokens_of_a_pass(inner: InnerSpec, model: ModelSpec) -> int:
    return inner.inner_steps * inner.sequences_per_step * model.seq_len


def _admitted(parent: RunSpec, admission: str, of_a_pass: int, told: Told) -> tuple[int, int]:
    """trust_tokens and bootstrap_tokens where nobody says otherwise: as many passes as in the parent."""
    before = _tokens_of_a_pass(parent.inner, parent.model)
    if admission == "local":
        return 0, 0
    if parent.admission != admission:
        trust, bootstrap = TRUSTED_PASSES * of_a_pass, BOOTSTRAP_PASSES * of_a_pass
    else:
        trust, bootstrap = (
            -(-tokens * of_a_pass // before) for tokens in (parent.trust_tokens, parent.bootstrap_tokens)
        )
    if (trust, bootstrap) != (parent.trust_tokens, parent.bootstrap_tokens):
        told.say(
            f"A pass or the admission is another one than in {parent.name}, so trust_tokens is {trust:,} and "
            f"bootstrap_tokens {bootstrap:,} here (--set run.trust_tokens=N, --set run.bootstrap_tokens=N)."
        )
    return trust, bootstrap


def _genesis(certified: Certified, put: Callable[[Digest, bytes | memoryview], None]) -> Genesis:
    """The certified chunks as they are, and a momentum of zeros."""
    params, momentum = [], []
    for chunk in certified.chunks():
        data = bytes(chunk)
        params.append(digest_of(data))
        put(params[-1], data)
        zeros = bytes(len(data))
        momentum.append(digest_of(zeros))
        put(momentum[-1], zeros)
    assert merkle_root(params) == certified.params_root, "chunks that are not the certified params"
    return Genesis(tuple(params), tuple(momentum))


def _replaced_data(data: DataSpec, fields: Mapping[str, Any]) -> DataSpec:
    shown = {key: value for key, value in fields.items() if key == "window_shards"}
    unused = sorted(set(fields) - set(shown))
    if unused:
        raise OperatorError(f"[data] {unused[0]} says how text is read: name the text with --data.", USAGE)
    made: DataSpec = replaced(data, shown, "data")
    return made


async def _same_data(
    source: JoinLink | Path,
    parent: RunSpec,
    work: Path,
    put: Callable[[Digest, bytes | memoryview], None],
    watch: Watch,
) -> DataSpec:
    """The parent's shards, evaluation sets and tokenizer into this run's folder. Raises: OperatorError."""
    wanted = {Digest(ref.digest): ref for ref in parent.data.blobs}
    if isinstance(source, Path):
        kept = on_disk.locate(source)

        def copy() -> None:
            for place, digest in enumerate(wanted, start=1):
                put(digest, on_disk.read_blob(kept, digest))
                watch("Copying the data", place, len(wanted), "blobs")

        try:
            await asyncio.to_thread(copy)
        except TransportError as error:
            raise OperatorError(
                f"{source} has not all of the run's data ({error}): fork from the run's link, or from its "
                "tracker's folder."
            ) from None
        return parent.data
    async with LinkedRun(source, work, watch) as linked:
        await linked.open()
        await linked.fetch(list(wanted), max(ref.size for ref in wanted.values()), "data", of_spec=True)

        def move() -> None:
            for digest in wanted:
                put(digest, linked.blobs.read(digest))

        await asyncio.to_thread(move)
    return parent.data


async def _other_data(found: Found, parts: Parts, out: Path, told: Told) -> DataSpec:
    """Other text, in the parent's tokens. Raises: OperatorError."""
    said, parent = parts["data"], found.origin.spec
    words, path = BYTES, out / MAKING / "tokenizer.json"
    if parent.data.tokenizer.kind != "bytes":
        make_folder(Files(), path.parent)
        replace_file(Files(), path, found.tokenizer_json)
        words = str(path)
    request = Request(
        said["data"], said.get("text_key", "text"), words, said.get("eval_per_source", False), 0, 0,
        parts["model"].get("seq_len", parent.model.seq_len),
    )  # fmt: skip
    data = await make_data_for(request, out, told)
    if data.tokenizer.vocab_size > parent.model.vocab_size:
        raise AssertionError("the parent's own tokenizer does not fit its model")
    return _replaced_data(data, {k: v for k, v in said.items() if k == "window_shards"})
