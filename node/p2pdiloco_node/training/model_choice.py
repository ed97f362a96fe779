"""What `run new --model` may name: a preset, a config.json, or a folder with a checkpoint. No torch here."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.exit_codes import FILES, USAGE
from p2pdiloco.run_spec import InnerSpec
from p2pdiloco_node.training import presets
from p2pdiloco_node.training.families import ABOUT_THE_FILE, POSITIONS, SIZES, check_values, family_of
from p2pdiloco_node.training.shapes import read_shape

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
FACTS = "p2pdiloco.json"  # of a folder that p2pdiloco export made
RUN_ID = re.compile("[0-9a-f]{64}")
PART = re.compile(r"[\w.-]+\.safetensors")  # a file of the folder itself


class ModelChoice(NamedTuple):
    """A model before there is a vocabulary for it."""

    name: (
        str  # a preset's; empty of files: what they are called on their owner's machine is nobody's business
    )
    family: str
    config: Mapping[str, Any]  # arguments of the family's class as given: defaults are not in it yet
    seq_len: int  # tokens of a training sequence
    rung: presets.Inner  # the inner loop of models of about this size
    checkpoint: Path | None  # folder of the params to start from
    tokenizer: Path | None  # the folder's own tokenizer
    origin: str = ""  # of the params to start from, for everybody who reads of the run

    def arguments(self, vocab_size: int) -> dict[str, Any]:
        """Of the family's class, for tokens 0 to `vocab_size` - 1.

        Raises: OperatorError: the checkpoint has fewer tokens.
        """
        if self.checkpoint is None:
            return presets.from_scratch(self.family, self.config, vocab_size=vocab_size, seq_len=self.seq_len)
        rows = self.config.get("vocab_size")
        if isinstance(rows, int) and rows < vocab_size:
            own = shlex.quote(str(self.checkpoint / TOKENIZER))
            raise OperatorError(
                f"the tokenizer has {vocab_size} tokens and the model in {self.checkpoint} knows {rows}: use "
                f"the tokenizer it was trained with (--tokenizer {own}).",
                FILES,
            )
        return dict(self.config)

    def inner_spec(self, target_tokens: int) -> InnerSpec:
        """algorithm.md 2, with sequences of `seq_len` tokens."""
        return presets.inner_loop(self.rung, target_tokens, seq_len=self.seq_len)


def choose_model(model: str, *, seq_len: int | None = None) -> ModelChoice:
    """`model`: a preset, the path of a config.json, or a folder with config.json and *.safetensors.

    Raises: OperatorError: no such thing, unreadable, of a family that is not trained, or with values that no
    run's config may have.
    """
    if seq_len is not None and not 1 <= seq_len <= limits.sequence_tokens_max:
        raise OperatorError(f"--seq-len is 1 to {limits.sequence_tokens_max} tokens.", USAGE)
    path = Path(model).expanduser()
    if model not in presets.PRESETS and path.exists():
        return _from_files(path, seq_len)
    if "/" in model or model.endswith(".json"):
        raise OperatorError(
            f"there is no file or folder {model}: name a config.json, a folder with one and *.safetensors, "
            "or a preset such as llama:20m (docs/models.md).",
            FILES,
        )
    chosen = presets.preset(model)
    rung = presets.inner_of(chosen.params)
    return ModelChoice(
        name=model, family=chosen.family, config=chosen.config, seq_len=seq_len or rung.seq_len, rung=rung,
        checkpoint=None, tokenizer=None,
    )  # fmt: skip


def _from_files(path: Path, seq_len: int | None) -> ModelChoice:
    folder = path if path.is_dir() else None
    file = path / CONFIG if path.is_dir() else path
    given = read_json(file)
    family = given.get("model_type")
    if not isinstance(family, str):
        raise OperatorError(f"{file} does not say its model_type: it is no config of transformers.", FILES)
    family_of(family)
    if "quantization_config" in given:
        raise OperatorError(
            f"the params of {path} are quantised, and a run trains float32: start from the original ones.",
            FILES,
        )
    config = {key: value for key, value in given.items() if key not in ABOUT_THE_FILE}
    check_values(family, config)
    for names in SIZES:
        if not any(isinstance(config.get(name), int) for name in names):
            raise OperatorError(
                f"{file} does not say its {' or '.join(names)}, and would be as large as its class is by "
                "default: write it into the file.",
                FILES,
            )
    if folder is not None:
        check_parts(folder)
    positions = next((int(config[key]) for key in POSITIONS if isinstance(config.get(key), int)), None)
    rung = presets.inner_of(_about(family, config))
    length = seq_len or min(rung.seq_len, positions or rung.seq_len)
    if positions is not None and length > positions:
        raise OperatorError(
            f"--seq-len {length} is more than the {positions} positions that {file} gives the model.", USAGE
        )
    tokenizer = folder / TOKENIZER if folder is not None and (folder / TOKENIZER).is_file() else None
    return ModelChoice(
        name="", family=family, config=config, seq_len=length, rung=rung,
        checkpoint=folder, tokenizer=tokenizer, origin=_origin(folder) if folder is not None else "",
    )  # fmt: skip


def _origin(folder: Path) -> str:
    """The run and version that an exported folder says it is of; of another folder nothing more is said."""
    try:
        facts = read_json(folder / FACTS)
        run, version = facts["run"]["id"], facts["version"]
    except (OperatorError, KeyError, TypeError):
        return "a checkpoint of the owner's"
    if not (
        isinstance(run, str)
        and RUN_ID.fullmatch(run)
        and type(version) is int
        and 0 <= version <= limits.run_versions_max
    ):
        return "a checkpoint of the owner's"
    return f"version {version} of run {run}"


def read_json(file: Path) -> dict[str, Any]:
    """An object from a file of the run's owner. Raises: OperatorError."""
    try:
        # A pipe would be waited for.
        if file.exists() and not file.is_file():
            raise OperatorError(f"{file} is not a file.", FILES)
        if file.stat().st_size > limits.checkpoint_json_bytes_max:
            raise OperatorError(f"{file} is larger than any such file.", FILES)
        found = json.loads(file.read_bytes())
    except OSError as error:
        raise OperatorError(f"{file} cannot be read: {error.strerror}.", FILES) from None
    except (ValueError, RecursionError) as error:
        raise OperatorError(f"{file} is not JSON: {error}.", FILES) from None
    if not isinstance(found, dict):
        raise OperatorError(f"{file} is not a JSON object.", FILES)
    return found


