"""Who may put a delta: its sender, shown by a signature over run and digest.

Bytes under a digest prove themselves, but somebody who read the header could keep the sender out by
filling the part with rubbish first. The proof is the same for every voter and worth nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping

from p2pdiloco.errors import PeerError
from p2pdiloco.ids import Digest, PeerId, RunId, peer_id_of
from p2pdiloco.wire.signing import Signer, Verify

KEY_HEADER = "P2PDiLoCo-Key"
SIGNATURE_HEADER = "P2PDiLoCo-Signature"


def statement(run: RunId, delta: Digest) -> bytes:
    return b"p2pdiloco/v1/upload\0" + run + delta


def proof_headers(signer: Signer, run: RunId, delta: Digest) -> dict[str, str]:
    """About 0.05 ms."""
    signature = signer.sign(statement(run, delta))
    return {KEY_HEADER: signer.public_key.hex(), SIGNATURE_HEADER: signature.hex()}


def check_proof(
    headers: Mapping[str, str], sender: PeerId, run: RunId, delta: Digest, verify: Verify
) -> None:
    """About 0.1 ms. Raises: PeerError BAD_SIGNATURE."""
    try:
        key = bytes.fromhex(headers.get(KEY_HEADER, ""))
        signature = bytes.fromhex(headers.get(SIGNATURE_HEADER, ""))
    except ValueError:
        raise PeerError("BAD_SIGNATURE", "the upload's proof is not hex") from None
    if peer_id_of(key) != sender or not verify(key, signature, statement(run, delta)):
        raise PeerError("BAD_SIGNATURE", "only the sender of the header may put this delta")
