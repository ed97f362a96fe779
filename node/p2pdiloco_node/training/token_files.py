"""Shards as the trainer maps them: raw token files, opened once from the compressed blobs.

The blobs stay as they came, to be served; what is opened is a cache that may be removed at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from p2pdiloco.errors import OperatorError, PeerError
from p2pdiloco.ids import Digest, short
from p2pdiloco.run_spec import BlobRef
from p2pdiloco.wire.frames import open_frame


class Write(Protocol):
    """Create a file with these bytes, whole or not at all. Raises: OperatorError."""

    def __call__(self, path: Path, data: bytes, /) -> object: ...


def open_token_files(
    refs: Sequence[BlobRef], read: Callable[[Digest], bytes], folder: Path, write: Write
) -> list[Path]:
    """One raw file for each shard of the RunSpec, in `folder`; what is there already is kept.

    `read` gives a blob whose digest was checked, so a frame that does not open is the fault of whoever made
    the run, and of nobody who sent it or keeps it.

    Raises: OperatorError: such a frame; the disk. TransportError: a blob is not here.
    """
    paths = []
    for ref in refs:
        path = folder / Digest(ref.digest).hex()
        paths.append(path)
        if path.is_file() and path.stat().st_size == ref.tokens:
            continue
        try:
            tokens = open_frame(read(Digest(ref.digest)), ref.tokens)
        except PeerError as error:
            raise OperatorError(
                f"The run's data is unusable: shard {short(ref.digest)} is not what its RunSpec says "
                f"({error}). This machine and its peers are fine; tell the owner of the run.",
                exit_code=5,
            ) from None
        write(path, tokens)
    return paths
