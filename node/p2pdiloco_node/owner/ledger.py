"""What a key has signed, beside the key: no two words have one number, and no two recoveries one epoch.

The log has what was certified. What was signed and is still on its way, or was lost with a swarm, is here
alone. Whoever copies the key to a second machine copies this file as well, and uses one of the two.

Numbers are taken and written under one lock, so two commands at once never get the same.

    KEY.signed        a JSON object, by RunId
    KEY.signed.lock   empty; who takes a number holds it
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError, PeerError
from p2pdiloco.ids import RunId
from p2pdiloco.wire.codec import decode, encode
from p2pdiloco.wire.log import OwnerWord
from p2pdiloco_node.storage.files import Files, guarded, read_at_most, replace_file

Number = Annotated[int, Meta(ge=0, le=2**62)]


class Signed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The highest numbers that were used in one run."""

    epoch: Number = 0  # begun by a recovery, or of a word
    sequence: Number = 0  # of a word in that epoch, or of the recovery itself
    word: str = ""  # the word of that sequence, encoded and in hex; empty: a recovery

    def is_above(self, other: Signed) -> bool:
        """No number goes back, and each is used once."""
        return self.epoch >= other.epoch and self.sequence > other.sequence


class Ledger:
    """Of one key."""

    def __init__(self, key: Path, files: Files | None = None) -> None:
        self._path = key.with_name(key.name + ".signed")
        self._files = files or Files()

    def of(self, run: RunId) -> Signed:
        """Raises: OperatorError: it is damaged."""
        return self._load().get(run.hex(), Signed())

    def word_of(self, run: RunId) -> OwnerWord | None:
        """The word that was signed last; None where that was a recovery, or nothing.

        Raises: OperatorError.
        """
        signed = self.of(run)
        if not signed.word:
            return None
        try:
            return decode(bytes.fromhex(signed.word), OwnerWord)
        except (ValueError, PeerError) as error:
            raise self._damaged(error) from None

    @contextmanager
    def held(self) -> Iterator[None]:
        """No other command takes a number meanwhile: read and note within. Raises: OperatorError."""
        lock = self._path.with_name(self._path.name + ".lock")
        fd = guarded(lambda: os.open(lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600), lock)
        try:
            guarded(lambda: fcntl.flock(fd, fcntl.LOCK_EX), lock)
            yield
        finally:
            os.close(fd)

    def note(self, run: RunId, signed: Signed) -> None:
        """Durable when it returns: call it before what was signed leaves, within `held`.

        Raises: OperatorError: also where a number was used before.
        """
        runs = self._load()
        before = runs.get(run.hex(), Signed())
        if not signed.is_above(before):
            raise OperatorError(
                f"Another command has signed number {before.sequence} of epoch {before.epoch} with this key "
                "meanwhile: nothing was signed. Look at the run and say it again."
            )
        runs[run.hex()] = signed
        replace_file(self._files, self._path, msgspec.json.encode(runs))

    def _load(self) -> dict[str, Signed]:
        if not self._path.exists():
            return {}
        data = read_at_most(self._path, limits.ledger_bytes_max + 1)
        try:
            if len(data) > limits.ledger_bytes_max:
                raise ValueError("it is too long")
            return msgspec.json.decode(data, type=dict[str, Signed])
        except (ValueError, msgspec.DecodeError) as error:
            raise self._damaged(error) from None

    def _damaged(self, error: Exception) -> OperatorError:
        return OperatorError(
            f"{self._path} is damaged ({error}): put it back from a backup. It says which recoveries "
            "were signed with the key beside it; only if there never was one, delete it."
        )


def in_hex(word: OwnerWord) -> str:
    """As `Signed.word` keeps it."""
    return encode(word).hex()
