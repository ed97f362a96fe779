"""`p2pdiloco run pause|resume|extend|finish|revoke`: the owner's word, signed, carried to the committee, and
waited for until a majority of it has put the word into the log."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.exit_codes import NETWORK, RUN, USAGE
from p2pdiloco.ids import PeerId
from p2pdiloco.rules.state import RulesState
from p2pdiloco.wire.log import OwnerEntry, OwnerWord
from p2pdiloco.wire.messages import OwnerWordMessage
from p2pdiloco.wire.signing import Ed25519Signer
from p2pdiloco.words import count_of
from p2pdiloco_node.owner.ledger import Ledger, Signed, in_hex
from p2pdiloco_node.owner.seen_run import SeenRun
from p2pdiloco_node.owner.telling import Teller
from p2pdiloco_node.storage.keys import load_key

POLL_S = 2.0  # a log is not read more often than once a second from one address
SAID_AGAIN_S = 5.0


class Wanted(NamedTuple):
    """What the owner says."""

    kind: str
    target_tokens: int = 0  # extend
    peer: str = ""  # revoke: a PeerId, the beginning of one, or a name


@dataclass(frozen=True, slots=True)
class Followed:
    """The word in the log."""

    kind: str
    index: int
    version: int  # outer steps before it
    epoch: int
    owner_sequence: int
    effect: str  # one sentence


def owner_of(seen: SeenRun, key: Path) -> Ed25519Signer:
    """Raises: OperatorError: no key, or another owner's."""
    signer = load_key(key)
    if signer.public_key != seen.spec.owner_key:
        raise OperatorError(
            f"{key} is not the key of this run's owner: run {seen.spec.name!r} was signed with another one; "
            "name it with --owner-key FILE."
        )
    return signer


async def say_word(
    seen: SeenRun,
    wanted: Wanted,
    key: Path,
    *,
    wait_s: float,
    agree: Callable[[str], None] | None = None,
) -> Followed | str:
    """Sign, deliver, and wait. A sentence where there is nothing to do.

    `agree`: asked before a word is signed that cannot be taken back, or that will most likely not do what is
    hoped for; None: nobody is.

    Raises: OperatorError: `agree` refuses, the key is not the owner's, the word makes no sense, or it is not
    certified within `wait_s`: then it may still be later.
    """
    signer = owner_of(seen, key)
    await seen.catch_up()
    peer = find_peer(seen, wanted.peer) if wanted.kind == "revoke" else PeerId(b"")
    nothing = _refuses(seen.rules, seen, wanted, peer)
    if nothing is not None:
        return nothing
    question = _question(seen, wanted, peer)
    if question and agree is not None:
        agree(question)  # nothing else goes on meanwhile, and Ctrl-C ends the question, not a thread's wait
    word = await asyncio.to_thread(_signed, seen, wanted, peer, signer, Ledger(key))
    return await _carry(seen, word, seen.log.epoch, wait_s)


def _refuses(rules: RulesState, seen: SeenRun, wanted: Wanted, peer: PeerId) -> str | None:
    """A sentence where the run already does that. Raises: OperatorError: it cannot."""
    if rules.finished:
        if wanted.kind == "finish":
            return "The run is over already."
        raise OperatorError(f"The run is over (version {rules.version}): nothing can be said to it.", RUN)
    if wanted.kind == "pause" and rules.paused:
        return "The run is paused already."
    if wanted.kind == "resume" and not rules.paused:
        return "The run is not paused."
    if wanted.kind == "extend" and wanted.target_tokens <= rules.target_tokens:
        raise OperatorError(
            f"--tokens {wanted.target_tokens:,} is no extension: the target is {rules.target_tokens:,} "
            f"tokens, and {rules.clock:,} are merged.",
            USAGE,
        )
    if wanted.kind == "revoke":
        if peer in rules.revoked:
            return f"{seen.name_of(peer)} is revoked already."
        if peer == seen.spec.committee.genesis.witness:
            raise OperatorError(
                "The witness has no deltas to refuse. To go on without it: p2pdiloco run recover.",
                USAGE,
            )
        if len(rules.revoked) >= limits.revoked_max:
            raise OperatorError(f"{limits.revoked_max} peers are revoked, and no more can be.", RUN)
    return None


