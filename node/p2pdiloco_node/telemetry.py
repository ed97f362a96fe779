"""What a node says of itself: log lines, `GET /v1/status` on this machine, and reports to the tracker.

It only listens: the driver, the trainer's supervisor and the announcer tell it what happened. Nothing here
enters a weight or a decision.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from p2pdiloco.ids import Digest, PeerId, RunId, short
from p2pdiloco.protocol.actions import InstallEntry
from p2pdiloco.status.curve import LATE_ROUNDS
from p2pdiloco.status.names import clean_text
from p2pdiloco.status.read_model import NodeView, View, Word
from p2pdiloco.wire.messages import DeltaReceipt, NodeReport, Outcome
from p2pdiloco.words import count_of
from p2pdiloco_node import __version__

log = logging.getLogger("p2pdiloco.node")
FORMAT = 1
GAP_NOTED_S = 0.5  # shorter pauses between inner steps are noise of the machine
GAPS_KEPT = 256
EVENTS_KEPT = 64
LAST_TRY_CHARS = 120  # a line at the terminal has more to say
VERSION_LINE_EVERY_S = 3.0  # a small model's versions come several a second
ON_THE_WAY = {Outcome.NOTED: "announced", Outcome.HELD: "held"}  # what is decided is written large
TONES = {"training": "good", "joining": "busy", "syncing": "busy", "waiting": "warn", "paused": "quiet",
         "leaving": "quiet", "over": "good", "witness": "good"}  # fmt: skip


class Seat(View, frozen=True):
    """A member of the committee, and when this node last heard from it."""

    peer: str
    witness: bool
    heard_s: float | None  # seconds ago; 0 for the node itself; None: never


class Gap(View, frozen=True):
    """A pause between two inner steps of the trainer."""

    at_monotonic_s: float  # its end, on this machine's monotonic clock
    seconds: float


class Said(View, frozen=True):
    at_unix: float
    kind: str
    text: str


class NodeStatus(NodeView, frozen=True, kw_only=True):
    """NodeView and what `p2pdiloco status`, the demo and tests need besides."""

    role: str
    pid: int
    over: bool  # the certified `finish` entry is installed
    clock: int  # tokens merged by the swarm
    device: str
    adopted_version: int
    inner_steps_done: int  # since the trainer started
    leads: bool
    committee: tuple[Seat, ...]
    listed: dict[str, int]  # peer -> newest version that lists a delta of it
    deltas_sent: int
    deltas_listed: int
    refused: dict[str, int]  # own deltas refused at the door, by reason, each delta once
    tracker_url: str
    tracker_silent_s: float | None  # None: it answers
    gaps: tuple[Gap, ...]
    loop_lag_s_max: float
    bytes_setup: int  # of bytes_down: the run's data and version 0, fetched once
    evaluating: bool
    said: tuple[Said, ...]
    of_a_pass: int = (
        0  # inner steps by the RunSpec (H); `inner_steps` are of the present pass, and may be more
    )


class Now(NamedTuple):
    """What the trainer does, for the line at the terminal; as in NodeView."""

    state: str
    why: str
    step: int
    inner_steps: int
    of_a_pass: int
    loss: float | None
    tokens_per_s: float | None
    last_outcome: str
    last_try: str  # the newest reason why a fetch that the node waits for gave nothing


def state_words(word: str, why: str) -> str:
    """A state and its reason; a reason that begins with the state stands alone."""
    return why if why.startswith(word) else f"{word}: {why}" if why else word


def step_words(step: int, inner_steps: int, of_a_pass: int) -> str:
    """Where the trainer is in its pass, which may have more steps than the RunSpec says: so that it ends in
    step with the others, or because what it sent is not settled."""
    longer = f" in a pass that is longer than {of_a_pass}" if 0 < of_a_pass < inner_steps else ""
    return f"inner step {step} of {inner_steps}{longer}"


class BrainView(View, frozen=True):
    """What only the protocol's state machine knows; read between two events."""

    index: int
    version: int
    term: int
    leads: bool
    aggregator: PeerId
    members: tuple[tuple[PeerId, bool], ...]  # (peer, is the witness)
    clock: int
    in_flight: int
    peers: int
    root: Digest  # of the certified state at `index`


