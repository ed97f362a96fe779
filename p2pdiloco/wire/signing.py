"""Ed25519 through one library, and the statements that are signed inside messages.

A statement is fixed-width bytes behind a domain tag, so that a signature for one purpose, run, epoch or
committee can never be shown as one for another.
"""

from __future__ import annotations

from typing import Protocol

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from p2pdiloco.ids import Digest, PeerId, RunId, peer_id_of

SIGNATURE_BYTES = 64
KEY_BYTES = 32


class Signer(Protocol):
    """Signs for one identity. Real: `Ed25519Signer`; the simulator has a fast one."""

    @property
    def public_key(self) -> bytes: ...

    @property
    def peer_id(self) -> PeerId: ...

    def sign(self, statement: bytes) -> bytes: ...


class Verify(Protocol):
    """True if `signature` (64 bytes) over `statement` is by `public_key` (32 bytes)."""

    def __call__(self, public_key: bytes, signature: bytes, statement: bytes) -> bool: ...


class Ed25519Signer:
    """A private key in memory."""

    def __init__(self, private_key: bytes) -> None:
        """`private_key`: the 32 raw bytes of RFC 8032."""
        self._key = Ed25519PrivateKey.from_private_bytes(private_key)
        self._public = self._key.public_key().public_bytes_raw()
        self._peer_id = peer_id_of(self._public)

    @property
    def public_key(self) -> bytes:
        return self._public

    @property
    def peer_id(self) -> PeerId:
        return self._peer_id

    def sign(self, statement: bytes) -> bytes:
        return self._key.sign(statement)


def verify_ed25519(public_key: bytes, signature: bytes, statement: bytes) -> bool:
    """About 105 us: call it off the event loop."""
    if len(public_key) != KEY_BYTES or len(signature) != SIGNATURE_BYTES:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, statement)
    except (InvalidSignature, ValueError):
        return False
    return True


def ack_statement(
    run: RunId, epoch: int, committee: Digest, term: int, index: int, body: Digest, *, last: bool
) -> bytes:
    """What a voter signs when it acknowledges a body (protocol.md 3)."""
    return _statement(b"ack", run, epoch, committee, term, index, body, last)


def proposal_statement(
    run: RunId, epoch: int, committee: Digest, term: int, index: int, body: Digest, *, last: bool
) -> bytes:
    """What the aggregator of a term signs when it proposes a body (protocol.md 3)."""
    return _statement(b"proposal", run, epoch, committee, term, index, body, last)


def delta_statement(
    run: RunId, delta: Digest, fragment: int, base_version: int, sequence: int, steps: int
) -> bytes:
    """What a node signs about its delta; repeated in the log entry that lists or refuses it."""
    numbers = b"".join(n.to_bytes(8, "big") for n in (fragment, base_version, sequence, steps))
    return b"p2pdiloco/v1/delta\0" + run + delta + numbers


def _statement(
    what: bytes, run: bytes, epoch: int, committee: bytes, term: int, index: int, body: bytes, last: bool
) -> bytes:
    numbers = b"".join(n.to_bytes(8, "big") for n in (epoch, term, index))
    return b"p2pdiloco/v1/" + what + b"\0" + run + numbers + committee + body + bytes([last])
