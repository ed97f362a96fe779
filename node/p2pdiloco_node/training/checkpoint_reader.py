"""A local checkpoint as the start of a run: safetensors alone, names and shapes as the config makes them.

transformers reads it: families keep their params in files under other names and in other shapes than in
memory (a mixture's experts one by one, say), and the mapping is its business. It opens files of safetensors
without running anything, keeps the params in the files' own precision, and tells what did not fit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from p2pdiloco.errors import OperatorError
from p2pdiloco.exit_codes import FILES
from p2pdiloco_node.training.families import family_of
from p2pdiloco_node.training.model_choice import check_parts
from p2pdiloco_node.training.models import derive_buffers, outline

SHOWN = 3  # names in a message
FLOATS = ("BF16", "F16", "F32", "F64")  # as safetensors names them


def read_checkpoint(family: str, config: Any, folder: Path) -> Any:
    """The family's model with the params in `folder`, on the CPU in the precision of its files.

    Raises: OperatorError: a file is missing or damaged, a tensor is no floats, is missing, left over or of
    another shape, or a table that is not trained by gradients differs from what the config derives.
    """
    if (folder / "adapter_config.json").exists():
        raise OperatorError(f"{folder} holds an adapter: merge it into its model and save that first.", FILES)
    files = check_parts(folder)
    derived = outline(family, config)
    try:
        model, info = _class_of(config).from_pretrained(
            folder,
            config=config,
            dtype="auto",
            attn_implementation="sdpa" if family_of(family).sdpa else "eager",
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except MemoryError:  # says nothing about the model
        raise
    except Exception as error:  # noqa: BLE001 - transformers and safetensors raise many kinds about files
        said = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise OperatorError(
            f"the checkpoint in {folder} cannot be read: {said.strip()[:300]}.", FILES
        ) from None
    found = difference(info)
    if found:
        raise OperatorError(f"the checkpoint in {folder} {found}: it is another model.", FILES)
    # Old files hold masks as well, which transformers passes over.
    passed_over = model._keys_to_ignore_on_load_unexpected or ()
    for file in files:
        _check_types(file, passed_over)
    _check_buffers(model, derived, folder)
    return model


def difference(info: Any) -> str:
    """What of a checkpoint did not fit the model, by transformers' `output_loading_info`; empty: nothing."""
    faults = {
        "lacks": info["missing_keys"],
        "has, unknown to its config,": info["unexpected_keys"],
        "has in another shape": [name for name, *_ in info["mismatched_keys"]],
    }
    for what, names in faults.items():
        if names:
            return f"{what} {', '.join(sorted(names)[:SHOWN])}" + (" and more" if len(names) > SHOWN else "")
    return ""


def _check_types(file: Path, passed_over: Iterable[str]) -> None:
    """The head of the file alone is read. Raises: OperatorError: a tensor of it is no floats."""
    with safe_open(file, "pt") as opened:
        types = {name: opened.get_slice(name).get_dtype() for name in sorted(opened.keys())}
    for name, kind in types.items():
        if kind not in FLOATS and not any(re.search(pattern, name) for pattern in passed_over):
            raise OperatorError(
                f"{file} holds {name} as {kind}: a run starts from floats of 16, 32 or 64 bits. Save the "
                "checkpoint as such first.",
                FILES,
            )


def _class_of(config: Any) -> Any:
    return AutoModelForCausalLM._model_mapping[type(config)]


def _check_buffers(model: Any, derived: Any, folder: Path) -> None:
    """A run sends params alone: a table that its nodes would derive otherwise is lost."""
    derive_buffers(derived, "cpu")
    named = dict(derived.named_buffers())
    for name, buffer in model.named_buffers():
        if not torch.equal(buffer.float(), named[name].float()):
            raise OperatorError(
                f"the checkpoint in {folder} has a table of its own, {name}, which no gradient trains and no "
                "run carries: it cannot be continued here.",
                FILES,
            )
