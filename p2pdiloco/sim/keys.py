"""Identities of a simulated world: a fast keyed hash by default, real Ed25519 in some seeds."""

from __future__ import annotations

import hashlib

from p2pdiloco.ids import PeerId, peer_id_of
from p2pdiloco.wire.signing import SIGNATURE_BYTES, Ed25519Signer, Signer


class FastSigner:
    """Signs with BLAKE2b keyed by the public key: about 2 us against 100 us.

    Anybody could forge it, so it stands for signatures only in a world whose liars do not forge.
    """

    def __init__(self, name: str) -> None:
        self._public = hashlib.sha256(b"p2pdiloco/sim/" + name.encode()).digest()
        self._peer_id = peer_id_of(self._public)

    @property
    def public_key(self) -> bytes:
        return self._public

    @property
    def peer_id(self) -> PeerId:
        return self._peer_id

    def sign(self, statement: bytes) -> bytes:
        return hashlib.blake2b(statement, digest_size=SIGNATURE_BYTES, key=self._public).digest()


def verify_fast(public_key: bytes, signature: bytes, statement: bytes) -> bool:
    """The counterpart of FastSigner."""
    return hashlib.blake2b(statement, digest_size=SIGNATURE_BYTES, key=public_key).digest() == signature


def signer_named(name: str, *, real: bool) -> Signer:
    """The identity of that name, the same in every world."""
    if real:
        return Ed25519Signer(hashlib.sha256(b"p2pdiloco/sim/ed25519/" + name.encode()).digest())
    return FastSigner(name)
