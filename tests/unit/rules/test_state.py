"""The rules state is bounded, forgets safely and travels unchanged."""

import pytest
from msgspec.structs import replace

from p2pdiloco import limits
from p2pdiloco.rules.staleness import too_late
from p2pdiloco.rules.state import (
    PeerState,
    RulesState,
    after_membership,
    after_owner,
    clock_at,
    genesis_state,
    is_trusted,
    last_sequence,
    rules_digest,
    targets_reached,
)
from p2pdiloco.wire.codec import decode, encode
from p2pdiloco.wire.log import Committee, OwnerWord


def word(kind, *, sequence=1, value=0, peer=b""):
    return OwnerWord(kind, sequence, value, peer, bytes(64))


def test_travels_unchanged_and_its_digest_names_it(log):
    for _ in range(3):
        log.deliver(1, 2, 3)
    again = decode(encode(log.state), RulesState)
    assert again == log.state
    assert rules_digest(again) == rules_digest(log.state)
    assert rules_digest(replace(again, clock=again.clock + 1)) != rules_digest(again)


def test_the_largest_state_fits_into_one_message(spec):
    name = bytes([255] * 32)
    listed = ((name, 2**40),) * limits.contributions_max
    largest = replace(
        genesis_state(spec),
        recent=(listed,) * limits.recent_entries_max,
        norms=(((1.5, 2**40),) * limits.contributions_max,) * limits.norm_entries_max,
        clocks=(2**50,) * limits.clocks_kept_max,
        peers=(PeerState(name, 2**40, 2**50, 2**40),) * limits.peers_max,
        departed=(name,) * limits.peers_max,
        revoked=(name,) * limits.revoked_max,
    )
    assert len(encode(largest)) <= limits.message_bytes_max


def test_clocks_are_kept_back_to_staleness_max_rounds(make_log):
    log = make_log(outer={"staleness_max": 3})
    for _ in range(20):
        log.deliver(1, 2)
    # Each entry is a full round of 20 tokens; k = (clock - base) / 20 - 1 <= 3 reaches four entries back.
    assert [clock_at(log.state, v) for v in range(14, 21)] == [None, None, 320, 340, 360, 380, 400]
    assert not too_late(log.state, log.spec, log.next_candidate(1, base=16))
    assert too_late(log.state, log.spec, log.next_candidate(1, base=15))


def test_what_was_too_late_stays_so_when_the_round_grows(make_log):
    log = make_log(outer={"staleness_max": 1})
    for _ in range(5):
        log.deliver(1)
    assert too_late(log.state, log.spec, log.next_candidate(1, base=2))
    log.deliver(*range(1, 30))
    assert too_late(log.state, log.spec, log.next_candidate(1, base=2))


def test_sequences_are_remembered_for_listed_and_refused_deltas(make_log, name_peer, make_candidate):
    log = make_log(outer={"staleness_max": 1})
    for _ in range(5):
        log.deliver(1)
    log.apply([make_candidate(name_peer(2), 7, base=0), log.next_candidate(1)])
    assert last_sequence(log.state, name_peer(1)) == 6
    assert last_sequence(log.state, name_peer(2)) == 7
    assert last_sequence(log.state, name_peer(3)) == 0


def test_a_forgotten_peer_cannot_have_a_delta_counted_twice(log, name_peer, make_candidate, monkeypatch):
    monkeypatch.setattr(limits, "peers_max", 4)
    first = log.next_candidate(0)
    log.apply([first, log.next_candidate(1)])
    for other in range(2, 6):
        log.deliver(other)
    assert len(log.state.peers) == 4
    assert last_sequence(log.state, name_peer(0)) == 0
    again = log.plan([first, log.next_candidate(9)])
    assert [r.delta for r in again.refused] == [first.delta]
    assert first.delta not in {c.delta for c in again.contributions}


def test_trust_grows_with_accepted_tokens_and_decays(make_log, name_peer):
    log = make_log(admission="open", trust_tokens=2000, bootstrap_tokens=0)
    log.state = replace(log.state, peers=tuple(sorted(
        (PeerState(name_peer(n), 0, 4096, 0) for n in (1, 2)), key=lambda p: p.peer)))  # fmt: skip
    assert is_trusted(log.state, log.spec, name_peer(1))
    assert not is_trusted(log.state, log.spec, name_peer(3))
    log.deliver(1)
    trust = {p.peer: p.trust for p in log.state.peers}
    assert trust == {name_peer(1): 4096 - 4 + 10, name_peer(2): 4096 - 4}


def test_everybody_is_trusted_in_local_runs_and_while_an_open_one_starts(make_log, name_peer):
    assert is_trusted(make_log().state, make_log().spec, name_peer(1))
    log = make_log(admission="open", trust_tokens=2000, bootstrap_tokens=15)
    assert is_trusted(log.state, log.spec, name_peer(3))
    log.deliver(1, 2)
    assert not is_trusted(log.state, log.spec, name_peer(3))


def test_owner_words(log, name_peer):
    log.deliver(1, 2)
    state = log.state
    assert after_owner(state, word("pause", sequence=3)).paused
    assert after_owner(state, word("pause", sequence=3)).owner_sequence == 3
    assert not after_owner(after_owner(state, word("pause")), word("resume", sequence=2)).paused
    assert after_owner(state, word("finish")).finished
    assert after_owner(state, word("extend", value=2**51)).target_tokens == 2**51
    revoked = after_owner(state, word("revoke", peer=name_peer(1)))
    assert revoked.revoked == (name_peer(1),)
    assert not is_trusted(revoked, log.spec, name_peer(1))


def test_a_finish_by_the_run_spec_leaves_the_owners_sequence(log):
    state = after_owner(log.state, word("pause", sequence=5))
    finished = after_owner(state, OwnerWord("finish", 0, 0, b"", b""))
    assert finished.finished
    assert finished.owner_sequence == 5


def test_targets(make_log):
    log = make_log(target_tokens=25)
    log.deliver(1, 2)
    assert not targets_reached(log.state, log.spec)
    log.deliver(1)
    assert targets_reached(log.state, log.spec)
    assert log.plan([log.next_candidate(1)]) is None
    assert not targets_reached(after_owner(log.state, word("extend", value=100)), log.spec)
    log = make_log(target_version=1)
    assert not targets_reached(log.state, log.spec)
    log.deliver(1)
    assert targets_reached(log.state, log.spec)


def test_membership_changes_the_committee_alone(log, name_peer):
    committee = Committee(name_peer(0), (name_peer(1), name_peer(2)))
    after = after_membership(log.state, committee)
    assert after.committee == committee
    assert replace(after, committee=log.state.committee) == log.state


def test_a_version_to_come_has_no_clock(log):
    with pytest.raises(AssertionError):
        clock_at(log.state, 1)
