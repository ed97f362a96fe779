"""`p2pdiloco simulate` without a file: directed schedules, then random swarms, one per seed, on all cores.

What a seed does is in p2pdiloco/sim; here are processes, numbers and words, and what both forms of the
command share: `--seeds`, `--jobs`, and how their output gets out.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.exit_codes import FILES, RESOURCES, USAGE
from p2pdiloco.protocol.node import Node
from p2pdiloco.sim.schedules import SCHEDULES, ScheduleReport, run_schedule
from p2pdiloco.sim.swarm import SeedReport, run_seed
from p2pdiloco.words import count_of

A = TypeVar("A")
R = TypeVar("R")

REAL_KEYS_EVERY = 15  # seeds divisible by it sign and verify with Ed25519: 20 of 300
TRACE_SHOWN = 40  # lines of a violated seed's story
VIOLATIONS_SHOWN = 10
SEED_MAX = 2**64 - 1  # PCG64 takes any, messages between processes and torch take 64 bits
SEEDS_CHARS_SHOWN = 80  # in a message


class SimulationReport(NamedTuple):
    """What a set of seeds showed."""

    seeds: int
    schedules: int
    violations: tuple[SeedReport, ...]
    broken_schedules: tuple[ScheduleReport, ...]
    entries: int
    versions: int
    memberships: int
    starts: int
    messages: int
    recovery_s_median: float  # simulated, from the end of the faults to the next certified entry
    recovery_s_99: float
    late: int  # seeds in which that took longer than target R2 allows in 99 of 100
    wall_s: float

    @property
    def ok(self) -> bool:
        return not self.violations and not self.broken_schedules


def parse_seeds(text: str, what: str = "--seeds", code: int = USAGE) -> list[int]:
    """`A..B`, or numbers separated by commas. Raises: OperatorError that says what is accepted."""
    shown = text if len(text) <= SEEDS_CHARS_SHOWN else f"{text[:SEEDS_CHARS_SHOWN]}..."
    try:
        seeds: list[int] = []
        for part in text.split(","):
            first, dots, last = part.partition("..")
            begin, end = int(first), int(last if dots else first)
            if max(begin, end) > SEED_MAX:
                raise OperatorError(f"{what} {shown}: a seed is at most {SEED_MAX}.", code)
            if end - begin + 1 + len(seeds) > limits.simulated_seeds_max:
                raise OperatorError(
                    f"{what} {shown}: at most {limits.simulated_seeds_max} seeds at once.", code
                )
            seeds.extend(range(begin, end + 1))
    except ValueError:
        raise OperatorError(
            f"{what} {shown!r} is not understood: write A..B (1..300) or numbers (1,2,3).", code
        ) from None
    if not seeds or min(seeds) < 0:
        raise OperatorError(f"{what} {shown} names no seed: write A..B with A not above B.", code)
    return seeds


def check_jobs(jobs: int) -> None:
    """Raises: OperatorError: nobody can start so many processes."""
    if not 0 <= jobs <= limits.lab_jobs_max:
        raise OperatorError(f"--jobs {jobs}: give 1 to {limits.lab_jobs_max}, or 0 for one a core.", USAGE)


def say(text: str) -> None:
    """Print to standard output, at once. What its encoding cannot write becomes a question mark.

    Raises: OperatorError: it cannot be written, as on a full disk; BrokenPipeError: nobody reads any more.
    """
    out = sys.stdout
    if out is None:  # closed by whoever started this
        return
    encoding = out.encoding or "utf-8"
    try:
        out.write(text.encode(encoding, "replace").decode(encoding) + "\n")
        out.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        # Python writes what is left once more when it ends, and would complain in its own words.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
        raise unwritable("Standard output", error) from None


def write_output(file: Path, data: bytes) -> None:
    """Replace a file as a whole: where that fails, what was there stays. Pipes and devices are written into.

    Raises: OperatorError.
    """
    try:
        if file.exists() and not file.is_file():
            with file.open("wb") as device:
                device.write(data)
            return
        part, target = part_of(file)
        try:
            part.write_bytes(data)
            if target.exists():
                shutil.copymode(target, part)
            part.replace(target)
        finally:
            with suppress(OSError):
                part.unlink(missing_ok=True)
    except OSError as error:
        raise unwritable(str(file), error) from None


def part_of(file: Path) -> tuple[Path, Path]:
    """Where to write what will replace a file, and the file itself: a link stays one."""
    target = Path(os.path.realpath(file))
    return target.with_name(f".p2pdiloco-{os.getpid()}.part"), target


def unwritable(what: str, error: OSError) -> OperatorError:
    """The sentence for a failed write."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    way_out = "make room there" if full else "give another name"
    return OperatorError(
        f"{what} cannot be written: {error.strerror or error}; {way_out}.", RESOURCES if full else FILES
    )


def generator(seed: int) -> np.random.Generator:
    """The one source of randomness of a world."""
    return np.random.Generator(np.random.PCG64(seed))


def simulate_one(seed: int) -> SeedReport:
    """One seed with the real brain; real keys for every fifteenth."""
    return run_seed(seed, generator(seed), Node, real_keys=seed % REAL_KEYS_EVERY == 0)


