"""What a key signs: each number once, the same word again while it waits, and nothing over an epoch's end."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from p2pdiloco.errors import OperatorError
from p2pdiloco.ids import NO_DIGEST, PeerId, RunId
from p2pdiloco.rules.state import after_entry
from p2pdiloco.wire.log import Committee, OwnerEntry
from p2pdiloco_node.owner import words
from p2pdiloco_node.owner.ledger import Ledger, Signed
from p2pdiloco_node.owner.seen_run import SeenRun
from p2pdiloco_node.owner.words import Followed, Wanted, _signed, say_word
from p2pdiloco_node.progress import Lines, Quiet
from tests.unit.protocol.builders import NODES, OWNER, Chain, make_run, recover

from .conftest import Swarm

A = NODES[0]
RUN = make_run(A)
ONE = RunId(b"r" * 32)


def seen_run(swarm: Swarm | None = None) -> SeenRun:
    if swarm is not None:
        return swarm.seen(RUN)
    return SeenRun(None, RUN.id, RUN.spec, ["http://x"], Quiet())  # type: ignore[arg-type]


def test_no_number_is_used_twice(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "owner.key")
    ledger.note(ONE, Signed(1, 4))
    for used in (Signed(1, 4), Signed(2, 4), Signed(0, 5), Signed(2, 3)):
        with pytest.raises(OperatorError, match="nothing was signed"):
            ledger.note(ONE, used)
    ledger.note(ONE, Signed(1, 5))
    assert ledger.of(ONE) == Signed(1, 5)


def test_who_takes_a_number_holds_the_ledger(tmp_path: Path) -> None:
    """Two commands of one key: the second waits, in another process as in another thread."""
    key = tmp_path / "owner.key"
    waiting, taken = threading.Event(), []

    def other() -> None:
        waiting.set()
        with Ledger(key).held():
            taken.append(Ledger(key).of(ONE))

    thread = threading.Thread(target=other)
    with Ledger(key).held():
        thread.start()
        assert waiting.wait(10)
        thread.join(0.05)
        assert not taken
        Ledger(key).note(ONE, Signed(1, 1))
    thread.join(10)
    assert taken == [Signed(1, 1)]


def test_the_same_word_again_is_the_word_that_waits(tmp_path: Path) -> None:
    """Voters keep so many words: who repeats a command does not fill that."""
    seen, ledger = seen_run(), Ledger(tmp_path / "owner.key")
    sign = lambda kind, **more: _signed(seen, Wanted(kind, **more), PeerId(b""), OWNER, ledger)  # noqa: E731
    pause = sign("pause")
    assert (pause.owner_sequence, seen.log.refuses_word(pause)) == (1, None)
    assert [sign("pause") for _ in range(3)] == [pause] * 3
    extend = sign("extend", target_tokens=10**9)
    assert extend.owner_sequence == 2
    assert sign("extend", target_tokens=10**9) == extend
    assert sign("extend", target_tokens=10**10).owner_sequence == 3
    assert sign("pause").owner_sequence == 4


def test_a_word_that_was_followed_is_not_said_again(tmp_path: Path) -> None:
    seen, ledger = seen_run(), Ledger(tmp_path / "owner.key")
    pause = _signed(seen, Wanted("pause"), PeerId(b""), OWNER, ledger)
    chain = Chain(RUN)
    chain.add(OwnerEntry(pause, NO_DIGEST))
    seen.tail.log.append(chain.entries[0])
    seen.tail.rules = after_entry(seen.tail.rules, seen.log.content(1), RUN.spec)
    assert _signed(seen, Wanted("pause"), PeerId(b""), OWNER, ledger).owner_sequence == 2


async def test_a_word_is_followed_once_it_is_in_the_log(swarm: Swarm) -> None:
    chain = Chain(RUN)
    chain.steps(2)
    host = (await swarm.serve(RUN, A)).has(chain)
    with pytest.raises(OperatorError, match="the word is not in the log"):
        await say_word(seen_run(swarm), Wanted("pause"), swarm.key, wait_s=0.0)
    assert len(host.told) == 1
    # It gets there later; whoever says it again finds it.
    word = Ledger(swarm.key).word_of(RUN.id)
    assert word is not None
    chain.add(OwnerEntry(word, NO_DIGEST))
    host.has(chain)
    assert await say_word(seen_run(swarm), Wanted("pause"), swarm.key, wait_s=0.0) == (
        "The run is paused already."
    )

    def followed() -> None:
        resume = Ledger(swarm.key).word_of(RUN.id)
        assert resume is not None
        chain.add(OwnerEntry(resume, NO_DIGEST))
        host.has(chain)

    host.on_told = followed
    said = await say_word(seen_run(swarm), Wanted("resume"), swarm.key, wait_s=20.0)
    assert isinstance(said, Followed)
    assert (said.index, said.version, said.owner_sequence) == (4, 2, 2)


async def test_what_an_owner_waits_for_is_said_once(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The log is read again at every look; that was said by turns with what is waited for."""
    chain = Chain(RUN)
    chain.steps(2)
    host = (await swarm.serve(RUN, A)).has(chain)
    monkeypatch.setattr(words, "POLL_S", 0.0)
    looks = 0

    def look(_request: object, data: bytes) -> bytes:
        nonlocal looks
        looks += 1
        if looks == 4:
            word = Ledger(swarm.key).word_of(RUN.id)
            assert word is not None
            chain.add(OwnerEntry(word, NO_DIGEST))
            host.has(chain)
        return data

    host.change = look
    seen = seen_run(swarm)
    seen.told = Lines()
    said = await say_word(seen, Wanted("pause"), swarm.key, wait_s=60.0)
    assert isinstance(said, Followed)
    assert looks == 5
    assert capsys.readouterr().out.splitlines() == [
        "Reading the log ...",
        "Word 1 of epoch 0 (pause) reached 1 of 1 peer; the committee puts it into the log.",
        "Waiting for the committee ...",
    ]


