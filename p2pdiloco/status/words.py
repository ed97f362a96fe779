"""The status words of the run and of each node, and why: pure decisions from plain facts (scenario P1).

Every word comes with a tone (a colour class) and a sentence; a word never depends on its colour.
"""

from __future__ import annotations

from typing import NamedTuple

from p2pdiloco import limits
from p2pdiloco.protocol.tracker import Listed
from p2pdiloco.status.names import clean_text
from p2pdiloco.status.read_model import EvalPoint, Word
from p2pdiloco.wire.log import OwnerWord
from p2pdiloco.words import count_of

TONES = {
    "joining": "busy",
    "syncing": "busy",
    "training": "good",
    "late": "warn",
    "waiting": "warn",
    "paused": "quiet",
    "leaving": "quiet",
    "unreachable": "bad",
    "offline": "quiet",
    "revoked": "bad",
}
LATE_AFTER_ROUNDS = 2.0  # of the token clock behind the newest version: one round late is the steady state
RECENT_VERSIONS = 64  # a delta listed this recently shows that a node reaches the committee somehow


class RunFacts(NamedTuple):
    version: int
    target_version: int  # 0: none
    tokens: int
    target_tokens: int
    finished: bool
    paused: bool
    training: int  # nodes
    coming: int  # nodes joining or syncing
    resting: int  # nodes paused or leaving
    revoked: int  # nodes that are connected and refused
    seats: int
    quorum: int
    answering: int
    silent_s: float | None  # since the last outer step; None: none seen by this tracker
    step_s: float | None  # mean seconds between outer steps
    deadline_s: float  # within which an outer step must come (algorithm.md 4), plus an election


def run_word(f: RunFacts) -> Word:
    """What the run does, and why (product.md 4, item 1)."""
    if f.finished:
        why = "its target is reached" if _reached(f) else "its owner ended it"
        return Word(word="finished", tone="good", why=f"The run is over: {why}, at version {f.version:,}.")
    if f.paused:
        return Word(
            word="paused", tone="quiet", why="The owner has paused the run; nodes keep what they have."
        )
    if f.training + f.coming == 0:
        why = f"{_nodes(f.resting)} paused by their owners" if f.resting else "No node is connected"
        if f.revoked and not f.resting:
            why = f"{_nodes(f.revoked)} connected and revoked by the run's owner"
        return Word(word="waiting", tone="warn", why=f"{why}. One that trains is enough to go on.")
    if f.answering < f.quorum:
        return Word(
            word="no quorum",
            tone="bad",
            why=f"{f.answering} of {f.seats} committee members answer and {f.quorum} are needed. Nodes train "
            "on within their bound; outer steps go on when a member returns.",
        )
    if f.training == 0:
        return Word(word="starting", tone="busy", why=f"{_nodes(f.coming)} fetching the model and the data.")
    if f.version == 0:
        return Word(
            word="starting",
            tone="busy",
            why=f"{_nodes(f.training)} training; the first outer step follows their first pass.",
        )
    if f.silent_s is not None and f.silent_s > f.deadline_s:
        return Word(
            word="stalled",
            tone="warn",
            why=f"No outer step for {f.silent_s:.0f} s; one was due within {f.deadline_s:.0f} s.",
        )
    pace = f", an outer step every {f.step_s:.1f} s" if f.step_s is not None else ""
    return Word(word="training", tone="good", why=f"{_nodes(f.training)} training{pace}.")


def node_word(
    listed: Listed | None,
    *,
    rounds_behind: float,
    versions_since_delta: int | None,
    left: bool = False,
    revoked: bool = False,
) -> Word:
    """What a node does, and why (product.md 4, item 5).

    Args:
        listed: its row in the directory; None: known from the log only.
        rounds_behind: full rounds of the token clock since the version it reports.
        versions_since_delta: outer steps since its last listed delta; None: never.
        left: it said goodbye in the log.
        revoked: by the run's owner, whatever it does since.
    """
    if revoked:
        return _node("revoked", "the run's owner refuses its deltas")
    if listed is None:
        return _node("offline", "left" if left else "not heard since this tracker started")
    if listed.left is not None:
        return _node("offline", f"left: {clean_text(listed.left)}" if listed.left else "left")
    if not listed.live:
        return _node("offline", f"silent for {_ago(listed.silent_s)}")
    reaches = versions_since_delta is not None and versions_since_delta <= RECENT_VERSIONS
    if listed.reachable is False and not listed.outbound_only and not reaches:
        return _node(
            "unreachable", "its announced address does not answer, and none of its deltas arrived lately"
        )
    if listed.bad_report:
        return Word(word=listed.state, tone="warn", why=f"bad report: {clean_text(listed.bad_report)}")
    why = clean_text(listed.report.why) if listed.report else ""
    if listed.state == "training" and listed.report and rounds_behind >= LATE_AFTER_ROUNDS:
        return _node("late", f"{rounds_behind:.1f} rounds behind; its work still counts, for less")
    if listed.state == "joining":
        why = why or "just arrived"
    if abs(listed.clock_offset_s) > limits.clock_offset_s_max and not why:
        way = "ahead" if listed.clock_offset_s > 0 else "behind"
        why = f"its clock is {abs(listed.clock_offset_s):.0f} s {way}"
    return _node(listed.state, why)


def owner_words(word: OwnerWord, who: str, version: int) -> str:
    """What happened by an owner entry. `who`: the node that it names; `version`: at which it stands."""
    if not word.owner_sequence:  # warranted by the RunSpec's targets; the owner did nothing
        return f"the target is reached: the run is over at version {version:,}"
    return {
        "pause": "the owner paused the run",
        "resume": "the owner resumed the run",
        "extend": f"the owner set the target to {count_of(word.value, 'token')}",
        "finish": f"the owner ended the run at version {version:,}",
        "revoke": f"the owner revoked {who}: its deltas are refused from now on",
        "recover": "the owner put another committee in charge; what came after here is lost",
    }[word.kind]


def evaluators_words(point: EvalPoint) -> str:
    """How many say what is shown of a version, and whether they agree; empty where that is not known."""
    n = len(point.reports)
    if n == 0:
        return ""
    how = {1: "as one evaluator says", 2: "mean of two evaluators"}.get(n, f"median of {n} evaluators")
    if n > 1:
        how += " that agree" if point.agreeing == n else f", of which {point.agreeing or 'none'} agree"
    return how + (f" ({point.asked} were asked)" if point.asked > n else "")


def _node(word: str, why: str) -> Word:
    return Word(word=word, tone=TONES[word], why=why)


def _reached(f: RunFacts) -> bool:
    return f.tokens >= f.target_tokens or 0 < f.target_version <= f.version


def _nodes(n: int) -> str:
    return count_of(n, "node is", "nodes are")


def _ago(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.0f} h"
