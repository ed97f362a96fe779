"""Names of things: digests, peers, runs. All are 32 bytes of SHA-256, domain-separated."""

from __future__ import annotations

import hashlib
from typing import NewType

Digest = NewType("Digest", bytes)
PeerId = NewType("PeerId", bytes)
RunId = NewType("RunId", bytes)

DIGEST_BYTES = 32
NO_DIGEST = Digest(bytes(DIGEST_BYTES))


def digest_of(data: bytes | memoryview) -> Digest:
    """The digest that names a blob: plain SHA-256 of its bytes, so that any tool can check a file."""
    return Digest(hashlib.sha256(data).digest())


def tagged_digest(tag: str, *parts: bytes) -> Digest:
    """SHA-256 over a domain tag and length-prefixed parts, so that no two kinds of thing share a digest."""
    h = hashlib.sha256(b"p2pdiloco/v1/" + tag.encode() + b"\0")
    for part in parts:
        h.update(len(part).to_bytes(8, "big"))
        h.update(part)
    return Digest(h.digest())


def peer_id_of(public_key: bytes) -> PeerId:
    """A peer is named by the digest of its Ed25519 public key (32 bytes)."""
    return PeerId(tagged_digest("peer", public_key))


def short(name: bytes) -> str:
    """The first eight hex digits: for people, never for programs."""
    return name[:4].hex()


def merkle_root(chunks: list[Digest]) -> Digest:
    """The root over the digests of a file's chunks, in order.

    Leaves and inner nodes are tagged apart, and the number of chunks is bound in, so that no two lists
    share a root. An odd node at the end of a level moves up unchanged.
    """
    level = [tagged_digest("leaf", c) for c in chunks]
    while len(level) > 1:
        paired = [tagged_digest("inner", level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
        if len(level) % 2:
            paired.append(level[-1])
        level = paired
    return tagged_digest("merkle", len(chunks).to_bytes(8, "big"), *level)
