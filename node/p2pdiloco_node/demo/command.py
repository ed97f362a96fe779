"""`p2pdiloco demo`: a whole run on this machine, with the same processes as a real one.

One tracker with its witness and N node daemons as separate processes on loopback, a small Llama, this
interpreter's standard library as corpus. It ends by itself; Ctrl-C ends everything within five seconds.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from p2pdiloco.errors import OperatorError
from p2pdiloco.exit_codes import FILES, INTERRUPTED, NO, USAGE
from p2pdiloco.ids import RunId
from p2pdiloco.run_spec import RunSpec, open_run_spec
from p2pdiloco.wire.log import Entry
from p2pdiloco.wire.signing import verify_ed25519
from p2pdiloco.words import count_of
from p2pdiloco_node.daemon import TRAINER_NICE
from p2pdiloco_node.demo.chaos import inject_faults
from p2pdiloco_node.demo.summary import Fault, NodeFacts, Summary, facts_of_log, in_words, summarise
from p2pdiloco_node.demo.swarm import POLL_S, Daemon, Swarm, training_bytes
from p2pdiloco_node.demo.view import View, make_view
from p2pdiloco_node.process.lifetime import on_hang_up
from p2pdiloco_node.run.new import Draft, Order, create_run
from p2pdiloco_node.storage.run_folder import JOURNAL, LOG, RUN, SPEC, WITNESS
from p2pdiloco_node.storage.scratch import temporary_folder
from p2pdiloco_node.training.timing import time_inner_steps
from p2pdiloco_node.verify import read_log

MODEL = "llama:1m"
PASS_S_MIN, PASS_S_WANTED, PASS_S_MAX = 3.0, 4.0, 6.0
STEPS_MIN = 6  # inner steps of a pass; with fewer, most deltas come late and traffic looks bad
OUTER_STEPS, OUTER_STEPS_CHAOS = 24, 48
# Half a minute of install check, imports and start; then a version takes at most a pass and its grace.
NEXT_STEP = (
    "Next: start the pieces yourself, on one machine or several: run new, tracker, node "
    "(README.md, The pieces by hand; or p2pdiloco --help)."
)
RUN_S_MAX = 1800.0
STEPS_MAX = 100_000  # outer, and inner of a pass
SEED_MAX = 2**62
END_S_MAX = 40.0  # for the last evaluation and for everybody to reach the last version
TIMINGS = {
    "rotation": 3,
    "voter_standing_s": 5.0,
    "size_max": 3,
    "heartbeat_s": 0.5,
    "timeout_s_min": 1.5,
    "timeout_s_max": 3.0,
    "voter_lease_s": 9.0,
}


class Options(NamedTuple):
    nodes: int = 3
    outer_steps: int | None = None
    inner_steps: int | None = None
    corpus: Sequence[str] | None = None
    chaos: bool = False
    headless: bool = False
    json: Path | None = None
    keep: Path | None = None
    seed: int = 1


def run_demo(options: Options) -> int:
    """Exit code 0: the run completed and every node holds the same model; 1: not; 130: Ctrl-C."""
    _check(options)
    with ExitStack() as stack:
        folder = stack.enter_context(_folder(options.keep))
        owner = stack.enter_context(temporary_folder("owner")) / "owner.key"
        try:
            return asyncio.run(_demo(options, folder, owner))
        except (KeyboardInterrupt, asyncio.CancelledError):
            print("Stopped; every process has ended.", file=sys.stderr)
            return INTERRUPTED


def _check(options: Options) -> None:
    """What would fail minutes later fails now. Raises: OperatorError."""
    if not 1 <= options.nodes <= 16:
        raise OperatorError("--nodes is 1 to 16 on one machine.", USAGE)
    for flag, steps in (("--outer-steps", options.outer_steps), ("--inner-steps", options.inner_steps)):
        if steps is not None and not 1 <= steps <= STEPS_MAX:
            raise OperatorError(
                f"{flag} is 1 to {STEPS_MAX}; leave it out for what fits this machine.", USAGE
            )
    if not 0 <= options.seed <= SEED_MAX:
        raise OperatorError("--seed is 0 to 2**62.", USAGE)
    if options.json is not None:
        folder = options.json.parent
        if options.json.is_dir() or not folder.is_dir():
            raise OperatorError(f"--json {options.json} is not a file in a folder that exists.", FILES)
        if not os.access(options.json if options.json.exists() else folder, os.W_OK):
            raise OperatorError(f"--json {options.json} cannot be written: name a file elsewhere.", FILES)


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with temporary_folder("demo") as folder:
            yield folder
        return
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise OperatorError(f"{keep} is not empty: name a new folder with --keep.", FILES)
    try:
        keep.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OperatorError(f"{keep} cannot be made: {error.strerror}.", FILES) from None
    yield keep


async def _demo(options: Options, folder: Path, owner: Path) -> int:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    on_hang_up(task.cancel)
    with make_view(headless=options.headless) as view:
        run, spec = await _make_run(options, folder / RUN, owner, view)
        async with Swarm(*_daemons(options, folder, run)) as swarm:
            began = time.monotonic()
            faults: list[Fault] = []
            page = await _start(swarm, view)
            await _follow(options, swarm, spec, faults, view)
            ended = swarm.version_seen.get(spec.target_version, time.monotonic())
            await _settle(swarm, spec, view)
            facts = [_node_facts(node) for node in swarm.nodes]
            names = {n.status.peer: n.name for n in swarm.nodes if n.status is not None}
            evaluations = _evaluations(swarm)
            await swarm.end()
        log = facts_of_log(spec, _entries(folder / RUN))
        summary = summarise(
            spec, log, facts, seed=options.seed, run_id=run.hex(), seconds=ended - began,
            evaluations=evaluations, faults=faults, page=page,
        )  # fmt: skip
        witness = log.entries_by.get(spec.committee.genesis.witness, 0)  # type: ignore[call-overload]
    for line in in_words(summary, names=names, witness_entries=witness):
        print(line)
    if options.keep is not None:
        print(f"Kept in {options.keep}; check it with: p2pdiloco verify {shlex.quote(str(options.keep))}")
    print(NEXT_STEP)
    if options.json is not None:
        try:
            options.json.write_bytes(msgspec.json.format(msgspec.json.encode(summary)) + b"\n")
        except OSError as error:
            raise OperatorError(f"{options.json} cannot be written: {error.strerror}.", FILES) from None
    return 0 if _good(options, spec, summary) else 1


async def _make_run(options: Options, out: Path, owner: Path, view: View) -> tuple[RunId, RunSpec]:
    """The corpus, the model and a RunSpec whose passes fit this machine."""
    versions = options.outer_steps or (OUTER_STEPS_CHAOS if options.chaos else OUTER_STEPS)

    async def tune(draft: Draft) -> RunSpec:
        view.say(f"Timing an inner step with {count_of(options.nodes, 'trainer')} at work at once ...")
        step_s = await time_inner_steps(
            draft.spec, draft.params, draft.shards, draft.folder, trainers=options.nodes, nice=TRAINER_NICE,
            on_ready=lambda n: view.say(
                f"trainer {n} of {options.nodes} is ready" + (", timing ..." if n == options.nodes else "")
            ),
        )  # fmt: skip
        steps = steps_of_a_pass(step_s, options.inner_steps)
        pass_s = max(steps * step_s, 0.1)
        view.say(f"An inner step takes {step_s:.3f} s: H = {steps} inner steps, a pass is {pass_s:.1f} s.")
        if not options.inner_steps and pass_s > PASS_S_MAX:
            view.say(f"This machine is busy: a pass takes {pass_s:.0f} s, and the demo as much longer.")
        elif not PASS_S_MIN <= pass_s <= PASS_S_MAX:
            view.say(f"A pass outside {PASS_S_MIN:.0f} to {PASS_S_MAX:.0f} s is as --inner-steps asked.")
        tokens = versions * options.nodes * steps * draft.spec.tokens_per_inner_step
        inner = msgspec.structs.replace(draft.spec.inner, inner_steps=steps, pass_s=pass_s)
        return msgspec.structs.replace(draft.spec, inner=inner, target_tokens=tokens)

    corpus = "the files given" if options.corpus else "the standard library's source"
    view.say(f"Making the run: {MODEL}, bytes as tokens, {corpus} as corpus.")
    run = await create_run(
        Order(
            "demo", MODEL, options.corpus, 2**40, admission="local", target_version=versions,
            eval_every=max(2, versions // 6), committee=TIMINGS, seed=options.seed,
        ),
        out, owner_key=owner, tune=tune, told=view,
    )  # fmt: skip
    _, spec = open_run_spec((out / SPEC).read_bytes(), verify_ed25519, expected=run)
    return run, spec


def steps_of_a_pass(step_s: float, asked: int | None) -> int:
    """H: as asked for, or what takes about `PASS_S_WANTED`, but never so few that most deltas come late."""
    return asked or max(STEPS_MIN, round(PASS_S_WANTED / step_s))


def _daemons(options: Options, folder: Path, run: RunId) -> tuple[Daemon, list[Daemon]]:
    address = f"127.0.0.1:{_free_port()}"
    tracker = Daemon(
        "tracker", ["tracker", "--run", str(folder / RUN), "--listen", address],
        folder / RUN / WITNESS, folder / "tracker.log",
    )  # fmt: skip
    keep = ["--keep-deltas"] if options.keep is not None else []
    nodes = []
    for n in range(1, options.nodes + 1):
        name = f"node-{n}"
        arguments = ["node", "--join", f"http://{address}/#{run.hex()}", "--data-dir", str(folder / name),
                     "--name", name, "--stay", *keep]  # fmt: skip
        nodes.append(Daemon(name, arguments, folder / name, folder / f"{name}.log"))
    return tracker, nodes


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _start(swarm: Swarm, view: View) -> str:
    swarm.tracker.start()
    page = await swarm.started(swarm.tracker)
    view.page(page)
    for node in swarm.nodes:
        node.start()
    await asyncio.gather(*(swarm.started(node) for node in swarm.nodes))
    return page


async def _follow(options: Options, swarm: Swarm, spec: RunSpec, faults: list[Fault], view: View) -> None:
    """Until every node says that the run is over; faults meanwhile, if asked for."""
    until = time.monotonic() + RUN_S_MAX
    chaos = asyncio.create_task(inject_faults(swarm, faults, view.say)) if options.chaos else None
    try:
        while time.monotonic() < until:
            if chaos is None or chaos.done():
                await swarm.poll()
                if (dead := swarm.dead()) is not None:
                    raise OperatorError(
                        f"{dead.name} ended unexpectedly; its last words:\n{dead.last_words()}", NO
                    )
            view.show(swarm, spec)
            if all(n.status is not None and n.status.over for n in swarm.nodes):
                break
            await asyncio.sleep(POLL_S)
        if chaos is not None and chaos.done():
            chaos.result()
    finally:
        if chaos is not None:
            chaos.cancel()
            await asyncio.wait([chaos])


async def _settle(swarm: Swarm, spec: RunSpec, view: View) -> None:
    """Wait for the last evaluation, and until everybody holds the last version."""
    until = time.monotonic() + END_S_MAX
    while time.monotonic() < until:
        await swarm.poll()
        view.show(swarm, spec)
        same = len({n.status.state_digest for n in swarm.nodes if n.status is not None}) == 1
        evaluated = max(_evaluations(swarm), default=-1) >= spec.target_version
        if same and evaluated and not any(n.status is not None and n.status.evaluating for n in swarm.nodes):
            return
        await asyncio.sleep(POLL_S)


def _evaluations(swarm: Swarm) -> dict[int, float]:
    """version -> held-out loss, from the tracker's page."""
    learning = (swarm.page or {}).get("learning")
    points = learning.get("evaluations", []) if isinstance(learning, dict) else []
    return {int(p["version"]): float(p["loss"]) for p in points if isinstance(p, dict)}


def _node_facts(node: Daemon) -> NodeFacts:
    status = node.status
    refused = dict(node.refused_before)
    for reason, n in (status.refused if status is not None else {}).items():
        refused[reason] = refused.get(reason, 0) + n
    return NodeFacts(
        name=node.name,
        state_digest=status.state_digest if status is not None else "",
        bytes_total=node.bytes_before + (training_bytes(status) if status is not None else 0),
        refused=refused,
        longest_gap_s=node.gap_s,
    )


def _entries(run: Path) -> list[Entry]:
    return read_log(run / WITNESS / JOURNAL / LOG)


def _good(options: Options, spec: RunSpec, summary: Summary) -> bool:
    if options.chaos and len(summary.faults) < 4:
        return False
    return summary.version >= spec.target_version and len(set(summary.state_digests.values())) == 1
