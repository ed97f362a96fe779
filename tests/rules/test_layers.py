"""Imports go down only, pure modules stay pure, and the message says what to do instead."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from itertools import product
from pathlib import Path

import pytest

# Lower layers first; a module may import from lower layers and from its own group, which is one string here.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("p2pdiloco.errors", "p2pdiloco.exit_codes", "p2pdiloco.ids", "p2pdiloco.limits", "p2pdiloco.words"),
    ("p2pdiloco.wire",),
    ("p2pdiloco.run_spec",),
    ("p2pdiloco.rules",),
    ("p2pdiloco.protocol", "p2pdiloco.diloco"),
    ("p2pdiloco.status",),
    ("p2pdiloco.sim",),
    # What everybody may need.
    (
        "p2pdiloco_node.commands.flags",
        "p2pdiloco_node.config",
        "p2pdiloco_node.data.news",
        "p2pdiloco_node.ports",
        "p2pdiloco_node.process.flight_recorder",
        "p2pdiloco_node.process.hosts",
        "p2pdiloco_node.progress",
        "p2pdiloco_node.run.fields",
        "p2pdiloco_node.taking_part.heads",
        "p2pdiloco_node.tokenizer_json",
    ),
    # Adapters: each knows one part of the world.
    (
        "p2pdiloco_node.status_page",
        "p2pdiloco_node.storage",
        "p2pdiloco_node.telemetry",
        "p2pdiloco_node.tracking.boards",
        "p2pdiloco_node.training",
        "p2pdiloco_node.transport",
    ),
    # One thing each, of adapters.
    (
        "p2pdiloco_node.corpus",
        "p2pdiloco_node.data.opened_shards",
        "p2pdiloco_node.driver",
        "p2pdiloco_node.hosting.page_feed",
        "p2pdiloco_node.lab.seeds",
        "p2pdiloco_node.process.local_status",
        "p2pdiloco_node.run.checks",
        "p2pdiloco_node.run.stopping",
        "p2pdiloco_node.run.file",
        "p2pdiloco_node.taking_part.blobs",
        "p2pdiloco_node.taking_part.desk",
        "p2pdiloco_node.taking_part.fitting",
        "p2pdiloco_node.taking_part.narrator",
        "p2pdiloco_node.tracking.figures",
    ),
    (
        "p2pdiloco_node.data.shards",
        "p2pdiloco_node.export",
        "p2pdiloco_node.process.lifetime",
        "p2pdiloco_node.run.inspect",
        "p2pdiloco_node.run.new",
        "p2pdiloco_node.taking_part.announcer",
        "p2pdiloco_node.taking_part.joining",
        "p2pdiloco_node.taking_part.reports",
    ),
    # What people start, and its parts.
    (
        "p2pdiloco_node.generation",
        "p2pdiloco_node.hosting.checkpoint_shelf",
        "p2pdiloco_node.lab.networks",
        "p2pdiloco_node.lab.text",
        "p2pdiloco_node.owner",
        "p2pdiloco_node.run.command",
        "p2pdiloco_node.taking_part.participant",
        "p2pdiloco_node.verify",
    ),
    ("p2pdiloco_node.hosting.checkpoint_maker", "p2pdiloco_node.data.room", "p2pdiloco_node.lab.compiling"),
    ("p2pdiloco_node.daemon", "p2pdiloco_node.lab.model", "p2pdiloco_node.tracker"),
    ("p2pdiloco_node.lab", "p2pdiloco_node.demo.summary", "p2pdiloco_node.demo.swarm"),
    ("p2pdiloco_node.demo.chaos", "p2pdiloco_node.demo.view"),
    ("p2pdiloco_node.demo.command",),
    ("p2pdiloco_node.commands.model", "p2pdiloco_node.commands.run", "p2pdiloco_node.commands.slips"),
    ("p2pdiloco_node.cli",),
    ("p2pdiloco_node.__main__",),
)

INSTEAD = {
    "asyncio": "return an action and let node/p2pdiloco_node/driver.py do the waiting",
    "aiohttp": "the network belongs in node/p2pdiloco_node/transport/",
    "torch": "torch lives in the trainer process, node/p2pdiloco_node/training/trainer_process.py",
    "transformers": "models live in the trainer process, node/p2pdiloco_node/training/models.py",
    "time": "take `now` (seconds, monotonic) as an argument",
    "datetime": "take `now` (seconds, monotonic) as an argument; wall clocks decide nothing",
    "random": "take a generator or `rng: Callable[[], float]` as an argument",
    "secrets": "take the random bytes as an argument",
    "os": "the world belongs in node/p2pdiloco_node/",
    "pathlib": "files belong in node/p2pdiloco_node/storage/",
    "socket": "the network belongs in node/p2pdiloco_node/transport/",
    "logging": "return a `Say` action; the driver writes the log",
    "threading": "return an action and let the driver run it in a thread",
    "subprocess": "processes belong in node/p2pdiloco_node/training/supervisor.py",
    "numpy": "rules use plain numbers; arrays belong in p2pdiloco/diloco/",
}
NUMERIC = ("p2pdiloco.diloco", "p2pdiloco.sim")  # these two may use numpy
TRAINER_ONLY = ("torch", "transformers")
# The trainer process and the lab, a process of its own: the only modules that may import torch.
TRAINER = (
    "p2pdiloco_node.training.worker",
    "p2pdiloco_node.training.trainer_process",
    "p2pdiloco_node.training.launch",
    "p2pdiloco_node.training.process_group",
    "p2pdiloco_node.training.flat_params",
    "p2pdiloco_node.training.sharded_params",
    "p2pdiloco_node.training.models",
    "p2pdiloco_node.training.inner_loop",
    "p2pdiloco_node.training.genesis",
    "p2pdiloco_node.training.trial",
    "p2pdiloco_node.training.losses",
    "p2pdiloco_node.training.sampling",
    "p2pdiloco_node.training.adamw",
    "p2pdiloco_node.training.checkpoint_reader",
    "p2pdiloco_node.export.hf_config",
    "p2pdiloco_node.generation.worker",
    "p2pdiloco_node.lab.model",
    "p2pdiloco_node.lab.networks",
    "p2pdiloco_node.lab.compiling",
)
VERSION = "p2pdiloco_node.__version__"
NEIGHBOURS = 4  # from this layer on groups of one layer do not import each other


def module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    parts = parts[1:] if parts[0] == "node" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(source: str, package: str) -> list[tuple[int, str]]:
    """(line, absolute dotted name) of every import, wherever it stands."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(package.split(".")[: -(node.level - 1) or None] + ([base] if base else []))
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return found


