"""Who says what in which run: whatever is not exactly as it was signed is refused with its reason."""

from __future__ import annotations

from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from p2pdiloco import limits
from p2pdiloco.errors import PeerError
from p2pdiloco.ids import NO_DIGEST, Digest, PeerId, RunId, digest_of
from p2pdiloco.wire import envelope
from p2pdiloco.wire.codec import decode, encode
from p2pdiloco.wire.envelope import (
    ANYBODY,
    PROTOCOL_VERSION,
    Signed,
    kind_of,
    open_envelope,
    receiver_of,
    seal,
)
from p2pdiloco.wire.log import (
    AckSignature,
    Body,
    Certificate,
    Committee,
    Contribution,
    Entry,
    Membership,
    OuterStep,
    Refused,
    Scalars,
    body_digest,
)
from p2pdiloco.wire.messages import (
    KINDS,
    OF_AN_EPOCH,
    PASSED_ON,
    Ack,
    DeltaHeader,
    Entries,
    EntriesWanted,
    Goodbye,
    Head,
    LastAck,
    Message,
    NewerTerm,
    PeerRecord,
    Proposal,
    SnapshotOffer,
    SnapshotWanted,
    Vote,
)
from p2pdiloco.wire.signing import (
    Ed25519Signer,
    ack_statement,
    delta_statement,
    proposal_statement,
    verify_ed25519,
)

from .examples import values_of

RUN = RunId(digest_of(b"a run"))
ME = Ed25519Signer(bytes([7]) * 32)
OTHER = Ed25519Signer(bytes([8]) * 32)
YOU = Ed25519Signer(bytes([9]) * 32).peer_id
COMMITTEE = Digest(digest_of(b"committee"))
INSIDE = (Ack, DeltaHeader, Entries, Proposal, Vote)  # kinds with signatures inside
WORDS = [kind for kind in KINDS.values() if kind not in INSIDE]


def sealed(message: Message, **changes: Any) -> bytes:
    to = receiver_of(message, YOU)
    return seal(message, ME, **{"run": RUN, "epoch": 0, "boot": 3, "n": 5, "to": to, **changes})


def refused(data: bytes, reason: str, epoch: int | None = None) -> None:
    with pytest.raises(PeerError) as error:
        open_envelope(data, verify_ed25519, run=RUN, me=YOU, epoch=epoch)
    assert error.value.reason == reason


def resigned(data: bytes, **changes: Any) -> bytes:
    """The signed part with other fields, signed anew by ME."""
    signed = decode(data[:-64], Signed)
    raw = encode(msgspec.structs.replace(signed, **changes))
    return raw + ME.sign(envelope.DOMAIN + raw)


def test_an_envelope_says_who_and_what() -> None:
    opened = open_envelope(sealed(NewerTerm(9)), verify_ed25519, run=RUN, me=YOU)
    assert opened == (ME.peer_id, ME.public_key, 3, 5, 0, NewerTerm(9))
    assert kind_of(sealed(NewerTerm(9))) == "NewerTerm"


@pytest.mark.parametrize("kind", WORDS, ids=lambda k: k.__name__)
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_every_kind_comes_out_as_it_went_in(kind: type[Any], data: st.DataObject) -> None:
    message = data.draw(values_of(kind))
    assert open_envelope(sealed(message), verify_ed25519, run=RUN, me=YOU).message == message


@pytest.mark.parametrize("kind", INSIDE, ids=lambda k: k.__name__)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a_made_up_signature_inside_is_refused(kind: type[Any], data: st.DataObject) -> None:
    message, reason = data.draw(values_of(kind)), ""
    try:
        open_envelope(sealed(message), verify_ed25519, run=RUN, me=YOU)
    except PeerError as error:
        reason = error.reason
    nothing_inside = getattr(message, "entries", 1) == () or getattr(message, "last_ack", 1) is None
    assert nothing_inside or reason in ("BAD_SIGNATURE", "BAD_CERTIFICATE", "WRONG_RUN", "MALFORMED")


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=400))
@example(b"")
@example(bytes(64))
@example(b"\x91" * 200)
def test_arbitrary_bytes_raise_nothing_but_a_peer_error(data: bytes) -> None:
    with pytest.raises(PeerError):
        open_envelope(data, verify_ed25519, run=RUN, me=YOU)
    assert isinstance(kind_of(data), str)