def _question(seen: SeenRun, wanted: Wanted, peer: PeerId) -> str:
    """What the owner has to know before the word is signed; empty: nothing. It names what the word is about:
    a link in the shell's history may be another run's."""
    run = f"run {seen.spec.name!r} ({seen.run.hex()[:16]}, version {seen.rules.version:,})"
    match wanted.kind:
        case "finish":
            return f"`finish` ends {run} for everybody, and cannot be taken back."
        case "revoke":
            who = f"{seen.name_of(peer)!r} ({peer.hex()[:16]})"
            return f"`revoke` refuses whatever {who} sends to {run} from now on, and cannot be taken back."
        case _:
            return _doubt(seen, wanted)


def _doubt(seen: SeenRun, wanted: Wanted) -> str:
    """Why more tokens would most likely not be trained on; empty where nothing speaks against it."""
    last, rules = seen.spec.target_version, seen.rules
    if wanted.kind != "extend" or not last:
        return ""
    words = (
        f"The run ends at version {last:,} whatever its target of tokens: its RunSpec says so, and that "
        "cannot be moved."
    )
    if not rules.version:
        return f"{words} Nothing is merged yet, so nobody can tell which comes first."
    reached = rules.clock * last // rules.version
    if reached <= rules.target_tokens:
        return (
            f"{words} At the pace so far it will have about {reached:,} tokens then, below its target of "
            f"{rules.target_tokens:,} already: with another target only the learning rate would end higher. "
            "A run that goes on is a fork: p2pdiloco run fork --outer-steps N."
        )
    seen.told.say(f"{words} At the pace so far it will have about {reached:,} tokens then.")
    return ""


def find_peer(seen: SeenRun, words: str) -> PeerId:
    """The one peer that `words` names: a PeerId, the beginning of one, or a name on the page.

    Raises: OperatorError: nobody, or more than one.
    """
    known = {*seen.hosts, *(PeerId(p.peer) for p in seen.rules.peers), *seen.log.committee.members}
    low = words.strip().lower()
    if len(low) == 64:
        try:
            return PeerId(bytes.fromhex(low))  # also one that was never heard of
        except ValueError:
            pass
    found = {p for p in known if len(low) >= 4 and p.hex().startswith(low)}
    found |= {p for p in known if seen.name_of(p).lower() == low}
    if len(found) == 1:
        return next(iter(found))
    if not found:
        raise OperatorError(
            f"No peer {words!r} is known: give its PeerId (64 hex digits), at least the first 4 of them, or "
            "its name as the page shows it.",
            USAGE,
        )
    names = ", ".join(sorted(f"{seen.name_of(p)} ({p.hex()[:16]})" for p in found))
    raise OperatorError(f"{words!r} names {len(found)} peers: {names}. Give more of the PeerId.", USAGE)


def _signed(seen: SeenRun, wanted: Wanted, peer: PeerId, signer: Ed25519Signer, ledger: Ledger) -> OwnerWord:
    """Its number is above every one that was certified or signed before.

    The same word again, while the last one waits, is that one: voters keep only so many.
    """
    epoch = seen.log.epoch
    with ledger.held():
        used = ledger.of(seen.run)
        if used.epoch > epoch:
            seen.told.say(
                f"A recovery to epoch {used.epoch} was signed with this key, and {seen.urls[0]} has not "
                "heard of it: this word is for its epoch alone."
            )
        waiting = ledger.word_of(seen.run)
        sequence = max(seen.rules.owner_sequence, used.sequence) + 1
        word = OwnerWord(wanted.kind, sequence, wanted.target_tokens, peer, b"")
        if waiting is not None and waiting.owner_sequence > seen.rules.owner_sequence:
            same = msgspec.structs.replace(word, owner_sequence=waiting.owner_sequence)
            same = msgspec.structs.replace(same, signature=signer.sign(same.statement(seen.run, epoch)))
            if same == waiting:
                return waiting
        word = msgspec.structs.replace(word, signature=signer.sign(word.statement(seen.run, epoch)))
        ledger.note(seen.run, Signed(max(used.epoch, epoch), sequence, in_hex(word)))
    return word


