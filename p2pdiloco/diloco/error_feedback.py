"""Error feedback: what a codec loses is sent later (algorithm.md 7), and what settles it (section 6).

At send: e <- beta e + delta; q = decode(encode(e)); e <- e - q; pending[digest] = q. "Subtract when
accepted" would diverge with two deltas in flight. With beta = 1 nothing is lost: what was settled as listed
or dropped, plus pending, plus e, is the sum of all pseudo-gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from p2pdiloco import limits
from p2pdiloco.diloco.compress import Origin, decode, encode
from p2pdiloco.diloco.layout import Array
from p2pdiloco.errors import PeerError
from p2pdiloco.ids import DIGEST_BYTES, Digest, digest_of
from p2pdiloco.run_spec import TensorSpec


class Sent(NamedTuple):
    """A delta ready to go: its blob, the blob's digest, and what every receiver decodes from it."""

    digest: Digest
    blob: bytes
    decoded: Array  # float32 [params]: kept in `pending`, do not write to it


class ErrorFeedback:
    """One node's `e` (float32 [params]) and its pending deltas by digest, oldest first.

    Memory: one array for e and one for each delta in flight. Nothing here is sent to anybody; all of it
    belongs to the checkpoint's one manifest.
    """

    def __init__(self, params: int, *, beta: float = 1.0) -> None:
        self.e: Array = np.zeros(params, np.float32)
        self.pending: dict[Digest, Array] = {}
        self.beta = beta

    def send(
        self,
        delta: Array,
        codec: str,
        tensors: tuple[TensorSpec, ...],
        origin: Origin,
    ) -> Sent:
        """Encode a pseudo-gradient (float32 [params]) together with what earlier ones lost.

        `origin` names this node and the delta's sequence. Nothing changes if it raises.

        Raises:
            PeerError: NOT_FINITE, from the codec: the trainer went astray.
            AssertionError: a third delta in flight; the trainer must prolong its pass instead.
        """
        assert len(self.pending) < limits.in_flight_max, "two deltas are in flight already"
        e = self.e * np.float32(self.beta)
        e += delta
        blob = encode(codec, e, tensors, origin)
        decoded = decode(codec, blob, tensors)
        digest = digest_of(blob)
        assert digest not in self.pending, "a sequence used twice"
        e -= decoded
        self.e = e
        self.pending[digest] = decoded
        return Sent(digest, blob, decoded)

    def listed(self, digest: Digest) -> None:
        """An entry lists it: it stays subtracted."""
        self.pending.pop(digest, None)

    def passed_over(self, digest: Digest) -> None:
        """A later delta of ours was listed before it, so it never will be: its content goes back, once."""
        decoded = self.pending.pop(digest, None)
        if decoded is not None:
            self.e += decoded

    def dropped(self, digest: Digest) -> None:
        """Refused or too late: its content is lost (a late delta must not return disguised as fresh)."""
        self.pending.pop(digest, None)

    def clear(self) -> None:
        """Not finite, or absent beyond staleness_max: nothing of the past is sent any more."""
        self.e = np.zeros_like(self.e)
        self.pending.clear()

    def in_flight(self) -> Array:
        """Sum of the pending deltas, float32 [params], oldest first: what the anchor lacks (section 3)."""
        total = np.zeros_like(self.e)
        for decoded in self.pending.values():
            total += decoded
        return total

    def to_arrays(self) -> dict[str, Array]:
        """For the checkpoint: "e", and "pending/<place>/<digest in hex>" for each delta in flight."""
        arrays = {"e": self.e}
        for place, (digest, decoded) in enumerate(self.pending.items()):
            arrays[f"pending/{place}/{digest.hex()}"] = decoded
        return arrays

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array], params: int, *, beta: float = 1.0) -> ErrorFeedback:
        """From a checkpoint, whose manifest has been verified.

        Raises:
            PeerError: BAD_SHAPE: the checkpoint is of another model, or was written by something else.
        """
        feedback = cls(params, beta=beta)
        for name in sorted(arrays):
            array = arrays[name]
            if array.shape != (params,) or array.dtype != np.float32:
                raise PeerError("BAD_SHAPE", f"{name}: {array.dtype} {array.shape}, not float32 ({params},)")
            if name == "e":
                feedback.e = array.copy()
                continue
            try:
                kind, _, digest = name.split("/")
                raw = bytes.fromhex(digest)
            except ValueError:
                raise PeerError("BAD_SHAPE", f"an array named {name[:80]!r}") from None
            if kind != "pending" or len(raw) != DIGEST_BYTES:
                raise PeerError("BAD_SHAPE", f"an array named {name[:80]!r}")
            feedback.pending[Digest(raw)] = array.copy()
        if "e" not in arrays or len(feedback.pending) > limits.in_flight_max:
            raise PeerError("BAD_SHAPE", "not the arrays of an error feedback")
        return feedback
