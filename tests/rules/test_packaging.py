"""What an install brings: two packages, no accidental namespaces, no torch outside the trainer."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import p2pdiloco

IMPORT_EVERYTHING = """
import importlib, pkgutil, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "tokenizers", "safetensors", "pyarrow"):
            raise ImportError(f"{name} is blocked: this module runs without it")

sys.meta_path.insert(0, Blocked())
trainer = set(sys.argv[1].split(","))
seen = []
for top in ("p2pdiloco", "p2pdiloco_node"):
    package = importlib.import_module(top)
    for module in pkgutil.walk_packages(package.__path__, top + "."):
        if module.name not in trainer and not module.name.endswith("__main__"):
            importlib.import_module(module.name)
            seen.append(module.name)
print(len(seen))
"""
# The processes with torch (architecture): the trainer, the lab, and what runs beside `run new` and `export`.
TRAINER = (
    *(
        f"p2pdiloco_node.training.{name}"
        for name in (
            *("worker", "models", "inner_loop", "genesis", "trial", "adamw", "losses"),
            *("sampling", "checkpoint_reader"),
            *("trainer_process", "launch", "led_loop", "process_group", "flat_params", "sharded_params"),
        )
    ),
    *(f"p2pdiloco_node.lab.{name}" for name in ("model", "networks", "compiling")),
    "p2pdiloco_node.export.hf_config",
    "p2pdiloco_node.generation.worker",
)


def test_the_wheel_has_two_packages(root: Path, tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"p2pdiloco", "p2pdiloco_node"}, f"`node`, `docker` and `tests` belong to others: {tops}"
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert any(name.startswith("p2pdiloco_node/status_page/") and name.endswith(".html") for name in names)


def test_no_folder_of_the_repository_became_a_module(root: Path, tmp_path: Path) -> None:
    """Without `dev-mode-exact` an editable install makes `import docker` succeed as an empty namespace."""
    probe = (
        "import importlib.util\n"
        "for name in ('docker', 'tests', 'docs', 'node'):\n"
        "    spec = importlib.util.find_spec(name)\n"
        "    for place in (spec.submodule_search_locations or [spec.origin]) if spec else []:\n"
        "        print(name, place)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", probe], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    assert str(root) not in found, f"import resolves into the checkout:\n{found}"


def test_all_but_the_trainer_imports_without_torch(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORT_EVERYTHING, ",".join(TRAINER)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert int(ran.stdout) > 20


def test_one_version(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert p2pdiloco.__version__ == project["version"]
