"""Version 0 by a real process with torch."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest

from p2pdiloco.errors import OperatorError
from p2pdiloco.exit_codes import RESOURCES
from p2pdiloco.run_spec import ModelSpec, RunSpec, open_run_spec
from p2pdiloco.wire.signing import verify_ed25519
from p2pdiloco_node.cli import run_command
from p2pdiloco_node.training.arrays import Floats
from p2pdiloco_node.training.model_choice import choose_model
from p2pdiloco_node.training.version_0 import look_at_model, make_version_0

pytestmark = pytest.mark.e2e


def made(
    model: str, *, vocab_size: int = 256, seed: int = 1, seq_len: int | None = None
) -> tuple[ModelSpec, Floats]:
    choice = choose_model(model, seq_len=seq_len)
    with tempfile.TemporaryDirectory() as folder:
        heard: list[str] = []
        made = make_version_0(
            choice, seed, vocab_size=vocab_size, folder=Path(folder) / "version-0", at=heard.append
        )
        spec, params, _ = asyncio.run(made)
        assert [*heard[:2], heard[-1]] == ["starting torch", "building it", "writing its params"]
        assert not list(Path(folder).iterdir())
    return spec, params


def test_a_preset_is_initialised_by_its_seed() -> None:
    spec, params = made("llama:tiny", vocab_size=300, seq_len=48)
    assert (spec.family, spec.preset, spec.vocab_size, spec.seq_len) == ("llama", "llama:tiny", 300, 48)
    assert params.shape == (spec.params,)
    assert spec.tensors[0].shape == (320, 32)  # rows for 300 tokens, up to a multiple of 64
    assert 0.005 < params.std() < 0.3
    again, other = made("llama:tiny", vocab_size=300, seq_len=48)[1], made("llama:tiny", seed=2)[1]
    assert np.array_equal(params, again)
    assert not np.array_equal(params[:1000], other[:1000])


def test_its_size_is_known_before_it_is_tried() -> None:
    def check(model: ModelSpec) -> None:
        raise OperatorError(f"{model.params} are too many")

    with pytest.raises(OperatorError, match=r"^\d+ are too many"):
        asyncio.run(look_at_model(choose_model("llama:tiny"), vocab_size=256, check=check))


def test_why_it_failed_is_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    sizes = {"hidden_size": 30, "num_attention_heads": 4, "num_hidden_layers": 1}
    file.write_text(json.dumps({"model_type": "llama", **sizes}))
    with pytest.raises(
        OperatorError, match="version 0 is not made: a model of the family 'llama' cannot be made"
    ) as e:
        made(str(file))
    assert "Traceback" not in str(e.value)


def test_a_model_beyond_this_machine_is_refused_before_it_takes_memory(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 75}))
    with pytest.raises(OperatorError, match=r"of RAM, where .* is free") as e:  # 240 GiB
        made(str(file))
    assert e.value.exit_code == RESOURCES


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("text")
    for number in range(40):
        (folder / f"{number}.txt").write_text(f"{number} the swarm trains one model together\n" * 40)
    return str(folder)


def run_new(out: Path, *flags: str) -> RunSpec:
    """The command as a person gives it; the signed run."""
    assert run_command(["run", "new", "--name", "t", "--admission", "local", "--out", str(out), *flags]) == 0
    return open_run_spec((out / "spec.bin").read_bytes(), verify_ed25519)[1]


def test_a_mixture_and_its_continuation(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From flags to a signed run; then a folder as other programs have it, to another run."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))  # of the owner's key
    data = ("--data", text, "--tokens", "20M")
    inner = ("--seq-len", "64", "--batch", "3", "--lr", "2e-3")
    spec = run_new(tmp_path / "one", "--model", "mixtral:tiny", *data, *inner)
    assert (spec.model.family, spec.model.seq_len, spec.origin) == ("mixtral", 64, "")
    assert (spec.inner.sequences_per_step, spec.inner.lr) == (3, 2e-3)
    assert spec.inner.warmup_tokens == 1000 * 3 * 64  # it follows the batch that was asked for
    blobs = tmp_path / "one" / "blobs"
    params = np.frombuffer(b"".join((blobs / c.hex()).read_bytes() for c in spec.genesis.params), "<f4")
    assert params.size == spec.model.params == pytest.approx(2e6, rel=0.1)
    # The same params as transformers saves them, experts one by one.
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **json.loads(spec.model.config)))
    at = 0
    with torch.no_grad():
        for _, parameter in model.named_parameters():
            parameter.copy_(
                torch.from_numpy(params[at : at + parameter.numel()].copy()).view(parameter.shape)
            )
            at += parameter.numel()
    folder = tmp_path / "saved"
    model.save_pretrained(folder)
    again = run_new(tmp_path / "two", "--model", str(folder), *data)
    assert (again.origin, again.model.preset) == ("a checkpoint of the owner's", "")
    assert again.model.tensors == spec.model.tensors
    assert again.genesis == spec.genesis
    assert again.inner.sequences_per_step != 3