@settings(max_examples=60, deadline=None)
@given(payload=st.binary(max_size=200), kind=st.sampled_from([*KINDS, "Nothing", ""]))
def test_a_signed_payload_of_rubbish_is_malformed(payload: bytes, kind: str) -> None:
    to = ANYBODY if KINDS.get(kind) in PASSED_ON else YOU
    data, reason = resigned(sealed(NewerTerm(1)), payload=payload, kind=kind, to=to), ""
    try:
        open_envelope(data, verify_ed25519, run=RUN, me=YOU)
    except PeerError as error:
        reason = error.reason
    assert reason in ("MALFORMED", "BAD_SIGNATURE") or encode(decode(payload, KINDS[kind]))


@pytest.mark.parametrize("place", range(0, 8 * len(sealed(NewerTerm(9))), 7))
def test_a_flipped_bit_is_refused(place: int) -> None:
    raw = bytearray(sealed(NewerTerm(9)))
    raw[place // 8] ^= 1 << place % 8
    with pytest.raises(PeerError):
        open_envelope(bytes(raw), verify_ed25519, run=RUN, me=YOU)


def test_truncated_and_lengthened() -> None:
    raw = sealed(NewerTerm(9))
    for cut in (0, 1, 63, 64, 65, len(raw) - 1):
        refused(raw[:cut], "MALFORMED")
    refused(raw + b"\0", "MALFORMED")
    refused(bytes(limits.message_bytes_max + 1025), "TOO_BIG")


def test_another_run_version_or_epoch() -> None:
    refused(sealed(NewerTerm(9), run=RunId(digest_of(b"another"))), "WRONG_RUN")
    refused(resigned(sealed(NewerTerm(9)), version=PROTOCOL_VERSION + 1), "WRONG_VERSION")


def test_what_belongs_to_an_epoch_opens_in_no_other() -> None:
    told = sealed(NewerTerm(9), epoch=1)
    with pytest.raises(PeerError, match="WRONG_EPOCH"):
        open_envelope(told, verify_ed25519, run=RUN, me=YOU, epoch=0)
    for epoch in (1, None):  # None: the rules judge
        assert open_envelope(told, verify_ed25519, run=RUN, me=YOU, epoch=epoch).epoch == 1


def test_what_leads_to_an_epoch_opens_in_any() -> None:
    wanted = sealed(EntriesWanted(4), epoch=2)
    assert open_envelope(wanted, verify_ed25519, run=RUN, me=YOU, epoch=0).message == EntriesWanted(4)
    assert not OF_AN_EPOCH & {Entries, EntriesWanted, SnapshotOffer, SnapshotWanted, PeerRecord, Goodbye}


HEAD = Head(3, bytes(32), 4)


def test_what_was_said_to_one_peer_opens_at_no_other() -> None:
    """B's heartbeat or vote to S, posted by S to W, would speak there for B."""
    beat = sealed(NewerTerm(9))
    for me in (OTHER.peer_id, ANYBODY):
        with pytest.raises(PeerError, match="WRONG_RECEIVER"):
            open_envelope(beat, verify_ed25519, run=RUN, me=me)
    refused(resigned(beat, to=OTHER.peer_id), "WRONG_RECEIVER")
    other = sealed(NewerTerm(9), to=OTHER.peer_id)
    changed = encode(msgspec.structs.replace(decode(other[:-64], Signed), to=YOU))
    refused(changed + other[-64:], "BAD_SIGNATURE")  # the receiver is part of what is signed


def test_only_what_is_meant_to_be_passed_on_is_for_anybody() -> None:
    for me in (YOU, OTHER.peer_id, ANYBODY):
        assert open_envelope(sealed(HEAD), verify_ed25519, run=RUN, me=me).message == HEAD
    with pytest.raises(PeerError, match="WRONG_RECEIVER"):
        open_envelope(resigned(sealed(NewerTerm(9)), to=ANYBODY), verify_ed25519, run=RUN, me=ANYBODY)
    refused(resigned(sealed(HEAD), to=YOU), "WRONG_RECEIVER")
    assert {kind.__name__ for kind in PASSED_ON} == {"PeerRecord", "Head", "StateShown"}


def test_versions_are_told_with_the_way_out() -> None:
    with pytest.raises(PeerError, match=r"protocol 4, this build speaks 3.*pip install --upgrade"):
        open_envelope(
            resigned(sealed(NewerTerm(9)), version=PROTOCOL_VERSION + 1), verify_ed25519, run=RUN, me=YOU
        )


def test_nobody_speaks_for_another() -> None:
    """S9: a key that claims to be another node."""
    refused(resigned(sealed(NewerTerm(9)), key=OTHER.public_key), "BAD_SIGNATURE")


def test_a_kind_is_part_of_what_is_signed() -> None:
    raw = sealed(NewerTerm(9))
    signed = decode(raw[:-64], Signed)
    other = encode(msgspec.structs.replace(signed, kind="EntriesWanted"))
    refused(other + raw[-64:], "BAD_SIGNATURE")


# Signatures inside messages


def named(signer: Ed25519Signer, sequence: int = 1) -> dict[str, Any]:
    delta = digest_of(b"delta %d" % sequence)
    return {
        "delta": delta, "peer": signer.peer_id, "base_version": 0, "sequence": sequence, "steps": 4,
        "key": signer.public_key, "signature": signer.sign(delta_statement(RUN, delta, 0, 0, sequence, 4)),
    }  # fmt: skip


def a_body(
    *, listed: dict[str, Any] | None = None, late: dict[str, Any] | None = None, **changes: Any
) -> bytes:
    figures = {"tokens": 32, "norm": 1.0, "staleness": 0.0, "weight": 1.0, "clip": 1.0}
    contribution = Contribution(**{**named(OTHER), **figures, **(listed or {})})
    refusals = () if late is None else (Refused(**{**named(ME, 2), "reason": "TOO_LATE", **late}),)
    step = OuterStep(1, 0, (contribution,), refusals, (), Scalars(1.0, 1.0, 0.9, 1.0, 0.4), 32, 32, NO_DIGEST)
    return encode(msgspec.structs.replace(Body(RUN, 0, 1, NO_DIGEST, COMMITTEE, step), **changes))


def a_proposal(body: bytes, signer: Ed25519Signer = ME, *, last: bool = False, term: int = 4) -> Proposal:
    statement = proposal_statement(RUN, 0, COMMITTEE, 4, 1, body_digest(body), last=last)
    return Proposal(term, body, last, signer.sign(statement))


def an_ack(signer: Ed25519Signer = ME, **changes: Any) -> Ack:
    statement = ack_statement(RUN, 0, COMMITTEE, 4, 1, NO_DIGEST, last=False)
    ack = Ack(COMMITTEE, 4, 1, NO_DIGEST, False, signer.sign(statement))
    return msgspec.structs.replace(ack, **changes)


def opens(message: Message) -> None:
    assert open_envelope(sealed(message), verify_ed25519, run=RUN, me=YOU).message == message


def test_a_proposal_is_signed_by_its_sender_over_term_body_and_last() -> None:
    body = a_body(late={})
    opens(a_proposal(body))
    refused(sealed(a_proposal(body, OTHER)), "BAD_SIGNATURE")
    refused(sealed(a_proposal(body, term=5)), "BAD_SIGNATURE")
    refused(sealed(msgspec.structs.replace(a_proposal(body), last=True)), "BAD_SIGNATURE")
    refused(sealed(msgspec.structs.replace(a_proposal(body), body=a_body(index=2))), "BAD_SIGNATURE")


@pytest.mark.parametrize(
    "change",
    [{"steps": 5}, {"base_version": 1}, {"sequence": 2}, {"delta": NO_DIGEST}, {"peer": ME.peer_id}],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_what_a_body_says_of_a_delta_is_what_its_sender_signed(change: dict[str, Any]) -> None:
    refused(sealed(a_proposal(a_body(listed=change))), "BAD_SIGNATURE")
    late = {**change, "peer": OTHER.peer_id} if "peer" in change else change
    late = {**late, "sequence": 3} if "sequence" in late else late  # the refused one is number 2 already
    refused(sealed(a_proposal(a_body(late=late))), "BAD_SIGNATURE")


def test_a_delta_of_another_run_is_not_taken() -> None:
    """S9: a delta signed for run X shown in run Y."""
    statement = delta_statement(RunId(digest_of(b"X")), Digest(named(OTHER)["delta"]), 0, 0, 1, 4)
    body = a_body(listed={"signature": OTHER.sign(statement)})
    refused(sealed(a_proposal(body)), "BAD_SIGNATURE")


def test_an_ack_is_signed_by_its_sender_over_everything_it_says() -> None:
    opens(an_ack())
    refused(sealed(an_ack(OTHER)), "BAD_SIGNATURE")
    for change in ({"term": 5}, {"index": 2}, {"last": True}, {"body": COMMITTEE}, {"committee": NO_DIGEST}):
        refused(sealed(an_ack(**change)), "BAD_SIGNATURE")


def test_an_ack_of_another_epoch_opens_only_where_that_is_judged() -> None:
    statement = ack_statement(RUN, 1, COMMITTEE, 4, 1, NO_DIGEST, last=False)
    data = sealed(an_ack(signature=ME.sign(statement)), epoch=1)
    refused(data, "WRONG_EPOCH", epoch=0)
    assert open_envelope(data, verify_ed25519, run=RUN, me=YOU).epoch == 1
    refused(sealed(an_ack(signature=ME.sign(statement)), epoch=0), "BAD_SIGNATURE")


def test_a_proposal_signature_is_no_ack_signature() -> None:
    statement = proposal_statement(RUN, 0, COMMITTEE, 4, 1, NO_DIGEST, last=False)
    refused(sealed(an_ack(signature=ME.sign(statement))), "BAD_SIGNATURE")


def test_a_vote_shows_the_proposal_that_was_acked() -> None:
    body = a_body()
    p = a_proposal(body, OTHER)
    acked = LastAck(4, body, False, OTHER.public_key, p.signature)
    opens(Vote(COMMITTEE, 5, 0, acked))
    opens(Vote(COMMITTEE, 5, 0, None))
    for change in ({"term": 5}, {"last": True}, {"proposer_key": ME.public_key}, {"body": a_body(index=2)}):
        refused(sealed(Vote(COMMITTEE, 5, 0, msgspec.structs.replace(acked, **change))), "BAD_SIGNATURE")


def test_a_header_is_signed_over_what_the_log_repeats() -> None:
    facts = named(ME)
    signature = facts["signature"]
    h = DeltaHeader(facts["delta"], 368, "fp16", 0, 0, 1, 4, 0, 4, 1.0, signature)
    opens(h)
    for change in ({"steps": 5}, {"base_version": 1}, {"sequence": 2}, {"fragment": 1}, {"delta": NO_DIGEST}):
        refused(sealed(msgspec.structs.replace(h, **change)), "BAD_SIGNATURE")
    refused(seal(h, OTHER, run=RUN, epoch=0, boot=1, n=1, to=YOU), "BAD_SIGNATURE")


def an_entry(signers: list[Ed25519Signer], *, body: bytes | None = None, **changes: Any) -> Entry:
    content = Membership(Committee(PeerId(NO_DIGEST), (ME.peer_id,)), NO_DIGEST)
    body = body or encode(Body(RUN, 0, 1, NO_DIGEST, COMMITTEE, content))
    statement = ack_statement(RUN, 0, COMMITTEE, 4, 1, body_digest(body), last=False)
    acks = tuple(AckSignature(s.public_key, s.sign(statement)) for s in signers)
    return Entry(body, msgspec.structs.replace(Certificate(COMMITTEE, 4, False, acks), **changes))


def test_every_ack_of_a_certificate_is_checked() -> None:
    opens(Entries((an_entry([ME, OTHER]),), 1))
    for change in ({"term": 5}, {"last": True}, {"committee": NO_DIGEST}):
        refused(sealed(Entries((an_entry([ME, OTHER], **change),), 1)), "BAD_CERTIFICATE")
    refused(sealed(Entries((an_entry([ME, ME]),), 1)), "BAD_CERTIFICATE")
    good, bad = an_entry([ME]), an_entry([OTHER])
    acks = (*good.certificate.acks, AckSignature(OTHER.public_key, bytes(64)))
    mixed = Entry(good.body, msgspec.structs.replace(good.certificate, acks=acks))
    refused(sealed(Entries((bad, mixed), 1)), "BAD_CERTIFICATE")
    other_run = encode(
        Body(NO_DIGEST, 0, 1, NO_DIGEST, COMMITTEE, Membership(Committee(NO_DIGEST, ()), NO_DIGEST))
    )
    refused(sealed(Entries((an_entry([ME], body=other_run),), 1)), "WRONG_RUN")


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=140) | st.lists(st.integers() | st.text(), max_size=4).map(
    lambda v: msgpack.packb([x if not isinstance(x, int) else x % 2**63 for x in v])))  # fmt: skip
def test_the_claimed_kind_of_anything_is_a_text(data: bytes) -> None:
    assert isinstance(kind_of(data), str)