def check_parts(folder: Path) -> list[Path]:
    """The checkpoint's files: one, or those that its index names.

    Raises: OperatorError: there are none, or one is missing or somewhere else.
    """
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    index = folder / WEIGHTS_INDEX
    if not index.is_file():
        pickled = sorted(p.name for p in folder.glob("*.bin")) + sorted(p.name for p in folder.glob("*.pt*"))
        hint = (
            f" {pickled[0]} may run code when it is opened; save it as safetensors first." if pickled else ""
        )
        raise OperatorError(f"{folder} has no {WEIGHTS} and no {WEIGHTS_INDEX}.{hint}", FILES)
    listed = read_json(index)
    where = listed.get("weight_map")
    named = list(where.values()) if isinstance(where, dict) else []
    if not named or not all(isinstance(name, str) and PART.fullmatch(name) for name in named):
        raise OperatorError(f"{index} does not name files beside it.", FILES)
    if not isinstance(listed.get("metadata"), dict):
        raise OperatorError(
            f'{index} lacks "metadata", without which no index is read: add an empty one.', FILES
        )
    names = sorted(set(named))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise OperatorError(f"{folder} lacks {missing[0]}, which its index names: fetch it again.", FILES)
    return [folder / name for name in names]


def _about(family: str, config: Mapping[str, Any]) -> float:
    """Parameters, roughly: enough to choose a rung."""
    shape = read_shape(family, config)
    inside = shape.experts * shape.expert + shape.shared or shape.dense
    layer = shape.hidden * (
        2 * shape.queries + 2 * shape.keys + (3 if family_of(family).gated else 2) * inside
    )
    return float(max(1, shape.layers * layer + shape.vocab * shape.hidden * (1 if shape.tied else 2)))
