"""`p2pdiloco run ...` for a run that goes on: one session, and one sentence at the end."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shlex
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TypeVar

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.exit_codes import USAGE
from p2pdiloco.ids import RunId
from p2pdiloco.run_spec import RunSpec
from p2pdiloco.words import count_of
from p2pdiloco_node import __version__
from p2pdiloco_node.config import JoinLink, parse_peers
from p2pdiloco_node.export.kept import spec_in
from p2pdiloco_node.owner.fork import fork
from p2pdiloco_node.owner.rescue import recover
from p2pdiloco_node.owner.seen_run import SeenRun, link_of, open_run
from p2pdiloco_node.owner.words import Followed, Wanted, say_word
from p2pdiloco_node.progress import Bar, Quiet, Told, shown
from p2pdiloco_node.run.checks import Declared, about_a_node
from p2pdiloco_node.run.file import Parts
from p2pdiloco_node.run.inspect import Now, as_plain, in_lines, sections
from p2pdiloco_node.run.new import owner_key_path, when_over
from p2pdiloco_node.run.stopping import run_making
from p2pdiloco_node.transport.http_session import make_session

T = TypeVar("T")
YES, NO = ("y", "yes"), ("", "n", "no")


@dataclasses.dataclass(frozen=True)
class Reach:
    """How a run is reached, and as whom."""

    where: str  # a link, or a folder of this machine
    owner_key: Path | None = None
    peers: tuple[str, ...] | None = None  # HOST:PORT of nodes, where the tracker is away
    wait_s: float = 120.0

    def __post_init__(self) -> None:
        """Raises: OperatorError."""
        if not 0 < self.wait_s <= limits.owner_wait_s_max:
            raise OperatorError(f"--wait-s is above 0 and at most {limits.owner_wait_s_max:.0f}.", USAGE)

    @property
    def key(self) -> Path:
        return self.owner_key or owner_key_path()


def _told(as_json: bool) -> AbstractContextManager[Told]:
    """What is under way is shown, unless standard output belongs to the JSON."""
    return nullcontext(Quiet()) if as_json else shown()


def _with_run(reach: Reach, told: Told, work: Callable[[SeenRun], Awaitable[T]]) -> T:
    """Raises: OperatorError."""

    async def live() -> T:
        async with make_session(connections_max=64, per_host_max=0, build=__version__) as session:
            seen = await open_run(session, link_of(reach.where), parse_peers(reach.peers), told)
            return await work(seen)

    return asyncio.run(live())


def print_word(reach: Reach, wanted: Wanted, *, as_json: bool, yes: bool = False) -> int:
    """Say a word and print where it stands. Raises: OperatorError."""
    with _told(as_json) as told:
        said = _with_run(
            reach, told,
            lambda seen: say_word(
                seen, wanted, reach.key, wait_s=reach.wait_s,
                agree=None if yes else lambda text: _agreed(text, told),
            ),
        )  # fmt: skip
    if as_json:
        nothing = {"kind": wanted.kind, "effect": said}
        print(json.dumps(dataclasses.asdict(said) if isinstance(said, Followed) else nothing))
    elif isinstance(said, Followed):
        print(f"Entry {said.index}, at version {said.version:,}: {said.kind}. {said.effect}")
    else:
        print(said)
    return 0


def print_recovered(
    reach: Reach, seats: Sequence[str], *, force: bool, yes: bool, as_json: bool
) -> int:  # fmt: skip
    """Rescue a run and print who follows. Raises: OperatorError."""

    with _told(as_json) as told:

        def agree(text: str) -> bool:
            print(text, file=sys.stderr, flush=True)
            if not yes:
                _agreed("A recovery cannot be taken back.", told)
            return True

        done = _with_run(
            reach, told,
            lambda seen: recover(
                seen, reach.key, seats=seats, force=force, agree=agree, wait_s=reach.wait_s
            ),
        )  # fmt: skip
    if as_json:
        print(json.dumps(dataclasses.asdict(done)))
    else:
        print(
            f"Epoch {done.epoch} began at entry {done.index}, from version {done.version:,}: "
            f"{', '.join(done.committee)} certify from here on, followed by "
            f"{count_of(done.following, 'peer')} so far. Who was away follows when it comes back."
        )
    return 0


def _agreed(text: str, told: Told) -> None:
    """Ask the person at the terminal. Raises: OperatorError: no, or nobody to ask."""
    if not sys.stdin.isatty():
        raise OperatorError(f"{text} Where nobody can be asked, say so with --yes.", USAGE)
    # A bar draws over the question, and takes what stands in brackets in it for a colour.
    aside = told.bars if isinstance(told, Bar) else None
    if aside is not None:
        aside.stop()
    try:
        with _interrupted_at_once():
            said = input(f"{text} Go on, yes or no? ").strip().lower()
    except EOFError:  # Ctrl-D
        said = ""
    except KeyboardInterrupt:
        print("\nNothing was said.", file=sys.stderr, flush=True)
        raise
    finally:
        if aside is not None:
            aside.start()
    if said not in YES:
        why = "" if said in NO else f" {said[:40]!r} is neither yes nor no."
        raise OperatorError(f"Nothing was said.{why}", USAGE)


@contextmanager
def _interrupted_at_once() -> Iterator[None]:
    """An event loop only takes note of Ctrl-C, and goes on with what it does: a question stays."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def print_inspected(reach: Reach, declared: Declared, *, as_json: bool) -> int:
    """Print what the RunSpec says and, where it can be reached, how far the run is. Raises: OperatorError."""
    declared.check()
    path = Path(reach.where).expanduser()
    kept = spec_in(path) if "://" not in reach.where and path.exists() else None
    link, now = "", None
    if kept is None:
        link, found, now = _seen_now(reach, as_json)
        run, spec = found
    else:
        run, spec = kept
        if path.is_dir():
            with suppress(OperatorError):  # no daemon serves it now: the RunSpec is what there is
                link, _, now = _seen_now(reach, as_json)
    if as_json:
        print(json.dumps(as_plain(run, spec, declared, link=link, now=now)))
        return 0
    print("\n".join(in_lines(sections(run, spec, declared, link=link, now=now))))
    for sentence in about_a_node(spec, declared):
        print(f"\n{sentence}")
    return 0


