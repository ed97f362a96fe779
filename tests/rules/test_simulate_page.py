"""docs/simulate.md knows every key of an experiment and its default; the ready experiments are read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from p2pdiloco.sim.lab.experiment import Experiment
from p2pdiloco_node.lab.study import SECTIONS, read_study

ROW = re.compile(r"^\| `([a-z_0-9]+)` \| ([^|]+) \| [^|]+ \|$", re.MULTILINE)


def listed(page: str, section: str) -> dict[str, str]:
    """Key to default, as the page has them."""
    _, _, after = page.partition(f"### `[{section}]`\n")
    return {
        key: default.strip() for key, default in ROW.findall(re.split(r"^##", after, flags=re.MULTILINE)[0])
    }


def in_toml(value: object) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def test_the_sections_are_those_of_an_experiment() -> None:
    assert set(SECTIONS) == set(Experiment.__struct_fields__) - {"name"}


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_is_on_the_page_with_its_default(root: Path, section: str) -> None:
    kind = SECTIONS[section]
    known = {f.name.rstrip("_"): in_toml(f.default) for f in msgspec.structs.fields(kind)}
    found = listed((root / "docs/simulate.md").read_text(), section)
    assert found == known


def test_ready_experiments_are_read(root: Path) -> None:
    ready = sorted((root / "docs/experiments").glob("*.toml"))
    assert len(ready) >= 3
    page = (root / "docs/simulate.md").read_text()
    for file in ready:
        study = read_study(file)
        assert study.question, f"{file.name} asks nothing"
        assert file.name in page, f"docs/simulate.md does not speak of {file.name}"
