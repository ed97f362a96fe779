"""`p2pdiloco export`: a certified version of a run becomes a Hugging Face folder, or nothing is written.

Everything happens in a temporary folder beside OUT, which takes OUT's name when it is whole.
"""

from __future__ import annotations

import asyncio
import io
import os
import shlex
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import numpy as np

from p2pdiloco.errors import OperatorError, PeerError, TransportError
from p2pdiloco.exit_codes import RUN, USAGE
from p2pdiloco.run_spec import RunSpec
from p2pdiloco.wire.frames import open_frame
from p2pdiloco.words import count_of
from p2pdiloco_node.config import parse_join
from p2pdiloco_node.export.config_files import Config, full_config
from p2pdiloco_node.export.hf_folder import Content, Folder, write_folder
from p2pdiloco_node.export.sources import Found, check_room, from_folder, from_link, room_needed
from p2pdiloco_node.export.weights import VALUE_BYTES, write_file
from p2pdiloco_node.progress import BYTES, Watch, shown
from p2pdiloco_node.storage.files import LOCK, Files, guarded, lock_folder
from p2pdiloco_node.storage.scratch import remove_unlocked
from p2pdiloco_node.training.supervisor import trainer_environment

HELD_OUT = "held-out.npy"
WRITING = "Writing the model"
FETCHED, MADE = "fetched", "made"  # in the temporary folder
DEFAULT_DATA_DIR = "p2pdiloco-node"


class Options(NamedTuple):
    """What the command was given."""

    out: Path
    join: str | None = None
    run: Path | None = None
    data_dir: Path | None = None
    version: str = "newest"
    dtype: str = "float32"
    held_out: bool = False


def print_export(options: Options) -> int:
    """The command. Raises: OperatorError; then OUT is as it was."""
    with shown(on_stderr=True) as told, ended_by_sigterm():
        folder = export(options, told.progress)
    facts = folder.facts
    files = count_of(len(folder.files), "file")
    size = sum(file.size for file in folder.files)
    print(
        f"Version {facts['version']} of run {facts['run']['name']} ({facts['run']['id'][:16]}) is in "
        f"{options.out}: {files}, {size / 1e6:,.1f} MB, {facts['weights']['dtype']}.\n"
        f"Let it talk: p2pdiloco generate --from {shlex.quote(str(options.out))} --prompt 'Once upon a time'"
    )
    return 0


def export(options: Options, told: Watch) -> Folder:
    """Make the folder. Raises: OperatorError."""
    check_source(options.join, options.run, options.data_dir)
    _check_out(options.out)
    if options.dtype not in VALUE_BYTES:
        raise OperatorError(f"--dtype is {' or '.join(VALUE_BYTES)}, not {options.dtype!r}.", USAGE)
    parent = options.out.absolute().parent
    guarded(lambda: parent.mkdir(parents=True, exist_ok=True), parent)
    with _beside(options.out) as work:
        found = find(options, work / FETCHED, told)
        check_room(work, room_needed(found.origin.spec, VALUE_BYTES[options.dtype], fetched=False))
        made = work / MADE
        made.mkdir()
        folder = _fill(made, found, options.dtype, told)
        _publish(made, options.out)
    return folder


def check_source(join: str | None, run: Path | None, data_dir: Path | None) -> None:
    """Raises: OperatorError: more than one place to read from."""
    given = [
        name
        for name, value in (("--join", join), ("--run", run), ("--data-dir", data_dir))
        if value is not None
    ]
    if len(given) > 1:
        raise OperatorError(f"{' and '.join(given)} name different places: give one of them.", USAGE)


def find(options: Options, fetched: Path, told: Watch) -> Found:
    """The certified version that the options name. `fetched`: for what comes over the network.

    Raises: OperatorError.
    """
    if options.join is not None:
        link = parse_join(options.join)
        return asyncio.run(
            from_link(
                link,
                fetched,
                options.version,
                told,
                value_bytes=VALUE_BYTES[options.dtype],
                held_out=options.held_out,
            )
        )  # fmt: skip
    folder = options.run or options.data_dir or Path(DEFAULT_DATA_DIR)
    if options.run is None and options.data_dir is None and not folder.exists():
        raise OperatorError(
            "No run is named: give --join with the line that the tracker printed, --run with a run's folder, "
            "or --data-dir with a node's.",
            USAGE,
        )
    return from_folder(folder, options.version, told, held_out=options.held_out)


