"""`p2pdiloco run ...`: make a run, look at one, speak as its owner. Flags in, one function called.

Everything heavy is imported inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from p2pdiloco_node.commands.flags import ConfigFile, Flag, Globs, Number, Whole

if TYPE_CHECKING:
    from p2pdiloco_node.owner.command import Reach
    from p2pdiloco_node.run.checks import Declared
    from p2pdiloco_node.run.file import Parts

OwnerKey = Annotated[Path | None, Parameter(name="--owner-key")]
Peers = Annotated[list[str] | None, Parameter(name="--peers", negative_iterable=())]
Sets = Annotated[list[str] | None, Parameter(name="--set", negative_iterable=())]
Flags = dict[str, dict[str, object]]  # as the tables of a run file; None: not given


@Parameter(name="*")
@dataclass(frozen=True)
class Speaking:
    """What every word of the owner takes."""

    owner_key: OwnerKey = None
    """Your key. Left out: owner.key in your configuration folder."""
    peers: Peers = None
    """HOST:PORT of nodes to ask when the tracker is away; may be given several times."""
    wait_s: Number = 120.0
    """Seconds to wait until the committee has put it into the log."""
    json: Flag = False
    """Print the result for programs."""

    def reach(self, run: str) -> Reach:
        from p2pdiloco_node.owner.command import Reach

        return Reach(run, self.owner_key, tuple(self.peers) if self.peers is not None else None, self.wait_s)


@Parameter(name="*")
@dataclass(frozen=True)
class Expected:
    """Machines that the run is meant for."""

    up_mbit: Number = 20.0
    """Upload of a node, in Mbit/s: a pass shorter than its transfer is refused."""
    down_mbit: Number = 100.0
    """Download of a node, in Mbit/s."""
    memory_gb: Number | None = None
    """GPU memory of a node, in GiB: a model that does not fit is refused."""

    def declared(self) -> Declared:
        from p2pdiloco_node.run.checks import Declared

        return Declared(self.up_mbit, self.down_mbit, self.memory_gb)


@Parameter(name="*")
@dataclass(frozen=True)
class Figures:
    """Of a run, new or a fork, which has its parent's where they are left out."""

    name: str | None = None
    """The run's name, up to 32 characters."""
    tokens: str | None = None
    """The run is over after so many tokens of its own: a number, with K, M, G or T. Left out in
    a new run: 20M."""
    data: Globs = None
    """What to train on: files, globs, folders or hf:NAME (docs/data.md); may be given several times.
    NAME=PATH names its evaluation set in public. Left out in a new run: Python's standard library."""
    outer_steps: Whole | None = None
    """End after so many versions, whatever the tokens; 0, or left out in a new run: by tokens alone."""
    inner_steps: Whole | None = None
    """Inner steps of a pass (H)."""
    pass_s: Number | None = None
    """Seconds from the first adoption in a pass to its end, if H steps are not taken before."""
    batch: Whole | None = None
    """Sequences of one inner step of one node."""
    lr: Number | None = None
    """Highest learning rate of the inner loop."""
    eval_every: Whole | None = None
    """Versions from one evaluation to the next. Left out in a new run: 8."""
    prompt: Annotated[list[str] | None, Parameter(name="--prompt", negative_iterable=())] = None
    """Of samples that evaluators write, for people to read; may be given up to four times."""

    def parts(self, config: Path | None, sets: list[str] | None, more: Flags) -> Parts:
        """Flags over `sets` over the file. `more`: flags of one command alone. Raises: OperatorError."""
        from p2pdiloco_node.run.file import parse_tokens, read_run_file, set_values

        parts = read_run_file(config)
        set_values(parts, sets or [])
        own: Flags = {
            "run": {
                "name": self.name, "tokens": parse_tokens(self.tokens) if self.tokens else None,
                "outer_steps": self.outer_steps, "eval_every": self.eval_every,
            },
            "data": {"data": self.data},
            "inner": {
                "inner_steps": self.inner_steps, "pass_s": self.pass_s, "sequences_per_step": self.batch,
                "lr": self.lr,
            },
            "samples": {"prompts": tuple(self.prompt) if self.prompt else None},
        }  # fmt: skip
        for flags in (own, more):
            for table, values in flags.items():
                parts[table] |= {key: value for key, value in values.items() if value is not None}
        return parts


