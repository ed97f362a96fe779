"""`p2pdiloco simulate FILE`: read, run what is not known yet, print, keep."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.sim.lab.result import Result
from p2pdiloco_node import __version__
from p2pdiloco_node.config import SETTINGS, USAGE
from p2pdiloco_node.lab import plots, tables
from p2pdiloco_node.lab.cache import Cache, source_digest
from p2pdiloco_node.lab.progress import StudyProgress
from p2pdiloco_node.lab.report import Summary, summarize
from p2pdiloco_node.lab.runs import Done, Failed, Share, Task, Work, run_live, run_tasks
from p2pdiloco_node.lab.study import Study, read_study

STORY_LINES = 12  # of a traceback that is ours


class Options(NamedTuple):
    """The flags."""

    file: Path
    changes: Sequence[str] = ()
    seeds: str | None = None
    jobs: int = 0  # 0: one a core
    fresh: bool = False
    json: str | None = None
    plot: Path | None = None
    markdown: Path | None = None


class Failure(NamedTuple):
    arm: str
    seed: int
    reason: str
    story: str


class Code(NamedTuple):
    """What a study ran on."""

    commit: str | None
    source_digest: str


def simulate_study(options: Options, *, work: Work = run_live, cache: Cache | None = None) -> int:
    """The command. Exit status 0: all runs came through, 1: at least one did not.

    Raises: OperatorError for the file, the flags, or what is not installed; KeyboardInterrupt once all
    processes have ended.
    """
    study = read_study(options.file, changes=options.changes, seeds=options.seeds)
    _check(options, study, real=work is run_live)
    # Now, and not after hours in which somebody edits and commits.
    code = Code(_commit(), source_digest(with_model=study.learns))
    cache = cache or Cache(fresh=options.fresh)
    results, failures = _run(study, options.jobs, work, cache)
    cache.trim()
    summary = summarize(study, results)
    if options.json is not None:
        whole = msgspec.json.encode(_whole(study, code, results, failures, summary))
        _write(options.json, msgspec.json.format(whole))
    if options.json != "-":
        print(tables.in_words(study, summary))
    if options.markdown is not None:
        _write(str(options.markdown), tables.in_markdown(study, summary).encode())
    if options.plot is not None and any(r.curve for r in results):
        plots.draw(options.plot, study, results)
    for failure in failures:
        print(f"p2pdiloco: {failure.arm}, seed {failure.seed}: {failure.reason}", file=sys.stderr)
    for story in sorted({f.story for f in failures if f.story}):
        print("\n".join(story.rstrip().splitlines()[-STORY_LINES:]), file=sys.stderr)
    return 1 if failures else 0


def _check(options: Options, study: Study, *, real: bool) -> None:
    """What would be a pity to find out after hours."""
    if not 0 <= options.jobs <= limits.lab_jobs_max:
        raise OperatorError(f"--jobs {options.jobs}: give 1 to {limits.lab_jobs_max}.", USAGE)
    if options.plot is not None:
        plots.check_plot(options.plot, study)
    for name in (options.json, options.plot, options.markdown):
        if name is not None and str(name) != "-":
            check_writable(Path(name))
    if real and study.learns and importlib.util.find_spec("torch") is None:
        raise OperatorError(
            "A model needs torch, which is not installed: pip install 'p2pdiloco[node]', or ask about "
            'traffic and goodput alone with --set model.kind=none.', SETTINGS,
        )  # fmt: skip


def check_writable(file: Path) -> None:
    """Raises: OperatorError: the folder is not there, or the file is a folder."""
    if file.is_dir() or not file.parent.is_dir():
        what = "is a folder" if file.is_dir() else f"cannot be made: there is no folder {file.parent}"
        raise OperatorError(f"{file} {what}. Give the name of a file.", SETTINGS)


def _run(study: Study, jobs: int, work: Work, cache: Cache) -> tuple[list[Result], list[Failure]]:
    """All arms of a seed before the next seed, so that a study cut short has pairs."""
    found: dict[tuple[str, int], Result] = {}
    tasks: list[Task] = []
    for seed in study.seeds:
        for arm in study.arms:
            if kept := cache.find(arm, seed):
                found[arm.name, seed] = kept
            else:
                tasks.append(Task(arm, seed))
    failures: list[Failure] = []
    names = [f"{t.experiment.name}, seed {t.seed}" for t in tasks]
    jobs = jobs or os.cpu_count() or 1
    try:
        with (
            StudyProgress(names, len(found)) as bars,
            contextlib.closing(run_tasks(tasks, jobs=jobs, work=work)) as heard,
        ):
            for number, said in heard:
                task = tasks[number]
                if isinstance(said, Share):
                    bars.told(number, said.share, said.text)
                    continue
                bars.ended(number)
                if isinstance(said, Done):
                    cache.keep(task.experiment, said.result)
                    found[task.experiment.name, task.seed] = said.result
                elif isinstance(said, Failed):
                    failures.append(Failure(task.experiment.name, task.seed, said.reason, said.story))
    except KeyboardInterrupt:
        total = len(study.arms) * len(study.seeds)
        print(f"\nStopped. {len(found)} of {total} runs are finished and kept; the same command goes on from "
              "there.", file=sys.stderr)  # fmt: skip
        raise
    ordered = [found[a.name, s] for a in study.arms for s in study.seeds if (a.name, s) in found]
    return ordered, failures


def _whole(
    study: Study, code: Code, results: Sequence[Result], failures: Sequence[Failure], summary: Summary
) -> dict[str, object]:
    """Everything, for programs; figures that are not finite become null."""
    return {
        "program": f"p2pdiloco {__version__}",
        "commit": code.commit,
        "source_digest": code.source_digest,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "python": platform.python_version()},
        "study": study,
        "summary": summary,
        "results": results,
        "failures": [{"arm": f.arm, "seed": f.seed, "reason": f.reason} for f in failures],
    }


def _write(name: str, data: bytes) -> None:
    if name == "-":
        sys.stdout.write(data.decode() + "\n")
        return
    try:
        Path(name).write_bytes(data.rstrip(b"\n") + b"\n")
    except OSError as error:
        raise OperatorError(f"{name} cannot be written: {error.strerror}.", SETTINGS) from None


def _commit() -> str | None:
    """The checkout that this code is run from, with + if it was changed; None for an installed package."""
    here = Path(__file__).parent
    try:
        said = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"],  # noqa: S607 - git of the PATH
            cwd=here, capture_output=True, text=True, check=False, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return said.stdout.strip() or None if said.returncode == 0 else None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
