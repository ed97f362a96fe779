"""Loss against tokens and virtual time, and where each arm ended. matplotlib is an optional extra."""

from __future__ import annotations

import importlib.util
import io
import math
import statistics
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from p2pdiloco.errors import OperatorError
from p2pdiloco.exit_codes import FILES, USAGE
from p2pdiloco.sim.lab.result import Point, Result
from p2pdiloco_node.lab.seeds import write_output
from p2pdiloco_node.lab.study import Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".svg", ".png")
# Okabe and Ito's colours, which colour-blind people tell apart; from the ninth arm on, dashes.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
STYLES = ("-", "--", ":", "-.")
BYTES_DIFFER = 1.5  # largest over smallest traffic from which the ends are drawn against it
FIRST_FALL = 1  # points left above the picture: the start falls so fast that it would hide the differences


def check_plot(file: Path, study: Study) -> None:
    """Before hours of work: can this picture be made? Raises: OperatorError that says what to do."""
    if file.suffix.lower() not in FORMATS:
        raise OperatorError(f"--plot {file}: the name ends in {' or '.join(FORMATS)}.", USAGE)
    if not study.learns:
        raise OperatorError('--plot draws loss, and model.kind = "none" has none: leave it out.', USAGE)
    if importlib.util.find_spec("matplotlib") is None:
        raise OperatorError(
            "--plot needs matplotlib, which is not installed: pip install 'p2pdiloco[lab]'.", FILES
        )


