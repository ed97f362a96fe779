"""Shards as the trainer maps them: raw token files, opened once from the compressed blobs.

The blobs stay as they came, to be served; what is opened is a cache that may be removed at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from p2pdiloco.errors import PeerError
from p2pdiloco.ids import Digest, short
from p2pdiloco.run_spec import BlobRef
from p2pdiloco.wire.frames import open_frame
from p2pdiloco_node.training.data import token_type, unusable


class Write(Protocol):
    """Create a file with these bytes, whole or not at all. Raises: OperatorError."""

    def __call__(self, path: Path, data: bytes, /) -> object: ...


def open_token_files(
    refs: Sequence[BlobRef],
    read: Callable[[Digest], bytes],
    folder: Path,
    write: Write,
    *,
    token_bytes: int = 1,
    vocab_size: int | None = None,
) -> list[Path]:
    """One raw file for each shard of the RunSpec, in `folder`; what is there already is kept.

    `read` gives a blob whose digest was checked, so a frame that does not open is the fault of whoever made
    the run, and of nobody who sent it or keeps it; so is a token outside `vocab_size`, if that is given.

    Raises: OperatorError: such a frame or token; the disk. TransportError: a blob is not here.
    """
    kind = token_type(token_bytes)
    paths = []
    for ref in refs:
        path = folder / Digest(ref.digest).hex()
        paths.append(path)
        size = ref.tokens * token_bytes
        if path.is_file() and path.stat().st_size == size:
            continue
        try:
            tokens = open_frame(read(Digest(ref.digest)), size)
        except PeerError as error:
            raise unusable(f"shard {short(ref.digest)} is not what its RunSpec says ({error})") from None
        largest = int(np.frombuffer(tokens, kind).max(initial=0))
        if vocab_size is not None and largest >= vocab_size:
            raise unusable(
                f"shard {short(ref.digest)} holds token {largest}, and its tokenizer has {vocab_size}"
            )
        write(path, tokens)
    return paths
