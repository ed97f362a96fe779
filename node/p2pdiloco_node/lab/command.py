"""`p2pdiloco simulate FILE`: read, run what is not known yet, print, keep."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from p2pdiloco.errors import OperatorError
from p2pdiloco.exit_codes import FILES, USAGE
from p2pdiloco.sim.lab.result import Result
from p2pdiloco.words import count_of
from p2pdiloco_node import __version__
from p2pdiloco_node.config import lab_compile
from p2pdiloco_node.lab import plots, tables
from p2pdiloco_node.lab.cache import Cache, source_digest
from p2pdiloco_node.lab.progress import StudyProgress
from p2pdiloco_node.lab.report import Summary, summarize
from p2pdiloco_node.lab.runs import Done, Failed, Share, Task, Work, run_live, run_tasks
from p2pdiloco_node.lab.seeds import check_jobs, part_of, say, write_output
from p2pdiloco_node.lab.study import Study, choose_arms, read_study

STORY_LINES = 12  # of a traceback that is ours


class Options(NamedTuple):
    """The flags."""

    file: Path
    changes: Sequence[str] = ()
    seeds: str | None = None
    arms: str | None = None
    against: str | None = None
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
    study = choose_arms(study, options.arms, options.against)
    _check(options, study, real=work is run_live)
    # Now, and not after hours in which somebody edits and commits.
    code = Code(_commit(), source_digest(with_model=study.learns))
    cache = cache or Cache(fresh=options.fresh)
    results, failures = _run(study, options.jobs, work, cache)
    cache.trim()
    summary = summarize(study, results)
    refused = _put_out(options, study, code, results, failures, summary)
    for failure in failures:
        print(f"p2pdiloco: {failure.arm}, seed {failure.seed}: {failure.reason}", file=sys.stderr)
    for story in sorted({f.story for f in failures if f.story}):
        print("\n".join(story.rstrip().splitlines()[-STORY_LINES:]), file=sys.stderr)
    sentences = [error for error in refused if isinstance(error, OperatorError)]
    if sentences:
        raise OperatorError(" ".join(map(str, sentences)), sentences[0].exit_code)
    for error in refused:
        raise error
    return 1 if failures else 0


def _put_out(
    options: Options, study: Study, code: Code, results: Sequence[Result], failures: Sequence[Failure],
    summary: Summary,
) -> list[Exception]:  # fmt: skip
    """The tables first, then the files; what cannot be written takes nothing else with it.

    Returns: what went wrong, OperatorError or BrokenPipeError (the reader of the tables had enough).
    """
    ways: list[Callable[[], None]] = []
    if options.json != "-":
        ways.append(lambda: say(tables.in_words(study, summary)))
    if options.json is not None:
        whole = msgspec.json.encode(_whole(study, code, results, failures, summary))
        # ASCII, so that any encoding of standard output carries it.
        escaped = json.dumps(json.loads(whole), indent=2).encode()
        ways.append(partial(_write, options.json, escaped))
    if options.markdown is not None:
        ways.append(partial(_write, str(options.markdown), tables.in_markdown(study, summary).encode()))
    if options.plot is not None and any(r.curve for r in results):
        ways.append(partial(plots.draw, options.plot, study, results))
    refused: list[Exception] = []
    for way in ways:
        try:
            way()
        except (OperatorError, BrokenPipeError) as error:
            refused.append(error)
    return refused


def _check(options: Options, study: Study, *, real: bool) -> None:
    """What would be a pity to find out after hours."""
    lab_compile(os.environ)
    check_jobs(options.jobs)
    if options.plot is not None:
        plots.check_plot(options.plot, study)
    named = [("the experiment", str(options.file))]
    for flag, name in (("--json", options.json), ("--plot", options.plot), ("--markdown", options.markdown)):
        if name is None:
            continue
        for other, known in named:
            if _same(str(name), known):
                raise OperatorError(f"{flag} {name} would write over {other}: give another name.", USAGE)
        named.append((f"what {flag} writes", str(name)))
        if str(name) != "-":
            check_writable(Path(name))
    if real and study.learns and importlib.util.find_spec("torch") is None:
        raise OperatorError(
            "A model needs torch, which is not installed: pip install 'p2pdiloco[node]', or ask about "
            'traffic and goodput alone with --set model.kind=none.', FILES,
        )  # fmt: skip


def _same(one: str, other: str) -> bool:
    """Whether two names are of one file, through links, too."""
    if os.path.realpath(one) == os.path.realpath(other):
        return True
    with contextlib.suppress(OSError):  # one of them is not there
        return Path(one).samefile(other)
    return False


def check_writable(file: Path) -> None:
    """Raises: OperatorError: the folder is not there or not ours, or the name is a folder's or too long."""
    try:
        if not file.parent.is_dir():
            why = f"there is no folder {file.parent}"
        elif file.is_dir():
            why = "it is a folder"
        elif file.exists() and not os.access(file, os.W_OK):
            why = "it may not be changed"
        else:
            if not file.exists() or file.is_file():
                part, _ = part_of(file)
                part.touch()
                part.unlink()
            return
    except OSError as error:
        why = error.strerror or str(error)
    raise OperatorError(f"{file} cannot be written: {why}. Give the name of a file.", FILES)


def _run(study: Study, jobs: int, work: Work, cache: Cache) -> tuple[list[Result], list[Failure]]:
    """All arms of a seed before the next seed, so that a study cut short has pairs."""
    found: dict[tuple[str, int], Result] = {}
    lost = 0  # runs that are finished and could not be kept
    tasks: list[Task] = []
    for seed in study.seeds:
        for arm in study.arms:
            if kept := cache.find(arm, seed):
                found[arm.name, seed] = kept
            else:
                tasks.append(Task(arm, seed))
    if found:
        whole = len(found) + len(tasks)
        print(
            f"Kept from earlier: {len(found)} of {count_of(whole, 'run')}; --fresh runs them again.",
            file=sys.stderr,
        )
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
                    why = cache.keep(task.experiment, said.result)
                    if why and not lost:
                        print(f"p2pdiloco: finished runs cannot be kept in {cache.folder}: {why}. The next "
                              "time they run again.", file=sys.stderr)  # fmt: skip
                    lost += bool(why)
                    found[task.experiment.name, task.seed] = said.result
                elif isinstance(said, Failed):
                    failures.append(Failure(task.experiment.name, task.seed, said.reason, said.story))
    except KeyboardInterrupt:
        total = len(study.arms) * len(study.seeds)
        how = f", {len(found) - lost} kept" if lost else " and kept"
        print(f"\nStopped. Finished{how}: {len(found)} of {count_of(total, 'run')}; the same command goes on "
              "from there.", file=sys.stderr)  # fmt: skip
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
    """Into a file, or for `-` to standard output."""
    if name == "-":
        say(data.decode().rstrip("\n"))
    else:
        write_output(Path(name), data.rstrip(b"\n") + b"\n")


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
