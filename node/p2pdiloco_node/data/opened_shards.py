"""Shards opened for the trainer: raw token files, each with a checksum; a cache that may go at any time.

Whether a blob is damaged, its digest says; of an opened one no digest is known. So its SHA-256 is kept when
it is made, and it is read again before a trainer of another life, or after one that failed, is given it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from p2pdiloco.ids import Digest, digest_of
from p2pdiloco.run_spec import BlobRef
from p2pdiloco_node.storage.files import Files, make_folder, remove_files, replace_file
from p2pdiloco_node.training.token_files import open_token_files

SUM = ".sum"


class OpenedShards:
    """Raw files in `folder`, named by the digest of their blob. Every call works on the disk: in a thread."""

    def __init__(self, folder: Path, read: Callable[[Digest], bytes], files: Files) -> None:
        """`read`: a blob whose digest was checked. Raises: TransportError where it is not here."""
        self._folder = folder
        self._read = read
        self._files = files

    def path(self, ref: BlobRef) -> Path:
        return self._folder / Digest(ref.digest).hex()

    def find(self, wanted: Sequence[BlobRef]) -> set[Digest]:
        """Which of `wanted` lie here whole, as an earlier life left them; everything else is removed, or a
        trainer would take what is damaged for what it looks like.

        Raises: OperatorError: the folder cannot be made.
        """
        make_folder(self._files, self._folder)
        names = {Digest(ref.digest).hex() for ref in wanted}
        for path in sorted(self._folder.iterdir()):
            if path.name.removesuffix(SUM) not in names:
                remove_files(self._files, path)
        whole = {Digest(ref.digest) for ref in wanted if self.is_whole(ref)}
        self.remove([ref for ref in wanted if ref.digest not in whole])
        return whole

    def is_whole(self, ref: BlobRef) -> bool:
        """Whether what lies here is what was made; reads all of it."""
        path = self.path(ref)
        try:
            return self._sum_of(path).read_bytes() == digest_of(path.read_bytes())
        except OSError:
            return False

    def open(self, ref: BlobRef, *, token_bytes: int, vocab_size: int | None) -> None:
        """Make the file anew from its blob; durable on return.

        Raises: OperatorError: the disk; the shard is not what its run says. TransportError: no blob is here.
        """
        make_folder(self._files, self._folder)
        # The checksum goes first: whatever lies here without one is made anew.
        remove_files(self._files, self._sum_of(self.path(ref)), self.path(ref))
        open_token_files(
            [ref], self._read, self._folder, self._write, token_bytes=token_bytes, vocab_size=vocab_size
        )

    def remove(self, refs: Collection[BlobRef]) -> None:
        for ref in refs:
            remove_files(self._files, self._sum_of(self.path(ref)), self.path(ref))

    def _write(self, path: Path, data: bytes, /) -> None:
        replace_file(self._files, path, data)
        replace_file(self._files, self._sum_of(path), digest_of(data))

    @staticmethod
    def _sum_of(path: Path) -> Path:
        return path.with_name(path.name + SUM)
