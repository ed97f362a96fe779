"""The chain of certified entries and the committee that it defines (protocol.md 3)."""

from __future__ import annotations

import msgspec
import pytest

from p2pdiloco.errors import PeerError
from p2pdiloco.ids import NO_DIGEST
from p2pdiloco.protocol.run_log import RunLog
from p2pdiloco.wire.log import (
    FINISH,
    Committee,
    Entry,
    Membership,
    OwnerEntry,
    OwnerWord,
    committee_digest,
    genesis_digest,
)

from .builders import (
    NODES,
    OWNER,
    WITNESS,
    Chain,
    body_of,
    certify,
    header,
    held,
    make_run,
    owner_word,
    plan,
)

A, B, C = NODES[:3]
RUN = make_run(A, B)


def fresh() -> tuple[RunLog, Membership]:
    return RunLog(RUN.id, RUN.spec), Membership(Committee(WITNESS.peer_id, (A.peer_id, C.peer_id)), NO_DIGEST)


def test_starts_at_genesis() -> None:
    log, _ = fresh()
    assert (log.index, log.head, log.committee) == (0, genesis_digest(RUN.id), RUN.committee)
    assert log.term_of(0) == 0


def test_a_majority_of_the_named_committee_makes_an_entry() -> None:
    log, content = fresh()
    body = log.append(certify(log, content, [WITNESS, A], term=4))
    assert body.index == log.index == 1
    assert log.term_of(1) == 4
    assert log.content(1) == content


@pytest.mark.parametrize("voters", [[A], [A, C], [C, NODES[3]]], ids=["one of three", "one outsider", "none"])
def test_less_than_a_majority_does_not(voters: list[object]) -> None:
    log, content = fresh()
    with pytest.raises(PeerError, match="BAD_CERTIFICATE"):
        log.append(certify(log, content, voters))  # type: ignore[arg-type]
    assert log.index == 0


def test_one_voter_named_twice_is_one_voter() -> None:
    log, content = fresh()
    entry = certify(log, content, [A])
    twice = msgspec.structs.replace(entry.certificate, acks=entry.certificate.acks * 2)
    with pytest.raises(PeerError, match="BAD_CERTIFICATE"):
        log.append(Entry(entry.body, twice))


def test_a_certificate_that_names_another_committee() -> None:
    log, content = fresh()
    entry = certify(log, content, [WITNESS, A])
    other = msgspec.structs.replace(entry.certificate, committee=committee_digest(content.committee))
    with pytest.raises(PeerError, match="BAD_CERTIFICATE"):
        log.append(Entry(entry.body, other))


@pytest.mark.parametrize(
    "change",
    [{"index": 2}, {"previous": NO_DIGEST}, {"epoch": 1}, {"run": NO_DIGEST}, {"committee": NO_DIGEST}],
    ids=lambda change: next(iter(change)),
)
def test_a_body_that_does_not_follow(change: dict[str, object]) -> None:
    log, content = fresh()
    entry = certify(log, content, [WITNESS, A])
    with pytest.raises(PeerError, match="BAD_CHAIN"):
        log.append(Entry(body_of(log, content, **change), entry.certificate))


def test_the_next_entry_is_governed_by_the_new_committee() -> None:
    log, content = fresh()
    log.append(certify(log, content, [WITNESS, B]))
    assert log.committee == content.committee
    back = Membership(RUN.committee, NO_DIGEST)
    with pytest.raises(PeerError, match="BAD_CERTIFICATE"):
        log.append(certify(log, back, [A, B]))  # B has no seat any more
    log.append(certify(log, back, [A, C]))
    assert log.committee == RUN.committee


def test_the_same_entry_is_not_appended_twice() -> None:
    log, content = fresh()
    entry = certify(log, content, [WITNESS, A])
    log.append(entry)
    with pytest.raises(PeerError, match="BAD_CHAIN"):
        log.append(entry)


# The owner's words


def owners(word: OwnerWord) -> OwnerEntry:
    return OwnerEntry(word, NO_DIGEST)


@pytest.mark.parametrize(
    "word",
    [
        OwnerWord("revoke", 7, 0, C.peer_id, bytes(64)),
        msgspec.structs.replace(owner_word(RUN, "pause"), kind="finish"),
        msgspec.structs.replace(owner_word(RUN, "extend", value=10**6), value=10**7),
        FINISH,
        msgspec.structs.replace(FINISH, kind="pause"),
        OwnerWord("recover", 1, 0, b"", b"", Committee(WITNESS.peer_id, ())),
    ],
    ids=["nobody's", "another kind", "another target", "no target reached", "of the targets", "a recovery"],
)
def test_a_majority_cannot_speak_for_the_owner(word: OwnerWord) -> None:
    log, _ = fresh()
    with pytest.raises(PeerError, match="BAD_C"):
        log.append(certify(log, owners(word), [WITNESS, A, B]))
    assert log.index == 0


def test_a_word_is_followed_once_and_in_its_epoch() -> None:
    log, _ = fresh()
    log.append(certify(log, owners(owner_word(RUN, "pause", 2)), [WITNESS, A]))
    for sequence in (1, 2):
        with pytest.raises(PeerError, match="followed already"):
            log.append(certify(log, owners(owner_word(RUN, "resume", sequence)), [WITNESS, A]))
    later = owner_word(RUN, "resume", 3)
    later = msgspec.structs.replace(later, signature=OWNER.sign(later.statement(RUN.id, 1)))
    with pytest.raises(PeerError, match="not signed"):
        log.append(certify(log, owners(later), [WITNESS, A]))
    log.append(certify(log, owners(owner_word(RUN, "resume", 3)), [WITNESS, A]))


def test_what_a_recovery_cut_off_binds_nobody() -> None:
    """The words behind its base count for nothing, neither their numbers nor the target."""
    chain = Chain(make_run(A, B, target_tokens=1))
    chain.step(held(header(chain.run, A), A))
    word = owner_word(chain.run, "extend", 1, value=10**9)
    chain.add(owners(word))
    assert chain.log.refuses_word(FINISH) is not None
    chain.log.cut(1)
    assert chain.log.refuses_word(FINISH) is None
    chain.add(owners(word))


def test_replayed_entries_give_the_same_log() -> None:
    chain = Chain(RUN)
    chain.step(held(header(RUN, A), A))
    chain.add(Membership(Committee(WITNESS.peer_id, (A.peer_id, C.peer_id)), NO_DIGEST), term=2)
    again = RunLog(RUN.id, RUN.spec, chain.entries)
    assert (again.index, again.head, again.committee) == (2, chain.log.head, chain.log.committee)
    assert [again.head_at(i) for i in range(3)] == [chain.log.head_at(i) for i in range(3)]
    assert again.entries_from(2, 16) == (chain.entries[1],)


def test_the_same_content_proposed_again_is_the_same_body() -> None:
    """No term and no author in a body (protocol.md 3)."""
    chain = Chain(RUN)
    content = plan(RUN, chain.state, [held(header(RUN, A), A)])
    one = certify(chain.log, content, [WITNESS, A], term=1)
    two = certify(chain.log, content, [WITNESS, B], term=7, last=True)
    assert one.body == two.body
    assert one.certificate != two.certificate
