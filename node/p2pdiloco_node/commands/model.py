"""Commands for who has a model: `export` and `generate`. cli.py makes them part of the one command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from p2pdiloco_node.commands.flags import Flag, Number, Text, Whole


def export(
    out: Path,
    /,
    *,
    join: str | None = None,
    run: Path | None = None,
    data_dir: Path | None = None,
    version: str = "newest",
    dtype: Literal["float32", "bfloat16"] = "float32",
    format_: Annotated[Literal["hf"], Parameter(name="--format")] = "hf",
    held_out: Flag = False,
) -> int:
    """Make a folder of a certified version, for Hugging Face transformers and whatever reads its formats.

    Parameters
    ----------
    out:
        The new folder.
    join:
        The line that the tracker printed: http://HOST:PORT/#RUNID.
    run:
        A run's folder, instead of a link.
    data_dir:
        A node's data folder, instead of a link.
    version:
        newest, or the number of one that is kept.
    dtype:
        Of the params: float32, bit for bit what the swarm agreed on, or bfloat16, half as large.
    format_:
        hf: a Hugging Face folder.
    held_out:
        Write the held-out tokens into the folder as well, to evaluate the model on.
    """
    from p2pdiloco_node.export.command import Options, print_export

    assert format_ == "hf", "the only one"
    return print_export(Options(out, join, run, data_dir, version, dtype, held_out))


def generate(
    *,
    from_: Annotated[str, Parameter(name="--from")],
    prompt: Text,
    tokens: Whole = 128,
    temperature: Number = 0.0,
    top_p: Number = 1.0,
    seed: Whole | None = None,
    device: str = "auto",
    json: Flag = False,
) -> int:
    """Let a model go on with a text.

    Parameters
    ----------
    from_:
        What `p2pdiloco export` made, a run's or a node's folder, or a link.
    prompt:
        The text to go on with; - reads it from standard input.
    tokens:
        How many tokens to make at most.
    temperature:
        0: always the likeliest token. Higher: more daring.
    top_p:
        Choose among the likeliest tokens that together have so much probability.
    seed:
        The same seed makes the same text. Left out: a new one each time.
    device:
        auto, cpu, cuda or cuda:N.
    json:
        Print one object for programs when all is done.
    """
    from p2pdiloco_node.generation.command import Options, print_generated

    return print_generated(Options(from_, prompt, tokens, temperature, top_p, seed, device, json))