SPEAKING = Speaking()
EXPECTED = Expected()
FIGURES = Figures()


def add_to(app: App) -> None:
    """Make these commands of `p2pdiloco run`."""
    for command in (new, inspect, pause, resume, extend, finish, revoke, recover, fork):
        app.command(command)


def new(
    *,
    out: Path,
    model: str | None = None,
    figures: Figures = FIGURES,
    text_key: str | None = None,
    tokenizer: str | None = None,
    eval_per_source: Flag | None = None,
    seed: Whole | None = None,
    jobs: Whole = 0,
    admission: Literal["open", "local"] | None = None,
    seq_len: Whole | None = None,
    codec: Literal["int4", "fp16", "topk32", "topk64", "topk128"] | None = None,
    committee: Literal[1, 3, 5, 7] | None = None,
    set_: Sets = None,
    config: ConfigFile = None,
    owner_key: OwnerKey = None,
    expected: Expected = EXPECTED,
) -> int:
    """Make a run in a new folder, ready to be served by `p2pdiloco tracker --run DIR`.

    Parameters
    ----------
    out:
        The new folder (DIR).
    model:
        A preset such as llama:20m or mixtral:tiny (docs/models.md), a config.json, or a folder with a
        checkpoint to start from.
    text_key:
        Where the text is in JSON lines and tables. Left out: text.
    tokenizer:
        bytes, bpe:N (trained here, N tokens), or a tokenizer.json. Left out: that of the model's folder, else
        bytes.
    eval_per_source:
        Hold out an evaluation set of each --data as well.
    seed:
        Of the data's order and of the model's initial params. Left out: 1.
    jobs:
        Processes that prepare the data; 0: one a core.
    admission:
        Who may take part: open, or local (this machine or network; every node is trusted). Left out: open.
    seq_len:
        Tokens of a training sequence.
    codec:
        How deltas are compressed: int4 (default), fp16, or topk32, topk64, topk128 for thin uplinks.
    committee:
        Most seats that the committee may have.
    set_:
        TABLE.KEY=VALUE, such as inner.weight_decay=0.05; may be given several times.
    config:
        TOML file with all that nodes agree on (run.example.toml); flags go before it.
    owner_key:
        Your key, made if there is none. Left out: owner.key in your configuration folder.
    """
    from p2pdiloco_node.run.command import print_made

    more: Flags = {
        "run": {"admission": admission},
        "model": {"model": model, "seq_len": seq_len, "seed": seed},
        "data": {"text_key": text_key, "tokenizer": tokenizer, "eval_per_source": eval_per_source},
        "outer": {"codec": codec},
        "committee": {"size_max": committee},
    }
    return print_made(figures.parts(config, set_, more), out, jobs, owner_key, expected.declared())


def inspect(run: str, /, *, expected: Expected = EXPECTED, peers: Peers = None, json: Flag = False) -> int:
    """What a run fixes, in words with units, how far it is, and what a node needs for it.

    Parameters
    ----------
    run:
        A run's folder (DIR), its spec.bin, or its link (http://HOST:PORT/#RUNID).
    peers:
        HOST:PORT of nodes to ask when the tracker is away; may be given several times.
    json:
        Print it for programs.
    """
    from p2pdiloco_node.owner.command import Reach, print_inspected

    reach = Reach(run, peers=tuple(peers) if peers is not None else None)
    return print_inspected(reach, expected.declared(), as_json=json)


def pause(run: str, /, *, owner: Speaking = SPEAKING) -> int:
    """Nobody trains until you resume; nodes go on serving and voting.

    Parameters
    ----------
    run:
        The run's link, or its folder (DIR) where its tracker runs on this machine.
    """
    return _say("pause", run, owner)


def resume(run: str, /, *, owner: Speaking = SPEAKING) -> int:
    """Nodes train again.

    Parameters
    ----------
    run:
        The run's link, or its folder (DIR) where its tracker runs on this machine.
    """
    return _say("resume", run, owner)


