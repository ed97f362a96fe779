"""Commands and flags on the pages are those of the program, and none is missing there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cyclopts import App

from p2pdiloco_node.cli import app
from p2pdiloco_node.config import NodeConfig, TrackerConfig
from p2pdiloco_node.demo.command import OUTER_STEPS, OUTER_STEPS_CHAOS

COMMAND = re.compile(r"p2pdiloco((?: +[^\s`|\\]+)+)")


DAEMONS = {
    ("node",): NodeConfig(),
    ("tracker",): TrackerConfig(),
}  # their flags have no defaults of their own


def commands(app: App, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], set[str]]:
    """Each command's path and its flags, without the negative twins that cyclopts makes."""
    found: dict[tuple[str, ...], set[str]] = {}
    for name in app:
        if name.startswith("-"):
            continue
        sub = app[name]
        if sub.default_command is not None:
            flags = set()
            for argument in sub.assemble_argument_collection():
                if argument.show:
                    flags |= {flag for flag in argument.names if flag.startswith("--")}
            found[(*path, name)] = {f for f in flags if not f.startswith(("--no-", "--empty-"))}
        found |= commands(sub, (*path, name))
    return found


KNOWN = commands(app)


def snippets(text: str) -> list[str]:
    """Fenced blocks, indented blocks and code spans, with continued lines joined."""
    fenced = re.findall(r"^```.*?\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    indented = re.findall(r"^ {4,}(?!\|)(.+)$", text, flags=re.MULTILINE)
    spans = re.findall(r"`([^`\n]+)`", text)
    return [part.replace("\\\n", " ") for part in [*fenced, *indented, *spans]]


def faults(text: str) -> list[str]:
    """Commands in a page that the program does not have."""
    wrong = []
    for snippet in snippets(text):
        for line in snippet.splitlines():
            # A line of code, not a path or a package name: `p2pdiloco` stands first or after a prompt.
            match = COMMAND.match(line.strip().removeprefix("$ "))
            if match is None:
                continue
            words = match[1].split()
            path = next((tuple(words[:n]) for n in (2, 1) if tuple(words[:n]) in KNOWN), None)
            if path is None:
                if not any(words[0] == known[0] for known in KNOWN) and words[0].isalpha():
                    wrong.append(f"`{line.strip()}`: no command {words[0]!r}")
                continue
            flags = {word.strip("[]").partition("=")[0] for word in words if word.strip("[").startswith("--")}
            wrong += [f"`{line.strip()}`: no flag {f}" for f in sorted(flags - KNOWN[path] - {"--help"})]
    return wrong


def test_the_program_is_read() -> None:
    assert {
        ("demo",),
        ("node",),
        ("tracker",),
        ("status",),
        ("verify",),
        ("simulate",),
        ("run", "new"),
    } <= set(KNOWN)
    assert "--chaos" in KNOWN[("demo",)]


def test_pages_name_only_what_exists(root: Path, files: list[Path]) -> None:
    pages = [path for path in files if path.suffix == ".md"]
    wrong = [f"{path}: {fault}" for path in pages for fault in faults((root / path).read_text())]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("Say `p2pdiloco dmeo`.", "no command 'dmeo'"),
        ("    p2pdiloco demo --nodes 3 --kaos\n", "no flag --kaos"),
        ("```\np2pdiloco run new --name x \\\n  --sise 3\n```\n", "no flag --sise"),
    ],
)
def test_invented_flags_are_found(text: str, fault: str) -> None:
    assert any(fault in found for found in faults(text))


def defaults(app: App, path: tuple[str, ...] = ()) -> dict[tuple[tuple[str, ...], str], object]:
    """(command, flag) -> what it is where it is left out; only where the program has a value for that."""
    found: dict[tuple[tuple[str, ...], str], object] = {}
    for name in app:
        if name.startswith("-"):
            continue
        here, sub = (*path, name), app[name]
        for argument in sub.assemble_argument_collection() if sub.default_command is not None else ():
            flag, value = argument.names[0], argument.field_info.default
            if here in DAEMONS:
                value = getattr(DAEMONS[here], flag.strip("-").replace("-", "_"), None)
            if flag.startswith("--") and argument.show and isinstance(value, str | int | float) and value:
                found[here, flag] = value
        found |= defaults(sub, here)
    return found


def test_defaults_on_the_configuration_page_are_those_of_the_program(root: Path) -> None:
    page = (root / "docs/configuration.md").read_text()
    found, wrong = defaults(app), []
    assert found[("node",), "--data-disk"] == "64GiB"
    for (path, flag), value in found.items():
        section = re.split(
            r"^#+ ", page.partition(f"### `p2pdiloco {' '.join(path)}`\n")[2], flags=re.MULTILINE
        )[0]
        said = re.findall(rf"^\| `{flag}` \| (.+?) \|", section, flags=re.MULTILINE)
        program = f"{value:g}" if isinstance(value, float) else str(value)
        if said != [program]:
            wrong.append(f"{' '.join(path)} {flag}: {said}, and {program} in the program")
    steps = re.findall(r"`--outer-steps` \| (\d+); (\d+) with `--chaos`", page)
    assert steps == [(str(OUTER_STEPS), str(OUTER_STEPS_CHAOS))]
    assert not wrong, "docs/configuration.md: " + "; ".join(wrong)


def test_every_flag_is_on_the_configuration_page(root: Path) -> None:
    page = (root / "docs/configuration.md").read_text()
    wrong = []
    for path, flags in sorted(KNOWN.items()):
        title = f"### `p2pdiloco {' '.join(path)}`"
        _, found, section = page.partition(title + "\n")
        if not found:
            wrong.append(f"no section {title}")
            continue
        section = re.split(r"^#+ ", section, flags=re.MULTILINE)[0]
        listed = set(re.findall(r"^\| `(--[a-z-]+)", section, flags=re.MULTILINE))
        if listed != flags:
            wrong.append(
                f"{title}: not listed {sorted(flags - listed)}, not existing {sorted(listed - flags)}"
            )
    assert not wrong, "docs/configuration.md: " + "; ".join(wrong)
