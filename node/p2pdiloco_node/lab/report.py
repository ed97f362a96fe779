"""What a study showed: a row an arm, and how each arm stands to the first with the same seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import msgspec

from p2pdiloco.sim.lab.experiment import Experiment
from p2pdiloco.sim.lab.result import Point, Result
from p2pdiloco_node.lab.study import Study

SEEDS_FOR_A_CLAIM = 3
EQUAL_TOKENS = 0.01  # share by which the trained tokens of two arms may differ in a fair comparison
# One-sided 90 % quantiles of Student's t for 1 to 30 degrees of freedom; beyond, the last is safe.
STUDENT_90 = (
    3.078, 1.886, 1.638, 1.533, 1.476, 1.440, 1.415, 1.397, 1.383, 1.372,
    1.363, 1.356, 1.350, 1.345, 1.341, 1.337, 1.333, 1.330, 1.328, 1.325,
    1.323, 1.321, 1.319, 1.318, 1.316, 1.315, 1.314, 1.313, 1.311, 1.310,
)  # fmt: skip


class Spread(msgspec.Struct, frozen=True):
    """Mean and sample standard deviation over seeds; `sd` None with one seed, or if not all are finite."""

    mean: float
    sd: float | None


class ArmRow(msgspec.Struct, frozen=True):
    """One arm, means over its seeds. Losses in nats per token; bytes are those of a mean node."""

    arm: str
    seeds: tuple[int, ...]
    diverged: int  # seeds whose loss is not finite
    tokens: float  # on the token clock, after caps
    trained_tokens: float  # in merged deltas, before caps
    versions: float
    hours: float  # virtual
    passes: float  # of a node; 0 without deltas (data parallel)
    loss: Spread | None
    perplexity: Spread | None
    train_loss: float | None
    goodput: float
    staleness_mean: float
    staleness_max: float
    rho_mean: float
    bytes_up: float
    bytes_down: float
    pass_bytes_up: float | None  # per pass, so per full round
    pass_bytes_down: float | None
    version_bytes_up: float | None  # per outer step, however many nodes are in it
    version_bytes_down: float | None
    up_busy: float | None  # share of the run in which a mean node's uplink is in use; None without a rate
    down_busy: float | None
    data_parallel_ratio: float | None  # bytes up of data parallel over ours, same tokens
    expert_entropy: float | None
    wall_s: float


class GapRow(msgspec.Struct, frozen=True):
    """An arm against the reference, seed by seed. Positive: the arm's loss is higher.

    A mean of +inf: the arm diverged with at least one seed; -inf: only the reference did.
    """

    arm: str
    reference: str
    seeds: tuple[int, ...]
    by_seed: tuple[float, ...]  # nats per token, in the order of `seeds`; empty without a model
    loss: Spread | None  # of these
    upper_90: float | None  # one-sided bound of the mean gap; None with one seed; inf: no bound
    perplexity_percent: float | None  # None where the gap is not finite
    trained: float  # tokens over the reference's, of the pair that differs most
    hours: float  # virtual hours to the same target, over the reference's
    hours_to_loss: float | None  # to the reference's final loss, over its own; None: not with all seeds
    reached: int  # seeds that came so far

    @property
    def fair(self) -> bool:
        """Whether both trained on equally many tokens; else the gap is no claim about what they do."""
        return abs(self.trained - 1) <= EQUAL_TOKENS


class SpeedRow(msgspec.Struct, frozen=True):
    """Nodes of one speed in one arm; shares in [0, 1]."""

    arm: str
    speed: float
    nodes: float
    steps: float  # inner steps of a node
    merged: float  # share of its steps that were merged
    waited: float  # share of the run
    off: float  # share of the run, dead and coming back
    late: float  # share of its deltas that came too late or were passed over
    bytes_up: float
    bytes_down: float


class Summary(msgspec.Struct, frozen=True):
    arms: tuple[ArmRow, ...]
    gaps: tuple[GapRow, ...]
    speeds: tuple[SpeedRow, ...]


def summarize(study: Study, results: Sequence[Result]) -> Summary:
    """Arms without any result are left out; gaps use the seeds that both arms have."""
    by_arm = {a.name: {r.seed: r for r in results if r.arm == a.name} for a in study.arms}
    rows = [_arm_row(a, list(by_arm[a.name].values())) for a in study.arms if by_arm[a.name]]
    first = study.arms[0].name
    gaps = []
    for arm in study.arms[1:]:
        common = [s for s in study.seeds if s in by_arm[first] and s in by_arm[arm.name]]
        if common:
            pairs = [(by_arm[arm.name][s], by_arm[first][s]) for s in common]
            gaps.append(_gap_row(arm.name, first, common, pairs))
    speeds = [row for a in study.arms for row in _speed_rows(a.name, list(by_arm[a.name].values()))]
    return Summary(tuple(rows), tuple(gaps), tuple(speeds))


def upper_bound_90(gaps: Sequence[float]) -> float | None:
    """One-sided 90 % bound of the mean of paired gaps: mean + t sd / sqrt(n).

    None with fewer than two; infinite where one is not finite, for then nothing bounds them.
    """
    if len(gaps) < 2:
        return None
    if not all(map(math.isfinite, gaps)):
        return math.inf
    t = STUDENT_90[min(len(gaps) - 1, len(STUDENT_90)) - 1]
    return statistics.fmean(gaps) + t * statistics.stdev(gaps) / math.sqrt(len(gaps))


def hours_to(curve: Sequence[Point], loss: float) -> float | None:
    """Virtual hours at which a curve first is at `loss`, on straight lines between points; None: never."""
    before: Point | None = None
    for point in curve:
        if point.loss <= loss:
            if before is None or before.loss == point.loss or not math.isfinite(before.loss):
                return point.hours
            share = (before.loss - loss) / (before.loss - point.loss)
            return before.hours + share * (point.hours - before.hours)
        before = point
    return None


def perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


def _arm_row(arm: Experiment, results: list[Result]) -> ArmRow:
    losses = [r.final_loss for r in results if r.final_loss is not None]
    hours = _mean(results, lambda r: r.hours)
    deltas = _mean(results, lambda r: statistics.fmean(n.deltas for n in r.nodes) if r.nodes else 0.0)
    passes = deltas / arm.outer.fragments
    versions = _mean(results, lambda r: r.versions)
    up, down = _mean(results, lambda r: r.bytes_up), _mean(results, lambda r: r.bytes_down)
    entropies = [r.expert_entropy for r in results if r.expert_entropy is not None]
    train = [r.train_loss for r in results if r.train_loss is not None]
    return ArmRow(
        arm=arm.name,
        seeds=tuple(sorted(r.seed for r in results)),
        diverged=sum(not math.isfinite(x) for x in losses),
        tokens=_mean(results, lambda r: r.tokens),
        trained_tokens=_mean(results, lambda r: r.trained_tokens),
        versions=versions,
        hours=hours,
        passes=passes,
        loss=_spread(losses) if losses else None,
        perplexity=_spread([perplexity(x) for x in losses]) if losses else None,
        train_loss=statistics.fmean(train) if train else None,
        goodput=_mean(results, lambda r: r.goodput),
        staleness_mean=_mean(results, lambda r: r.staleness_mean),
        staleness_max=max(r.staleness_max for r in results),
        rho_mean=_mean(results, lambda r: r.rho_mean),
        bytes_up=up,
        bytes_down=down,
        pass_bytes_up=up / passes if passes else None,
        pass_bytes_down=down / passes if passes else None,
        version_bytes_up=up / versions if versions else None,
        version_bytes_down=down / versions if versions else None,
        up_busy=_busy(up, arm.swarm.up_mbit, hours),
        down_busy=_busy(down, arm.swarm.down_mbit, hours),
        data_parallel_ratio=_mean(results, lambda r: r.data_parallel_bytes) / up if up else None,
        expert_entropy=statistics.fmean(entropies) if entropies else None,
        wall_s=_mean(results, lambda r: r.wall_s),
    )


def _busy(sent: float, mbit: float, hours: float) -> float | None:
    return sent * 8 / (mbit * 1e6 * hours * 3600) if mbit and hours else None


def _gap_row(arm: str, first: str, seeds: list[int], pairs: list[tuple[Result, Result]]) -> GapRow:
    gaps = [
        _gap(a.final_loss, b.final_loss)
        for a, b in pairs
        if a.final_loss is not None and b.final_loss is not None
    ]
    ratios = [r for a, b in pairs if (r := _hours_ratio(a, b)) is not None]
    loss = _spread(gaps) if gaps else None
    shares = [a.trained_tokens / b.trained_tokens if b.trained_tokens else 1.0 for a, b in pairs]
    hours = sum(b.hours for _, b in pairs)
    return GapRow(
        arm=arm,
        reference=first,
        seeds=tuple(seeds),
        by_seed=tuple(gaps),
        loss=loss,
        upper_90=upper_bound_90(gaps),
        perplexity_percent=100 * (perplexity(loss.mean) - 1) if loss and math.isfinite(loss.mean) else None,
        trained=max(shares, key=lambda share: abs(share - 1)),
        hours=sum(a.hours for a, _ in pairs) / hours if hours else math.nan,
        hours_to_loss=statistics.fmean(ratios) if len(ratios) == len(pairs) else None,
        reached=len(ratios),
    )


def _gap(arm: float, reference: float) -> float:
    """An arm that diverged is infinitely worse, whatever became of the reference."""
    if not math.isfinite(arm):
        return math.inf
    return arm - reference if math.isfinite(reference) else -math.inf


def _hours_ratio(arm: Result, reference: Result) -> float | None:
    """Time to the reference's final loss, as a ratio."""
    goal = reference.curve
    if not goal or not math.isfinite(goal[-1].loss) or not goal[-1].hours:
        return None
    ours = hours_to(arm.curve, goal[-1].loss)
    return None if ours is None else ours / goal[-1].hours


