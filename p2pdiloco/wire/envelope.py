"""Envelopes: who says what to whom, in which run, signed over the bytes as sent (protocol.md 2).

Layout: MessagePack array (version, kind, run, epoch, to, key, boot, n, payload), then 64 bytes of signature
over a domain tag and exactly those bytes. The receiver is signed as well: otherwise what B said to S could be
shown to W, as if B had said it there. Opening verifies what came, never a re-encoding; it also
verifies every signature inside (proposal, ack, certificate, last ack, owner's word is left to the log),
so that nothing unverified reaches the rules. It costs about 0.1 ms a signature: call it off the loop.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgpack
from msgspec import Meta

from p2pdiloco import limits
from p2pdiloco.errors import PeerError
from p2pdiloco.ids import NO_DIGEST, Digest, PeerId, RunId, peer_id_of
from p2pdiloco.wire.codec import Struct, decode, encode
from p2pdiloco.wire.log import (
    Body,
    Bytes32,
    Contribution,
    Count,
    Entry,
    OuterStep,
    Refused,
    body_digest,
    open_body,
)
from p2pdiloco.wire.messages import (
    KINDS,
    OF_AN_EPOCH,
    PASSED_ON,
    Ack,
    DeltaHeader,
    Entries,
    Message,
    Proposal,
    Vote,
)
from p2pdiloco.wire.signing import (
    SIGNATURE_BYTES,
    Signer,
    Verify,
    ack_statement,
    delta_statement,
    proposal_statement,
)

PROTOCOL_VERSION = 3
DOMAIN = b"p2pdiloco/v1/envelope\0"
ANYBODY = PeerId(NO_DIGEST)  # the receiver of what is meant to be passed on


class Signed(Struct, frozen=True):
    """The signed part of an envelope."""

    version: Count
    kind: Annotated[str, Meta(max_length=32)]
    run: Bytes32
    epoch: Count
    to: Bytes32  # the receiver's PeerId; zeros: anybody, for the kinds in PASSED_ON alone
    key: Bytes32
    boot: Count  # the sender's starts, to tell a restored disk from an honest one
    n: Count  # the sender's messages since its start
    payload: Annotated[bytes, Meta(max_length=limits.run_spec_bytes_max)]


class Opened(NamedTuple):
    """A verified message."""

    sender: PeerId
    key: bytes
    boot: int
    n: int
    epoch: int
    message: Message


def receiver_of(message: Message, peer: PeerId) -> PeerId:
    """Whom an envelope to `peer` names: `peer`, or ANYBODY for what is meant to be passed on."""
    return ANYBODY if type(message) in PASSED_ON else peer


def seal(
    message: Message, signer: Signer, *, run: RunId, epoch: int, boot: int, n: int, to: PeerId = ANYBODY
) -> bytes:
    """Sign a message: the bytes that travel. `to`: the receiver, needed for all kinds but PASSED_ON."""
    kind = type(message)
    assert (to == ANYBODY) == (kind in PASSED_ON), f"{kind.__name__} to {to.hex()}"
    signed = encode(
        Signed(
            PROTOCOL_VERSION, kind.__name__, run, epoch, to, signer.public_key, boot, n, encode(message)
        )
    )  # fmt: skip
    return signed + signer.sign(DOMAIN + signed)


def open_envelope(data: bytes, verify: Verify, *, run: RunId, me: PeerId, epoch: int | None = None) -> Opened:
    """Open untrusted bytes. `me`: who opens; ANYBODY: only what is meant to be passed on opens.

    `epoch`: the only one in which what belongs to an epoch opens; None: any, and the rules judge it.

    Raises:
        PeerError: TOO_BIG, MALFORMED, WRONG_VERSION, WRONG_RUN, WRONG_EPOCH, WRONG_RECEIVER, BAD_SIGNATURE.
    """
    if len(data) > limits.message_bytes_max + 1024:
        raise PeerError("TOO_BIG", f"{len(data)} bytes")
    if len(data) <= SIGNATURE_BYTES:
        raise PeerError("MALFORMED", "shorter than a signature")
    raw, signature = data[:-SIGNATURE_BYTES], data[-SIGNATURE_BYTES:]
    signed = decode(raw, Signed, bytes_max=limits.message_bytes_max + 1024)
    if signed.version != PROTOCOL_VERSION:
        raise PeerError(
            "WRONG_VERSION",
            f"the peer speaks protocol {signed.version}, this build speaks {PROTOCOL_VERSION}; "
            "the older one upgrades with: pip install --upgrade p2pdiloco",
        )
    if signed.run != run:
        raise PeerError("WRONG_RUN", f"the message is for run {signed.run.hex()[:16]}")
    kind = KINDS.get(signed.kind)
    if kind is None:
        raise PeerError("MALFORMED", f"unknown kind {signed.kind!r}")
    if epoch is not None and signed.epoch != epoch and kind in OF_AN_EPOCH:
        raise PeerError("WRONG_EPOCH", f"the message is of epoch {signed.epoch}, this is epoch {epoch}")
    anybody = signed.to == ANYBODY
    if anybody != (kind in PASSED_ON) or not (anybody or signed.to == me):
        raise PeerError(
            "WRONG_RECEIVER", f"a {signed.kind} to {'anybody' if anybody else signed.to.hex()[:8]}"
        )
    if not verify(signed.key, signature, DOMAIN + raw):
        raise PeerError("BAD_SIGNATURE", signed.kind)
    message = decode(signed.payload, kind)
    _verify_inside(message, signed, verify)
    sender = peer_id_of(signed.key)
    return Opened(sender, signed.key, signed.boot, signed.n, signed.epoch, message)


def kind_of(data: bytes) -> str:
    """The kind that an unopened envelope claims, for rate limits before any signature is checked."""
    try:
        unpacker = msgpack.Unpacker(max_buffer_size=len(data))
        unpacker.feed(data[:128])
        unpacker.read_array_header()
        unpacker.skip()
        kind = unpacker.unpack()
    except (ValueError, msgpack.UnpackException):
        return ""
    return kind if isinstance(kind, str) else ""


def sender_of(data: bytes) -> PeerId:
    """Who seals an envelope that opened before. Raises: PeerError MALFORMED."""
    signed = decode(data[:-SIGNATURE_BYTES], Signed, bytes_max=limits.message_bytes_max + 1024)
    return peer_id_of(signed.key)


def verify_entry(entry: Entry, run: RunId, verify: Verify) -> None:
    """Check that each ack of the certificate is a signature over this body.

    Whether the signers are a majority of the right committee is for the log (`RunLog.append`).

    Raises: PeerError BAD_CERTIFICATE or MALFORMED.
    """
    body = open_body(entry.body)
    certificate = entry.certificate
    digest = body_digest(entry.body)
    statement = ack_statement(
        run, body.epoch, Digest(certificate.committee), certificate.term, body.index, digest,
        last=certificate.last,
    )  # fmt: skip
    if body.run != run:
        raise PeerError("WRONG_RUN", "an entry of another run")
    if len({a.key for a in certificate.acks}) != len(certificate.acks):
        raise PeerError("BAD_CERTIFICATE", "one voter counted twice")
    for ack in certificate.acks:
        if not verify(ack.key, ack.signature, statement):
            raise PeerError("BAD_CERTIFICATE", f"index {body.index}")
    verify_deltas(body, verify)


def verify_deltas(body: Body, verify: Verify) -> None:
    """Check that each delta named by an outer step was signed by the peer to which it is credited.

    Raises: PeerError BAD_SIGNATURE.
    """
    if not isinstance(body.content, OuterStep):
        return
    run = RunId(body.run)
    step = body.content
    named_deltas: list[Contribution | Refused] = [*step.contributions, *step.refused]
    for named in named_deltas:
        statement = delta_statement(
            run, Digest(named.delta), step.fragment, named.base_version, named.sequence, named.steps
        )
        if peer_id_of(named.key) != named.peer or not verify(named.key, named.signature, statement):
            raise PeerError("BAD_SIGNATURE", f"a delta of {named.peer.hex()[:8]} at index {body.index}")


def _verify_inside(message: Message, signed: Signed, verify: Verify) -> None:
    run = RunId(signed.run)
    if isinstance(message, Proposal):
        body = open_body(message.body)
        statement = proposal_statement(
            run, body.epoch, Digest(body.committee), message.term, body.index, body_digest(message.body),
            last=message.last,
        )  # fmt: skip
        if not verify(signed.key, message.signature, statement):
            raise PeerError("BAD_SIGNATURE", "Proposal")
        verify_deltas(body, verify)
    elif isinstance(message, Ack):
        statement = ack_statement(
            run, signed.epoch, Digest(message.committee), message.term, message.index, Digest(message.body),
            last=message.last,
        )  # fmt: skip
        if not verify(signed.key, message.signature, statement):
            raise PeerError("BAD_SIGNATURE", "Ack")
    elif isinstance(message, Vote) and message.last_ack is not None:
        acked = message.last_ack
        body = open_body(acked.body)
        statement = proposal_statement(
            run, body.epoch, Digest(body.committee), acked.term, body.index, body_digest(acked.body),
            last=acked.last,
        )  # fmt: skip
        if not verify(acked.proposer_key, acked.proposal_signature, statement):
            raise PeerError("BAD_SIGNATURE", "Vote")
        verify_deltas(body, verify)
    elif isinstance(message, DeltaHeader):
        statement = delta_statement(
            run,
            Digest(message.delta),
            message.fragment,
            message.base_version,
            message.sequence,
            message.steps,
        )
        if not verify(signed.key, message.signature, statement):
            raise PeerError("BAD_SIGNATURE", "DeltaHeader")
    elif isinstance(message, Entries):
        for entry in message.entries:
            verify_entry(entry, run, verify)
