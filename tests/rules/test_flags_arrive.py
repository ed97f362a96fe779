"""Every flag of every command reaches the code behind it, as itself and alone.

The real command line is parsed by the real program; only the one function that a command calls is replaced by
one that notes what it was given. With a flag exactly one value of that must be another than without it, and
it must be the one that the table names: a flag that goes nowhere, or into its neighbour's place, is found.
What the value then does is tested where it is used.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from p2pdiloco_node.cli import run_command

from .test_cli_flags import KNOWN


class Command(NamedTuple):
    calls: str  # module:function
    base: str  # the shortest command line
    # flag -> (words after it, where they arrive). Nothing is added for a switch.
    flags: Mapping[str, tuple[str, str]]


REACH = {
    "--peers": ("10.0.0.1:7", "reach.peers"),
    "--owner-key": ("mine.key", "reach.owner_key"),
    "--wait-s": ("7.5", "reach.wait_s"),
    "--json": ("", "as_json"),
}
EXPECTED = {
    "--up-mbit": ("3.5", "declared.up_mbit"),
    "--down-mbit": ("4.5", "declared.down_mbit"),
    "--memory-gb": ("5.5", "declared.memory_gb"),
}
DAEMON = {
    "--listen": ("127.0.0.1:9", "config.listen"),
    "--tensorboard": ("curves", "config.tensorboard"),
    "--wandb": ("project", "config.wandb"),
    "--log-level": ("debug", "config.log_level"),
    "--config": ("other.toml", "config.log_level"),
}
FIGURES = {
    "--name": ("tiny", "parts.run.name"),
    "--tokens": ("5M", "parts.run.tokens"),
    "--data": ("*.txt", "parts.data.data"),
    "--outer-steps": ("5", "parts.run.outer_steps"),
    "--inner-steps": ("5", "parts.inner.inner_steps"),
    "--pass-s": ("5", "parts.inner.pass_s"),
    "--batch": ("5", "parts.inner.sequences_per_step"),
    "--lr": ("0.5", "parts.inner.lr"),
    "--eval-every": ("5", "parts.run.eval_every"),
    "--prompt": ("once", "parts.samples.prompts"),
    "--set": ("outer.mu=0.5", "parts.outer.mu"),
    "--config": ("run.toml", "parts.inner.weight_decay"),
}
OWNER, LAB = "p2pdiloco_node.owner.command", "p2pdiloco_node.lab.command"
WORD = f"{OWNER}:print_word"
COMMANDS: dict[tuple[str, ...], Command] = {
    ("demo",): Command(
        "p2pdiloco_node.demo.command:run_demo", "demo",
        {
            "--nodes": ("5", "options.nodes"),
            "--outer-steps": ("5", "options.outer_steps"),
            "--inner-steps": ("5", "options.inner_steps"),
            "--corpus": ("*.txt", "options.corpus"),
            "--chaos": ("", "options.chaos"),
            "--headless": ("", "options.headless"),
            "--json": ("x.json", "options.json"),
            "--keep": ("kept", "options.keep"),
            "--seed": ("5", "options.seed"),
        },
    ),
    ("tracker",): Command(
        "p2pdiloco_node.tracker:run_tracker", "tracker",
        DAEMON | {
            "--run": ("tiny-run", "config.run"),
            "--public-url": ("http://8.8.8.8:1", "config.public_url"),
            "--archive-bytes-max": ("5", "config.archive_bytes_max"),
            "--checkpoints": ("5", "config.checkpoints"),
        },
    ),
    ("node",): Command(
        "p2pdiloco_node.daemon:run_node", "node",
        DAEMON | {
            "--join": ("http://127.0.0.1:9", "config.join"),
            "--data-dir": ("here", "config.data_dir"),
            "--name": ("attic", "config.name"),
            "--advertise": ("10.0.0.1:7", "config.advertise"),
            "--peers": ("10.0.0.1:7", "config.peers"),
            "--device": ("cuda:1", "config.device"),
            "--threads": ("5", "config.threads"),
            "--micro-batch": ("5", "config.micro_batch"),
            "--checkpointing": ("on", "config.checkpointing"),
            "--offload": ("anchor", "config.offload"),
            "--compile": ("", "config.compile"),
            "--gpus": ("0,1", "config.gpus"),
            "--ranks": ("5", "config.ranks"),
            "--parallel": ("fsdp", "config.parallel"),
            "--nnodes": ("5", "config.nnodes"),
            "--rdzv": ("10.0.0.1:7", "config.rdzv"),
            "--data-disk": ("5GB", "config.data_disk"),
            "--keep-deltas": ("", "config.keep_deltas"),
            "--stay": ("", "config.stay"),
        },
    ),
    ("ranks",): Command(
        "p2pdiloco_node.training.further_ranks:run_ranks",
        "ranks --nnodes 3 --node-rank 1 --rdzv 10.0.0.1:7",
        {
            "--nnodes": ("5", "settings.nnodes"),
            "--node-rank": ("2", "node_rank"),
            "--rdzv": ("10.0.0.2:7", "settings.rdzv"),
            "--gpus": ("0,1", "settings.gpus"),
            "--ranks": ("5", "settings.ranks"),
            "--device": ("cpu", "settings.device"),
            "--threads": ("5", "settings.threads"),
            "--nice": ("7", "nice"),
        },
    ),
    ("status",): Command(
        "p2pdiloco_node.process.local_status:print_status", "status",
        {"--url": ("http://127.0.0.1:9", "url"), "--json": ("", "as_json")},
    ),
    ("verify",): Command("p2pdiloco_node.verify:print_verified", "verify x", {"--json": ("", "as_json")}),
    ("simulate",): Command(
        f"{LAB}:simulate_study", "simulate study.toml",
        {
            "--set": ("outer.mu=0", "options.changes"),
            "--seeds": ("5", "options.seeds"),
            "--arms": ("a", "options.arms"),
            "--against": ("a", "options.against"),
            "--json": ("x.json", "options.json"),
            "--plot": ("x.svg", "options.plot"),
            "--markdown": ("x.md", "options.markdown"),
            "--jobs": ("5", "options.jobs"),
            "--fresh": ("", "options.fresh"),
        },
    ),
    ("export",): Command(
        "p2pdiloco_node.export.command:print_export", "export out",
        {
            "--join": ("http://127.0.0.1:9", "options.join"),
            "--run": ("tiny-run", "options.run"),
            "--data-dir": ("here", "options.data_dir"),
            "--version": ("5", "options.version"),
            "--dtype": ("bfloat16", "options.dtype"),
            "--format": ("hf", ""),  # the only one there is
            "--held-out": ("", "options.held_out"),
        },
    ),
    ("generate",): Command(
        "p2pdiloco_node.generation.command:print_generated", "generate --from here --prompt words",
        {
            "--from": ("there", "options.source"),
            "--prompt": ("others", "options.prompt"),
            "--tokens": ("5", "options.tokens"),
            "--temperature": ("0.5", "options.temperature"),
            "--top-p": ("0.5", "options.top_p"),
            "--seed": ("5", "options.seed"),
            "--device": ("cpu", "options.device"),
            "--json": ("", "options.as_json"),
        },
    ),
    ("run", "new"): Command(
        "p2pdiloco_node.run.command:print_made", "run new --out here",
        EXPECTED | FIGURES | {
            "--out": ("there", "out"),
            "--model": ("llama:tiny", "parts.model.model"),
            "--text-key": ("body", "parts.data.text_key"),
            "--tokenizer": ("bpe:300", "parts.data.tokenizer"),
            "--eval-per-source": ("", "parts.data.eval_per_source"),
            "--seed": ("5", "parts.model.seed"),
            "--jobs": ("5", "jobs"),
            "--admission": ("local", "parts.run.admission"),
            "--seq-len": ("5", "parts.model.seq_len"),
            "--codec": ("topk64", "parts.outer.codec"),
            "--committee": ("5", "parts.committee.size_max"),
            "--owner-key": ("mine.key", "owner_key"),
        },
    ),
    ("run", "inspect"): Command(
        f"{OWNER}:print_inspected", "run inspect tiny-run",
        EXPECTED | {"--peers": REACH["--peers"], "--json": REACH["--json"]},
    ),
    ("run", "pause"): Command(WORD, "run pause tiny-run", REACH),
    ("run", "resume"): Command(WORD, "run resume tiny-run", REACH),
    ("run", "extend"): Command(
        WORD, "run extend tiny-run --tokens 1M",
        REACH | {"--tokens": ("5M", "wanted.target_tokens"), "--yes": ("", "yes")},
    ),
    ("run", "finish"): Command(WORD, "run finish tiny-run", REACH | {"--yes": ("", "yes")}),
    ("run", "revoke"): Command(WORD, "run revoke tiny-run node-1", REACH | {"--yes": ("", "yes")}),
    ("run", "recover"): Command(
        f"{OWNER}:print_recovered", "run recover tiny-run",
        REACH | {"--seats": ("node-1", "seats"), "--force": ("", "force"), "--yes": ("", "yes")},
    ),
    ("run", "fork"): Command(
        f"{OWNER}:print_forked", "run fork tiny-run --out here",
        EXPECTED | FIGURES | {
            "--out": ("there", "out"),
            "--version": ("5", "version"),
            "--owner-key": REACH["--owner-key"],
            "--json": REACH["--json"],
        },
    ),
}  # fmt: skip
ALSO = [  # another function, for another shape of a command line
    Command(
        "p2pdiloco_node.lab.seeds:print_simulation", "simulate",
        {"--seeds": ("5", "seeds"), "--json": ("x.json", "json_file"), "--jobs": ("5", "jobs")},
    ),
]  # fmt: skip
PRINTED = {("config", "show"): {"--which", "--config"}, ("version",): set()}  # tested by what they print
FILES = {"other.toml": 'log_level = "error"\n', "run.toml": "[inner]\nweight_decay = 0.5\n"}


def leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Each value below, with its place in words: fields, keys and parameters joined by dots."""
    if isinstance(value, msgspec.Struct):
        value = {field: getattr(value, field) for field in value.__struct_fields__}
    elif dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif hasattr(value, "_asdict"):
        value = value._asdict()
    elif dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{name}.{key}" if name else key)
    else:
        yield name, value