def within(name: str, group: str) -> bool:
    return name == group or name.startswith(group + ".")


def layer_of(name: str) -> tuple[int, str] | None:
    for level, groups in enumerate(LAYERS):
        for group in groups:
            if within(name, group):
                return level, group
    return None


def is_folder(name: str) -> bool:
    """Whether this is a folder whose modules have their places one by one."""
    return any(group.startswith(name + ".") for groups in LAYERS for group in groups)


def folder_of(name: str) -> str:
    """The folder of p2pdiloco_node that a module is in, or the module itself; empty: of neither."""
    package, _, rest = name.partition(".")
    return rest.partition(".")[0] if package == "p2pdiloco_node" else ""


def circles(modules: Mapping[str, str]) -> list[str]:
    """Folders that import each other, by whatever way: none of them can be read, or moved, without the other.

    `modules`: source by name.
    """
    needs: dict[str, set[str]] = {}
    for name, source in modules.items():
        found = {folder_of(imported) for _, imported in imports(source, name.rpartition(".")[0])}
        needs.setdefault(folder_of(name), set()).update(found - {"", "__version__"})
    reached = {folder: set(direct) - {folder} for folder, direct in needs.items()}
    for between, start in product(reached, reached):
        if between in reached[start]:
            reached[start] |= reached[between]
    return sorted(folder for folder, found in reached.items() if folder in found)


def purity_faults(name: str, source: str) -> list[str]:
    """What a module of `p2pdiloco` imports although it is pure."""
    faults = []
    for line, imported in imports(source, name.rpartition(".")[0]):
        top = imported.partition(".")[0]
        numeric = top == "numpy" and any(within(name, group) for group in NUMERIC)
        if top == "p2pdiloco_node":
            faults.append(f"{name}:{line} imports {imported}: p2pdiloco never imports what runs it")
        elif top in INSTEAD and not numeric:
            faults.append(f"{name}:{line} imports {top}: {INSTEAD[top]}")
    return faults


def layer_faults(name: str, source: str) -> list[str]:
    """Imports that go up, or sideways into a neighbour."""
    own = layer_of(name)
    if own is None:
        if name in ("p2pdiloco", "p2pdiloco_node"):  # the packages themselves may be named by anybody
            return []
        if not is_folder(name):
            return [f"{name} has no place: give it one in LAYERS"]
        return [
            f"{name}:{line} imports {imported}: its modules stand in several layers, so its door opens none"
            for line, imported in imports(source, name)
        ]
    faults = []
    for line, imported in imports(source, name.rpartition(".")[0]):
        other = layer_of(imported)
        if other is None and imported.startswith("p2pdiloco_node.") and imported != VERSION:
            faults.append(
                f"{name}:{line} imports {imported}, which stands above it: pass it in as an argument"
            )
        elif other is not None and other[1] != own[1] and other[0] > own[0]:
            faults.append(
                f"{name}:{line} imports {imported}, which stands above it: move the shared part down"
            )
        elif other is not None and other[1] != own[1] and other[0] == own[0] and own[0] >= NEIGHBOURS:
            faults.append(f"{name}:{line} imports its neighbour {imported}: pass in what it needs")
    return faults


def trainer_faults(name: str, source: str) -> list[str]:
    """torch outside the trainer process."""
    if name in TRAINER:
        return []
    return [
        f"{name}:{line} imports {imported}: {INSTEAD[imported.partition('.')[0]]}"
        for line, imported in imports(source, name.rpartition(".")[0])
        if imported.partition(".")[0] in TRAINER_ONLY
    ]


