"""The container files, as far as they can be checked without an engine: sources exist, commands are known."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from p2pdiloco_node.cli import app

INSTRUCTIONS = {
    "FROM",
    "ARG",
    "WORKDIR",
    "RUN",
    "COPY",
    "USER",
    "VOLUME",
    "ENV",
    "EXPOSE",
    "STOPSIGNAL",
    "ENTRYPOINT",
    "CMD",
}
DOCKERFILES = ("docker/node.Dockerfile", "docker/tracker.Dockerfile")


def instructions(text: str) -> list[tuple[str, str]]:
    """(instruction, rest) of each line, with continued lines joined and comments left out."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in joined.splitlines() if line.strip()]


def check_command(words: list[str]) -> None:
    """The program has this command with these flags."""
    command = app[words[0]]
    flags = [word for word in words[1:] if word.startswith("--")]
    if words[0] == "run":
        command = command[words[1]]
    known = {name for argument in command.assemble_argument_collection() for name in argument.names}
    assert set(flags) <= known, f"{words}: no flag {sorted(set(flags) - known)}"


@pytest.mark.parametrize("name", DOCKERFILES)
def test_dockerfiles(root: Path, name: str) -> None:
    found = instructions((root / name).read_text())
    assert {word for word, _ in found} <= INSTRUCTIONS
    assert found[0][0] == "FROM"
    allowed = (root / ".dockerignore").read_text().splitlines()
    for word, rest in found:
        if word == "COPY":
            *sources, _ = shlex.split(rest)
            for source in sources:
                assert (root / source).exists(), f"{name} copies {source}"
                assert f"!{source}" in allowed, f".dockerignore keeps {source} out"
    users = [rest for word, rest in found if word == "USER"]
    assert users == ["p2pdiloco"], "the daemon does not run as root"
    assert ("ENTRYPOINT", '["p2pdiloco"]') in found
    (command,) = [yaml.safe_load(rest) for word, rest in found if word == "CMD"]
    check_command(command)


def test_the_tracker_image_has_no_torch(root: Path) -> None:
    text = "\n".join(rest for _, rest in instructions((root / "docker/tracker.Dockerfile").read_text()))
    assert "torch" not in text
    assert "[node]" not in text


def test_compose(root: Path) -> None:
    """As the demo: a run made by a service that ends, one tracker, three nodes that join it."""
    compose: dict[str, Any] = yaml.safe_load((root / "docker/compose.yaml").read_text())
    services = compose["services"]
    assert sorted(services) == ["init", "node-1", "node-2", "node-3", "tracker"]
    for name, service in services.items():
        assert (root / service["build"]["dockerfile"]).exists()
        for mount in service.get("volumes", []):
            assert mount.partition(":")[0] in compose["volumes"], f"{name} uses an undeclared volume {mount}"
        for before in service.get("depends_on", {}):
            assert before in services
    made = services["init"]["command"][0].partition("||")[2].split()
    assert made[0] == "p2pdiloco"
    check_command(made[1:])
    check_command(services["tracker"]["command"])
    port = services["tracker"]["ports"][0].rpartition(":")[2]
    for n in (1, 2, 3):
        check_command(services[f"node-{n}"]["command"])
        assert services[f"node-{n}"]["environment"]["P2PDILOCO_JOIN"] == f"http://tracker:{port}"
    mounts = [services[f"node-{n}"]["volumes"] for n in (1, 2, 3)]
    assert len({str(mount) for mount in mounts}) == 3, "each node has a folder of its own"