class Telemetry:
    """The memory of one life. All methods are cheap and called on the event loop."""

    def __init__(
        self,
        name: str,
        peer: PeerId,
        run: RunId,
        run_name: str,
        *,
        role: str,
        pid: int,
        inner_steps: int,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.name = name
        self._peer = peer
        self._run = run
        self._run_name = run_name
        self._role = role
        self._pid = pid
        self._inner_steps = self._of_a_pass = inner_steps
        self._clock = clock
        self._wall = wall
        self.state = "witness" if role == "witness" else "joining"
        self.why = ""
        self.over = False
        self.evaluates = ""  # the evaluation that is under way or waits; empty: none
        self.stays = ""  # what a node whose run is over stays for besides
        self.device = ""
        self.tracker_url = ""
        self._tracker_lost_at: float | None = None
        self._tracker_refuses = False
        self.adopted_version = 0
        self._step = 0
        self._steps_done = 0
        self._loss: float | None = None
        self._tokens_per_s: float | None = None
        self._gap_s: float | None = None
        self._gaps: deque[Gap] = deque(maxlen=GAPS_KEPT)
        self._heard: dict[PeerId, float] = {}
        self._listed: dict[str, int] = {}
        self._sent = 0
        self._own_listed = 0
        self._staleness: float | None = None
        self._last_outcome = ""
        self._refused: dict[Digest, Outcome] = {}
        self._fetches = ""  # `why` while the first blobs are fetched
        self._last_try = ("", "")  # (`why` at that time, what a donor did that gave nothing)
        self._lacks = ""  # data that nobody has, while training goes on
        self._version_said_at = float("-inf")
        self._said: deque[Said] = deque(maxlen=EVENTS_KEPT)
        self.on_installed: Callable[[InstallEntry], None] | None = None
        self.on_said: Callable[[str, str], None] | None = None
        self.on_over: Callable[[int], None] | None = None

    # The driver's Watcher.

    def installed(self, action: InstallEntry) -> None:
        step = action.step
        if step is not None:
            for contribution in step.contributions:
                self._listed[contribution.peer.hex()] = step.version
                if contribution.peer == self._peer:
                    self._own_listed += 1
                    self._staleness = contribution.staleness
                    late = contribution.staleness >= LATE_ROUNDS
                    self._outcome(f"STALE by {contribution.staleness:.1f} rounds" if late else "ACCEPTED")
            for refusal in step.refused:
                if refusal.peer == self._peer:
                    self._outcome(clean_text(refusal.reason, 32))
            due = self._clock() - self._version_said_at >= VERSION_LINE_EVERY_S
            self._version_said_at = self._clock() if due else self._version_said_at
            log.log(
                logging.INFO if due else logging.DEBUG,
                "version %d: %s, %d refused, %d tokens", step.version,
                count_of(len(step.contributions), "delta"),
                len(step.refused), step.clock,
            )  # fmt: skip
        if self.on_installed is not None:
            self.on_installed(action)

    def say(self, kind: str, text: str) -> None:
        log.info("%s: %s", kind, text)
        self._said.append(Said(at_unix=self._wall(), kind=kind, text=text))
        if self.on_said is not None:
            self.on_said(kind, text)

    def run_ended(self, version: int) -> None:
        self.over, self.why = True, ""
        if self._last_outcome in ON_THE_WAY.values():
            self._last_outcome = ""  # nothing more comes of it
        self.say("finished", f"The run is over at version {version}.")
        if self.on_over is not None:
            self.on_over(version)

    # Peers and the tracker.

    def heard(self, peer: PeerId) -> None:
        self._heard[peer] = self._clock()

    def receipt(self, receipt: DeltaReceipt) -> None:
        """A voter's word on an own delta. What only asks to wait is not a refusal."""
        waits = (Outcome.NOTED, Outcome.HELD, Outcome.ACCEPTED, Outcome.STALE, Outcome.TOO_EARLY,
                 Outcome.DUPLICATE, Outcome.RATE_LIMITED, Outcome.OUTLIER)  # fmt: skip
        self._outcome(ON_THE_WAY.get(receipt.outcome, str(receipt.outcome)))
        if receipt.outcome not in waits:
            self._refused[Digest(receipt.delta)] = receipt.outcome

    def tracker_answered(self) -> None:
        if self._tracker_lost_at is not None:
            self.say("tracker", f"The tracker {self.tracker_url} answers again.")
        self._tracker_lost_at = None
        self._tracker_refuses = False

    def tracker_failed(self, why: str, *, refuses: bool = False) -> None:
        """`refuses`: it answered no."""
        if self._tracker_lost_at is None or refuses != self._tracker_refuses:
            what = "refuses this node" if refuses else "is unreachable"
            self.say("tracker", f"The tracker {what} ({why}); training goes on, it is tried again.")
        if self._tracker_lost_at is None:
            self._tracker_lost_at = self._clock()
        self._tracker_refuses = refuses

    # The trainer.

    def stepped(
        self, step: int, inner_steps: int, loss: float, tokens_per_s: float, gap_s: float, version: int
    ) -> None:
        self._inner_steps = inner_steps
        self._steps_done += step - self._step if step > self._step else step
        self._step = step
        self._loss = loss if math.isfinite(loss) else None
        self._tokens_per_s = tokens_per_s
        self.adopted_version = version
        self._gap_s = max(self._gap_s or 0.0, gap_s)
        if gap_s >= GAP_NOTED_S:
            self._gaps.append(Gap(at_monotonic_s=self._clock(), seconds=gap_s))
        if self.state != "leaving":
            self.state, self.why = "training", self._lacks

    def pass_sent(self) -> None:
        self._sent += 1

    def fetching(self, what: str, done: int, total: int) -> None:
        """Before training: so many of the blobs wanted are here."""
        self.why = self._fetches = f"fetching {what}: {done} of {total}"

    def fetch_failed(self, why: str) -> None:
        """A donor gave nothing, or there is none. It is news for as long as nothing else came."""
        self._last_try = (self.why, why[:LAST_TRY_CHARS])

    def lacks(self, what: str) -> None:
        """Data that nobody has, for the page and the terminal; empty: none."""
        self._lacks = what

    def begins(self, device: str) -> None:
        """The trainer has its model and its data."""
        self.device = device
        if self.state in ("joining", "syncing"):
            self.state, self.why = "syncing", f"the trainer begins ({device})"

    def waiting(self, why: str) -> None:
        if not self.over:
            self.state, self.why = "waiting", why
            self._tokens_per_s = None  # nothing is computed: the last figure would stand for hours

    def trainer_down(self, why: str, retry_s: float, *, braked: bool) -> None:
        self.state = "paused" if braked else "joining"
        self.why = f"the trainer ended: {why}; next try in {retry_s:.0f} s"[:256]
        self.say("trainer", f"The trainer ended ({why}); it is started again in {retry_s:.0f} s.")
        self._step = 0

    @property
    def trained(self) -> bool:
        """Whether this life took an inner step."""
        return self._steps_done > 0

    # Answers.

    def now(self) -> Now:
        state, why = self._state()
        during, last_try = self._last_try
        waits = bool(why) and why == during and why in (self._fetches, self._lacks)
        return Now(
            state,
            why,
            self._step,
            self._inner_steps,
            self._of_a_pass,
            self._loss,
            self._tokens_per_s,
            self._last_outcome,
            last_try if waits else "",
        )

    def status(
        self, brain: BrainView, *, bytes_up: int, bytes_down: int, bytes_setup: int, lag_s_max: float
    ) -> NodeStatus:
        state, why = self._state()
        silent_s = None if self._tracker_lost_at is None else self._clock() - self._tracker_lost_at
        lost = "refuses this node" if self._tracker_refuses else "unreachable"
        return NodeStatus(
            format=FORMAT, generated_unix=self._wall(), name=self.name, peer=self._peer.hex(),
            run_id=self._run.hex(), run_name=self._run_name,
            state=Word(word=state, tone=TONES.get(state, "busy"), why=why),
            version=brain.version, index=brain.index, term=brain.term, aggregator=short(brain.aggregator),
            inner_step=self._step, inner_steps=self._inner_steps, loss=self._loss,
            tokens_per_s=self._tokens_per_s, in_flight=brain.in_flight, last_outcome=self._last_outcome,
            staleness=self._staleness, peers=brain.peers, bytes_up=bytes_up, bytes_down=bytes_down,
            longest_inner_gap_s=self._gap_s,
            tracker="ok" if silent_s is None else f"{lost} since {silent_s:.0f} s",
            state_digest=brain.root.hex(), build=__version__, role=self._role, pid=self._pid,
            over=self.over, clock=brain.clock, device=self.device, adopted_version=self.adopted_version,
            inner_steps_done=self._steps_done, leads=brain.leads,
            committee=tuple(self._seat(peer, witness=witness) for peer, witness in brain.members),
            listed=dict(self._listed), deltas_sent=self._sent, deltas_listed=self._own_listed,
            refused=dict(Counter(str(outcome) for outcome in self._refused.values())),
            tracker_url=self.tracker_url, tracker_silent_s=silent_s, gaps=tuple(self._gaps),
            loop_lag_s_max=lag_s_max, bytes_setup=bytes_setup, evaluating=bool(self.evaluates),
            said=tuple(self._said), of_a_pass=self._of_a_pass,
        )  # fmt: skip

    def report(self, version: int, *, bytes_up: int, bytes_down: int) -> NodeReport:
        """For the public page; the words that the tracker knows."""
        state = "waiting" if self.over else self.state
        return NodeReport(
            state=state, why=("the run is over" if self.over else self.why)[:256], version=version,
            inner_step=self._step, inner_steps=self._inner_steps, loss=self._loss or 0.0,
            tokens_per_s=self._tokens_per_s or 0.0, device=self.device[:64],
            last_outcome=self._last_outcome[:32], bytes_up=bytes_up, bytes_down=bytes_down,
            longest_inner_gap_s=self._gap_s or 0.0, build=__version__[:32],
        )  # fmt: skip

    def _state(self) -> tuple[str, str]:
        """In a word, and why. What a run that is over still waits for is all that there is to say of it."""
        return ("over", self.evaluates or self.stays) if self.over else (self.state, self.why)

    def _outcome(self, words: str) -> None:
        """What became of the newest own delta that anything is known of; in the page's words."""
        if not (self.over and words in ON_THE_WAY.values()):
            self._last_outcome = words

    def _seat(self, peer: PeerId, *, witness: bool) -> Seat:
        if peer == self._peer:
            heard_s: float | None = 0.0
        else:
            heard_s = self._clock() - self._heard[peer] if peer in self._heard else None
        return Seat(peer=peer.hex(), witness=witness, heard_s=heard_s)
