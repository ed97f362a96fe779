"""What the page says of the owner's words, of nodes that are revoked and of a run that is over."""

from __future__ import annotations

import pytest

from p2pdiloco.status.view import _params
from p2pdiloco.wire.log import OwnerEntry, OwnerWord
from tests.unit.status.test_builder import row, say


def test_each_word_of_the_owner_is_told_once(fake_run):
    """The page had "pause at index 99" beside "the owner says pause", and an end three times."""
    run = fake_run()
    run.node(1, "lazy")
    run.listed()
    run.step([(1, 1000, 3.0)])
    for kind in ("pause", "resume", "extend", "revoke", "finish"):
        run.owner(kind, 5000, node=1 if kind == "revoke" else None)
        # The witness's node tells of the same entry.
        run.builder.said("owner", f"{kind} at index 99", when_unix=run.now)
    run.builder.said("finished", "The run is over at version 1.", when_unix=run.now)
    run.builder.said("committee", "2 voters from index 100 on", when_unix=run.now)
    fingerprint = row(say(run), "lazy").who.fingerprint
    assert [e.text for e in reversed(say(run).events) if e.kind in ("owner", "finished", "committee")] == [
        "the owner paused the run",
        "the owner resumed the run",
        "the owner set the target to 5,000 tokens",
        f"the owner revoked lazy ({fingerprint}): its deltas are refused from now on",
        "the owner ended the run at version 1",
    ]
    run.builder.said("syncing", "fetching the snapshot of version 7", when_unix=run.now)
    assert say(run).events[0].kind == "syncing", "what no entry tells is kept"


def test_a_run_that_reached_its_target_was_ended_by_nobody(fake_run):
    run = fake_run()
    run.step([(1, 1000, 3.0)])
    run.entry(OwnerEntry(OwnerWord("finish", 0, 0, b"", b""), bytes(32)))
    newest = say(run).events[0]
    assert (newest.kind, newest.text) == ("finished", "the target is reached: the run is over at version 1")


def test_a_run_whose_one_node_is_revoked_says_so(fake_run):
    """It was "No node is connected", above the row of one."""
    run = fake_run()
    run.node(1, "lazy", loss=2.5, tokens_per_s=900.0)
    run.listed()
    run.step([(1, 1000, 3.0)])
    run.owner("revoke", node=1)
    run.listed()
    status = say(run)
    assert status.state.why.startswith("1 node is connected and revoked by the run's owner.")
    lazy = row(status, "lazy")
    assert (lazy.state.word, lazy.loss, lazy.tokens_per_s) == ("revoked", None, None), "old figures"
    run.node(1, "lazy", live=False)
    run.listed()
    assert say(run).state.why.startswith("No node is connected.")


def test_a_run_that_is_over_keeps_what_its_traffic_was(fake_run):
    run = fake_run()
    run.lifelike(12)
    before = say(run).rates.times_less_than_bf16_data_parallel
    run.owner("finish")
    for i in range(1, 5):
        run.node(i, live=False, left="the run is over")
    run.builder.directory(run.rows.values(), when_unix=run.now)
    assert before is not None
    assert say(run).rates.times_less_than_bf16_data_parallel == pytest.approx(before)


@pytest.mark.parametrize(
    ("params", "words"),
    [(42_080, "42,080"), (999_999, "999,999"), (1_250_000, "1.25 million"), (7_000_000_000, "7.0 billion")],
)
def test_small_models_have_thousands_of_parameters(params, words):
    assert _params(params) == words