def test_pure_modules_touch_nothing(root: Path, sources: list[Path]) -> None:
    pure = [path for path in sources if path.parts[0] == "p2pdiloco"]
    assert len(pure) > 10
    faults = [fault for path in pure for fault in purity_faults(module_name(path), (root / path).read_text())]
    assert not faults, "\n".join(faults)


def test_imports_go_down_only(root: Path, sources: list[Path]) -> None:
    faults = [
        fault for path in sources for fault in layer_faults(module_name(path), (root / path).read_text())
    ]
    assert not faults, "\n".join(faults)


def test_every_place_is_looked_at() -> None:
    groups = [group for groups in LAYERS for group in groups]
    assert [group for group in groups if layer_of(group)[1] != group] == []  # type: ignore[index]


def test_every_place_is_somebody_s(sources: list[Path]) -> None:
    names = {module_name(path) for path in sources}
    named = [*(group for groups in LAYERS for group in groups), *TRAINER]
    assert [name for name in named if not any(within(module, name) for module in names)] == []


def test_no_two_folders_import_each_other(root: Path, sources: list[Path]) -> None:
    """Modules of a folder stand in several layers: that alone would let two folders lean on each other."""
    found = circles({module_name(path): (root / path).read_text() for path in sources})
    assert not found, f"{', '.join(found)}: move what both need into a folder below them"


def test_only_the_trainer_process_imports_torch(root: Path, sources: list[Path]) -> None:
    faults = [
        fault for path in sources for fault in trainer_faults(module_name(path), (root / path).read_text())
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("check", "name", "source", "message"),
    [
        (purity_faults, "p2pdiloco.rules.x", "import time", "take `now`"),
        (purity_faults, "p2pdiloco.rules.x", "def f():\n    from os import path", "the world belongs in"),
        (purity_faults, "p2pdiloco.protocol.x", "import numpy as np", "arrays belong in"),
        (purity_faults, "p2pdiloco.sim.x", "from p2pdiloco_node import ports", "never imports what runs it"),
        (layer_faults, "p2pdiloco.protocol.x", "from p2pdiloco.diloco import merge", "neighbour"),
        (layer_faults, "p2pdiloco.diloco.x", "import p2pdiloco.protocol.node", "neighbour"),
        (layer_faults, "p2pdiloco.wire.x", "from p2pdiloco.rules import state", "stands above"),
        (layer_faults, "p2pdiloco_node.storage.x", "from p2pdiloco_node.transport import y", "neighbour"),
        (layer_faults, "p2pdiloco_node.training.x", "from p2pdiloco_node.daemon import y", "stands above"),
        (layer_faults, "p2pdiloco_node.training.x", "from p2pdiloco_node.lab.text import y", "stands above"),
        (layer_faults, "p2pdiloco_node.corpus.x", "from p2pdiloco_node.owner import y", "stands above"),
        (layer_faults, "p2pdiloco_node.training.x", "from p2pdiloco_node.export import y", "stands above"),
        (layer_faults, "p2pdiloco_node.verify", "from p2pdiloco_node.owner import y", "neighbour"),
        (layer_faults, "p2pdiloco_node.newcomer", "import json", "no place"),
        (layer_faults, "p2pdiloco_node.commands.newcomer", "import json", "no place"),
        (layer_faults, "p2pdiloco_node.commands", "from p2pdiloco_node.commands.run import y", "opens none"),
        (
            layer_faults,
            "p2pdiloco_node.commands.run",
            "from p2pdiloco_node.commands.model import y",
            "neighbour",
        ),
        (layer_faults, "p2pdiloco.sim.lab.x", "from p2pdiloco_node.lab import y", "stands above"),
        (trainer_faults, "p2pdiloco_node.daemon", "import torch.nn", "trainer process"),
    ],
)
def test_the_checks_find_what_they_are_for(check, name: str, source: str, message: str) -> None:  # type: ignore[no-untyped-def]
    assert any(message in fault for fault in check(name, source))


def test_the_check_finds_folders_that_import_each_other() -> None:
    node = "p2pdiloco_node"
    modules = {
        f"{node}.storage.x": f"from {node}.run.folder import y",
        f"{node}.run.folder": "",
        f"{node}.run.new": f"from {node}.corpus.making import y\nfrom {node} import __version__",
        f"{node}.corpus.making": f"from {node}.storage.files import y",
        f"{node}.cli": f"from {node}.run.new import y",
    }
    assert circles(modules) == ["corpus", "run", "storage"]
    assert circles(modules | {f"{node}.storage.x": f"from {node}.storage.files import y"}) == []


def test_the_checks_let_honest_imports_pass() -> None:
    assert purity_faults("p2pdiloco.diloco.x", "import numpy as np\nimport math") == []
    assert layer_faults("p2pdiloco.rules.x", "from p2pdiloco.wire.log import Body") == []
    assert layer_faults("p2pdiloco_node.storage.x", "from p2pdiloco_node.storage.files import y") == []
    assert layer_faults("p2pdiloco_node.commands", '"""What it is."""') == []
