"""Where a run may be read from: a link, or a folder on this disk. Either gives a certified version."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError, TransportError
from p2pdiloco.exit_codes import RESOURCES
from p2pdiloco.ids import Digest
from p2pdiloco.rules.delta_layout import encoded_size
from p2pdiloco.run_spec import RunSpec, chunk_sizes
from p2pdiloco_node.config import JoinLink
from p2pdiloco_node.export import kept as on_disk
from p2pdiloco_node.export.certified import (
    Certified,
    Plan,
    Read,
    follow,
    follow_arrays,
    plans,
    tokenizer_bytes,
    wanted_version,
)
from p2pdiloco_node.export.chain import Chain, checked
from p2pdiloco_node.export.facts import Heard, Origin
from p2pdiloco_node.export.fetched import LinkedRun
from p2pdiloco_node.progress import Watch
from p2pdiloco_node.storage.files import Files, guarded, make_folder

DELTAS, CHUNKS, TEXTS = "deltas", "chunks of the model", "tokenizer and held-out text"


class Found(NamedTuple):
    """A certified version and all that goes with it into a folder."""

    origin: Origin
    certified: Certified
    tokenizer_json: bytes
    held_out: bytes | None  # the first evaluation set as it travels, where it was asked for
    heard: Heard


def from_folder(folder: Path, asked: str, watch: Watch, *, held_out: bool) -> Found:
    """From a kept run; nothing there is changed. `asked`: newest, or a version's number.

    Raises: OperatorError: there is no such run or version, or it is damaged.
    """
    kept = on_disk.locate(folder)
    run, spec = on_disk.open_spec(kept.spec)
    chain = checked(run, spec, on_disk.entries(kept), watch, where=str(folder))
    version = wanted_version(chain, asked)

    def read(digest: Digest, /) -> bytes:
        return on_disk.read_blob(kept, digest)

    certified = _from_disk(kept, chain, version, read, watch)
    try:
        tokenizer_json = tokenizer_bytes(spec, read)
        text = read(Digest(spec.data.evaluation.digest)) if held_out else None
    except TransportError as error:
        raise OperatorError(
            f"{folder} has not all of the run's texts ({error}): export from the run's link with --join."
        ) from None
    return Found(_origin(chain, certified), certified, tokenizer_json, text, on_disk.heard(kept, version))


def _from_disk(kept: on_disk.Kept, chain: Chain, version: int, read: Read, watch: Watch) -> Certified:
    """Raises: OperatorError: nothing here leads to that version."""
    params = chain.spec.model.params
    why: TransportError | None = None
    ways = plans(chain, version, on_disk.offers(kept))
    for index in on_disk.state_indices(kept):
        # A state file saves outer steps, never more than reading a snapshot's chunks would.
        if index <= max((way.start.index for way in ways if not way.steps), default=-1):
            break
        arrays = on_disk.read_state(kept, index, params)
        if arrays is None:
            continue
        try:
            found = follow_arrays(chain, arrays, version, read, watch)
        except TransportError as error:
            why = error
            continue
        if found is not None:
            return found
    for way in ways:
        missing = [digest for digest in way.blobs if not on_disk.has_blob(kept, digest)]
        if missing:
            why = why or TransportError(f"{len(missing)} of {len(way.blobs)} blobs that it needs are gone")
            continue
        try:
            return follow(chain, way, read, watch)
        except TransportError as error:
            why = error
    raise OperatorError(
        f"version {version} cannot be made from what is kept in {kept.own} ({why}): "
        + _instead(kept, chain, version, read, watch)
    )


def _instead(kept: on_disk.Kept, chain: Chain, version: int, read: Read, watch: Watch) -> str:
    """What to do about a version that nothing here leads to."""
    newest = _newest_made(kept, chain, read, watch)
    if newest is None or newest > version:
        other = f"The newest is {chain.version}; a run's" if newest is None else f"{newest} is here; a run's"
        return f"older versions are let go. {other} witness keeps most."
    return (
        f"the log here is at version {chain.version}, and the model at version {newest}, because its node is "
        f"still behind or was ended meanwhile. Export that with --version {newest}, let the node catch up, "
        "or export from the run's link with --join."
    )


def _newest_made(kept: on_disk.Kept, chain: Chain, read: Read, watch: Watch) -> int | None:
    """The newest version whose arrays are here as they are, checked; None: of none."""
    for index in on_disk.state_indices(kept):
        arrays = on_disk.read_state(kept, index, chain.spec.model.params)
        if arrays is None or index > chain.index:
            continue
        at = chain.version_at(index)
        if follow_arrays(chain, arrays, at, read, watch) is not None:
            return at
    return None


async def from_link(
    link: JoinLink, folder: Path, asked: str, watch: Watch, *, value_bytes: int, held_out: bool
) -> Found:  # fmt: skip
    """From whoever serves `link`; blobs are kept in `folder` for as long as the result is used.

    `value_bytes`: of a parameter as it will be written on the same disk.

    Raises: OperatorError: nobody answers, another run, no such version, nothing that verifies, no room.
    """
    files = Files()
    await asyncio.to_thread(make_folder, files, folder)
    async with LinkedRun(link, folder, watch) as linked:
        run, spec = await linked.open()
        check_room(folder, room_needed(spec, value_bytes, fetched=True))
        chain = await linked.chain(run, spec)
        version = wanted_version(chain, asked)
        ways = await asyncio.to_thread(plans, chain, version, await linked.offers())
        read = linked.blobs.read
        texts = [*spec.data.tokenizer.pieces, *([spec.data.evaluation] if held_out else [])]
        size_max = max((text.size for text in texts), default=0)
        await linked.fetch([Digest(text.digest) for text in texts], size_max, TEXTS, of_spec=True)
        certified = await _from_ways(linked, chain, ways, read, watch)
        heard = await linked.heard(version)
        tokenizer_json = await asyncio.to_thread(tokenizer_bytes, spec, read)
        text = read(Digest(spec.data.evaluation.digest)) if held_out else None
        return Found(_origin(chain, certified), certified, tokenizer_json, text, heard)


async def _from_ways(
    linked: LinkedRun, chain: Chain, ways: Sequence[Plan], read: Read, watch: Watch
) -> Certified:  # fmt: skip
    """The first way whose blobs come. Raises: OperatorError."""
    why: OperatorError | None = None
    spec = chain.spec
    for way in ways:
        chunks = {Digest(c) for c in (*way.start.params, *way.start.momentum)}
        deltas = [digest for digest in way.blobs if digest not in chunks]
        try:
            # Deltas first: they go first where they are kept, and are small.
            await linked.fetch(deltas, encoded_size(spec.outer.codec, spec.model.tensors), DELTAS)
            size_max = max(chunk_sizes(spec.model.params))
            of_spec = way.start.index == 0  # other chunks are the committee's word
            await linked.fetch([d for d in way.blobs if d in chunks], size_max, CHUNKS, of_spec=of_spec)
        except OperatorError as error:
            why = why or error
            continue
        return await asyncio.to_thread(follow, chain, way, read, watch)
    assert why is not None, "version 0 is always a way"
    raise why


def _origin(chain: Chain, certified: Certified) -> Origin:
    return Origin(
        run=chain.run,
        spec=chain.spec,
        version=certified.version,
        index=certified.index,
        head=chain.head_at(certified.index),
        params_root=certified.params_root,
        tally=chain.tally(certified.version),
    )


def room_needed(spec: RunSpec, value_bytes: int, *, fetched: bool) -> int:
    """Bytes of disk for an export: the weights, and what is fetched for them at most; deltas and texts are
    small beside."""
    params = spec.model.params
    return value_bytes * params + (8 * params if fetched else 0) + 64 * limits.MIB


def check_room(folder: Path, needed: int) -> None:
    """Raises: OperatorError: the disk with `folder` has less."""
    free = guarded(lambda: shutil.disk_usage(folder).free, folder)
    if free < needed:
        raise OperatorError(
            f"This needs {needed / 1e6:,.0f} MB of disk beside OUT, and {free / 1e6:,.0f} MB are free: make "
            "room, or name a folder on another disk.",
            RESOURCES,
        )
