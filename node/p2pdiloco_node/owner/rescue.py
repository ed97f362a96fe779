"""`p2pdiloco run recover`: those who are left go on without the majority that is gone (protocol.md 3).

The base is the newest certified entry whose state somebody reachable has; the committee is of those who are
there and have it, too. What was certified beyond it, and only those knew who are gone, is lost: that is said
before anything is signed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from p2pdiloco.errors import OperatorError
from p2pdiloco.ids import NO_DIGEST, Digest, PeerId
from p2pdiloco.rules.rescue import recovery_entry, refuses_rescue, rescue_committee
from p2pdiloco.rules.state import rules_digest
from p2pdiloco.wire.log import Committee, Entry, open_body, state_root
from p2pdiloco.wire.messages import Entries, StateShown
from p2pdiloco_node.config import USAGE
from p2pdiloco_node.contact import NETWORK
from p2pdiloco_node.owner.ledger import Ledger, Signed
from p2pdiloco_node.owner.seen_run import RUN, SeenRun
from p2pdiloco_node.owner.telling import Teller
from p2pdiloco_node.owner.words import find_peer, owner_of

POLL_S = 1.0
SAID_AGAIN_S = 5.0
TERMS_AHEAD_MAX = 1 << 20  # a peer that claims a term further beyond the log's is not believed


@dataclass(frozen=True, slots=True)
class Recovered:
    """What was begun, and who follows."""

    epoch: int
    index: int  # of the recovery
    version: int  # the model goes on from it
    committee: tuple[str, ...]  # names
    following: int  # peers that showed the new epoch


@dataclass(frozen=True, slots=True)
class Found:
    """The base, and who has its state."""

    index: int
    epoch: int
    head: Digest
    roots: tuple[Digest, Digest]
    there: tuple[PeerId, ...]  # at the base
    term: int  # the highest own term that they show


async def recover(
    seen: SeenRun,
    key: Path,
    *,
    seats: Sequence[str],
    force: bool,
    agree: Callable[[str], bool],
    wait_s: float,
) -> Recovered:
    """Find, ask `agree` with what is lost, sign, deliver, and wait until a majority of them follows.

    `seats`: who shall have one; empty: those who are there. `force`: although the committee can certify.

    Raises: OperatorError.
    """
    signer, ledger = owner_of(seen, key), Ledger(key)
    found = await _find(seen, wait_s)
    rules = seen.rules_at(found.index)
    if rules.finished:
        raise OperatorError(f"The run is over (version {rules.version}): there is nothing to rescue.", RUN)
    committee = _committee(seen, found, seats)
    old = seen.log.committee_at(found.index)
    alive = [m for m in old.members if m in found.there]
    if len(alive) >= old.quorum and not force:
        raise OperatorError(
            f"{len(alive)} of {old.size} voters are there and have the newest state, and {old.quorum} are a "
            "majority: the run goes on by itself. To put another committee in charge all the same: --force.",
            RUN,
        )
    if not agree(_what_follows(seen, found, old, committee)):
        raise OperatorError("Nothing was signed.", USAGE)
    used = ledger.of(seen.run)
    epoch = max(used.epoch, found.epoch) + 1
    sequence = max(used.sequence, rules.owner_sequence) + 1
    entry = recovery_entry(
        seen.run, signer, epoch=epoch, base_index=found.index, base=found.head, state=rules,
        roots=found.roots, committee=committee, owner_sequence=sequence, term=found.term + 1,
    )  # fmt: skip
    ledger.note(seen.run, Signed(epoch, sequence))  # before anybody sees it: an epoch is begun once
    following = await _carry(seen, entry, committee, wait_s)
    names = tuple(seen.name_of(m) for m in committee.members)
    return Recovered(epoch, found.index + 1, rules.version, names, following)


async def _find(seen: SeenRun, wait_s: float) -> Found:
    """The newest state that somebody has and the log proves; waits a little for the others to get there.

    Raises: OperatorError.
    """
    until, before = time.monotonic() + wait_s / 4, (-1, -1, 0)
    while True:
        states = await seen.states()
        if not states:
            raise OperatorError(
                "No node of the run answers: nobody has its state. Start at least one that took part, or "
                "name its address with --peers HOST:PORT.",
                NETWORK,
            )
        found = await _best(seen, states)
        seen.told.say(
            f"{len(states)} of {len(seen.hosts)} known peers answer; {len(found.there)} have entry "
            f"{found.index} of epoch {found.epoch}, the newest."
        )
        now = (found.epoch, found.index, len(found.there))
        # Who lags is caught up by the others without any majority: as long as that goes on, it is waited for.
        if now == before or len(found.there) == len(states) or time.monotonic() > until:
            return found
        before = now
        await asyncio.sleep(3 * seen.spec.committee.heartbeat_s)


async def _best(seen: SeenRun, states: dict[PeerId, tuple[StateShown, str]]) -> Found:
    """Raises: OperatorError: no claim is proved by a log."""
    why: OperatorError | None = None
    ranked = sorted(states.values(), key=lambda s: (s[0].epoch, s[0].index), reverse=True)
    for claim, url in ranked:
        try:
            await seen.read_from(url)
        except OperatorError as error:
            why = error
            continue
        if not _proved(seen, claim):
            continue
        there = [p for p, (s, _) in states.items() if (s.epoch, s.index, s.head) == _key(claim)]
        certified = seen.log.term_of(claim.index)
        terms = [states[p][0].term for p in there if states[p][0].term <= certified + TERMS_AHEAD_MAX]
        return Found(
            claim.index, claim.epoch, Digest(claim.head), (Digest(claim.params), Digest(claim.momentum)),
            tuple(sorted(there)), max([certified, *terms]),
        )  # fmt: skip
    raise why or OperatorError(
        "No state that a node shows is the one that its log was certified with: nothing can be signed.", RUN
    )


def _key(claim: StateShown) -> tuple[int, int, bytes]:
    return claim.epoch, claim.index, claim.head


def _proved(seen: SeenRun, claim: StateShown) -> bool:
    """Whether the log of whoever shows this state was certified with it."""
    log = seen.log
    if claim.index > log.index or log.epoch_at(claim.index) != claim.epoch:
        return False
    if log.head_at(claim.index) != claim.head:
        return False
    if claim.index == 0:
        genesis = seen.spec.genesis
        return (claim.params, claim.momentum) == (genesis.params_root, genesis.momentum_root)
    root = state_root(claim.params, claim.momentum, rules_digest(seen.rules_at(claim.index)))
    return root == log.content(claim.index).state_root


def _committee(seen: SeenRun, found: Found, seats: Sequence[str]) -> Committee:
    """Raises: OperatorError."""
    rules, old = seen.rules_at(found.index), seen.log.committee_at(found.index)
    if seats:
        wanted = [find_peer(seen, words) for words in seats]
        absent = [seen.name_of(p) for p in wanted if p not in found.there]
        if absent:
            raise OperatorError(
                f"{absent[0]} does not answer, or lacks the newest state: it cannot have a seat."
            )
        witness = seen.spec.committee.genesis.witness
        voters = tuple(p for p in wanted if p != witness)
        committee = Committee(witness if witness in wanted else NO_DIGEST, voters)
        why = refuses_rescue(seen.spec, rules, committee)
        if why is not None:
            raise OperatorError(f"That can be no committee: {why}.", USAGE)
        return committee
    # Those who had a seat first, then those who contributed lately, then by name: the same for everybody.
    lately = {PeerId(p.peer): p.version for p in rules.peers}
    order = sorted(
        found.there, key=lambda p: (p not in old.members, -lately.get(p, -1), p)
    )  # fmt: skip
    largest = rescue_committee(seen.spec, rules, order)
    if largest is None:
        raise OperatorError("Nobody who is there may have a seat: all of them are revoked.", RUN)
    return largest


def _what_follows(seen: SeenRun, found: Found, old: Committee, new: Committee) -> str:
    """What the owner agrees to."""
    rules = seen.rules_at(found.index)
    gone = [m for m in old.members if m not in found.there]
    base = f"entry {found.index}, version {rules.version} ({rules.clock:,} tokens)"
    lines = [
        f"Run {seen.spec.name!r} goes on from {base}, in a new epoch.",
        f"New committee: {', '.join(seen.name_of(m) for m in new.members)}.",
    ]
    if gone:
        names = ", ".join(seen.name_of(m) for m in gone)
        lines.append(
            f"Not there, or behind: {names}. What they certified after entry {found.index} and nobody else "
            "has is lost for good, words of yours included; when they come back they follow."
        )
    return "\n".join(lines)


async def _carry(seen: SeenRun, entry: Entry, committee: Committee, wait_s: float) -> int:
    """Peers that follow, once a majority of the committee does. Raises: OperatorError."""
    body = open_body(entry.body)
    teller, message = Teller(seen.session, seen.run), Entries((entry,), body.index)
    until, again = time.monotonic() + wait_s, 0.0
    following: set[PeerId] = set()
    while True:
        now = time.monotonic()
        if now >= again:
            await teller.tell(seen.hosts.values(), message, body.epoch)
            again = now + SAID_AGAIN_S
        states = await seen.states()
        following = {p for p, (s, _) in states.items() if s.epoch >= body.epoch and s.index >= body.index}
        seen.told.progress(
            f"Waiting for the new committee ({len(following & set(committee.members))} of {committee.size})",
            min(wait_s, wait_s - (until - now)), wait_s, "s",
        )  # fmt: skip
        if len(following & set(committee.members)) >= committee.quorum:
            return len(following)
        if now >= until:
            waiting = ", ".join(seen.name_of(m) for m in committee.members if m not in following)
            raise OperatorError(
                f"The recovery is signed (epoch {body.epoch}) and after {wait_s:.0f} s these voters do not "
                f"follow: {waiting}. Start them and look again with p2pdiloco run inspect, or recover once "
                "more without them.",
                NETWORK,
            )
        await asyncio.sleep(POLL_S)
