"""Whom a recovery believes: those who prove it, and only those whom the log trusts are put in charge."""

from __future__ import annotations

import asyncio
import dataclasses
import time

import msgspec
import pytest

from p2pdiloco.errors import OperatorError
from p2pdiloco.ids import NO_DIGEST, Digest
from p2pdiloco.rules.state import after_entry
from p2pdiloco.wire.envelope import open_envelope
from p2pdiloco.wire.log import Committee, Entry
from p2pdiloco.wire.messages import Entries
from p2pdiloco.wire.signing import Ed25519Signer, verify_ed25519
from p2pdiloco_node.owner.ledger import Ledger, Signed
from p2pdiloco_node.owner.rescue import _committee as choose
from p2pdiloco_node.owner.rescue import _following, _Look, _what_follows, recover
from tests.unit.protocol.builders import NODES, WITNESS, Chain, Run, header, held, make_run
from tests.unit.protocol.builders import recover as recovery

from .conftest import Swarm

A, B, C, D, E = NODES[:5]
RUN = make_run(A, B)  # and the witness
OPEN = make_run(A, B, admission="open", trust_tokens=1000, bootstrap_tokens=1)


def chain_of(run: Run, count: int) -> Chain:
    chain = Chain(run)
    chain.steps(count)
    return chain


async def look(swarm: Swarm, run: Run, *, strangers_s: float = 0.3, all_s: float = 30.0) -> _Look:
    now = time.monotonic()
    return _Look(swarm.seen(run), strangers_until=now + strangers_s, until=now + all_s)


def soon() -> float:
    return time.monotonic() + 20.0


# Who is there


async def test_a_state_is_shown_by_the_peer_itself_and_now(swarm: Swarm) -> None:
    chain = chain_of(RUN, 2)
    host = (await swarm.serve(RUN, A)).has(chain)
    seen = swarm.seen(RUN)
    (there,) = seen.hosts.values()
    shown = await seen.state_of(there)
    assert shown is not None
    assert shown[0].head == chain.log.head
    host.seals = B  # another key answers at its address
    assert await seen.state_of(there) is None
    host.seals, host.nonce = A, bytes(32)  # an answer from before
    assert await seen.state_of(there) is None


async def test_strangers_who_claim_more_hold_nobody_up(swarm: Swarm) -> None:
    """Each claims the newest state and is slow with its log; there are more than are read at once."""
    chain = chain_of(OPEN, 3)
    await swarm.serve(OPEN, A)
    swarm.hosts[0].has(chain)
    (await swarm.serve(OPEN, WITNESS)).has(chain)
    for number, stranger in enumerate(NODES[2:], start=1):
        (await swarm.serve(OPEN, stranger, slow=True)).claims(epoch=5, index=2**40 + number)
    looking = await look(swarm, OPEN)
    states = await looking._seen.states()
    assert len(states) == 2 + len(NODES[2:])
    async with asyncio.timeout(20):
        found = await looking.best(states)
    assert (found.epoch, found.index, found.head) == (0, 3, chain.log.head)
    assert set(found.there) == {A.peer_id, WITNESS.peer_id}
    asked = sum(host.logs_asked for host in swarm.hosts)
    again = await looking.best(states)  # who proved nothing is not asked again
    assert again == found
    assert sum(host.logs_asked for host in swarm.hosts) == asked


async def test_the_newest_state_may_be_a_stranger_s(swarm: Swarm) -> None:
    """It proves it: with what the voters certified."""
    (await swarm.serve(OPEN, A)).has(chain_of(OPEN, 3))
    (await swarm.serve(OPEN, D)).has(chain_of(OPEN, 5))
    looking = await look(swarm, OPEN, strangers_s=20.0)
    found = await looking.best(await looking._seen.states())
    assert (found.index, found.there) == (5, (D.peer_id,))


async def test_a_log_that_is_no_log_of_the_run_proves_nothing(swarm: Swarm) -> None:
    host = (await swarm.serve(RUN, A)).has(chain_of(RUN, 2))
    host.path.write_bytes(b"no log")
    looking = await look(swarm, RUN)
    with pytest.raises(OperatorError, match="nothing can be signed"):
        await looking.best(await looking._seen.states())


# Who gets a seat


def trusting(chain: Chain, who: Ed25519Signer, steps: int) -> Chain:
    """Tokens that the log accepted of somebody."""
    for _ in range(steps):
        version = chain.state.version
        delta = held(header(chain.run, who, version + 1, base=version), who)
        chain.step(delta)
    return chain


