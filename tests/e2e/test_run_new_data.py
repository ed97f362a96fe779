"""The data flags of `run new`, from the command line to the signed RunSpec."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from p2pdiloco.run_spec import RunSpec, open_run_spec
from p2pdiloco.wire.signing import verify_ed25519
from p2pdiloco_node.cli import run_command

pytestmark = pytest.mark.e2e


def lines(path: Path, first: int) -> None:
    texts = [
        f"Number {n} of the texts about one model trained by many. " * 8 for n in range(first, first + 80)
    ]
    path.write_text("".join(json.dumps({"body": text, "text": "no"}) + "\n" for text in texts))


def made(folder: Path, out: str, *flags: str) -> RunSpec:
    command = [
        "run",
        "new",
        "--name",
        "x",
        "--model",
        "llama:tiny",
        "--admission",
        "local",
        "--out",
        str(folder / out),
    ]
    assert run_command([*command, *flags]) == 0
    assert {p.name for p in (folder / out).iterdir()} == {"blobs", "spec.bin", "witness.key"}
    _, spec = open_run_spec((folder / out / "spec.bin").read_bytes(), verify_ed25519)
    for blob in spec.data.blobs:
        assert (folder / out / "blobs" / blob.digest.hex()).stat().st_size == blob.size
    return spec


def test_every_data_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    lines(tmp_path / "a.jsonl", 0)
    lines(tmp_path / "b.jsonl", 500)
    data = ["--data", f"{tmp_path}/a.jsonl", "--data", f"{tmp_path}/b.jsonl", "--text-key", "body"]
    plain = made(tmp_path, "1", *data, "--seed", "5", "--jobs", "1")
    assert plain.data.tokenizer.kind == "bytes"
    assert len(plain.data.evaluations) == 1
    said = capsys.readouterr().out
    assert "Read 160 documents" in said
    assert "Making version 0 ..." in said

    other = made(tmp_path, "2", *data, "--seed", "6", "--tokenizer", "bpe:300", "--eval-per-source")
    assert (other.data.tokenizer.kind, other.data.tokenizer.vocab_size, other.data.token_bytes) == (
        "json",
        300,
        2,
    )
    assert [s.name[-7:] for s in other.data.evaluations] == ["all", "a.jsonl", "b.jsonl"]
    assert other.model.vocab_size == 300
    assert plain.model.vocab_size == 256
    assert other.genesis.params != plain.genesis.params

    again = made(tmp_path, "3", *data, "--seed", "5", "--jobs", "2")
    assert again.data == plain.data
    assert again.genesis == plain.genesis
