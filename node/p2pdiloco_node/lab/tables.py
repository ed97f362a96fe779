"""A summary as text of at most 100 columns, and as Markdown for docs/results."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from p2pdiloco.words import count_of
from p2pdiloco_node.lab.report import SEEDS_FOR_A_CLAIM, ArmRow, GapRow, Spread, Summary
from p2pdiloco_node.lab.study import Study

SEEDS_SHOWN = 6  # gaps of single seeds in one line
COLUMNS = 100
ARM_CHARS = 16  # of an arm's name in the text
SPEEDS_SHOWN_MAX = 24  # rows by speed; beyond, the JSON has them


class Table(NamedTuple):
    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str


def tables_of(study: Study, summary: Summary) -> list[Table]:
    """What people read, in the order in which they read it."""
    found = [_outcome_table(summary)] if summary.arms else []
    found += [_traffic_table(summary)] if summary.arms else []
    if summary.gaps and study.learns:
        found.append(_gap_table(summary))
    if (
        summary.arms
        and 1 < len(summary.speeds) <= SPEEDS_SHOWN_MAX
        and len(summary.speeds) > len(summary.arms)
    ):
        found.append(_speed_table(summary))
    return found


def in_words(study: Study, summary: Summary) -> str:
    """For a terminal."""
    lines = [study.question] if study.question else []
    for table in tables_of(study, summary):
        lines += ["", table.title, *_columns(table)]
        lines += [textwrap.fill(table.note, COLUMNS)] if table.note else []
    return "\n".join([*lines, *_claims(study, summary)]).strip("\n")


def in_markdown(study: Study, summary: Summary) -> str:
    """The same tables for a page."""
    lines = [f"**{study.question}**"] if study.question else []
    for table in tables_of(study, summary):
        lines += ["", table.title + ":", "", "| " + " | ".join(table.head) + " |"]
        lines.append("|---|" + "--:|" * (len(table.head) - 1))
        lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in table.rows]
        lines += ["", table.note] if table.note else []
    return "\n".join([*lines, *_claims(study, summary)]).strip("\n") + "\n"


def _outcome_table(summary: Summary) -> Table:
    learns = any(row.loss for row in summary.arms)
    head = ["arm", "seeds", "tokens", "versions", "time"]
    head += ["loss (sd)", "perplexity"] if learns else []
    rows = []
    for row in summary.arms:
        cells = [row.arm, str(len(row.seeds)), _count(row.tokens), f"{row.versions:.0f}", duration(row.hours)]
        if learns:
            cells += [_loss(row), _ppl(row.perplexity)]
        cells += [f"{100 * row.goodput:.1f} %", f"{row.staleness_mean:.2f}", f"{row.staleness_max:.1f}"]
        rows.append(tuple(cells))
    head += ["goodput", "stale", "max"]
    note = "loss: held out, nats per token; " if learns else ""
    note += "stale: rounds, mean by tokens, and the highest; time is virtual." + _trained(summary)
    entropies = [f"{r.arm} {r.expert_entropy:.3f}" for r in summary.arms if r.expert_entropy is not None]
    if entropies:
        note += f" Entropy of the experts' load, as a share of an even one: {', '.join(entropies)}."
    return Table("What came out", tuple(head), tuple(rows), note)


def _trained(summary: Summary) -> str:
    """Of each arm in which the clock does not count all merged tokens, how many they are."""
    capped = [
        f"{row.arm} {_count(row.trained_tokens)}"
        for row in summary.arms
        if _count(row.trained_tokens) != _count(row.tokens)
    ]
    if not capped:
        return ""
    others = "; in the other arms all count" if len(capped) < len(summary.arms) else ""
    return f" Trained tokens, before caps: {', '.join(capped)}{others}."


def _traffic_table(summary: Summary) -> Table:
    rows = tuple(
        (
            row.arm,
            size(row.pass_bytes_up),
            size(row.pass_bytes_down),
            size(row.version_bytes_up),
            size(row.version_bytes_down),
            size(row.bytes_up),
            size(row.bytes_down),
            "-" if row.data_parallel_ratio is None else f"{row.data_parallel_ratio:,.0f} x less",
        )
        for row in summary.arms
    )
    busy = [
        f"{row.arm} {'-' if row.up_busy is None else f'{100 * row.up_busy:.0f} %'} up, "
        f"{'-' if row.down_busy is None else f'{100 * row.down_busy:.0f} %'} down"
        for row in summary.arms
        if row.up_busy is not None or row.down_busy is not None
    ]
    links = f" Links are in use: {'; '.join(busy)}." if busy else ""
    return Table(
        "Traffic of a mean node",
        ("arm", "up/pass", "down/pass", "up/version", "down/version", "up", "down", "data parallel"),
        rows,
        "pass: from one delta of a node to its next; version: one outer step; data parallel: a bf16 ring "
        "all-reduce at each step, same tokens, over ours, upwards." + links,
    )


def _gap_table(summary: Summary) -> Table:
    return Table(
        f"Against {summary.gaps[0].reference}, seed by seed (positive: worse)",
        ("arm", "seeds", "gap, nats", "sd", "upper 90 %", "perplexity", "time", "time to its loss"),
        tuple(_gap_cells(gap) for gap in summary.gaps),
        "upper 90 %: one-sided bound of the mean gap (Student's t); time: of the whole run, over the "
        "reference's; time to its loss: to the reference's final loss, as a ratio too."
        + _by_seed(summary) + _warnings(summary),
    )  # fmt: skip


def _by_seed(summary: Summary) -> str:
    """The gaps themselves, while they can be read."""
    rows = [g for g in summary.gaps if 1 < len(g.by_seed) <= SEEDS_SHOWN]
    said = (f"{g.arm} {', '.join(f'{x:+.3f}' for x in g.by_seed)}" for g in rows)
    return f" By seed: {'; '.join(said)}." if rows else ""


def _warnings(summary: Summary) -> str:
    """What takes a gap's meaning away."""
    said = ""
    reference = next(row for row in summary.arms if row.arm == summary.gaps[0].reference)
    if reference.diverged:
        seeds = f"{reference.diverged} of {count_of(len(reference.seeds), 'seed')}"
        said += f" {reference.arm} diverged with {seeds}: there is no gap to it."
    unfair = [f"{gap.arm} by up to {100 * (gap.trained - 1):+.1f} %" for gap in summary.gaps if _marked(gap)]
    if unfair:
        said += (
            f" *: did not train on equally many tokens as {reference.arm} ({', '.join(unfair)}), so the gap "
            "is no claim."
        )
    return said


