"""Documents of one part of the input, in the order in which they stand, with where to go on.

A part of a file that is not compressed begins and ends anywhere; documents belong to the part in which they
begin, so that a large file is read by several processes and gives the same documents however it was divided.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco_node.corpus.documents import WINDOW_BYTES, boundary, clean, cut
from p2pdiloco_node.corpus.sources import HUB, HUB_PREFIX, JSONL, PARQUET, TOKENS, Input
from p2pdiloco_node.corpus.streams import pieces
from p2pdiloco_node.corpus.tables import Rows, columns_words, read_hub, read_parquet
from p2pdiloco_node.corpus.token_input import read_tokens

BATCH_BYTES = 1 << 20
# What a file of another encoding begins with; the first that fits counts.
MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32"), (codecs.BOM_UTF32_BE, "UTF-32"), (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)  # fmt: skip
END = 2**62  # of a part that goes to the end of what it reads


class Part(msgspec.Struct, frozen=True, array_like=True):
    """[first, stop) of one input: bytes, row groups of a Parquet file, rows of a dataset, tokens."""

    number: int  # of the input
    first: int
    stop: int


class Format(msgspec.Struct, frozen=True, array_like=True):
    """How documents are found in files."""

    text_key: str  # of JSON lines and tables
    token_bytes: int = 0  # of ready tokens; 0: there are none
    vocab_size: int = 0
    end_token: int = 0


class Broken(NamedTuple):
    """A document that is passed over. `at`: its byte, or its row."""

    at: int
    why: str


class Batch(NamedTuple):
    """Some documents. `after`: where the next one begins; a reading may go on from there."""

    texts: list[bytes]  # clean ones, at most `limits.document_bytes_max` and a window long
    empty: int
    broken: list[Broken]
    after: int


def read_part(entry: Input, part: Part, form: Format, resume: int | None = None) -> Iterator[Batch]:
    """`resume`: the `after` of the last batch that is kept, or None.

    Raises: OperatorError: the input cannot be read as what it is.
    """
    first = part.first if resume is None else resume
    if entry.kind == TOKENS:
        tokens = read_tokens(
            Path(entry.path), first, part.stop, aligned=resume is not None, token_bytes=form.token_bytes,
            vocab_size=form.vocab_size, end_token=form.end_token,
        )  # fmt: skip
        yield from (Batch(documents, 0, [], after) for documents, after in tokens)
        return
    if entry.kind == PARQUET:
        groups = range(part.first, min(part.stop, len(entry.groups)))
        batches = _of_rows(entry, read_parquet(Path(entry.path), form.text_key, groups, resume or 0))
    elif entry.kind == HUB:
        batches = _of_rows(entry, read_hub(entry.path, form.text_key, first))
    elif entry.kind == JSONL:
        batches = _json_lines(entry, first, part.stop, form.text_key, aligned=resume is not None)
    else:
        batches = _text(entry, first, part.stop, aligned=resume is not None)
    good, broken = False, 0
    for batch in batches:
        good = good or bool(batch.texts)
        broken += len(batch.broken)
        if not good and broken >= limits.broken_documents_first_max:
            raise OperatorError(
                f"{describe(entry, batch.broken[0])}, and so are {broken} documents in a row: this file is "
                "not what its name says; leave it out with --data."
            )
        yield batch


def describe(entry: Input, broken: Broken) -> str:
    """The file, line or row, and what is wrong. Counts lines from the file's beginning.

    Raises: OperatorError.
    """
    if entry.kind in {PARQUET, HUB}:
        prefix = HUB_PREFIX if entry.kind == HUB else ""
        return f"{prefix}{entry.path}, row {broken.at + 1}: {broken.why}"
    line, seen = 1, 0
    for piece in pieces(entry.path, entry.packed, 0):
        if seen >= broken.at:
            break
        line += piece.count(b"\n", 0, broken.at - seen)
        seen += len(piece)
    return f"{entry.path}, line {line}: {broken.why}"


def _cleaned(raw: Sequence[Any], ats: Sequence[int], after: int, broken: Sequence[Broken] = ()) -> Batch:
    """`raw`: bytes, text, or None for what is empty; `ats`: where each stands."""
    texts: list[bytes] = []
    faults = list(broken)
    empty = 0
    for at, document in zip(ats, raw, strict=True):
        if document is None:
            empty += 1
            continue
        try:
            text = clean(document if isinstance(document, bytes) else document.encode())
        except UnicodeError as error:
            faults.append(Broken(at, f"it is not UTF-8 ({error})"))
            continue
        if text is None:
            empty += 1
        elif len(text) <= limits.document_bytes_max:
            texts.append(text)
        else:
            # Blank parts of a long document are no documents.
            texts += [part for part in cut(text) if not part.isspace()]
    return Batch(texts, empty, faults, after)


def _of_rows(entry: Input, tables: Iterator[Rows]) -> Iterator[Batch]:
    for rows in tables:
        ats = range(rows.first, rows.first + len(rows.cells))
        broken = []
        cells = rows.cells
        for number, cell in enumerate(cells):
            if cell is None:
                continue
            if not isinstance(cell, bytes | str):
                raise OperatorError(
                    f"{describe(entry, Broken(ats[number], type(cell).__name__))} is no text; name another "
                    "column with --text-key."
                )
            if len(cell) > limits.corpus_line_bytes_max:
                cells[number] = b""
                broken.append(Broken(ats[number], f"it is longer than {limits.corpus_line_bytes_max} bytes"))
        batch = _cleaned(cells, ats, ats.stop, broken)
        yield batch._replace(empty=batch.empty - len(broken))


def _text(entry: Input, at: int, stop: int, *, aligned: bool) -> Iterator[Batch]:
    """A file is one document, or cut near each multiple of `limits.document_bytes_max`."""
    grid = limits.document_bytes_max
    source = _pieces(entry, at)
    room = bytearray()  # of the file from `at` on

    def fill(size: int) -> None:
        while len(room) < size and (piece := next(source, b"")):
            room.extend(piece)

    if at and not aligned:
        fill(WINDOW_BYTES)
        skip = boundary(bytes(room[:WINDOW_BYTES]))
        del room[:skip]
        at += skip
    documents: list[bytes] = []
    ats: list[int] = []
    size = 0
    while at < stop:
        # Up to the next multiple of the grid, and the end of a paragraph behind it.
        length = (at // grid + 1) * grid - at
        fill(length + WINDOW_BYTES)
        if not room:
            break
        if len(room) > length:
            length += boundary(bytes(room[length : length + WINDOW_BYTES]))
        documents.append(bytes(room[:length]))
        ats.append(at)
        del room[:length]
        at += len(documents[-1])
        size += len(documents[-1])
        if size >= BATCH_BYTES:
            yield _cleaned(documents, ats, at)
            documents, ats, size = [], [], 0
    if documents:
        yield _cleaned(documents, ats, at)


def _json_lines(entry: Input, first: int, stop: int, key: str, *, aligned: bool) -> Iterator[Batch]:
    """Lines that begin in [first, stop)."""
    field = "text"
    line_type = msgspec.defstruct("Line", [(field, str | None)], rename={field: key})
    decoder = msgspec.json.Decoder(line_type)
    checked = False
    for lines, at in _lines(entry, first, stop, aligned=aligned):
        documents: list[Any] = []
        ats: list[int] = []
        broken: list[Broken] = []
        for line in lines:
            place, at = at, at + len(line) + 1
            if not line or line.isspace():
                continue
            try:
                documents.append(getattr(decoder.decode(line), field))
                ats.append(place)
                checked = True
            except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
                fault = Broken(place, f"it is no JSON with a text {key!r} ({error})")
                if not checked:
                    _check_key(entry, line, key, place)
                broken.append(fault)
        yield _cleaned(documents, ats, at, broken)


def _check_key(entry: Input, line: bytes, key: str, at: int) -> None:
    """The first lines say whether the key is the right one. Raises: OperatorError."""
    try:
        found = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return
    names = list(found) if isinstance(found, dict) else []
    if key in names:
        why = f"{key!r} holds {type(found[key]).__name__}, no text; name another with --text-key"
    else:
        why = f"there is no text {key!r}{columns_words(names)}"
    raise OperatorError(f"{describe(entry, Broken(at, why))}.")


def _lines(entry: Input, at: int, stop: int, *, aligned: bool) -> Iterator[tuple[list[bytes], int]]:
    """Whole lines that begin in [at, stop), without their ends, and where the first of each list begins."""
    begins = at if aligned or at == 0 else at - 1
    rest = bytearray()
    searching = begins != at  # for the end of the line that began before
    at = begins
    for piece in _pieces(entry, begins):
        if searching:
            end = piece.find(b"\n")
            at += len(piece) if end < 0 else end + 1
            if end < 0:
                continue
            searching, piece = False, piece[end + 1 :]
        if at >= stop:
            return
        end = piece.rfind(b"\n")
        if end < 0:
            rest += piece
            _check_length(entry, rest, at)
            continue
        whole = bytes(rest) + piece[:end]
        rest[:] = piece[end + 1 :]
        if at + len(whole) >= stop:
            # The last line that begins before `stop` ends at the first line end at or behind `stop` - 1.
            last = whole.find(b"\n", stop - 1 - at)
            whole = whole if last < 0 else whole[:last]
        yield whole.split(b"\n"), at
        at += len(whole) + 1
        if at >= stop:
            return
    if rest and not searching and at < stop:
        yield [bytes(rest)], at


def _pieces(entry: Input, at: int) -> Iterator[bytes]:
    """As `pieces`. Raises: OperatorError: the file begins with the mark of another encoding than UTF-8.

    Its later parts might pass as UTF-8: what is not English would be trained on as noise.
    """
    source = pieces(entry.path, entry.packed, at)
    if at == 0:
        head = b""
        while len(head) < len(codecs.BOM_UTF32) and (piece := next(source, b"")):
            head += piece
        for mark, encoding in MARKS:
            if head.startswith(mark):
                raise OperatorError(
                    f"{entry.path} is text in {encoding}, by its first bytes, and a corpus is UTF-8: convert "
                    f"it (iconv -f {encoding} -t UTF-8), or leave it out with --data."
                )
        if head:
            yield head
    yield from source


def _check_length(entry: Input, rest: bytearray, at: int) -> None:
    if len(rest) > limits.corpus_line_bytes_max:
        fault = Broken(at, f"it is longer than {limits.corpus_line_bytes_max >> 20} MiB")
        raise OperatorError(
            f"{describe(entry, fault)}: is it JSON lines? One document is to stand on each line."
        )
