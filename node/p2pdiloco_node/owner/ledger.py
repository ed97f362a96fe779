"""What a key has signed, beside the key: no two words have one number, and no two recoveries one epoch.

The log has what was certified. What was signed and is still on its way, or was lost with a swarm, is here
alone. Whoever copies the key to a second machine copies this file as well.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.ids import RunId
from p2pdiloco_node.storage.files import Files, read_at_most, replace_file

Number = Annotated[int, Meta(ge=0, le=2**62)]


class Signed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The highest numbers that were used in one run."""

    epoch: Number = 0  # begun by a recovery
    sequence: Number = 0  # of a word in that epoch, or of the recovery itself


class Ledger:
    """`KEY.signed`: a JSON object, by RunId."""

    def __init__(self, key: Path, files: Files | None = None) -> None:
        self._path = key.with_name(key.name + ".signed")
        self._files = files or Files()

    def of(self, run: RunId) -> Signed:
        """Raises: OperatorError: it is damaged."""
        return self._load().get(run.hex(), Signed())

    def note(self, run: RunId, signed: Signed) -> None:
        """Durable when it returns: call it before what was signed leaves. Raises: OperatorError."""
        runs = self._load()
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
            raise OperatorError(
                f"{self._path} is damaged ({error}): put it back from a backup. It says which recoveries "
                "were signed with the key beside it; only if there never was one, delete it."
            ) from None