def draw(file: Path, study: Study, results: Sequence[Result]) -> None:
    """Write the picture. Thin lines are seeds, a thick one their mean; the last, larger evaluation is a dot.

    The third panel shows the ends alone, close up: against what a node sent, where arms differ in that.

    Raises: OperatorError: the file cannot be written, or no run left a curve.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    drawn = [r for r in results if any(math.isfinite(p.loss) for p in r.curve)]
    if not drawn:
        raise OperatorError(f"--plot {file}: no run has a curve to draw.", FILES)
    figure = Figure(figsize=(14, 4.8), layout="constrained")
    by_tokens, by_time, ends = figure.subplots(1, 3)
    by_time.sharey(by_tokens)
    longest = max(r.hours for r in drawn)
    unit, hours = _time_unit(longest)
    for number, arm in enumerate(study.arms):
        runs = [r for r in drawn if r.arm == arm.name]
        colour, style = COLOURS[number % len(COLOURS)], STYLES[number // len(COLOURS) % len(STYLES)]
        for axes, scale in ((by_tokens, None), (by_time, hours)):
            _draw_arm(axes, arm.name, runs, colour, style, scale)
    _dress(by_tokens, by_time, drawn, unit)
    _draw_ends(ends, study, drawn)
    figure.suptitle(_plain(study.question or study.name), fontsize=11, wrap=True)
    figure.legend(*by_tokens.get_legend_handles_labels(), loc="outside lower center",
                  ncols=min(5, len(study.arms)), frameon=False)  # fmt: skip
    # Text stays text, and the same figures make the same file.
    picture = io.BytesIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "p2pdiloco"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)  # of a name: a box stands for it
        kind = file.suffix.lower()[1:]
        figure.savefig(picture, format=kind, dpi=140, metadata={"Date": None} if kind == "svg" else None)
    write_output(file, picture.getvalue())


def _plain(text: str) -> str:
    """No formula between dollars; and a name that begins with _ is not hidden, as matplotlib would."""
    return (" " if text.startswith("_") else "") + text.replace("$", r"\$")


def _draw_arm(
    axes: Axes, name: str, runs: Sequence[Result], colour: str, style: str, hours: float | None
) -> None:
    """`hours`: those of one unit of the axis; None: tokens."""

    def across(point: Point) -> float:
        return point.tokens / 1e6 if hours is None else point.hours / hours

    curves = [r.curve for r in runs]
    if len(curves) > 1:
        for curve in curves:
            axes.plot(
                [across(p) for p in curve], [p.loss for p in curve], style, color=colour, lw=0.6, alpha=0.45
            )
    # Evaluations of all seeds stand at the same numbers of tokens, but one may have an odd one.
    points = list(zip(*curves, strict=False))
    axes.plot(
        [sum(across(p) for p in same) / len(same) for same in points],
        [sum(p.loss for p in same) / len(same) for same in points],
        style, color=colour, lw=1.8, label=_plain(name),
    )  # fmt: skip
    ends = [r.curve[-1] for r in runs]
    axes.plot([across(p) for p in ends], [p.loss for p in ends], "o", color=colour, ms=3.5)


def _dress(by_tokens: Axes, by_time: Axes, drawn: Sequence[Result], unit: str) -> None:
    losses = [p.loss for r in drawn for p in r.curve if math.isfinite(p.loss)]
    begun = [p.loss for r in drawn for p in r.curve[FIRST_FALL:] if math.isfinite(p.loss)] or losses
    best, first = min(losses), max(r.curve[0].loss for r in drawn)
    # An arm that runs away may leave the picture, too.
    top = min(max(begun), first) if math.isfinite(first) else max(begun)
    top += 0.05 * (top - best) or 1.0
    by_tokens.set_ylim(best - 0.03 * (top - best), top)
    by_tokens.set_ylabel("held-out loss, nats per token")
    by_tokens.set_xlabel("merged tokens, millions")
    by_time.set_xlabel(f"virtual time, {unit}")
    by_time.annotate("dots: the end of each seed\nthin lines: seeds", (0.99, 0.98), xycoords="axes fraction",
                     ha="right", va="top", fontsize=8, color="#555555")  # fmt: skip
    for axes in (by_tokens, by_time):
        axes.set_xlim(left=0)
        axes.grid(visible=True, lw=0.4, alpha=0.5)
        axes.spines[["top", "right"]].set_visible(False)


def _draw_ends(axes: Axes, study: Study, drawn: Sequence[Result]) -> None:
    """Final losses of seeds, small, and their mean, large; on an axis of their own: hundredths show."""
    from matplotlib.ticker import StrMethodFormatter

    sent = [r.bytes_up for r in drawn if r.bytes_up > 0]
    apart = len(sent) == len(drawn) and max(sent) > BYTES_DIFFER * min(sent)
    finite = []
    for number, arm in enumerate(study.arms):
        runs = [r for r in drawn if r.arm == arm.name and math.isfinite(r.curve[-1].loss)]
        if not runs:
            continue
        colour = COLOURS[number % len(COLOURS)]
        places = [r.bytes_up / 1e6 if apart else number for r in runs]
        losses = [r.curve[-1].loss for r in runs]
        finite += losses
        axes.plot(places, losses, "o", color=colour, ms=3, alpha=0.6)
        mark = "os^D"[number // len(COLOURS) % 4]
        axes.plot([sum(places) / len(places)], [sum(losses) / len(losses)], mark, color=colour, ms=9,
                  markeredgecolor="white")  # fmt: skip
    if apart:
        axes.set_xscale("log", subs=(2, 5))
        for ticks in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
            ticks(StrMethodFormatter("{x:g}"))
        axes.set_xlabel("sent by a node, MB")
    else:
        axes.set_xticks([])
        axes.set_xlabel("arms, in the order of the legend")
    if finite:  # an arm that was ruined would press the others into one line
        middle = statistics.median(finite)
        top = max(x for x in finite if x - middle <= 3 * (middle - min(finite)) + 0.02)
        margin = 0.08 * (top - min(finite)) or 0.01
        axes.set_ylim(min(finite) - margin, top + margin)
    axes.set_ylabel("loss at the end")
    axes.grid(visible=True, lw=0.4, alpha=0.5)
    axes.spines[["top", "right"]].set_visible(False)


def _time_unit(hours: float) -> tuple[str, float]:
    """Word and length in hours of a unit in which the longest run is a few to a few hundred."""
    for unit, length in (("days", 24.0), ("hours", 1.0), ("minutes", 1 / 60)):
        if hours >= 3 * length:
            return unit, length
    return "seconds", 1 / 3600