def simulate_seeds(
    seeds: Sequence[int],
    *,
    schedules: Iterable[str] = (),
    jobs: int = 1,
    told: Callable[[int, int], None] = lambda _done, _bad: None,
) -> SimulationReport:
    """Named schedules, then seeds, on `jobs` processes; `told` hears how many are done and how many bad."""
    began = time.monotonic()
    names = list(schedules)
    broken: list[ScheduleReport] = []
    reports: list[SeedReport] = []
    bad = 0
    pool = ProcessPoolExecutor(jobs, get_context("spawn")) if jobs > 1 else None
    try:
        for lives in _map(pool, _schedule, names):
            broken.extend(r for r in lives if r.violation)
        for chunk in _map(pool, _chunk, _chunks(seeds)):
            reports.extend(chunk)
            bad += sum(1 for r in chunk if r.violation)
            told(len(reports), bad + len(broken))
    finally:
        if pool is not None:
            pool.shutdown(cancel_futures=True)
    recoveries = sorted(r.recovery_s for r in reports if r.recovery_s == r.recovery_s)
    return SimulationReport(
        seeds=len(reports),
        schedules=len(names),
        violations=tuple(r for r in reports if r.violation),
        broken_schedules=tuple(broken),
        entries=sum(r.entries for r in reports),
        versions=sum(r.version for r in reports),
        memberships=sum(r.memberships for r in reports),
        starts=sum(r.starts for r in reports),
        messages=sum(r.messages for r in reports),
        recovery_s_median=_at(recoveries, 0.5),
        recovery_s_99=_at(recoveries, 0.99),
        late=sum(1 for r in reports if r.recovery_s > r.failover_s),
        wall_s=time.monotonic() - began,
    )


def print_simulation(seeds: str, *, json_file: str | None = None, jobs: int = 0) -> int:
    """The command without an experiment. Exit status 0: no violation, 1: at least one.

    A range runs the directed schedules first; single seeds are lived through again and nothing else.
    `json_file`: where the report for programs goes besides, `-`: to standard output instead. `jobs` 0: a
    process a core.

    Raises: OperatorError for bad seeds, or a file that cannot be written.
    """
    check_jobs(jobs)
    numbers = parse_seeds(seeds)
    schedules = SCHEDULES if ".." in seeds else ()
    jobs = min(jobs or os.cpu_count() or 1, -(-len(numbers) // limits.simulated_chunk_seeds))

    def told(done: int, bad: int) -> None:
        if sys.stderr.isatty():
            print(
                f"\r{done} of {count_of(len(numbers), 'seed')}, {count_of(bad, 'violation')}",
                end="",
                file=sys.stderr,
                flush=True,
            )

    report = simulate_seeds(numbers, schedules=schedules, jobs=jobs, told=told)
    plain = json.dumps(as_plain(report))
    try:
        say(plain if json_file == "-" else in_words(report))
    finally:
        # Also where nobody reads the words.
        if json_file not in (None, "-"):
            write_output(Path(json_file), plain.encode() + b"\n")
    return 0 if report.ok else 1


def as_plain(report: SimulationReport) -> dict[str, object]:
    """The report for programs; violations with seed or name, the broken promise and the last lines."""
    plain = report._asdict()
    plain["violations"] = [_story(str(r.seed), r.violation, r.trace) for r in report.violations]
    plain["broken_schedules"] = [_story(r.name, r.violation, r.trace) for r in report.broken_schedules]
    return {k: None if isinstance(v, float) and v != v else v for k, v in plain.items()}


def in_words(report: SimulationReport) -> str:
    lines = [
        (
            f"{count_of(report.seeds, 'seed')} and {count_of(report.schedules, 'directed schedule')} in "
            f"{report.wall_s:.0f} s: {count_of(report.entries, 'entry', 'entries')} certified, "
            f"{count_of(report.memberships, 'change of committee', 'changes of committee')}, "
            f"{count_of(report.starts, 'start')}, {count_of(report.messages, 'message')}."
        )
    ]
    if report.recovery_s_median == report.recovery_s_median:
        lines.append(
            f"After the faults the next entry came within {report.recovery_s_median:.1f} s (median), "
            f"{report.recovery_s_99:.1f} s (99 %), simulated; in "
            f"{count_of(report.late, 'seed')} later than target R2."
        )
    if report.ok:
        return "\n".join([*lines, "No violation."])
    stories = [(r.name, r.violation, r.trace) for r in report.broken_schedules]
    stories += [(f"seed {r.seed}", r.violation, r.trace) for r in report.violations]
    lines.append(f"{count_of(len(stories), 'VIOLATION', 'VIOLATIONS')}:")
    for name, violation, trace in stories[:VIOLATIONS_SHOWN]:
        lines.append(f"\n{name}: {violation}")
        lines.extend(f"    {line[:160]}" for line in trace[-TRACE_SHOWN:])
        if name.startswith("seed "):
            lines.append(f"  again: p2pdiloco simulate --seeds {name.removeprefix('seed ')}")
    return "\n".join(lines)


def _story(name: str, violation: str, trace: tuple[str, ...]) -> dict[str, object]:
    return {"name": name, "violation": violation, "trace": list(trace[-TRACE_SHOWN:])}


def _schedule(name: str) -> list[ScheduleReport]:
    return [run_schedule(name, generator(1), Node)]


def _chunk(seeds: list[int]) -> list[SeedReport]:
    return [simulate_one(seed) for seed in seeds]


def _chunks(seeds: Sequence[int]) -> list[list[int]]:
    rest = iter(seeds)
    return list(iter(lambda: list(islice(rest, limits.simulated_chunk_seeds)), []))


def _map(
    pool: ProcessPoolExecutor | None, work: Callable[[A], list[R]], over: Sequence[A]
) -> Iterator[list[R]]:
    """Over processes, or in this one where one is enough."""
    return map(work, over) if pool is None else pool.map(work, over)


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else float("nan")