def extend(run: str, /, *, tokens: str, yes: Flag = False, owner: Speaking = SPEAKING) -> int:
    """Move the target: the run is over after so many tokens, and the learning rate ends there.

    Parameters
    ----------
    run:
        The run's link, or its folder (DIR) where its tracker runs on this machine.
    tokens:
        The new target in all: a number, with K, M, G or T.
    yes:
        Do not ask, although the run will most likely end before its target.
    """
    from p2pdiloco_node.owner.command import print_word
    from p2pdiloco_node.owner.words import Wanted
    from p2pdiloco_node.run.file import parse_tokens

    wanted = Wanted("extend", target_tokens=parse_tokens(tokens))
    return print_word(owner.reach(run), wanted, as_json=owner.json, yes=yes)


def finish(run: str, /, *, yes: Flag = False, owner: Speaking = SPEAKING) -> int:
    """End the run now: nodes keep the model. This cannot be taken back.

    Parameters
    ----------
    run:
        The run's link, or its folder (DIR) where its tracker runs on this machine.
    yes:
        Do not ask.
    """
    return _say("finish", run, owner, yes=yes)


def revoke(run: str, peer: str, /, *, yes: Flag = False, owner: Speaking = SPEAKING) -> int:
    """Refuse a node's deltas from now on, and take its seat. This cannot be taken back.

    Parameters
    ----------
    run:
        The run's link, or its folder (DIR) where its tracker runs on this machine.
    peer:
        Its PeerId, the beginning of it, or its name as the page shows it.
    yes:
        Do not ask.
    """
    from p2pdiloco_node.owner.command import print_word
    from p2pdiloco_node.owner.words import Wanted

    return print_word(owner.reach(run), Wanted("revoke", peer=peer), as_json=owner.json, yes=yes)


def recover(
    run: str,
    /,
    *,
    seats: Annotated[list[str] | None, Parameter(negative_iterable=())] = None,
    force: Flag = False,
    yes: Flag = False,
    owner: Speaking = SPEAKING,
) -> int:
    """Rescue a run whose committee lost its majority: those who are there go on without the others.

    Parameters
    ----------
    run:
        The run's link, or its folder (DIR) where its tracker runs on this machine.
    seats:
        Who shall have a seat, as in revoke; may be given several times. Left out: the witness and those who
        had one or trained lately.
    force:
        Although a majority of the committee is there.
    yes:
        Do not ask.
    """
    from p2pdiloco_node.owner.command import print_recovered

    reach = owner.reach(run)
    return print_recovered(reach, seats or (), force=force, yes=yes, as_json=owner.json)


def fork(
    run: str,
    /,
    *,
    out: Path,
    version: str = "newest",
    figures: Figures = FIGURES,
    set_: Sets = None,
    config: ConfigFile = None,
    owner_key: OwnerKey = None,
    expected: Expected = EXPECTED,
    json: Flag = False,
) -> int:
    """A new run from a certified version of another one, which it follows in everything that is left out.

    Parameters
    ----------
    run:
        The parent: its link, or a folder that keeps it.
    out:
        The new folder (DIR).
    version:
        Of the parent: newest, or a number.
    set_:
        TABLE.KEY=VALUE, such as outer.mu=0.4; may be given several times.
    config:
        TOML file with what differs (run.example.toml).
    owner_key:
        Your key for the new run, made if there is none. Left out: owner.key in your configuration folder.
    json:
        Print the result for programs.
    """
    from p2pdiloco_node.owner.command import Reach, print_forked

    parts, declared = figures.parts(config, set_, {}), expected.declared()
    return print_forked(Reach(run, owner_key), version, out, parts, declared, as_json=json)


def _say(kind: str, run: str, owner: Speaking, *, yes: bool = False) -> int:
    from p2pdiloco_node.owner.command import print_word
    from p2pdiloco_node.owner.words import Wanted

    return print_word(owner.reach(run), Wanted(kind), as_json=owner.json, yes=yes)
