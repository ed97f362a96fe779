"""What the owner signs to rescue a run whose quorum is gone (protocol.md 3): pure choices and one entry.

The base is a certified entry whose state somebody still has; the committee is of those who answer. Used by
the owner's command and by the simulator.
"""

from __future__ import annotations

from collections.abc import Iterable

from p2pdiloco import limits
from p2pdiloco.ids import NO_DIGEST, Digest, PeerId, RunId
from p2pdiloco.rules.state import RulesState, after_owner, is_trusted, rules_digest, trust_of
from p2pdiloco.run_spec import RunSpec
from p2pdiloco.wire.codec import encode
from p2pdiloco.wire.log import (
    AckSignature,
    Body,
    Certificate,
    Committee,
    Entry,
    OwnerEntry,
    OwnerWord,
    body_digest,
    committee_digest,
    state_root,
)
from p2pdiloco.wire.signing import Signer, ack_statement


def rescue_committee(spec: RunSpec, state: RulesState, present: Iterable[PeerId]) -> Committee | None:
    """The largest committee of those in `present`; None if nobody of them may sit.

    Anybody can say to be present. So the certified log alone gives seats: those who have one keep it, then
    those who it trusts, more trust first. Nobody else gets one. The witness has a seat if it is there.
    """
    here = set(present)
    witness = PeerId(spec.committee.genesis.witness)
    voters = sorted(
        (p for p in here - {witness} if may_sit(spec, state, p)),
        key=lambda p: (p not in state.committee.members, -trust_of(state, p), p),
    )
    seated = witness in here
    most = min(spec.committee.size_max, len(voters) + seated)
    sizes = [size for size in limits.committee_sizes if size <= most]
    if not sizes:
        return None
    return Committee(witness if seated else NO_DIGEST, tuple(voters[: sizes[-1] - seated]))


def may_sit(spec: RunSpec, state: RulesState, peer: PeerId) -> bool:
    """Whether the certified log gives any reason to put `peer` in charge."""
    return peer not in state.revoked and (peer in state.committee.members or is_trusted(state, spec, peer))


def refuses_rescue(spec: RunSpec, state: RulesState, committee: Committee) -> str | None:
    """Why this committee, which the owner names, cannot go on with the run; None if it can."""
    witness = spec.committee.genesis.witness
    if committee.size not in limits.committee_sizes:
        return f"a committee has 1, 3, 5 or 7 seats, not {committee.size}"
    if len(set(committee.members)) != committee.size or witness in committee.voters:
        return "a seat is named twice, or the witness as one that trains"
    if committee.witness not in (NO_DIGEST, witness):
        return "that is not this run's witness"
    if set(committee.members) & set(state.revoked):
        return "a revoked node has no seat"
    return None


def recovery_entry(
    run: RunId,
    owner: Signer,
    *,
    epoch: int,
    base_index: int,
    base: Digest,
    state: RulesState,
    roots: tuple[Digest, Digest],
    committee: Committee,
    owner_sequence: int,
    term: int,
) -> Entry:
    """The entry that begins `epoch` behind the certified one at `base_index`, whose body's digest is `base`.

    `state` and `roots` (params, momentum): the state there. `term`: above every term that its voters are in,
    so that they meet at once. An epoch may be begun once: whoever holds the owner's key sees to that.
    """
    word = OwnerWord("recover", owner_sequence, 0, b"", b"", committee)
    after = after_owner(state, word)
    content = OwnerEntry(word, state_root(*roots, rules_digest(after)))
    named = committee_digest(committee)
    body = encode(Body(run, epoch, base_index + 1, base, named, content))
    statement = ack_statement(run, epoch, named, term, base_index + 1, body_digest(body), last=False)
    return Entry(
        body,
        Certificate(named, term, False, (AckSignature(owner.public_key, owner.sign(statement)),)),  # noqa: FBT003
    )