def _fill(made: Path, found: Found, dtype: str, told: Watch) -> Folder:
    files = Files()
    params, value_bytes = found.origin.spec.model.params, VALUE_BYTES[dtype]

    def fill_in(config: Config) -> Config | None:
        return full_config(config, found.origin.spec.model, trainer_environment(1))

    try:
        folder = write_folder(
            files,
            made,
            Content(found.origin, found.heard, found.tokenizer_json, dtype),
            found.certified.chunks,
            lambda values: told(WRITING, values * value_bytes, params * value_bytes, BYTES),
            fill_in=fill_in,
        )
    except TransportError as error:  # chunks are read only now
        raise OperatorError(
            f"A part of version {found.origin.version} as it is kept there is of no use ({error}): export "
            "another --version, or from the run's link with --join."
        ) from None
    if found.held_out is None:
        return folder
    tokens = _held_out(found.origin.spec, found.held_out)
    return folder._replace(files=(*folder.files, write_file(files, made / HELD_OUT, tokens)))


def _held_out(spec: RunSpec, frame: bytes) -> bytes:
    """The first evaluation set as a NumPy file: (tokens,) unsigned integers.

    Raises: OperatorError: it is not what the RunSpec says.
    """
    width, count = spec.data.token_bytes, spec.data.evaluation.tokens
    try:
        raw = open_frame(frame, width * count)
    except PeerError as error:
        raise OperatorError(
            f"The run's held-out text is not what its RunSpec says ({error}): tell the owner of the run.", RUN
        ) from None
    file = io.BytesIO()
    np.lib.format.write_array(file, np.frombuffer(raw, f"<u{width}"))
    return file.getvalue()


def _check_out(out: Path) -> None:
    """Raises: OperatorError: something is there."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise OperatorError(f"{out} is not a folder: name a new one.")
    if out.is_dir() and any(guarded(lambda: list(out.iterdir()), out)):
        raise OperatorError(f"{out} holds other things: nothing is overwritten, name a new folder.")


@contextmanager
def _beside(out: Path) -> Iterator[Path]:
    """An empty folder on the same disk as `out`, of this call alone; gone at the end, however that comes.

    Its name is always the same, so that what a killed call left there goes with the next one, whatever
    folder that one makes there.

    Raises: OperatorError: another call makes `out` just now.
    """
    parent = out.absolute().parent
    work = parent / f".{out.name}.export"
    remove_unlocked(
        path for path in guarded(lambda: list(parent.glob(".*.export")), parent) if _is_left(path)
    )
    fd = guarded(lambda: lock_folder(work), work)
    if fd is None:
        raise OperatorError(f"Another p2pdiloco export makes {out}: wait for it, or name another folder.")
    parts = (work / FETCHED, work / MADE)
    try:
        for left in parts:
            shutil.rmtree(left, ignore_errors=True)
        yield work
    finally:
        for part in parts:
            shutil.rmtree(part, ignore_errors=True)
        with suppress(OSError):
            (work / LOCK).unlink(missing_ok=True)
            work.rmdir()
        os.close(fd)


def _is_left(folder: Path) -> bool:
    """Whether it is such a folder, and holds an export's parts alone: an empty one may be anybody's."""
    try:
        names = {path.name for path in folder.iterdir()}
        return bool(names) and names <= {FETCHED, MADE}
    except OSError:
        return False


def _publish(made: Path, out: Path) -> None:
    """`made` takes the name `out`: a reader sees nothing, or all of it."""
    mask = os.umask(0)
    os.umask(mask)
    for path in made.iterdir():
        path.chmod(0o666 & ~mask)
    made.chmod(0o777 & ~mask)
    files = Files()

    def rename() -> None:
        files.rename(made, out)
        files.sync_folder(out.absolute().parent)

    try:
        rename()
    except OSError as error:
        if out.exists():
            raise OperatorError(f"{out} was filled by something else meanwhile: name a new folder.") from None
        raise OperatorError(f"{out} cannot take its name ({error.strerror}): check that disk.") from None


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends as Ctrl-C does: what is half written goes."""

    def end(number: int, _frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before: Any = signal.SIG_DFL
    with suppress(ValueError):  # not in the main thread: then the caller sees to signals
        before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        with suppress(ValueError):
            signal.signal(signal.SIGTERM, before)
