"""RunStatus: everything that the public page, its JSON twin and /metrics say (product.md 4).

Plain values, ready for JSON: None where nothing is known yet, never NaN or infinity; names are cleaned;
no address anywhere but in `join`. Times are Unix seconds, durations seconds, sizes bytes, losses nats
per token. Keys are only ever added: `format` goes up when the meaning of one changes.
"""

from __future__ import annotations

import msgspec

FORMAT = 1


class View(msgspec.Struct, frozen=True, kw_only=True):
    """Base of everything in the read model: maps in JSON."""


class Word(View, frozen=True):
    """A status word, the colour class that goes with it, and the reason in one sentence."""

    word: str
    tone: str  # good, busy, warn, bad, quiet: never the only sign, the word is always there
    why: str


class PeerName(View, frozen=True):
    name: str
    fingerprint: str  # first eight hex digits of the PeerId: tells two of one name apart


class RunView(View, frozen=True):
    name: str
    run_id: str  # 64 hex digits
    about: str
    params: int
    local: bool  # admission is local: everything is on one machine or network


class Progress(View, frozen=True):
    version: int  # outer steps applied
    target_version: int | None
    tokens: int  # token clock
    target_tokens: int
    measure: str  # what `share` counts: "version" or "tokens", whichever target is nearer
    share: float  # 0 to 1, of the target named by `measure`
    eta_s: float | None
    last_step_unix: float | None
    seconds_per_step: float | None  # mean of the last outer steps


class VersionPoint(View, frozen=True):
    """One outer step in the history; kept in the tracker's database."""

    version: int
    when_unix: float | None  # None: learnt from the log alone, which has no wall clock
    tokens: int  # token clock after it
    t_full: int  # tokens of a full round after it
    loss: float | None  # token-weighted mean over its contributions
    deltas: int
    stale: int  # contributions with staleness of half a round or more
    refused: int
    staleness_max: float  # rounds
    term: int
    aggregator: PeerName


class Credit(View, frozen=True):
    """One contribution as certified; kept in the tracker's database."""

    version: int
    when_unix: float | None
    peer: str  # 64 hex digits
    name: str
    tokens: int
    steps: int
    staleness: float  # rounds
    weight: float
    loss: float | None


class EvalWord(View, frozen=True):
    """What one evaluator says of a version."""

    peer: str  # 64 hex digits
    by: PeerName
    losses: tuple[float, ...]  # by evaluation set, in the RunSpec's order
    tokens: int  # of the first set


class EvalPoint(View, frozen=True):
    """Held-out losses of a certified version; kept in the tracker's database.

    Losses are medians over `reports`; of one or two the mean.
    """

    version: int
    when_unix: float
    loss: float  # on the first set, the whole corpus
    tokens: int
    by: PeerName  # the first of `reports`
    losses: tuple[float, ...] = ()  # by evaluation set, in the RunSpec's order
    asked: int = 1  # evaluators that the log chose
    agreeing: int = 1  # of `reports`: say `loss`, within what devices differ by
    reports: tuple[EvalWord, ...] = ()  # only of the newest point in the JSON


class EvalSet(View, frozen=True):
    """One evaluation set at the newest evaluated version."""

    name: str
    loss: float
    perplexity: float
    bits_per_byte: float
    tokens: int  # held out in it


class Sample(View, frozen=True):
    prompt: str
    text: str  # the continuation; cleaned, line breaks kept
    agreeing: int  # evaluators that wrote just this


class Samples(View, frozen=True):
    """What a version writes; kept in the tracker's database."""

    version: int
    when_unix: float
    samples: tuple[Sample, ...]
    evaluators: int


class Curve(View, frozen=True):
    """`versions` and `losses` are thinned to limits.chart_points_max; each is a token-weighted mean."""

    versions: tuple[int, ...]
    losses: tuple[float, ...]
    membership_changes: tuple[int, ...]  # versions at which a node joined, left or went offline


class Learning(View, frozen=True):
    loss: float | None
    curve: Curve
    evaluation: EvalPoint | None  # the newest
    evaluation_first: EvalPoint | None
    perplexity: float | None
    bits_per_byte: float | None
    evaluations: tuple[EvalPoint, ...]
    evaluators: str  # how many say so, and whether they agree; empty: not known
    sets: tuple[EvalSet, ...]  # of the newest evaluation
    samples: tuple[Samples, ...]  # newest first


