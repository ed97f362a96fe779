"""The line at the terminal: every ten seconds, when the state changes, and never a flood."""

from __future__ import annotations

from p2pdiloco.ids import Digest, PeerId, RunId
from p2pdiloco.wire.messages import DeltaReceipt, Outcome
from p2pdiloco_node.taking_part.narrator import Narrator
from p2pdiloco_node.telemetry import BrainView, Telemetry

ME, OTHER, WITNESS = PeerId(b"m" * 32), PeerId(b"o" * 32), PeerId(b"w" * 32)


class Kit:
    def __init__(self) -> None:
        self.at = 100.0
        self.aggregator = OTHER
        self.telemetry = Telemetry("n", ME, RunId(bytes(32)), "r", role="node", pid=1, inner_steps=8)
        self.narrator = Narrator(self.telemetry, self._brain, ME, WITNESS, clock=lambda: self.at)

    def _brain(self) -> BrainView:
        return BrainView(
            index=3, version=2, term=1, leads=False, aggregator=self.aggregator,
            members=((WITNESS, True), (ME, False), (OTHER, False)), clock=0, in_flight=0, peers=2,
            root=Digest(bytes(32)),
        )  # fmt: skip

    def line(self, after_s: float) -> str:
        self.at += after_s
        return self.narrator.due() or ""


def test_it_says_what_it_fetches_and_then_what_it_trains() -> None:
    kit = Kit()
    kit.telemetry.fetching("data shards", 1, 3)
    assert kit.line(0).startswith("joining: fetching data shards: 1 of 3; version 2;")
    kit.telemetry.fetching("data shards", 2, 3)
    assert kit.line(1) == "", "only a number changed"
    assert kit.line(9).startswith("joining: fetching data shards: 2 of 3")
    kit.telemetry.begins("cpu")
    assert kit.line(1).startswith("syncing: the trainer begins (cpu)")
    kit.telemetry.stepped(3, 8, 2.5, 1234.4, 0.1, 2)
    kit.telemetry.receipt(DeltaReceipt(b"d" * 32, Outcome.HELD, "", 0.0))
    assert kit.line(1) == (
        "training; version 2; inner step 3 of 8; loss 2.500; 1,234 tokens/s; last delta held; "
        "node 6f6f6f6f aggregates"
    )
    kit.telemetry.stepped(4, 8, 2.4, 1200.0, 0.1, 2)
    assert kit.line(9.9) == ""
    kit.aggregator = ME
    assert kit.line(0.1).endswith("this node aggregates")


def test_the_line_carries_the_newest_reason_and_is_no_flood() -> None:
    kit = Kit()
    kit.telemetry.fetching("pieces of version 0", 1, 3)
    kit.telemetry.fetch_failed("peer 0102 is busy")
    assert kit.line(0).startswith(
        "joining: fetching pieces of version 0: 1 of 3; last try: peer 0102 is busy; version 2;"
    )
    kit.telemetry.fetch_failed("it came damaged, last from peer abcd")
    assert kit.line(1) == ""
    assert "; last try: it came damaged, last from peer abcd;" in kit.line(9)
    kit.telemetry.fetching("pieces of version 0", 2, 3)
    assert kit.line(10).startswith("joining: fetching pieces of version 0: 2 of 3; version 2;")
    kit.telemetry.lacks("nobody has data shard 3")
    kit.telemetry.stepped(3, 8, 2.5, 1234.4, 0.1, 2)
    kit.telemetry.fetch_failed("x" * 1000)
    assert f"training: nobody has data shard 3; last try: {'x' * 120}; version 2" in kit.line(10)


def test_a_reason_that_begins_with_the_state_is_said_once() -> None:
    kit = Kit()
    kit.telemetry.waiting("waiting for the swarm: 2 deltas are not settled yet")
    kit.aggregator = WITNESS
    assert kit.line(0) == (
        "waiting for the swarm: 2 deltas are not settled yet; version 2; the witness aggregates"
    )


def test_an_end_that_waits_says_what_for_until_it_does_not() -> None:
    """It was silent for as long as a slow machine evaluated the last version."""
    kit = Kit()
    kit.telemetry.stays = "others fetch the last entries"
    kit.telemetry.evaluates = "evaluating version 2"
    kit.telemetry.run_ended(2)
    assert kit.line(0) == "over: evaluating version 2"
    kit.telemetry.evaluates = "evaluating version 2, 30 %"
    assert kit.line(9) == "over: evaluating version 2, 30 %"
    assert kit.line(9) == ""
    assert kit.line(1) == "over: evaluating version 2, 30 %"
    kit.telemetry.evaluates = ""
    assert kit.line(1) == "over: others fetch the last entries; version 2"


def test_the_end_of_the_run_is_said_once() -> None:
    kit = Kit()
    kit.telemetry.run_ended(2)
    assert kit.line(0) == "over; version 2"
    kit.telemetry.why = "catching up with the swarm"
    assert kit.line(60) == ""


def test_a_pass_that_is_longer_than_the_run_says_so() -> None:
    """ "inner step 7 of 16" in a run with passes of 4 looked like an error."""
    kit = Kit()
    kit.telemetry.stepped(7, 32, 2.5, 1200.0, 0.1, 2)
    assert "inner step 7 of 32 in a pass that is longer than 8; loss" in kit.line(0)


def test_a_node_that_waits_has_no_speed() -> None:
    """One that the owner had revoked went on showing what it had done hours before."""
    kit = Kit()
    kit.telemetry.stepped(3, 8, 2.5, 1234.4, 0.1, 2)
    kit.telemetry.waiting("the owner revoked this node")
    line = kit.line(0)
    assert "inner step 3 of 8; loss 2.500" in line
    assert "tokens/s" not in line
    assert kit.telemetry.report(2, bytes_up=0, bytes_down=0).tokens_per_s == 0