def _seen_now(reach: Reach, as_json: bool) -> tuple[str, tuple[RunId, RunSpec], Now]:
    async def look(seen: SeenRun) -> tuple[str, tuple[RunId, RunSpec], Now]:
        await seen.catch_up()
        names = {peer: host.name for peer, host in seen.hosts.items()}
        link = f"{seen.urls[0]}/#{seen.run.hex()}"
        return link, (seen.run, seen.spec), Now(seen.log, seen.rules, names)

    with _told(as_json) as told:
        return _with_run(reach, told, look)


def print_forked(
    reach: Reach, version: str, out: Path, parts: Parts, declared: Declared, *, as_json: bool
) -> int:  # fmt: skip
    """Make a fork and print how to serve it. Raises: OperatorError."""
    folder = Path(reach.where).expanduser()
    source: JoinLink | Path = folder if "://" not in reach.where and folder.is_dir() else link_of(reach.where)
    with _told(as_json) as told:
        made = run_making(
            fork(source, version, out, parts, owner_key=reach.key, declared=declared, told=told)
        )
    parent = made.spec.parent
    assert parent is not None, "a fork has a parent"
    if as_json:
        print(json.dumps({
            "run": made.run.hex(), "name": made.spec.name, "out": str(out), "parent": parent.run.hex(),
            "version": parent.version, "params_root": parent.params_root.hex(), "warnings": made.warnings,
        }))  # fmt: skip
        return 0
    for warning in made.warnings:
        print(warning)
    print(when_over(made.spec.target_tokens, made.spec.target_version))
    print(
        f"Run {made.run.hex()}\nis ready in {out}: version 0 is version {parent.version:,} of run "
        f"{parent.run.hex()[:16]}. Serve it with: p2pdiloco tracker --run {shlex.quote(str(out))} "
        "--listen HOST:PORT"
    )
    return 0
