"""The run owner's file: every key, and what is said of one that does not exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from p2pdiloco.errors import OperatorError
from p2pdiloco_node.run.file import TABLES, parse_tokens, read_run_file, set_values

ROOT = Path(__file__).resolve().parents[3]


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def test_without_a_file_every_table_is_empty() -> None:
    assert read_run_file(None) == {table: {} for table in TABLES}


def test_values_of_every_table(tmp_path: Path) -> None:
    parts = read_run_file(
        write(
            tmp_path,
            '[run]\ntokens = "2G"\n[model]\nseq_len = 64\n[data]\ndata = ["a", "b"]\n[inner]\nlr = 1e-3\n'
            '[outer]\ncodec = "fp16"\n[committee]\nsize_max = 5\n[samples]\nprompts = ["Once"]\n',
        )
    )
    assert parts["run"] == {"tokens": 2 * 10**9}
    assert (parts["model"]["seq_len"], parts["inner"]["lr"]) == (64, 1e-3)
    assert parts["data"]["data"] == ["a", "b"]
    assert tuple(parts["samples"]["prompts"]) == ("Once",)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[outr]\nmu = 1\n", "unknown table [outr]; did you mean 'outer'?"),
        ("[outer]\nmue = 1\n", "[outer]: unknown key 'mue'; did you mean 'mu'?"),
        ("mu = 0.5\n", "mu stands outside a table: write it under [outer]."),
        (
            "[inner]\ninner_steps = 2.5\n",
            "[inner] inner_steps is a whole number from 1 to 1,048,576; 2.5 is not",
        ),
        ('[run]\ntokens = "many"\n', "'many' is not a number of tokens"),
        ("[committee]\ngenesis = 1\n", "unknown key 'genesis'"),
        ("[outer\n", "is not valid TOML"),
        ('[model]\nmodel = ""\n', "[model]: model is empty: give it a value, or leave it out."),
    ],
)
def test_slips_are_refused_with_the_nearest(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(OperatorError, match=re.escape(sentence)):
        read_run_file(write(tmp_path, text))


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="cannot be read") as caught:
        read_run_file(tmp_path / "none.toml")
    assert caught.value.exit_code == 3


def test_set_goes_over_the_file() -> None:
    parts = read_run_file(None)
    set_values(parts, ["outer.mu=0.25", "outer.codec=int4", "run.tokens=3M", 'samples.prompts=["a"]'])
    assert parts["outer"] == {"mu": 0.25, "codec": "int4"}
    assert parts["run"]["tokens"] == 3 * 10**6
    for words, sentence in (
        ("outer.mue=1", "did you mean 'mu'"),
        ("outr.mu=1", "did you mean 'outer'"),
        ("mu=1", "is not TABLE.KEY=VALUE"),
        ("inner.lr=fast", "is not possible"),
    ):
        with pytest.raises(OperatorError, match=sentence) as caught:
            set_values(parts, [words])
        assert caught.value.exit_code == 2


def test_the_example_names_every_key_and_is_valid(tmp_path: Path) -> None:
    """What is commented out is valid, too, once the # is away."""
    example = (ROOT / "node/run.example.toml").read_text()
    bare = re.sub(r"^# (?=\w+ = )", "", example, flags=re.MULTILINE)
    found: dict[str, dict[str, Any]] = tomllib.loads(bare)
    assert {t: set(keys) for t, keys in found.items()} == {t: set(keys) for t, keys in TABLES.items()}
    read_run_file(write(tmp_path, bare))
    read_run_file(write(tmp_path, example))


def test_every_key_is_explained_on_the_owner_s_page() -> None:
    page = (ROOT / "docs/run-owner.md").read_text()
    for table, keys in TABLES.items():
        _, found, rest = page.partition(f"| `[{table}]` |")
        assert found, f"docs/run-owner.md has no table of [{table}]"
        rows = rest.split("\n\n")[0]
        explained = {key for row in rows.splitlines() for key in re.findall(r"`(\w+)`", row.split(" | ")[0])}
        assert set(keys) <= explained, f"[{table}]: not explained: {sorted(set(keys) - explained)}"


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("20M", 20 * 10**6), ("1.5k", 1500), ("7", 7), ("2T", 2 * 10**12), ("1,300,000", 1_300_000),
        ("1,300k", 1_300_000),
    ],
)  # fmt: skip
def test_tokens(text: str, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["1,3", "1,3000", ",300", "1,300,", "1300,000", "1,5M", "1,,300"])
def test_commas_that_group_no_thousands_are_a_slip(text: str) -> None:
    with pytest.raises(OperatorError, match="is not a number of tokens"):
        parse_tokens(text)
