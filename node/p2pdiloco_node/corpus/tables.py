"""Documents in tables: Parquet files, and datasets of a hub in its streaming mode.

Nothing is held whole: a row group is decoded page by page, a dataset row by row. Positions are row numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.exit_codes import NETWORK, USAGE
from p2pdiloco_node.corpus.streams import cannot_read

PAGE_BYTES = 1 << 20  # read from a file at a time
BATCH_BYTES = 4 << 20  # of text decoded at a time, by the file's own mean
BATCH_ROWS_MAX = 16_384
HUB_ROWS = 256  # of a dataset at a time
SPLITS = ("train", "validation", "test")


class Rows(NamedTuple):
    """Cells of the text column, as bytes or text (None: empty), and the number of the first one's row."""

    cells: list[Any]
    first: int


def parquet_text_bytes(path: Path, column: str) -> tuple[int, ...]:
    """Bytes of the text column in each row group, as the file's foot says.

    Raises: OperatorError: it is no Parquet file, has no such column, or the column holds no text.
    """
    file = _open_parquet(path, column)
    number = next(i for i in range(len(file.schema)) if file.schema.column(i).path == column)
    meta = file.metadata
    return tuple(meta.row_group(i).column(number).total_uncompressed_size for i in range(meta.num_row_groups))


def read_parquet(path: Path, column: str, groups: range, first: int) -> Iterator[Rows]:
    """Rows of these row groups from row number `first` of the file on; 0: from the first group's first.

    Raises: OperatorError: the file is damaged, with the row; a cell is too long.
    """
    import pyarrow as pa

    file = _open_parquet(path, column)
    row = sum(file.metadata.row_group(i).num_rows for i in range(groups.start))
    number = next(i for i in range(len(file.schema)) if file.schema.column(i).path == column)
    for group in groups:
        meta = file.metadata.row_group(group)
        if row + meta.num_rows <= first:
            row += meta.num_rows
            continue
        mean = max(1, meta.column(number).total_uncompressed_size // max(1, meta.num_rows))
        if mean > limits.corpus_line_bytes_max:  # before it is in memory, several times over
            raise OperatorError(
                f"{path} has rows of {mean >> 20} MiB of text each from row {row} on, more than "
                f"{limits.corpus_line_bytes_max >> 20}: cut them into documents first, or leave it out."
            )
        size = min(max(1, BATCH_BYTES // mean), BATCH_ROWS_MAX)
        try:
            for batch in file.iter_batches(batch_size=size, row_groups=[group], columns=[column]):
                skip = min(max(0, first - row), batch.num_rows)
                cells = batch.column(0).slice(skip)
                if pa.types.is_dictionary(cells.type):
                    cells = cells.dictionary_decode()
                # As bytes, because a Parquet file may call anything UTF-8.
                yield Rows(cells.cast(pa.large_binary()).to_pylist(), row + skip)
                row += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            # The library calls damage an OSError, too; a disk's has a number.
            if isinstance(error, OSError) and error.errno:
                raise cannot_read(path, error) from None
            raise OperatorError(
                f"{path} is damaged at row {row} or soon behind it ({_first_line(error)}): fetch it again, "
                "or leave it out with --data."
            ) from None


def read_hub(name: str, column: str, first: int) -> Iterator[Rows]:
    """Rows of a dataset, NAME[:CONFIG][:SPLIT], from number `first` on, in its streaming mode.

    Raises: OperatorError: the `datasets` library is not installed (2), the dataset cannot be read (4).
    """
    try:
        import datasets
    except ImportError:
        raise OperatorError(
            f"hf:{name} needs the datasets library: pip install 'p2pdiloco[hub]', or fetch the files "
            "yourself and name them with --data.",
            exit_code=USAGE,
        ) from None
    where, config, split = hub_parts(name)
    row = first
    try:
        rows = datasets.load_dataset(where, config, split=split, streaming=True)
        known = rows.column_names or list(next(iter(rows.take(1)), {}))
        if column in known:
            for batch in rows.select_columns([column]).skip(first).iter(batch_size=HUB_ROWS):
                yield Rows(batch[column], row)
                row += len(batch[column])
            return
    except GeneratorExit:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a network, a hub and a file format can come up with
        raise OperatorError(
            f"hf:{name} could not be read at row {row} ({_first_line(error)}): check the network and the "
            "name and give the same command again, or fetch the files yourself and name them with --data.",
            exit_code=NETWORK,
        ) from None
    raise OperatorError(f"hf:{name} has no column {column!r}{columns_words(known)}.")


def hub_parts(name: str) -> tuple[str, str | None, str]:
    """(dataset, config, split) of NAME[:CONFIG][:SPLIT]. One word behind the name is a config, unless it is
    train, validation or test. Raises: OperatorError."""
    parts = name.split(":")
    if not parts[0] or len(parts) > 3:
        raise OperatorError(f"hf:{name} is not hf:NAME[:CONFIG][:SPLIT].", exit_code=USAGE)
    if len(parts) == 2 and parts[1] in SPLITS:
        parts.insert(1, "")
    config, split = (*parts[1:], "", "")[:2]
    return parts[0], config or None, split or SPLITS[0]


def _open_parquet(path: Path, column: str) -> Any:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise OperatorError(
            f"{path} is read with the pyarrow library: pip install 'p2pdiloco[node]'.", exit_code=USAGE
        ) from None
    try:
        file = pq.ParquetFile(path, buffer_size=PAGE_BYTES, pre_buffer=False, memory_map=False)
        schema = file.schema_arrow
    except OSError as error:
        if isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError):
            raise OperatorError(
                f"{path} cannot be read ({error.strerror}); mend that, or leave it out."
            ) from None
        raise _no_parquet(path, error) from None
    except pa.ArrowException as error:
        raise _no_parquet(path, error) from None
    if column not in schema.names:
        raise OperatorError(f"{path} has no column {column!r}{columns_words(schema.names)}.")
    if schema.names.count(column) > 1:
        raise OperatorError(
            f"{path} has {schema.names.count(column)} columns {column!r}: give them names of their own."
        )
    kind = schema.field(column).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    if not any(is_it(kind) for is_it in (*texts, pa.types.is_binary, pa.types.is_large_binary)):
        raise OperatorError(
            f"column {column!r} of {path} holds {kind}, no text; name another with --text-key."
        )
    return file


def _no_parquet(path: Path, error: Exception) -> OperatorError:
    return OperatorError(
        f"{path} is no Parquet file, or is damaged ({_first_line(error)}): fetch it again, or leave it out."
    )


def columns_words(names: Sequence[str]) -> str:
    """What there is instead, for a sentence about a column or key that is not there."""
    shown = ", ".join(names[:12]) + (" ..." if len(names) > 12 else "")
    return f"; it has {shown}: name one with --text-key" if names else ""


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][: limits.text_chars_max]
