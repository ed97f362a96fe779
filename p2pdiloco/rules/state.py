"""The rules state: all that the rules remember, a pure function of the certified log (protocol.md 3).

It is a third of every snapshot and hashed into every state root, so each list in it is bounded and each
change is integers or declared float32 values. Open untrusted bytes with
`wire.codec.decode(data, RulesState)`; `wire.codec.encode` is the other way.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Annotated

from msgspec import Meta
from msgspec.structs import replace

from p2pdiloco import limits
from p2pdiloco.ids import Digest, PeerId, tagged_digest
from p2pdiloco.run_spec import RunSpec
from p2pdiloco.wire.codec import Struct, encode
from p2pdiloco.wire.log import (
    Bytes32,
    Committee,
    Content,
    Count,
    Membership,
    OuterStep,
    OwnerWord,
    Share,
)

_Listed = Annotated[tuple[tuple[Bytes32, Count], ...], Meta(max_length=limits.contributions_max)]
_Norms = Annotated[tuple[tuple[Share, Count], ...], Meta(max_length=limits.contributions_max)]


class PeerState(Struct, frozen=True):
    """What the log says of one peer."""

    peer: Bytes32
    sequence: Count  # of its last delta that an entry listed or refused
    trust: Count  # tokens accepted, decaying with every outer step
    version: Count  # of the entry that last named it


class RulesState(Struct, frozen=True):
    """After `version` outer steps. `clock` and `t_full` are tokens (algorithm.md 1)."""

    version: Count
    clock: Count  # tokens merged so far, capped, not discounted
    t_full: Count  # tokens of a full round; 0 before the first outer step
    recent: Annotated[tuple[_Listed, ...], Meta(max_length=limits.recent_entries_max)]  # oldest first
    norms: Annotated[tuple[_Norms, ...], Meta(max_length=limits.norm_entries_max)]  # (L2 norm, steps)
    clocks: Annotated[
        tuple[Count, ...], Meta(min_length=1, max_length=limits.clocks_kept_max)
    ]  # to `version`
    peers: Annotated[tuple[PeerState, ...], Meta(max_length=limits.peers_max)]  # sorted by peer
    committee: Committee
    departed: Annotated[tuple[Bytes32, ...], Meta(max_length=limits.peers_max)]  # sorted
    revoked: Annotated[tuple[Bytes32, ...], Meta(max_length=limits.revoked_max)]  # sorted
    owner_sequence: Count
    target_tokens: Count
    paused: bool
    finished: bool


def genesis_state(spec: RunSpec) -> RulesState:
    """The rules state of version 0, index 0."""
    return RulesState(
        version=0,
        clock=0,
        t_full=0,
        recent=(),
        norms=(),
        clocks=(0,),
        peers=(),
        committee=spec.committee.genesis,
        departed=(),
        revoked=(),
        owner_sequence=0,
        target_tokens=spec.target_tokens,
        paused=False,
        finished=False,
    )


def rules_digest(state: RulesState) -> Digest:
    """The third part of the state root."""
    return tagged_digest("rules", encode(state))


def after_entry(state: RulesState, content: Content, spec: RunSpec) -> RulesState:
    """The rules state after the next certified entry.

    Raises:
        AssertionError: the entry does not follow `state`; a certified one always does.
    """
    match content:
        case OuterStep():
            return after_outer_step(state, content, spec)
        case Membership(committee=committee):
            return after_membership(state, committee)
        case _:
            return after_owner(state, content.word)


def after_outer_step(state: RulesState, step: OuterStep, spec: RunSpec) -> RulesState:
    """The rules state after a certified outer step. The step's own figures are used as declared.

    Raises:
        AssertionError: the step does not follow `state`; a certified one always does.
    """
    assert step.version == state.version + 1, "an outer step out of turn"
    listed = tuple((c.peer, c.tokens) for c in step.contributions)
    here = {peer for peer, _ in listed}
    recent = (*state.recent, listed)[-limits.recent_entries_max :]
    norms = tuple((c.norm, c.steps) for c in step.contributions)
    peers, forgotten = _peers_after(state, step)
    clocks = _clocks_after(state, step, spec, forgotten)
    named = {peer for entry in recent for peer, _ in entry}
    # Who is in no kept entry cannot be in T_full any more: its departure is forgotten.
    departed = ((set(state.departed) - here) | {gone.peer for gone in step.left}) & named
    return replace(
        state,
        version=step.version,
        clock=step.clock,
        t_full=step.t_full,
        recent=recent,
        norms=(*state.norms, norms)[-limits.norm_entries_max :],
        clocks=clocks,
        peers=peers,
        departed=tuple(sorted(departed)[: limits.peers_max]),
    )


def after_membership(state: RulesState, committee: Committee) -> RulesState:
    return replace(state, committee=committee)


def after_owner(state: RulesState, word: OwnerWord) -> RulesState:
    """The rules state after a certified owner entry. Signature and sequence were checked by the voters."""
    # A finish that the RunSpec warrants carries sequence 0 and leaves the owner's sequence alone.
    sequence = max(state.owner_sequence, word.owner_sequence)
    state = replace(state, owner_sequence=sequence)
    match word.kind:
        case "pause":
            return replace(state, paused=True)
        case "resume":
            return replace(state, paused=False)
        case "extend":
            return replace(state, target_tokens=max(state.target_tokens, word.value))
        case "finish":
            return replace(state, finished=True)
        case "revoke":
            revoked = sorted({*state.revoked, word.peer})
            assert len(revoked) <= limits.revoked_max, "voters refuse a revocation beyond the limit"
            return replace(state, revoked=tuple(revoked))
        case "recover":
            assert word.committee is not None, "a recovery names its committee"
            return replace(state, committee=word.committee)
        case _:
            raise AssertionError(f"no such owner word: {word.kind}")


def clock_at(state: RulesState, version: int) -> int | None:
    """Tokens merged when `version` was made; None where it is older than kept (so: TOO_LATE)."""
    assert version <= state.version, "a version that is not made yet"
    place = version - (state.version + 1 - len(state.clocks))
    return state.clocks[place] if place >= 0 else None


def peer_state(state: RulesState, peer: PeerId) -> PeerState | None:
    """What the log says of `peer`, or None for one it does not know or has forgotten."""
    place = bisect_left(state.peers, peer, key=lambda p: PeerId(p.peer))
    if place < len(state.peers) and state.peers[place].peer == peer:
        return state.peers[place]
    return None


def last_sequence(state: RulesState, peer: PeerId) -> int:
    """Sequence of the peer's last delta that the log listed or refused; 0 if none."""
    known = peer_state(state, peer)
    return known.sequence if known else 0


