"""Which figures are tracked: of a whole run at its tracker, of one node at its daemon (boards.py)."""

from __future__ import annotations

from collections.abc import Callable

from p2pdiloco import limits
from p2pdiloco.ids import PeerId
from p2pdiloco.protocol.actions import InstallEntry
from p2pdiloco.rules.evaluation import bits_per_byte, perplexity
from p2pdiloco.run_spec import RunSpec
from p2pdiloco.status.builder import Unsaved
from p2pdiloco.status.names import clean_name
from p2pdiloco.status.read_model import EvalPoint, RunStatus, Samples
from p2pdiloco_node.tracking.boards import Point
from p2pdiloco_node.training.frames import Evaluated, Stepped


def about_run(spec: RunSpec) -> dict[str, object]:
    """What the RunSpec says, for those who compare runs."""
    return {
        "run": spec.name,
        "model": spec.model.preset or spec.model.family,
        "family": spec.model.family,
        "params": spec.model.params,
        "seq_len": spec.model.seq_len,
        "inner_steps": spec.inner.inner_steps,
        "sequences_per_step": spec.inner.sequences_per_step,
        "lr": spec.inner.lr,
        "mu": spec.outer.mu,
        "lambda": spec.outer.lambda_,
        "codec": spec.outer.codec,
        "target_tokens": spec.target_tokens,
    }


class OfRun:
    """At the tracker: each outer step and each evaluation once."""

    def __init__(self, spec: RunSpec, tokens_at: Callable[[int], int]) -> None:
        """`tokens_at(version)`: the token clock when that version was made."""
        self._spec = spec
        self._tokens_at = tokens_at
        self._waiting: dict[int, EvalPoint] = {}  # evaluated, but not by all who were asked

    def points(self, new: Unsaved, status: RunStatus) -> list[Point]:
        """What came since the last call, oldest first."""
        points = []
        nodes_per_s = sum(n.tokens_per_s or 0.0 for n in status.nodes)
        rate = status.rates.tokens_per_s
        for step in new.versions:
            scalars: dict[str, float] = {
                "version": step.version,
                "staleness_max": step.staleness_max,
                "deltas": step.deltas,
                "refused": step.refused,
                "nodes": len([n for n in status.nodes if n.tokens_per_s]),
            }
            if step.loss is not None:
                scalars["loss"] = step.loss
            if rate is not None:
                scalars["tokens_per_s"] = rate
            if rate is not None and nodes_per_s:
                scalars["goodput"] = rate / nodes_per_s
            points.append(Point(step.tokens, step.when_unix or status.generated_unix, scalars))
        samples = {s.version: s for s in status.learning.samples}
        settled = self._settled(new.evaluations)
        return points + [self._evaluation(p, samples.get(p.version)) for p in settled]

    def last(self, status: RunStatus) -> list[Point]:
        """Evaluations that not all who were asked have made: nobody is waited for any more."""
        samples = {s.version: s for s in status.learning.samples}
        waiting, self._waiting = self._waiting, {}
        return [self._evaluation(p, samples.get(v)) for v, p in sorted(waiting.items())]

    def _settled(self, new: tuple[EvalPoint, ...]) -> list[EvalPoint]:
        """Each evaluator moves the median: tracked is a version of which all have spoken, or an older one."""
        for point in new:
            self._waiting[point.version] = point
        newest = max(self._waiting, default=0)
        done = sorted(
            v for v, p in self._waiting.items() if v < newest or (v > 0 and len(p.reports) >= p.asked)
        )
        return [self._waiting.pop(v) for v in done]

    def _evaluation(self, point: EvalPoint, samples: Samples | None) -> Point:
        scalars = _by_set(self._spec, point.losses or (point.loss,))
        scalars["evaluation/evaluators"] = len(point.reports)
        scalars["evaluation/agreeing"] = point.agreeing
        texts = {}
        if samples is not None:
            texts = {f"samples/{n}": s.prompt + s.text for n, s in enumerate(samples.samples, start=1)}
        return Point(self._tokens_at(point.version), point.when_unix, scalars, texts)


class OfNode:
    """At a daemon: its own training, its own evaluations, and what became of its deltas."""

    def __init__(
        self, spec: RunSpec, me: PeerId, add: Callable[[Point], None], wall: Callable[[], float]
    ) -> None:
        self._spec = spec
        self._me = me
        self._add = add
        self._wall = wall
        self._clock = 0  # tokens, of the newest report
        self._trained = 0  # tokens, in this life
        self._listed = 0  # of these, in the log
        self._step = 0
        self._clock_at: dict[int, int] = {0: 0}  # by version, the newest few

    def stepped(self, told: Stepped) -> None:
        steps = told.step - self._step if told.step > self._step else told.step
        self._trained += steps * self._spec.tokens_per_inner_step
        self._step, self._clock = told.step, told.clock
        figures = {
            "loss": told.loss,
            "lr": told.lr,
            "tokens_per_s": told.tokens_per_s,
            "version": told.version,
        }
        self._add(Point(told.clock, self._wall(), figures))

    def installed(self, action: InstallEntry) -> None:
        """What an outer step says of this node's deltas, if it lists any."""
        step = action.step
        if step is None:
            return
        self._clock_at[step.version] = step.clock
        while len(self._clock_at) > 64:
            del self._clock_at[min(self._clock_at)]
        own = [c for c in step.contributions if c.peer == self._me]
        if not own:
            return
        self._listed += sum(c.tokens for c in own)
        scalars = {"staleness": max(c.staleness for c in own)}
        if self._trained:
            # What an earlier life trained may be listed in this one.
            scalars["goodput"] = min(1.0, self._listed / self._trained)
        self._add(Point(max(self._clock, step.clock), self._wall(), scalars))

    def evaluated(self, found: Evaluated) -> None:
        texts = {
            f"samples/{n}": prompt + text
            for n, (prompt, text) in enumerate(
                zip(self._spec.samples.prompts, found.samples, strict=False), start=1
            )
        }
        clock = self._clock_at.get(found.version, self._clock)
        self._add(Point(clock, self._wall(), _by_set(self._spec, found.losses), texts))


def _by_set(spec: RunSpec, losses: tuple[float, ...]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for held_out, loss in zip(spec.data.evaluations, losses, strict=False):
        name = f"evaluation/{clean_name(held_out.name)}"
        figures[f"{name}/loss"] = loss
        figures[f"{name}/perplexity"] = perplexity(min(loss, limits.loss_shown_max))
        figures[f"{name}/bits_per_byte"] = bits_per_byte(loss, held_out)
    return figures
