"""Error feedback: what a codec loses is sent later (algorithm.md 7), and what settles it (section 6).

At send: e <- beta e + delta; q = decode(encode(e)); e <- e - q; pending[digest] = q. "Subtract when
accepted" would diverge with two deltas in flight. With beta = 1 nothing is lost: what was settled as listed
or dropped, plus pending, plus e, is the sum of all pseudo-gradients.

In flight, which the anchor lacks, is q where the codec is dense, and the raw pseudo-gradient where it is
sparse: q holds a few of its coordinates, and the node's view would lose the others (algorithm.md 3).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from p2pdiloco import limits
from p2pdiloco.diloco.compress import Origin, decode, encode, is_sparse
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

    Memory: one array for e and one for each delta in flight, two where the codec is sparse. Nothing here is
    sent to anybody; all of it belongs to the checkpoint's one manifest.
    """

    def __init__(
        self,
        params: int,
        *,
        beta: float = 1.0,
        in_flight_max: int = limits.in_flight_max,
        enabled: bool = True,
    ) -> None:
        """`enabled` False: e stays zero, what a codec loses is lost (to compare with; lab only)."""
        self.e: Array = np.zeros(params, np.float32)
        self.pending: dict[Digest, Array] = {}
        self.raw: dict[Digest, Array] = {}  # of those in `pending` whose codec is sparse
        self.beta = beta
        self._in_flight_max = in_flight_max
        self._enabled = enabled

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
            AssertionError: more in flight than is allowed; the trainer must prolong its pass instead.
        """
        assert len(self.pending) < self._in_flight_max, f"{len(self.pending)} deltas are in flight already"
        e = self.e * np.float32(self.beta)
        e += delta
        blob = encode(codec, e, tensors, origin)
        decoded = decode(codec, blob, tensors)
        digest = digest_of(blob)
        assert digest not in self.pending, "a sequence used twice"
        if self._enabled:
            e -= decoded
            self.e = e
        self.pending[digest] = decoded
        if is_sparse(codec):
            self.raw[digest] = delta.copy()
        return Sent(digest, blob, decoded)

    def listed(self, digest: Digest) -> None:
        """An entry lists it: it stays subtracted."""
        self._settle(digest)

    def passed_over(self, digest: Digest) -> None:
        """A later delta of ours was listed before it, so it never will be: its content goes back, once."""
        decoded = self._settle(digest)
        if decoded is not None and self._enabled:
            self.e += decoded

    def dropped(self, digest: Digest) -> None:
        """Refused or too late: its content is lost (a late delta must not return disguised as fresh)."""
        self._settle(digest)

    def clear(self) -> None:
        """Not finite, or absent beyond staleness_max: nothing of the past is sent any more."""
        self.e = np.zeros_like(self.e)
        self.pending.clear()
        self.raw.clear()

    def parts_in_flight(self) -> list[Array]:
        """Of each pending delta what the anchor lacks (section 3), oldest first; do not write to them."""
        return [self.raw.get(digest, decoded) for digest, decoded in self.pending.items()]

    def in_flight(self) -> Array:
        """The sum of the parts in flight, float32 [params], a new array."""
        total = np.zeros_like(self.e)
        for part in self.parts_in_flight():
            total += part
        return total

    def to_arrays(self) -> dict[str, Array]:
        """For the checkpoint: "e", and of each delta in flight "pending/<place>/<digest in hex>"; where its
        codec is sparse also "raw/<place>/<digest in hex>".
        """
        arrays = {"e": self.e}
        for place, (digest, decoded) in enumerate(self.pending.items()):
            arrays[f"pending/{place}/{digest.hex()}"] = decoded
            if digest in self.raw:
                arrays[f"raw/{place}/{digest.hex()}"] = self.raw[digest]
        return arrays

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array], params: int, *, beta: float = 1.0) -> ErrorFeedback:
        """From a checkpoint, whose manifest has been verified.

        Raises:
            PeerError: BAD_SHAPE: the checkpoint is of another model, or was written by something else.
        """
        feedback = cls(params, beta=beta)
        kinds = {"pending": feedback.pending, "raw": feedback.raw}
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
            if kind not in kinds or len(raw) != DIGEST_BYTES:
                raise PeerError("BAD_SHAPE", f"an array named {name[:80]!r}")
            kinds[kind][Digest(raw)] = array.copy()
        whole = "e" in arrays and feedback.raw.keys() <= feedback.pending.keys()
        if not whole or len(feedback.pending) > limits.in_flight_max:
            raise PeerError("BAD_SHAPE", "not the arrays of an error feedback")
        return feedback

    def _settle(self, digest: Digest) -> Array | None:
        self.raw.pop(digest, None)
        return self.pending.pop(digest, None)
