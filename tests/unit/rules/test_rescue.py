"""What the owner signs to rescue a run: who may sit, and that the entry is certified by the owner alone."""

from __future__ import annotations

import msgspec
import pytest

from p2pdiloco.errors import PeerError
from p2pdiloco.ids import NO_DIGEST, PeerId, digest_of
from p2pdiloco.rules.rescue import may_sit, recovery_entry, refuses_rescue, rescue_committee
from p2pdiloco.rules.state import PeerState, RulesState, genesis_state, rules_digest
from p2pdiloco.run_spec import RunSpec
from p2pdiloco.sim.tiny_run import tiny_run
from p2pdiloco.wire.envelope import verify_entry
from p2pdiloco.wire.log import Committee, Entry, OwnerEntry, is_recovery, open_body, state_root
from p2pdiloco.wire.signing import Ed25519Signer, verify_ed25519

OWNER = Ed25519Signer(bytes([9]) * 32)
WITNESS = PeerId(b"w" * 32)
A, B, C, D, E = (PeerId(bytes([n]) * 32) for n in range(1, 6))
RUN = tiny_run(OWNER, WITNESS, size_max=5)


@pytest.mark.parametrize(
    ("present", "seats"),
    [
        ((WITNESS,), Committee(WITNESS, ())),
        ((A,), Committee(NO_DIGEST, (A,))),
        ((WITNESS, A), Committee(WITNESS, ())),  # never two
        ((A, B), Committee(NO_DIGEST, (A,))),
        ((A, WITNESS, B), Committee(WITNESS, (A, B))),
        ((A, B, C), Committee(NO_DIGEST, (A, B, C))),
        ((A, B, WITNESS, C), Committee(WITNESS, (A, B))),  # never four
        ((A, B, C, D, E, WITNESS), Committee(WITNESS, (A, B, C, D))),
        ((A, A, A), Committee(NO_DIGEST, (A,))),
    ],
)
def test_the_largest_committee_of_those_who_are_there(present: tuple[PeerId, ...], seats: Committee) -> None:
    state = genesis_state(RUN.spec)
    assert rescue_committee(RUN.spec, state, present) == seats
    assert refuses_rescue(RUN.spec, state, seats) is None


def test_no_seat_for_the_revoked_and_none_for_nobody() -> None:
    state = msgspec.structs.replace(genesis_state(RUN.spec), revoked=(A,))
    assert rescue_committee(RUN.spec, state, [A, B]) == Committee(NO_DIGEST, (B,))
    assert rescue_committee(RUN.spec, state, [A]) is None
    assert "revoked" in str(refuses_rescue(RUN.spec, state, Committee(NO_DIGEST, (A,))))


@pytest.mark.parametrize(
    ("committee", "why"),
    [
        (Committee(NO_DIGEST, (A, B)), "not 2"),
        (Committee(NO_DIGEST, ()), "not 0"),
        (Committee(NO_DIGEST, (A, A, B)), "named twice"),
        (Committee(WITNESS, (A, WITNESS)), "one that trains"),
        (Committee(C, (A, B)), "not this run's witness"),
    ],
)
def test_what_can_be_no_committee(committee: Committee, why: str) -> None:
    assert why in str(refuses_rescue(RUN.spec, genesis_state(RUN.spec), committee))


def entry(state: RulesState | None = None, owner: Ed25519Signer = OWNER) -> Entry:
    state = state or genesis_state(RUN.spec)
    return recovery_entry(
        RUN.run, owner, epoch=3, base_index=7, base=digest_of(b"seventh"), state=state,
        roots=(digest_of(b"params"), digest_of(b"momentum")), committee=Committee(WITNESS, (A, B)),
        owner_sequence=5, term=12,
    )  # fmt: skip


def test_the_entry_stands_on_its_base_and_says_what_follows() -> None:
    made = entry()
    body = open_body(made.body)
    assert (body.epoch, body.index, body.previous) == (3, 8, digest_of(b"seventh"))
    assert isinstance(body.content, OwnerEntry)
    after = msgspec.structs.replace(
        genesis_state(RUN.spec), committee=Committee(WITNESS, (A, B)), owner_sequence=5
    )
    root = state_root(digest_of(b"params"), digest_of(b"momentum"), rules_digest(after))
    assert body.content.state_root == root
    assert made.certificate.term == 12
    verify_entry(made, RUN.run, verify_ed25519)
    assert is_recovery(made, OWNER.public_key)


def test_nobody_else_begins_an_epoch() -> None:
    forged = entry(owner=Ed25519Signer(bytes([8]) * 32))
    verify_entry(forged, RUN.run, verify_ed25519)  # signed, but by whom?
    assert not is_recovery(forged, OWNER.public_key)


def test_a_changed_body_is_no_longer_signed() -> None:
    made = entry()
    other = entry(msgspec.structs.replace(genesis_state(RUN.spec), clock=1))
    with pytest.raises(PeerError, match="BAD_CERTIFICATE"):
        verify_entry(msgspec.structs.replace(made, body=other.body), RUN.run, verify_ed25519)


def open_state(**trust: int) -> tuple[RunSpec, RulesState]:
    """An open run that is past its beginning; who has how much trust: `a=5`."""
    spec = msgspec.structs.replace(RUN.spec, admission="open", trust_tokens=1000, bootstrap_tokens=1)
    peers = {"a": A, "b": B, "c": C, "d": D, "e": E}
    known = tuple(PeerState(peers[name], 1, tokens, 900) for name, tokens in sorted(trust.items()))
    return spec, msgspec.structs.replace(
        genesis_state(spec), version=900, clock=10**9, peers=known, committee=Committee(WITNESS, (E,))
    )


def test_seats_are_the_log_s_to_give_and_not_for_whoever_says_to_be_there() -> None:
    """Names can be ground and a delta costs little: neither puts a stranger in charge."""
    spec, state = open_state(a=10, b=10, d=5 * 10**8)
    present = (WITNESS, A, B, C, D)
    assert rescue_committee(spec, state, present) == Committee(WITNESS, ())  # never two
    assert rescue_committee(spec, state, (A, B, C, D)) == Committee(NO_DIGEST, (D,))
    assert rescue_committee(spec, state, (A, B, C)) is None
    assert not may_sit(spec, state, C)
    # The owner may name them all the same.
    assert refuses_rescue(spec, state, Committee(WITNESS, (A, D))) is None


def test_who_has_a_seat_keeps_it_and_more_trust_comes_first() -> None:
    spec, state = open_state(a=2000, b=9000, c=4000, d=10)
    assert rescue_committee(spec, state, (A, B, C, D, E, WITNESS)) == Committee(WITNESS, (E, B, C, A))
    gone = msgspec.structs.replace(state, revoked=(E,))
    assert rescue_committee(spec, gone, (A, B, C, D, E, WITNESS)) == Committee(WITNESS, (B, C))