class Rates(View, frozen=True):
    tokens_per_s: float | None
    tokens_per_s_24h: float | None
    bytes_per_node_per_step: float | None  # sent and received
    bytes_per_node_per_token: float | None
    times_less_than_bf16_data_parallel: float | None


class NodeRow(View, frozen=True):
    who: PeerName
    state: Word
    device: str
    loss: float | None
    tokens_per_s: float | None
    versions_behind: int | None
    tokens: int  # accepted in the log, all time
    tokens_24h: int
    deltas: int
    last_outcome: str
    last_seen_s: float | None
    seat: bool  # in the committee
    aggregates: bool
    clock_offset_s: float | None  # only when it is worth a remark
    build: str


class Member(View, frozen=True):
    who: PeerName
    role: str  # witness, voter
    aggregates: bool
    answers: bool | None


class CommitteeView(View, frozen=True):
    term: int | None
    aggregator: PeerName | None
    steps_until_rotation: int | None
    members: tuple[Member, ...]
    quorum: int
    answering: int


class RoundRow(View, frozen=True):
    version: int
    when_unix: float | None
    aggregator: PeerName
    deltas: int
    stale: int
    refused: int
    seconds: float | None  # since the outer step before it
    loss: float | None


class Totals(View, frozen=True):
    accepted: int
    stale: int
    refused: dict[str, int]  # by reason
    staleness: dict[str, int]  # contributions by whole rounds late: "0", "1", ... "16"
    terms: int
    aggregators: tuple[PeerName, ...]


class EventLine(View, frozen=True):
    """Something that happened; kept in the tracker's database."""

    when_unix: float
    kind: str  # joined, left, offline, back, elected, committee, refused, owner, recovered, finished, tracker
    text: str
    version: int


class JoinHint(View, frozen=True):
    """`line` is None where there is no address that works elsewhere; `note` says what to do then."""

    line: str | None
    note: str


class CheckpointFile(View, frozen=True):
    name: str
    path: str  # under the page's address
    bytes: int
    sha256: str  # 64 hex digits


class Checkpoint(View, frozen=True):
    """A version that the tracker offers for download: a Hugging Face folder, file by file."""

    version: int
    when_unix: float
    loss: float | None  # held-out, of this very version
    dtype: str
    bytes: int  # of all files
    files: tuple[CheckpointFile, ...]  # weights first


class Health(View, frozen=True):
    build: str
    uptime_s: float
    data_age_s: float | None  # since this page's source was last fed
    stale: bool  # older than limits.data_age_s_max: greyed
    history_since_unix: float | None


class RunStatus(View, frozen=True):
    format: int
    generated_unix: float
    run: RunView
    state: Word
    progress: Progress
    learning: Learning
    rates: Rates
    nodes: tuple[NodeRow, ...]
    nodes_by_state: dict[str, int]
    committee: CommitteeView
    rounds: tuple[RoundRow, ...]
    totals: Totals
    events: tuple[EventLine, ...]
    join: JoinHint
    health: Health
    checkpoints: tuple[Checkpoint, ...] = ()  # newest first
    export_line: str | None = None  # makes the newest version a folder; None where no address works


class NodeView(View, frozen=True):
    """What one daemon says of itself on its own machine (`GET /v1/status`, `p2pdiloco status`)."""

    format: int
    generated_unix: float
    name: str
    peer: str  # 64 hex digits
    run_id: str
    run_name: str
    state: Word
    version: int
    index: int
    term: int
    aggregator: str  # fingerprint
    inner_step: int
    inner_steps: int
    loss: float | None
    tokens_per_s: float | None
    in_flight: int
    last_outcome: str
    staleness: float | None  # of the last listed delta, in rounds
    peers: int
    bytes_up: int
    bytes_down: int
    longest_inner_gap_s: float | None
    tracker: str  # "ok", or "unreachable since ..."
    state_digest: str
    build: str


def to_json(status: RunStatus | NodeView) -> bytes:
    """UTF-8 JSON. What is not finite becomes null, so every JSON parser can read it."""
    return msgspec.json.encode(status)