def arrived(command: Command, words: list[str], patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the command calls its function with."""
    module, _, function = command.calls.partition(":")
    real: Callable[..., int] = getattr(importlib.import_module(module), function)
    called: list[dict[str, Any]] = []

    def note(*values: Any, **named: Any) -> int:
        bound = inspect.signature(real).bind(*values, **named)
        bound.apply_defaults()
        called.append(dict(leaves(bound.arguments, "")))
        return 0

    with patch.context() as patched:
        patched.setattr(f"{module}.{function}", note)
        assert run_command(words) == 0, words
    (found,) = called
    return found


@pytest.mark.parametrize("command", [*COMMANDS.values(), *ALSO], ids=lambda command: command.base)
def test_each_flag_changes_its_own_value_and_no_other(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text)
    base = shlex.split(command.base)
    without = arrived(command, base, monkeypatch)
    wrong = []
    for flag, (value, place) in command.flags.items():
        words = list(base)
        if flag in words:  # needed: with another value then
            del words[words.index(flag) : words.index(flag) + 2]
        given = arrived(command, [*words, flag, *([value] if value else [])], monkeypatch)
        changed = {k for k in without | given if without.get(k, ...) != given.get(k, ...)}
        if changed != ({place} if place else set()):
            wrong.append(f"{flag} changes {sorted(changed) or 'nothing'} instead of {place!r}")
    assert not wrong, f"p2pdiloco {command.base}: " + "; ".join(wrong)


def test_the_table_has_every_flag_and_no_other() -> None:
    table = {path: set(command.flags) for path, command in COMMANDS.items()} | PRINTED
    assert set(table) == set(KNOWN), "a new command: give it a row here"
    wrong = [
        f"{' '.join(path)}: without a row {sorted(flags - table[path])}, gone {sorted(table[path] - flags)}"
        for path, flags in KNOWN.items()
        if table[path] != flags
    ]
    assert not wrong, "say where a flag arrives, and test there what it does: " + "; ".join(wrong)
