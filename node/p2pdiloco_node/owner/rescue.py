"""`p2pdiloco run recover`: those who are left go on without the majority that is gone (protocol.md 3).

The base is the newest certified entry whose state somebody reachable has; the committee is of those who are
there and have it, too. What was certified beyond it, and only those knew who are gone, is lost: that is said
before anything is signed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.exit_codes import NETWORK, RUN, USAGE
from p2pdiloco.ids import NO_DIGEST, Digest, PeerId
from p2pdiloco.protocol.run_log import RunLog
from p2pdiloco.rules.rescue import may_sit, recovery_entry, refuses_rescue, rescue_committee
from p2pdiloco.rules.state import RulesState, rules_digest, trust_of
from p2pdiloco.wire.log import Body, Committee, Entry, body_digest, open_body, state_root
from p2pdiloco.wire.messages import Entries, StateShown
from p2pdiloco_node.export.log_reader import LogReader
from p2pdiloco_node.owner.ledger import Ledger, Signed
from p2pdiloco_node.owner.seen_run import SeenRun
from p2pdiloco_node.owner.telling import Teller
from p2pdiloco_node.owner.words import find_peer, owner_of

POLL_S = 1.0
SAID_AGAIN_S = 5.0
SHOWN_MAX = 8  # peers named in a sentence
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
    there: tuple[PeerId, ...]  # at the base, and able to vote
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
    used = ledger.of(seen.run)
    unheard = used.epoch if used.epoch > found.epoch else 0
    if len(alive) >= old.quorum and not force:
        raise OperatorError(_why_not(old, len(alive), unheard), RUN)
    if not agree(_what_follows(seen, found, old, committee, unheard)):
        raise OperatorError("Nothing was signed.", USAGE)
    epoch = max(used.epoch, found.epoch) + 1
    sequence = max(used.sequence, rules.owner_sequence) + 1
    entry = recovery_entry(
        seen.run, signer, epoch=epoch, base_index=found.index, base=found.head, state=rules,
        roots=found.roots, committee=committee, owner_sequence=sequence, term=found.term + 1,
    )  # fmt: skip
    await asyncio.to_thread(_note, ledger, seen, used, Signed(epoch, sequence))
    following = await _carry(seen, entry, committee, wait_s)
    names = tuple(seen.name_of(m) for m in committee.members)
    return Recovered(epoch, found.index + 1, rules.version, names, following)


def _note(ledger: Ledger, seen: SeenRun, before: Signed, signed: Signed) -> None:
    """Before anybody sees it: an epoch is begun once. Raises: OperatorError: the key signed meanwhile."""
    with ledger.held():
        if ledger.of(seen.run) != before:
            raise OperatorError(
                "This key has signed something else for the run meanwhile, so what was shown may not be so "
                "any more. Nothing was signed: look at the run, and recover again if it needs it."
            )
        ledger.note(seen.run, signed)


async def _find(seen: SeenRun, wait_s: float) -> Found:
    """The newest state that somebody has and the log proves; waits a little for the others to get there.

    Raises: OperatorError.
    """
    began, before = time.monotonic(), (-1, -1, 0)
    look = _Look(seen, strangers_until=began + wait_s / 4, until=began + wait_s)
    # Whoever was named may be gone; if not, its log says best whom the run trusts.
    with suppress(OperatorError, TimeoutError):
        async with asyncio.timeout(wait_s):
            await seen.catch_up()
    while True:
        states = await seen.states()
        if not states:
            raise OperatorError(
                "No node of the run answers: nobody has its state. Start at least one that took part, or "
                "name its address with --peers HOST:PORT.",
                NETWORK,
            )
        found = await look.best(states)
        seen.told.say(
            f"{len(states)} of {len(seen.hosts)} known peers answer; {len(found.there)} have entry "
            f"{found.index} of epoch {found.epoch}, the newest."
        )
        now = (found.epoch, found.index, len(found.there))
        # Who lags is caught up by the others without any majority: as long as that goes on, it is waited for.
        if now == before or len(found.there) == len(states) or time.monotonic() > look.strangers_until:
            return found
        before = now
        await asyncio.sleep(3 * seen.spec.committee.heartbeat_s)


States = dict[PeerId, tuple[StateShown, str]]


class _Look:
    """For the newest state that a log proves. Anybody can claim a newer one, and be slow to prove it.

    So whoever is known to the log is asked first, several at once, and strangers get a share of the time
    together: they hold nobody up for longer.
    """

    def __init__(self, seen: SeenRun, *, strangers_until: float, until: float) -> None:
        """Monotonic seconds."""
        self._seen = seen
        self.strangers_until = strangers_until
        self._until = until
        self._hopeless: set[tuple[PeerId, Claim]] = set()  # no log of theirs proved it

    async def best(self, states: States) -> Found:
        """`seen` goes on with the log that proves it. Raises: OperatorError: no claim is proved by a log."""
        while True:
            claims = sorted({_claim(s): s for s, _ in states.values()}.values(), key=_rank, reverse=True)
            best = next((claim for claim in claims if proves(self._seen.tail, claim)), None)
            asked, until = self._next(states, (-1, -1) if best is None else _rank(best))
            if not asked:
                break
            logs = await asyncio.gather(*(self._read(states[peer], until) for peer in asked))
            for peer, log in zip(asked, logs, strict=True):
                claim = states[peer][0]
                if log is None or not proves(log, claim):
                    self._hopeless.add((peer, _claim(claim)))
                elif best is None or _rank(claim) > _rank(best):
                    best, self._seen.tail = claim, log
        if best is None:
            raise OperatorError(
                "No state that a node shows is the one that its log was certified with: nothing can be "
                "signed. Name nodes that took part with --peers HOST:PORT.",
                RUN,
            )
        return self._found(states, best)

    def _next(self, states: States, above: tuple[int, int]) -> tuple[list[PeerId], float]:
        """Who is asked for a log next, one for each claim above `above`, and until when."""
        open_claims = [
            peer
            for peer, (shown, _) in states.items()
            if _rank(shown) > above and (peer, _claim(shown)) not in self._hopeless
        ]
        for known, until in ((True, self._until), (False, self.strangers_until)):
            some = [peer for peer in open_claims if self._is_known(peer) == known]
            if some and time.monotonic() < until:
                newest = sorted(some, key=lambda p: (_rank(states[p][0]), p))
                one_each = {_claim(states[peer][0]): peer for peer in newest}
                return list(one_each.values())[-limits.logs_read_at_once :], until
        return [], 0.0

    def _is_known(self, peer: PeerId) -> bool:
        """The log so far gives a reason to believe that it takes part."""
        seen = self._seen
        if seen.spec.admission == "local" or peer == seen.spec.committee.genesis.witness:
            return True
        return peer in seen.log.committee.members or trust_of(seen.rules, peer) >= max(
            1, seen.spec.trust_tokens
        )

    async def _read(self, shown: tuple[StateShown, str], until: float) -> LogReader | None:
        claim, url = shown
        log = self._seen.reader(url)
        try:
            async with asyncio.timeout(until - time.monotonic()):
                await log.catch_up(to=claim.index)
        except (OperatorError, TimeoutError):
            return None
        return log

    def _found(self, states: States, best: StateShown) -> Found:
        there = [p for p, (s, _) in states.items() if s.votes and _claim(s) == _claim(best)]
        certified = self._seen.log.term_of(best.index)
        terms = [states[p][0].term for p in there if states[p][0].term <= certified + TERMS_AHEAD_MAX]
        return Found(
            best.index, best.epoch, Digest(best.head), (Digest(best.params), Digest(best.momentum)),
            tuple(sorted(there)), max([certified, *terms]),
        )  # fmt: skip


Claim = tuple[int, int, bytes, bytes, bytes]


def _claim(shown: StateShown) -> Claim:
    return shown.epoch, shown.index, shown.head, shown.params, shown.momentum


def _rank(shown: StateShown) -> tuple[int, int]:
    return shown.epoch, shown.index


def proves(reader: LogReader, claim: StateShown) -> bool:
    """Whether the log was certified with the state that is shown."""
    log = reader.log
    if claim.index > log.index or log.epoch_at(claim.index) != claim.epoch:
        return False
    if log.head_at(claim.index) != claim.head:
        return False
    if claim.index == 0:
        genesis = log.spec.genesis
        return (claim.params, claim.momentum) == (genesis.params_root, genesis.momentum_root)
    root = state_root(claim.params, claim.momentum, rules_digest(reader.rules_at(claim.index)))
    return root == log.content(claim.index).state_root


def _committee(seen: SeenRun, found: Found, seats: Sequence[str]) -> Committee:
    """Raises: OperatorError."""
    rules = seen.rules_at(found.index)
    if seats:
        wanted = [find_peer(seen, words) for words in seats]
        absent = [seen.name_of(p) for p in wanted if p not in found.there]
        if absent:
            raise OperatorError(
                f"{absent[0]} does not answer, lacks the newest state, or votes no more: it can have no seat."
            )
        witness = seen.spec.committee.genesis.witness
        voters = tuple(p for p in wanted if p != witness)
        committee = Committee(witness if witness in wanted else NO_DIGEST, voters)
        why = refuses_rescue(seen.spec, rules, committee)
        if why is not None:
            raise OperatorError(f"That can be no committee: {why}.", USAGE)
        return committee
    largest = rescue_committee(seen.spec, rules, found.there)
    if largest is None:
        there = "; ".join(_described(seen, rules, p) for p in found.there[:SHOWN_MAX]) or "nobody who votes"
        raise OperatorError(
            "Nobody who is there can have a seat by what the log says: anybody may come with a new key, so "
            f"only those whom the run trusts are put in charge. There are: {there}. Name whom you know with "
            "--seats PEER.",
            RUN,
        )
    return largest


def _described(seen: SeenRun, rules: RulesState, peer: PeerId) -> str:
    """A name is what its owner says; the beginning of the PeerId and the trust are not."""
    if peer == seen.spec.committee.genesis.witness:
        return f"the witness ({peer.hex()[:16]})"
    trusted = "" if may_sit(seen.spec, rules, peer) else ", which the log does not trust"
    return f"{seen.name_of(peer)} ({peer.hex()[:16]}, {trust_of(rules, peer):,} tokens of trust{trusted})"


def _why_not(old: Committee, alive: int, unheard: int) -> str:
    there = f"{alive} of {old.size} voters are there and have the newest state"
    if unheard:
        return (
            f"{there}, but this key began epoch {unheard} already, and nobody who answers follows it. Name "
            "those who do with --peers HOST:PORT. If a crash took it from everybody who was told, begin "
            "another with --force."
        )
    return (
        f"{there}, and {old.quorum} are a majority: the run goes on by itself. To put another committee in "
        "charge all the same: --force."
    )


def _what_follows(seen: SeenRun, found: Found, old: Committee, new: Committee, unheard: int) -> str:
    """What the owner agrees to. `unheard`: an epoch that this key began and nobody who answers is in."""
    rules = seen.rules_at(found.index)
    gone = [m for m in old.members if m not in found.there]
    base = f"entry {found.index}, version {rules.version} ({rules.clock:,} tokens)"
    lines = [
        f"Run {seen.spec.name!r} goes on from {base}, in a new epoch.",
        f"New committee: {'; '.join(_described(seen, rules, m) for m in new.members)}.",
    ]
    if gone:
        names = ", ".join(seen.name_of(m) for m in gone)
        lines.append(
            f"Not there, or behind: {names}. What they certified after entry {found.index} and nobody else "
            "has is lost for good, words of yours included; when they come back they follow."
        )
    if unheard:
        lines.append(
            f"Epoch {unheard}, which this key began before, is over as well, and what was certified in it."
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
        following = await _following(seen, entry, committee, states, until)
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


async def _following(
    seen: SeenRun, entry: Entry, committee: Committee, states: States, until: float
) -> set[PeerId]:
    """Who shows that this recovery is in its log, and not another one of the same number.

    Raises: OperatorError: a voter's log has another.
    """
    body, head = open_body(entry.body), body_digest(entry.body)
    following: set[PeerId] = set()
    for peer, (shown, url) in states.items():
        if shown.epoch < body.epoch or shown.index < body.index:
            continue
        if (shown.epoch, shown.index, shown.head) == (body.epoch, body.index, head):
            following.add(peer)
        elif peer in committee.members or _is_on(seen.tail.log, shown):
            # Further on, or elsewhere: its log says which. One log serves for all who are on it.
            if not _is_on(seen.tail.log, shown):
                reader = seen.reader(url)
                with suppress(OperatorError, TimeoutError):
                    async with asyncio.timeout(max(1.0, until - time.monotonic())):
                        await reader.catch_up(to=shown.index)
                if not _is_on(reader.log, shown):
                    continue  # not now
                seen.tail = reader
            if seen.log.head_at(body.index) == head:
                following.add(peer)
            else:
                raise OperatorError(_another(f"{seen.name_of(peer)} ({peer.hex()[:16]})", body, shown), RUN)
    return following


def _another(who: str, body: Body, shown: StateShown) -> str:
    if shown.epoch > body.epoch:
        return (
            f"{who} follows epoch {shown.epoch}, which was begun with this key as well and has dropped the "
            f"recovery of this command (epoch {body.epoch}): that one holds."
        )
    return (
        f"The run is split: {who} follows another recovery of epoch {body.epoch}, signed with a copy of this "
        "key. Recover once more, with all of them there (--peers): everybody follows the newer epoch."
    )


def _is_on(log: RunLog, shown: StateShown) -> bool:
    return shown.index <= log.index and log.head_at(shown.index) == shown.head