def _marked(gap: GapRow) -> bool:
    return gap.loss is not None and math.isfinite(gap.loss.mean) and not gap.fair


def _gap_cells(gap: GapRow) -> tuple[str, ...]:
    if gap.hours_to_loss is not None:
        reached = f"{gap.hours_to_loss:.2f} x"
    else:
        reached = f"by {gap.reached} of {count_of(len(gap.seeds), 'seed')}" if gap.reached else "not reached"
    if gap.loss is None or not math.isfinite(gap.loss.mean):
        loss = "diverged" if gap.loss is not None and gap.loss.mean > 0 else "-"
        return (gap.arm, str(len(gap.seeds)), loss, "-", "-", "-", f"{gap.hours:.2f} x", reached)
    return (
        gap.arm,
        str(len(gap.seeds)),
        f"{gap.loss.mean:+.4f}{' *' if _marked(gap) else ''}",
        "-" if gap.loss.sd is None else f"{gap.loss.sd:.4f}",
        "-" if gap.upper_90 is None else f"{gap.upper_90:+.4f}",
        f"{gap.perplexity_percent:+.2f} %",
        f"{gap.hours:.2f} x",
        reached,
    )


def _speed_table(summary: Summary) -> Table:
    rows = tuple(
        (
            row.arm,
            f"{row.speed:g}",
            f"{row.nodes:g}",
            _count(row.steps),
            f"{100 * row.merged:.1f} %",
            f"{100 * row.waited:.1f} %",
            f"{100 * row.off:.1f} %",
            f"{100 * row.late:.1f} %",
            size(row.bytes_up),
            size(row.bytes_down),
        )
        for row in summary.speeds
    )
    return Table(
        "By speed, of a mean node",
        ("arm", "speed", "nodes", "steps", "merged", "waited", "off", "late", "up", "down"),
        rows,
        "merged: of its steps; waited, off (dead or coming back): of the time; late: of its deltas, "
        "too late or passed over.",
    )


def _claims(study: Study, summary: Summary) -> list[str]:
    few = max((len(row.seeds) for row in summary.arms), default=0)
    if study.learns and few < SEEDS_FOR_A_CLAIM:
        seeds = count_of(few, "seed")
        return [
            "",
            f"{seeds}: no claim about loss can be made; three or more can carry one (--seeds 1..3).",
        ]
    return []


def _columns(table: Table) -> list[str]:
    """Names to the left, figures to the right, two blanks between."""
    cells = [table.head, *((_short(row[0]), *row[1:]) for row in table.rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(table.head))]
    lines = []
    for row in cells:
        figures = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        lines.append("  ".join([row[0].ljust(widths[0]), *figures]).rstrip())
    return lines


def _short(name: str) -> str:
    """Names that are too long often differ at their end."""
    half = ARM_CHARS // 2
    return name if len(name) <= ARM_CHARS else f"{name[: half - 1]}…{name[-half:]}"


def _loss(row: ArmRow) -> str:
    loss = row.loss
    if loss is None:
        return "-"
    if row.diverged:
        seeds = len(row.seeds)
        return "diverged" if row.diverged == seeds else f"{row.diverged} of {seeds} diverged"
    return f"{loss.mean:.4f}" if loss.sd is None else f"{loss.mean:.4f} ({loss.sd:.4f})"


def _ppl(perplexity: Spread | None) -> str:
    if perplexity is None or not math.isfinite(perplexity.mean):
        return "-"
    mean = perplexity.mean
    return f"{mean:.3f}" if mean < 1000 else f"{mean:.3g}"


def duration(hours: float) -> str:
    """Seconds, minutes, hours or days, three figures."""
    seconds = hours * 3600
    for unit, length in (("d", 172_800.0), ("h", 7200.0), ("min", 120.0)):
        if seconds >= length:
            return f"{seconds / {'d': 86400, 'h': 3600, 'min': 60}[unit]:.1f} {unit}"
    return f"{seconds:.0f} s"


def size(number: float | None) -> str:
    """Bytes with a decimal unit, three figures."""
    if number is None:
        return "-"
    return _scaled(number, ("B", "kB", "MB", "GB", "TB", "PB"))


def _count(number: float) -> str:
    return _scaled(number, ("", "k", "M", "G", "T", "P")).strip()


def _scaled(number: float, units: Sequence[str]) -> str:
    power = 0
    while abs(number) >= 999.5 and power < len(units) - 1:
        number, power = number / 1000, power + 1
    digits = 0 if power == 0 or number >= 99.95 else 1 if number >= 9.995 else 2
    return f"{number:.{digits}f} {units[power]}"