async def _carry(seen: SeenRun, word: OwnerWord, epoch: int, wait_s: float) -> Followed:
    """`epoch`: for which the word was signed. Raises: OperatorError."""
    first = seen.log.index + 1  # it is not in the log yet
    teller, message = Teller(seen.session, seen.run), OwnerWordMessage(word)
    until, again = time.monotonic() + wait_s, 0.0
    told: set[PeerId] = set()
    while True:
        now = time.monotonic()
        if now >= again:
            fresh = await teller.tell(seen.hosts.values(), message, epoch)
            if fresh - told:
                told |= fresh
                seen.told.say(
                    f"Word {word.owner_sequence} of epoch {epoch} ({word.kind}) reached {len(told)} "
                    f"of {count_of(len(seen.hosts), 'peer')}; the committee puts it into the log."
                )
            again = now + SAID_AGAIN_S
        seen.told.progress("Waiting for the committee", min(wait_s, wait_s - (until - now)), wait_s, "s")
        await seen.catch_up()
        if seen.log.epoch != epoch:
            raise OperatorError(
                f"A recovery began epoch {seen.log.epoch} of the run meanwhile, and this word was for epoch "
                f"{epoch}, where nobody follows it any more. Look at the run and say it again.",
                RUN,
            )
        index = _found(seen, word, first)
        if index:
            rules = seen.rules_at(index)
            return Followed(
                word.kind, index, rules.version, seen.log.epoch_at(index), word.owner_sequence,
                _effect(seen, rules, word),
            )  # fmt: skip
        if now >= until:
            raise _not_followed(seen, told, wait_s)
        await asyncio.sleep(POLL_S)


def _found(seen: SeenRun, word: OwnerWord, first: int) -> int:
    """The index, from `first` on, at which the word stands; 0 where it does not yet."""
    for index in range(seen.log.index, first - 1, -1):
        content = seen.log.content(index)
        if isinstance(content, OwnerEntry) and content.word == word:
            return index
    return 0


def _effect(seen: SeenRun, rules: RulesState, word: OwnerWord) -> str:
    match word.kind:
        case "pause":
            return (
                "Passes that are under way end; nobody begins another until you resume. Nodes go on serving."
            )
        case "resume":
            return "Nodes train again."
        case "extend":
            return f"The target is {rules.target_tokens:,} tokens now, and the learning rate ends there."
        case "finish":
            return f"The run is over at version {rules.version}: nodes keep the model and end."
        case _:
            name = seen.name_of(PeerId(word.peer))
            return f"Deltas of {name} are refused from here on, and a seat that it has goes to somebody else."


def _not_followed(seen: SeenRun, told: set[PeerId], wait_s: float) -> OperatorError:
    committee = seen.log.committee
    there = [m for m in committee.members if m in told]
    names = ", ".join(
        f"{seen.name_of(m)} ({'reached' if m in told else 'not reached'})" for m in committee.members
    )
    advice = (
        "It keeps trying while it runs: look again later with p2pdiloco run inspect."
        if len(there) >= committee.quorum
        else "If a majority of it is gone for good: p2pdiloco run recover."
    )
    return OperatorError(
        f"After {wait_s:.0f} s the word is not in the log: of the committee ({names}), {committee.quorum} "
        f"must agree. {advice}",
        NETWORK,
    )
