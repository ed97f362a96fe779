"""What the `--data` arguments name: files by kind, with their sizes, in a fixed order.

An argument is [NAME=] and a file, a glob (`**` goes into folders), a folder (with all that is in it, of kinds
that can be told by their names) or `hf:NAME[:CONFIG][:SPLIT]`. A file that two arguments name belongs to the
first.
"""

from __future__ import annotations

import glob
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco_node.corpus.tables import parquet_text_bytes

TEXT, JSONL, PARQUET, TOKENS, HUB = "text", "jsonl", "parquet", "tokens", "hf"
HUB_PREFIX = "hf:"
KINDS = {
    ".jsonl": JSONL, ".ndjson": JSONL, ".json": JSONL, ".parquet": PARQUET, ".bin": TOKENS, ".npy": TOKENS,
}  # fmt: skip
PACKED = {".gz": "gz", ".zst": "zst", ".zstd": "zst"}
# Of a folder only what is surely text; everything else is named by a glob.
TEXT_IN_FOLDERS = {".txt", ".text", ".md", ".rst", ".tex"}
FOR_THE_SHELL = set("*?[{}]~$ ")  # what it puts something else in the place of, or cuts the word at
NAME = re.compile(rf"[\w .-]{{1,{limits.name_chars_max}}}")
UNPACKED_FACTOR = 4  # text in a compressed file by its size: web text and prose shrink 2.5 to 4 times
# The standard library's tests are as large as the rest and full of generated tables.
NOT_PROSE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class Named(NamedTuple):
    """A `--data` argument: its evaluation set's name, empty where nobody says, and what it names."""

    name: str
    place: str


class Input(msgspec.Struct, frozen=True, array_like=True):
    """One file, or one dataset of a hub."""

    path: str
    kind: str
    packed: str  # gz, zst or empty
    source: int  # number of the argument that names it
    size: int  # bytes on disk; 0: unknown
    changed_ns: int  # when it was last written
    groups: tuple[int, ...] = ()  # bytes of text in each row group

    @property
    def text_bytes(self) -> int:
        """Bytes of text, as far as can be told without reading it."""
        if self.kind == PARQUET:
            return sum(self.groups)
        return self.size * (UNPACKED_FACTOR if self.packed else 1)


def find_files(globs: Sequence[str] | None) -> list[Path]:
    """All files that the arguments name, sorted; None: this interpreter's standard library.

    Raises: OperatorError: nothing matches, or too many do.
    """
    if globs is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        return sorted(p for p in root.rglob("*.py") if not NOT_PROSE & set(p.relative_to(root).parts))
    found: set[Path] = set()
    for argument in _checked(globs):
        found.update(_matches(named(argument).place))
        _check_count(len(found))
    return sorted(found)


def find_inputs(arguments: Sequence[str] | None, *, text_key: str) -> tuple[Input, ...]:
    """What is to be read, in the order of the arguments, then of the names.

    Raises: OperatorError: as `find_files`, a file cannot be looked at, a table has no such column.
    """
    if arguments is None:
        return inputs_of(find_files(None))
    inputs: list[Input] = []
    taken: set[Path] = set()
    for number, given in enumerate(_checked(arguments)):
        argument = named(given).place
        if argument.startswith(HUB_PREFIX):
            inputs.append(Input(argument.removeprefix(HUB_PREFIX), HUB, "", number, 0, 0))
            continue
        new = [path for path in sorted(_matches(argument)) if path not in taken]
        taken.update(new)
        _check_count(len(taken))
        inputs += [_input(path, number, text_key) for path in new]
    return tuple(inputs)


def inputs_of(files: Sequence[Path], *, text_key: str = "text") -> tuple[Input, ...]:
    """These files, as one argument would name them. Raises: OperatorError."""
    return tuple(_input(path, 0, text_key) for path in files)


def named(argument: str) -> Named:
    """`NAME=PLACE`, or a place. What is there by the whole text is a place, whatever is in its name."""
    name, equals, place = argument.partition("=")
    is_name = NAME.fullmatch(name) is not None and bool(place)
    if not equals or not is_name or Path(argument).expanduser().exists() or glob.has_magic(name):
        return Named("", argument)
    folder = Path(argument).expanduser().parts[0]  # of a glob: lang=en/*.txt
    return Named("", argument) if Path(folder).exists() else Named(name.strip(), place)


def kind_of(path: Path) -> tuple[str, str]:
    """(kind, how it is packed), by the name alone; what has no other kind is text. Raises: OperatorError."""
    packed = PACKED.get(path.suffix.lower(), "")
    kind = KINDS.get((path.with_suffix("") if packed else path).suffix.lower(), TEXT)
    if packed and kind not in {TEXT, JSONL}:
        raise OperatorError(f"{path} is compressed; only text and JSON lines may be: unpack it first.")
    return kind, packed


def _checked(arguments: Sequence[str]) -> Sequence[str]:
    if not arguments:
        raise OperatorError("the list of data files is empty; name files, such as --data 'texts/**/*.txt'.")
    if len(arguments) > limits.corpus_arguments_max:
        raise OperatorError(
            f"--data is given {len(arguments)} times, {limits.corpus_arguments_max} are the most: use globs."
        )
    if not all(argument.strip() for argument in arguments):
        raise OperatorError("one of the names of data files is empty: say which file or folder is meant.")
    return arguments


def _check_count(files: int) -> None:
    if files > limits.corpus_files_max:
        raise OperatorError(f"more than {limits.corpus_files_max} files match; join small ones first.")


def _matches(argument: str) -> set[Path]:
    if argument.startswith(HUB_PREFIX):
        raise OperatorError(f"{argument} is no file; only `p2pdiloco run new` reads datasets of a hub.")
    place = Path(argument).expanduser()
    if place.is_dir():
        files = set(_in_folder(place))
        if not files:
            raise OperatorError(
                f"{place} holds no text, JSON lines or Parquet by their names; say which files in it are "
                f"text, such as '{place}/**/*.html'."
            )
        return files
    # A file may have a bracket in its name.
    named = [str(place)] if place.is_file() else glob.iglob(str(place), recursive=True)  # noqa: PTH207  # absolute patterns
    files = {path for path in map(Path, named) if path.is_file()}
    if not files:
        advice = ", and quote it for the shell" if FOR_THE_SHELL & set(argument) else ""
        raise OperatorError(f"no file matches {argument!r}; check the path{advice}.")
    return files


def _in_folder(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(root, name)
            bare = path.with_suffix("") if path.suffix.lower() in PACKED else path
            suffix = bare.suffix.lower()
            # .bin is a model's file as often as it is tokens.
            known = suffix in TEXT_IN_FOLDERS or KINDS.get(suffix) in {JSONL, PARQUET}
            if known and not name.startswith(".") and path.is_file():
                yield path


def _input(path: Path, source: int, text_key: str) -> Input:
    kind, packed = kind_of(path)
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError:
        raise OperatorError(
            f"the name of {str(path)!a} is no UTF-8; give the file another name, or leave it out with --data."
        ) from None
    try:
        found = path.stat()
    except OSError as error:
        raise OperatorError(
            f"{path} cannot be read ({error.strerror}); mend that, or leave it out with --data."
        ) from None
    groups = parquet_text_bytes(path, text_key) if kind == PARQUET else ()
    return Input(str(path.absolute()), kind, packed, source, found.st_size, found.st_mtime_ns, groups)