async def test_an_open_run_is_never_put_into_the_hands_of_newcomers(swarm: Swarm) -> None:
    """Two fresh keys with a delta each, there and up to date; names may be ground so that they sort first."""
    chain = trusting(trusting(trusting(Chain(OPEN), D, 40), B, 1), C, 1)
    state = chain.state
    trust = {p.peer: p.trust for p in state.peers}
    spec = msgspec.structs.replace(OPEN.spec, trust_tokens=(trust[D.peer_id] + trust[C.peer_id]) // 2)
    assert trust[C.peer_id] < spec.trust_tokens <= trust[D.peer_id]
    run = Run(OPEN.id, spec)
    for who in (WITNESS, B, C, D, E):
        (await swarm.serve(run, who)).has(chain)
    looking = await look(swarm, run)
    seen = looking._seen
    await seen.catch_up()
    found = await looking.best(await seen.states())
    assert choose(seen, found, ()) == Committee(WITNESS.peer_id, (B.peer_id, D.peer_id))  # B had a seat
    strangers = dataclasses.replace(found, there=(C.peer_id, E.peer_id))
    with pytest.raises(OperatorError, match=r"--seats PEER") as error:
        choose(seen, strangers, ())
    assert C.peer_id.hex()[:16] in str(error.value)
    # Whom the owner knows, it may name; what the log knows of them is said before it agrees.
    committee = choose(seen, found, (WITNESS.peer_id.hex(), C.peer_id.hex(), D.peer_id.hex()))
    asked = _what_follows(seen, found, seen.log.committee, committee, 0)
    assert f"({C.peer_id.hex()[:16]}, {trust[C.peer_id]:,} tokens of trust, which the log does not" in asked
    assert f"({D.peer_id.hex()[:16]}, {trust[D.peer_id]:,} tokens of trust)" in asked


# An epoch is begun once


async def test_two_recoveries_at_once_begin_one_epoch_once(swarm: Swarm) -> None:
    """The other command signs while this one waits for its person."""
    host = (await swarm.serve(RUN, A)).has(chain_of(RUN, 2))
    seen = swarm.seen(RUN)

    def agree(_text: str) -> bool:
        Ledger(swarm.key).note(RUN.id, Signed(1, 1))
        return True

    with pytest.raises(OperatorError, match="signed something else for the run meanwhile"):
        await recover(seen, swarm.key, seats=(), force=False, agree=agree, wait_s=20.0)
    assert not host.told
    assert Ledger(swarm.key).of(RUN.id) == Signed(1, 1)


def with_recovery(entry: Entry, base: int, count: int) -> Chain:
    """`base` entries, the recovery, and `count` more under its committee."""
    chain = chain_of(RUN, base)
    chain.log.append(entry)
    chain.entries.append(entry)
    chain.state = after_entry(chain.state, chain.log.content(base + 1), RUN.spec)
    chain.steps(count)
    return chain


@pytest.mark.parametrize("count", [0, 3], ids=["at the recovery", "further on"])
async def test_who_follows_is_told_by_the_log_and_not_by_a_number(swarm: Swarm, count: int) -> None:
    base, new = chain_of(RUN, 2), Committee(NO_DIGEST, (A.peer_id,))
    mine = recovery(base.log, base.state, 2, new)
    (await swarm.serve(RUN, A)).has(with_recovery(mine, 2, count))
    (await swarm.serve(RUN, B)).has(base)  # in the epoch before
    seen = swarm.seen(RUN)
    assert await _following(seen, mine, new, await seen.states(), soon()) == {A.peer_id}


@pytest.mark.parametrize("count", [0, 3], ids=["at the recovery", "further on"])
@pytest.mark.parametrize(("epoch", "sentence"), [(1, "The run is split"), (2, "that one holds")])
async def test_another_recovery_of_the_same_key_is_said(
    swarm: Swarm, count: int, epoch: int, sentence: str
) -> None:
    """Signed with a copy of the key, which knows nothing of this one's numbers."""
    base, new = chain_of(RUN, 2), Committee(NO_DIGEST, (A.peer_id,))
    mine = recovery(base.log, base.state, 2, new)
    other = recovery(base.log, base.state, 2, new, epoch=epoch, at=(Digest(b"p" * 32), Digest(b"m" * 32)))
    (await swarm.serve(RUN, A)).has(with_recovery(other, 2, count))
    seen = swarm.seen(RUN)
    with pytest.raises(OperatorError, match=sentence):
        await _following(seen, mine, new, await seen.states(), soon())


async def test_a_claim_to_follow_another_recovery_proves_nothing(swarm: Swarm) -> None:
    base, new = chain_of(RUN, 2), Committee(NO_DIGEST, (A.peer_id,))
    mine = recovery(base.log, base.state, 2, new)
    (await swarm.serve(RUN, A)).has(base).claims(epoch=1, index=3)
    seen = swarm.seen(RUN)
    assert await _following(seen, mine, new, await seen.states(), soon()) == set()


async def test_a_recovery_is_signed_told_and_followed(swarm: Swarm) -> None:
    host = (await swarm.serve(RUN, A)).has(chain_of(RUN, 2))

    def follow() -> None:
        epoch = Ledger(swarm.key).of(RUN.id).epoch
        assert epoch == 1  # noted before anybody was told
        message = open_envelope(host.told[0], verify_ed25519, run=RUN.id, me=A.peer_id).message
        assert isinstance(message, Entries)
        host.has(with_recovery(message.entries[0], 2, 0))

    host.on_told = follow
    done = await recover(
        swarm.seen(RUN), swarm.key, seats=(), force=False, agree=lambda _text: True, wait_s=20.0
    )
    assert (done.epoch, done.index, done.version, done.following) == (1, 3, 2, 1)