def _speed_rows(arm: str, results: list[Result]) -> list[SpeedRow]:
    rows = []
    for speed in sorted({n.speed for r in results for n in r.nodes}, reverse=True):
        lives = [(n, r) for r in results for n in r.nodes if n.speed == speed]
        steps = sum(n.steps for n, _ in lives)
        seconds = sum(r.hours * 3600 for _, r in lives)
        deltas = sum(n.deltas for n, _ in lives)
        rows.append(
            SpeedRow(
                arm=arm,
                speed=speed,
                nodes=len(lives) / len(results),
                steps=steps / len(lives),
                merged=sum(n.merged_steps for n, _ in lives) / steps if steps else 0.0,
                waited=sum(n.waited_s for n, _ in lives) / seconds if seconds else 0.0,
                off=sum(n.down_s for n, _ in lives) / seconds if seconds else 0.0,
                late=sum(n.too_late + n.passed_over for n, _ in lives) / deltas if deltas else 0.0,
                bytes_up=sum(n.bytes_up for n, _ in lives) / len(lives),
                bytes_down=sum(n.bytes_down for n, _ in lives) / len(lives),
            )
        )
    return rows


def _spread(values: Sequence[float]) -> Spread:
    if not all(math.isfinite(v) for v in values):
        worse = any(math.isnan(v) or v == math.inf for v in values)
        return Spread(math.inf if worse else -math.inf, None)
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


def _mean(results: Sequence[Result], value: Callable[[Result], float]) -> float:
    return statistics.fmean(value(r) for r in results)
