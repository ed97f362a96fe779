"""The one command, `p2pdiloco`. Thin: it reads flags, calls one function, prints one sentence on failure.

Everything heavy is imported inside the commands, so that `--help` answers at once. Exit codes are those of
docs/exit-codes.md; 70 is a fault of this program, with a traceback.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import cyclopts
from cyclopts import App, Parameter

from p2pdiloco.errors import OperatorError, P2PDiLoCoError
from p2pdiloco.exit_codes import FILES, INTERRUPTED, OURS, USAGE
from p2pdiloco_node import __version__
from p2pdiloco_node.commands import model, run
from p2pdiloco_node.commands.flags import (
    ConfigFile,
    FileOrDash,
    Flag,
    Globs,
    Hidden,
    Whole,
    Words,
    refuse_empty,
)
from p2pdiloco_node.commands.slips import slip
from p2pdiloco_node.config import (
    INTERNAL,
    Loaded,
    NodeConfig,
    TrackerConfig,
    in_a_line,
    is_utf8,
    load,
)
from p2pdiloco_node.storage.scratch import remove_temporary_folders, temporary_folder

app = App(
    name="p2pdiloco",
    help="Train one language model together over the ordinary internet.",
    version=f"p2pdiloco {__version__}",
    config=refuse_empty,
    exit_on_error=False,
    print_error=False,
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)
run_app = App(name="run", help="Make a run, look at one, and speak as its owner.")
config_app = App(name="config", help="Look at settings.")
run.add_to(run_app)
app.command(run_app)
app.command(config_app)
app.command(model.export)
app.command(model.generate)


@app.command
def demo(
    *,
    nodes: Whole = 3,
    outer_steps: Whole | None = None,
    inner_steps: Whole | None = None,
    corpus: Globs = None,
    chaos: Flag = False,
    headless: Flag = False,
    json: Path | None = None,
    keep: Path | None = None,
    seed: Whole = 1,
) -> int:
    """Everything on this machine: tracker, nodes, page, real text. Ends by itself in a few minutes.

    Parameters
    ----------
    nodes:
        Training nodes, each with its own trainer process.
    outer_steps:
        Versions after which the run is over.
    inner_steps:
        Inner steps of a pass (H). Left out: what takes about four seconds here.
    corpus:
        Files to train on (a glob; may be given several times). Left out: Python's standard library.
    chaos:
        Kill and pause daemons meanwhile, one at a time.
    headless:
        Plain lines instead of a live table.
    json:
        Write the summary for programs into this file.
    keep:
        Keep everything in this new folder, for `p2pdiloco verify`.
    seed:
        Of the model's initial params.
    """
    from p2pdiloco_node.demo.command import Options, run_demo

    return run_demo(Options(nodes, outer_steps, inner_steps, corpus, chaos, headless, json, keep, seed))


@app.command
def tracker(
    *,
    run: str | None = None,
    listen: str | None = None,
    public_url: str | None = None,
    archive_bytes_max: Whole | None = None,
    checkpoints: Whole | None = None,
    tensorboard: str | None = None,
    wandb: str | None = None,
    log_level: Literal["debug", "info", "warning", "error"] | None = None,
    config: ConfigFile = None,
    die_with_parent: Hidden = None,
) -> int:
    """Serve a run: directory, witness, data and the public page, in one process without torch.

    Parameters
    ----------
    run:
        The folder that `p2pdiloco run new` made (DIR).
    listen:
        HOST:PORT. With a loopback address only nodes of this machine can join. Left out: 127.0.0.1:7474.
    public_url:
        Address to print in the join line, where nodes reach the tracker under another one.
    archive_bytes_max:
        Most bytes of merged deltas that the witness keeps for verification. Left out: 4294967296.
    checkpoints:
        Newest versions offered for download, each as large as the model in float32; 0: none. Left out: 3.
    tensorboard:
        Write the run's curves and samples into this folder, for TensorBoard.
    wandb:
        Send them to this project of Weights & Biases.
    log_level:
        How much is logged. Left out: info.
    """
    from p2pdiloco_node.tracker import run_tracker

    return run_tracker(_tracker_config(config, locals()).values)


@app.command
def node(
    *,
    join: str | None = None,
    data_dir: str | None = None,
    name: str | None = None,
    listen: str | None = None,
    advertise: Words = None,
    peers: Words = None,
    device: str | None = None,
    threads: Whole | None = None,
    micro_batch: Whole | None = None,
    checkpointing: Literal["auto", "on", "off"] | None = None,
    offload: Literal["auto", "none", "anchor", "moments"] | None = None,
    compile_: Annotated[bool | None, Parameter(name="--compile")] = None,
    gpus: str | None = None,
    ranks: Whole | None = None,
    parallel: Literal["auto", "ddp", "fsdp"] | None = None,
    nnodes: Whole | None = None,
    rdzv: str | None = None,
    data_disk: str | None = None,
    keep_deltas: bool | None = None,
    stay: bool | None = None,
    tensorboard: str | None = None,
    wandb: str | None = None,
    log_level: Literal["debug", "info", "warning", "error"] | None = None,
    config: ConfigFile = None,
    die_with_parent: Hidden = None,
) -> int:
    """Join a run and train.

    Parameters
    ----------
    join:
        The line that the tracker printed: http://HOST:PORT/#RUNID.
    data_dir:
        Folder for everything of this node. Left out: p2pdiloco-node.
    name:
        Shown on the run's page. Left out: the beginning of its key.
    listen:
        HOST:PORT for other peers. Left out: a free port.
    advertise:
        HOST:PORT at which others reach this node, where it is not as it seems from here.
    peers:
        HOST:PORT of nodes to ask when no tracker answers.
    device:
        auto, cpu, cuda or cuda:N. Left out: auto.
    threads:
        CPU threads of the trainer. Left out: 1.
    micro_batch:
        Sequences per forward pass; 0: as many as fit well in memory. Less needs less of it.
    checkpointing:
        Compute activations twice to keep fewer of them. Left out: auto.
    offload:
        What lies in host memory instead of the GPU's; moments: these and the anchor. Left out: auto.
    compile_:
        Compile the losses with torch.compile: faster on GPUs after a minute or two.
    gpus:
        Train on several GPUs as one node: all, or their numbers, such as 0,1,3.
    ranks:
        Processes of a trainer on the CPU. Left out: 1.
    parallel:
        ddp: each rank holds the whole model; fsdp: each holds a part; auto: fsdp where that would not fit.
        Left out: auto.
    nnodes:
        Machines of this one node; on the others run `p2pdiloco ranks`.
    rdzv:
        HOST:PORT on this machine, where the ranks of all machines meet.
    data_disk:
        Most that the run's data may take on disk, such as 20GB. A corpus that is larger is read in windows.
        Left out: 64GiB.
    keep_deltas:
        Keep every delta on disk, so that `p2pdiloco verify` can start at version 0 here.
    stay:
        When the run is over, keep serving it instead of ending.
    tensorboard:
        Write this node's curves and samples into this folder, for TensorBoard.
    wandb:
        Send them to this project of Weights & Biases.
    log_level:
        How much is logged. Left out: info.
    """
    from p2pdiloco_node.daemon import run_node

    flags = locals() | {"compile": compile_}
    return run_node(_node_config(config, flags).values)


@app.command
def ranks(
    *,
    nnodes: Whole,
    node_rank: Whole,
    rdzv: str,
    gpus: str | None = None,
    ranks: Whole | None = None,
    device: str | None = None,
    threads: Whole | None = None,
    nice: Whole = 5,
) -> int:
    """Lend this machine's GPUs to a node on another machine, as further ranks of its trainer.

    Parameters
    ----------
    nnodes:
        Machines of that node, as there.
    node_rank:
        Which of them this is; the node's own is 0.
    rdzv:
        HOST:PORT on the node's own machine, as there.
    gpus:
        all, or their numbers; as many as on the other machines.
    ranks:
        Processes on the CPU; as many as on the other machines.
    device:
        auto, cpu, cuda or cuda:N, for one rank.
    threads:
        CPU threads of each rank.
    nice:
        Niceness of the ranks.
    """
    from p2pdiloco_node.training.further_ranks import run_ranks

    given = {
        "gpus": gpus, "ranks": ranks, "device": device, "nnodes": nnodes, "rdzv": rdzv, "threads": threads,
    }  # fmt: skip
    settings = load(NodeConfig, given, environment={}).values
    return run_ranks(settings, node_rank=node_rank, nice=nice, scratch=temporary_folder)


@app.command
def status(*, url: str | None = None, json: Flag = False) -> int:
    """What the daemons on this machine are doing.

    Parameters
    ----------
    url:
        Ask this daemon instead (http://127.0.0.1:PORT).
    json:
        Print what they answer, for programs.
    """
    from p2pdiloco_node.process.local_status import print_status

    return print_status(url, as_json=json)


@app.command
def verify(folder: Path, /, *, json: Flag = False) -> int:
    """Replay a kept run: every signature, certificate, scalar and state root.

    Parameters
    ----------
    folder:
        A run's folder, what `demo --keep` kept, or a node's data folder.
    json:
        Print the result for programs.
    """
    from p2pdiloco_node.verify import print_verified

    return print_verified(folder, as_json=json)


@app.command
def simulate(
    experiment: Path | None = None,
    /,
    *,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative_iterable=())] = None,
    seeds: str | None = None,
    arms: str | None = None,
    against: str | None = None,
    json: FileOrDash = None,
    plot: Path | None = None,
    markdown: Path | None = None,
    jobs: Whole = 0,
    fresh: Flag = False,
) -> int:
    """What would a run do with these nodes, links and failures? Without a file: the protocol's own checkers.

    Parameters
    ----------
    experiment:
        TOML file (docs/simulate.md). Left out: whole swarms with faults, checked from outside.
    set_:
        SECTION.KEY=VALUE instead of what the file says, such as outer.lambda=0.1; may be given several times.
    seeds:
        A..B, or numbers separated by commas. Left out: those of the file, or 1; without a file 1..100.
    arms:
        Only these arms of the file, separated by commas.
    against:
        The arm that the others are compared with. Left out: the first.
    json:
        Write everything for programs into this file; - prints it instead of the tables.
    plot:
        Draw loss against tokens and against time into this .svg or .png.
    markdown:
        Write the tables as Markdown into this file.
    jobs:
        Processes; 0: one a core.
    fresh:
        Run again what is kept from earlier.
    """
    if experiment is None:
        from p2pdiloco_node.lab.seeds import print_simulation

        given = {
            "--set": set_, "--arms": arms, "--against": against, "--plot": plot, "--markdown": markdown,
            "--fresh": fresh,
        }  # fmt: skip
        if needless := [flag for flag, value in given.items() if value]:
            raise OperatorError(f"{needless[0]} is for an experiment: p2pdiloco simulate FILE.toml.", USAGE)
        return print_simulation(seeds or "1..100", json_file=json, jobs=jobs)
    from p2pdiloco_node.lab.command import Options, simulate_study

    return simulate_study(
        Options(experiment, set_ or (), seeds, arms, against, jobs, fresh, json, plot, markdown)
    )


@config_app.command
def show(which: Literal["node", "tracker"] = "node", *, config: ConfigFile = None) -> int:
    """Each setting, its value, and where it comes from.

    Parameters
    ----------
    which:
        Settings of which command.
    """
    loaded: Loaded[NodeConfig] | Loaded[TrackerConfig] = (
        load(NodeConfig, {}, file=config) if which == "node" else load(TrackerConfig, {}, file=config)
    )
    shown = {key: origin for key, origin in loaded.origins.items() if key not in INTERNAL}
    width = max(map(len, shown))
    for key, origin in shown.items():
        print(f"{key:{width}}  {in_a_line(getattr(loaded.values, key)):<24}  {origin}")
    return 0


@app.command
def version() -> int:
    """Versions of this program, its protocol and its arithmetic."""
    from p2pdiloco.run_spec import FORMAT, MATH_VERSION
    from p2pdiloco.wire.envelope import PROTOCOL_VERSION

    print(f"p2pdiloco {__version__} (protocol {PROTOCOL_VERSION}, run format {FORMAT}, math {MATH_VERSION})")
    return 0


def _node_config(config: Path | None, flags: dict[str, object]) -> Loaded[NodeConfig]:
    flags = {k: v for k, v in flags.items() if k in NodeConfig.__struct_fields__}
    loaded = load(NodeConfig, flags, file=config)
    _check_folders(loaded.origins, loaded.values, "data_dir", "tensorboard")
    return loaded


def _tracker_config(config: Path | None, flags: dict[str, object]) -> Loaded[TrackerConfig]:
    flags = {k: v for k, v in flags.items() if k in TrackerConfig.__struct_fields__}
    loaded = load(TrackerConfig, flags, file=config)
    _check_folders(loaded.origins, loaded.values, "run", "tensorboard")
    return loaded


def _check_folders(origins: dict[str, str], values: NodeConfig | TrackerConfig, *keys: str) -> None:
    """A folder without a name would be the current one, also where a variable or a file says it.

    Raises: OperatorError.
    """
    for key in keys:
        folder = getattr(values, key)
        if origins[key] != "default" and isinstance(folder, str) and not folder.strip():
            raise OperatorError(f"{origins[key]}: {key} is empty: say which folder is meant.", FILES)


def run_command(arguments: Sequence[str]) -> int:
    """Run one command; the exit code. Sentences for people go to stderr."""
    strange = next((word for word in arguments if not is_utf8(word)), None)
    if strange is not None:  # names, prompts and paths are written into files and messages, all of them UTF-8
        print(f"p2pdiloco: {strange!r} is no UTF-8: write it in a terminal that is, or rename that file.",
              file=sys.stderr)  # fmt: skip
        return USAGE
    remove_temporary_folders()
    try:
        result = app(list(arguments))
    except cyclopts.CycloptsError as error:
        print(f"p2pdiloco: {slip(error, app, arguments)}", file=sys.stderr)
        return USAGE
    except P2PDiLoCoError as error:
        print(f"p2pdiloco: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, OperatorError) else 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception:  # noqa: BLE001 - the last resort: said, with a traceback, and a documented exit code
        traceback.print_exc()
        print("p2pdiloco: this is a fault of p2pdiloco itself; please report it with the lines above.",
              file=sys.stderr)  # fmt: skip
        return OURS
    return result if isinstance(result, int) else 0


if __name__ == "__main__":
    sys.exit(run_command(sys.argv[1:]))