def trust_of(state: RulesState, peer: PeerId) -> int:
    """Tokens accepted of the peer, decayed; 0 where the log does not know it."""
    known = peer_state(state, peer)
    return known.trust if known else 0


def is_trusted(state: RulesState, spec: RunSpec, peer: PeerId) -> bool:
    """Trust is a function of the certified log alone (protocol.md 8)."""
    if peer in state.revoked:
        return False
    if spec.admission == "local" or state.clock < spec.bootstrap_tokens:
        return True
    return trust_of(state, peer) >= spec.trust_tokens


def targets_reached(state: RulesState, spec: RunSpec) -> bool:
    """Whether the RunSpec itself warrants `finish` (protocol.md 7)."""
    return state.clock >= state.target_tokens or 0 < spec.target_version <= state.version


def _clocks_after(state: RulesState, step: OuterStep, spec: RunSpec, forgotten: int) -> tuple[int, ...]:
    """Clocks from `forgotten` on, back to staleness_max rounds, and no more than the limit.

    What is dropped here stays too late even if T_full grows afterwards: the state, not the figure, decides.
    """
    reach = (spec.outer.staleness_max + 1) * step.t_full
    clocks = (*state.clocks, step.clock)[-limits.clocks_kept_max :]
    first = bisect_left(clocks, step.clock - reach)
    oldest = step.version + 1 - len(clocks)
    return clocks[max(first, forgotten - oldest) :]


def _peers_after(state: RulesState, step: OuterStep) -> tuple[tuple[PeerState, ...], int]:
    """Sequences and trust after `step`, and the newest version that named a forgotten peer (0: none).

    A delta has its base before the entry that names it. So a peer may be forgotten, and nothing can count
    twice, when every base older than the entry that last named it is too late: its clock is dropped as well.
    """
    peers = {
        p.peer: replace(p, trust=p.trust - lost) if (lost := p.trust >> limits.trust_decay_shift) else p
        for p in state.peers
    }
    named = [(c.peer, c.sequence, c.tokens) for c in step.contributions]
    named += [(r.peer, r.sequence, 0) for r in step.refused]
    for peer, sequence, tokens in named:
        old = peers.get(peer) or PeerState(peer, 0, 0, 0)
        peers[peer] = PeerState(peer, max(old.sequence, sequence), old.trust + tokens, step.version)
    forgotten = 0
    if len(peers) > limits.peers_max:
        idle = sorted(peers.values(), key=lambda p: (p.version, p.peer))[: len(peers) - limits.peers_max]
        forgotten = idle[-1].version
        for p in idle:
            del peers[p.peer]
    return tuple(peers[name] for name in sorted(peers)), forgotten
