"""The repository as these rules see it: tracked files and new ones that git does not ignore."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def files() -> list[Path]:
    """Every file of the repository, relative to its root, sorted."""
    listed = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    return sorted(Path(name) for name in listed.stdout.split("\0") if name and (ROOT / name).is_file())


@pytest.fixture(scope="session")
def sources(files: list[Path]) -> list[Path]:
    """The modules of the two import packages, relative to the root."""
    packages = ("p2pdiloco", "node")
    return [path for path in files if path.suffix == ".py" and path.parts[0] in packages]