async def test_a_word_of_an_epoch_that_ends_meanwhile_is_given_up(swarm: Swarm) -> None:
    """It was signed for that epoch: nobody would ever follow it, however long one waits."""
    chain = Chain(RUN)
    chain.steps(3)
    host = (await swarm.serve(RUN, A)).has(chain)

    def recovered() -> None:
        host.journal.load_entries()
        host.journal.cut(2)
        base = Chain(RUN)
        base.steps(2)
        entry = recover(base.log, base.state, 2, Committee(NO_DIGEST, (A.peer_id,)))
        host.has_entries([entry])

    host.on_told = recovered
    with pytest.raises(OperatorError, match="A recovery began epoch 1"):
        await say_word(seen_run(swarm), Wanted("pause"), swarm.key, wait_s=20.0)


@pytest.mark.parametrize(("versions", "last"), [(0, 900), (2, 3)])
async def test_an_extend_that_will_move_nothing_is_asked_about_before_it_is_signed(
    swarm: Swarm, versions: int, last: int
) -> None:
    """The run ends by its outer steps: only the learning rate would end higher."""
    run = make_run(A, target_version=last)
    chain = Chain(run)
    chain.steps(versions)
    (await swarm.serve(run, A)).has(chain)
    more = Wanted("extend", target_tokens=run.spec.target_tokens * 2)

    def no(text: str) -> None:
        raise OperatorError(text)

    with pytest.raises(OperatorError, match=rf"ends at version {last:,} whatever its target"):
        await say_word(swarm.seen(run), more, swarm.key, wait_s=0.0, agree=no)
    assert Ledger(swarm.key).word_of(run.id) is None
    with pytest.raises(OperatorError, match="the word is not in the log"):
        await say_word(swarm.seen(run), more, swarm.key, wait_s=0.0)
    assert Ledger(swarm.key).word_of(run.id) is not None


@pytest.mark.parametrize("kind", ["finish", "revoke"])
async def test_what_cannot_be_taken_back_is_asked_with_its_run_and_node_before_it_is_signed(
    swarm: Swarm, kind: str
) -> None:
    """`revoke` did not ask, and `finish` did not say which run it was about to end."""
    chain = Chain(RUN)
    chain.steps(2)
    (await swarm.serve(RUN, A)).has(chain)
    asked = []

    def no(text: str) -> None:
        asked.append(text)
        raise OperatorError(text)

    wanted = Wanted(kind, peer=A.peer_id.hex() if kind == "revoke" else "")
    with pytest.raises(OperatorError, match="cannot be taken back"):
        await say_word(seen_run(swarm), wanted, swarm.key, wait_s=0.0, agree=no)
    assert Ledger(swarm.key).word_of(RUN.id) is None
    assert f"run {RUN.spec.name!r} ({RUN.id.hex()[:16]}, version 2)" in asked[0]
    if kind == "revoke":
        assert f"'n{A.peer_id.hex()[:4]}' ({A.peer_id.hex()[:16]})" in asked[0]
    with pytest.raises(OperatorError, match="the word is not in the log"):
        await say_word(seen_run(swarm), wanted, swarm.key, wait_s=0.0)
    assert Ledger(swarm.key).word_of(RUN.id) is not None
