"""Version 0: initialised, or read from a checkpoint as other programs write it."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from p2pdiloco.errors import OperatorError
from p2pdiloco.run_spec import ModelSpec
from p2pdiloco_node.training import version_0
from p2pdiloco_node.training.arrays import Floats, read_array
from p2pdiloco_node.training.model_choice import choose_model
from p2pdiloco_node.training.presets import config_bytes, inner_spec
from p2pdiloco_node.training.version_0 import DOING, GenesisOrder, last_words, unheard

LLAMA: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}  # fmt: skip
MIXTRAL = LLAMA | {"num_local_experts": 4, "tie_word_embeddings": False}


def made(model: str, folder: Path, *, vocab_size: int = 256, seed: int = 1) -> tuple[ModelSpec, Floats]:
    """What the process makes, in this one."""
    from p2pdiloco_node.training.genesis import make

    choice, path = choose_model(model), folder / "params.f32"
    checkpoint = str(choice.checkpoint or "")
    config = config_bytes(choice.arguments(vocab_size))
    answer = make(
        GenesisOrder(choice.family, config, vocab_size, choice.seq_len, checkpoint, seed, str(path))
    )
    spec = ModelSpec(choice.family, choice.name, answer.config, vocab_size, choice.seq_len, answer.tensors)
    return spec, read_array(path, spec.params)


def saved(folder: Path, family: str, config: dict[str, Any], *, dtype: str = "float32", **how: Any) -> Any:
    """A checkpoint as transformers writes it; the model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config)).to(getattr(torch, dtype))
    model.save_pretrained(folder, **how)
    return model.eval()  # some classes' config drops out by default


def losses(spec: ModelSpec, params: Floats, model: Any) -> tuple[float, float]:
    """Of the run's trainer at version 0, and of transformers alone."""
    import torch

    from p2pdiloco_node.training.inner_loop import InnerLoop

    class Terms(msgspec.Struct):
        model: ModelSpec
        inner: Any

    loop = InnerLoop(Terms(spec, inner_spec("llama:tiny", 10**6)))
    loop.start_from(params)
    loop.load_evaluation(params.copy())
    tokens = np.random.default_rng(2).integers(0, 256, (4, 33))
    batch = torch.from_numpy(tokens)
    logits = model.float()(input_ids=batch[:, :-1]).logits.detach()
    alone = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[:, 1:].reshape(-1))
    return loop.evaluate(tokens) / (4 * 32), float(alone)


async def test_a_refused_model_leaves_nobody_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever listened to the process went on while it was killed."""
    answers = (
        "import sys, time; sys.stdout.buffer.write(bytes([0, 0, 0, 1, 7])); sys.stdout.flush(); "
        "time.sleep(600)"
    )

    async def listen_for_ever(*_: object) -> str:
        await asyncio.Event().wait()
        return ""

    def refuse(answer: bytes) -> None:
        raise OperatorError(f"refused: {answer!r}")

    monkeypatch.setattr(version_0, "GENESIS", (sys.executable, "-c", answers))
    monkeypatch.setattr(version_0, "last_words", listen_for_ever)
    async with asyncio.timeout(60):
        with pytest.raises(OperatorError, match=r"refused: b'\\x07'"):
            await version_0._run(b"", unheard, refuse)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_what_the_process_is_at_is_told_apart_from_what_it_says() -> None:
    said = asyncio.StreamReader()
    heard: list[str] = []
    for piece in (f"a warning\n{DOING}build", f"ing it\n{DOING}forward pass\n", "x" * 200_000 + "\n", "no "):
        said.feed_data(piece.encode())
    said.feed_data(b"room")
    said.feed_eof()
    assert await last_words(said, heard.append) == "no room"
    assert heard == ["building it", "forward pass"]


async def test_a_process_that_is_killed_without_a_word_is_said_to_have_been_at_something() -> None:
    said = asyncio.StreamReader()
    said.feed_data(f"{DOING}backward pass\n".encode())
    said.feed_eof()
    assert await last_words(said, unheard) == "it said nothing, at: backward pass"


def test_positions_must_hold_a_sequence(tmp_path: Path) -> None:
    from p2pdiloco_node.training.genesis import make

    order = GenesisOrder("llama", config_bytes(LLAMA), 256, 65, "", 1, str(tmp_path / "params.f32"))
    with pytest.raises(OperatorError, match="--seq-len 65 is more than the 64 positions"):
        make(order)


def test_dropout_that_the_config_asks_for_is_said(tmp_path: Path) -> None:
    from p2pdiloco_node.training.genesis import make

    order = GenesisOrder(
        "llama", config_bytes(LLAMA | {"attention_dropout": 0.1}), 256, 64, "", 1, str(tmp_path / "p")
    )
    assert make(order).notes == ("Dropout as the config asks: attention_dropout 0.1.",)


def test_a_trained_table_is_not_lost_in_silence(tmp_path: Path) -> None:
    """DeepSeek's routers have a bias that no gradient trains: a run sends params alone."""
    import torch

    from tests.unit.training.test_families import tiny_config

    config = tiny_config("deepseek_v3")
    folder = tmp_path / "deepseek"
    model = saved(folder, "deepseek_v3", config)
    choice_tokens = config["vocab_size"]
    ours, _ = made(str(folder), tmp_path, vocab_size=choice_tokens)
    assert ours.family == "deepseek_v3"
    biased = [b for name, b in model.named_buffers() if "bias" in name]
    with torch.no_grad():
        biased[0].fill_(0.5)
    model.save_pretrained(folder)
    with pytest.raises(OperatorError, match="a table of its own"):
        made(str(folder), tmp_path, vocab_size=choice_tokens)


def test_a_config_file_is_initialised_with_all_its_arguments(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA | {"model_type": "llama", "rope_theta": 12345.0, "use_cache": True}))
    spec, params = made(str(file), tmp_path)
    frozen = json.loads(spec.config)
    assert frozen["rope_parameters"] == {"rope_theta": 12345.0, "rope_type": "default"}
    assert frozen["vocab_size"] == 256
    assert spec.params == len(params)


@pytest.mark.parametrize(
    ("family", "config", "how"),
    [
        ("llama", LLAMA, {}),
        ("llama", LLAMA | {"tie_word_embeddings": False}, {"dtype": "bfloat16", "max_shard_size": "10KB"}),
        ("mixtral", MIXTRAL, {}),
        (
            "gpt2",
            {"vocab_size": 300, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4},
            {"dtype": "float16"},
        ),
    ],
    ids=["one file", "bfloat16 in pieces", "experts", "gpt2"],
)
def test_a_checkpoint_is_the_start(
    tmp_path: Path, family: str, config: dict[str, Any], how: dict[str, Any]
) -> None:
    model = saved(tmp_path, family, config, **how)
    assert ("max_shard_size" in how) == (tmp_path / "model.safetensors.index.json").exists()
    spec, params = made(str(tmp_path), tmp_path)
    ours, alone = losses(spec, params, model)
    assert ours == pytest.approx(alone, rel=1e-5)
    assert spec.preset == ""  # what a folder is called on its owner's machine is nobody's business


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    saved(folder, "llama", LLAMA)
    return folder


def changed(whole: Path, folder: Path, **config: Any) -> Path:
    shutil.copytree(whole, folder, dirs_exist_ok=True)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return folder


def test_what_is_no_start_is_refused(whole: Path, tmp_path: Path) -> None:
    deeper = changed(whole, tmp_path / "deeper", num_hidden_layers=3)
    with pytest.raises(OperatorError, match=r"lacks model\.layers\.2.*another model"):
        made(str(deeper), tmp_path)
    flatter = changed(whole, tmp_path / "flatter", num_hidden_layers=1)
    with pytest.raises(OperatorError, match=r"unknown to its config, model\.layers\.1"):
        made(str(flatter), tmp_path)
    wider = changed(whole, tmp_path / "wider", intermediate_size=64)
    with pytest.raises(OperatorError, match=r"in another shape|cannot be read"):
        made(str(wider), tmp_path)
    cut = changed(whole, tmp_path / "cut")
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(OperatorError, match="cannot be read"):
        made(str(cut), tmp_path)
    with pytest.raises(OperatorError, match=r"400 tokens and the model .* knows 300"):
        made(str(whole), tmp_path, vocab_size=400)
    unknown = changed(whole, tmp_path / "unknown", hiden_act="silu")
    with pytest.raises(
        OperatorError, match="'hiden_act', which 'llama' does not know; did you mean 'hidden_act'"
    ):
        made(str(unknown), tmp_path)


def test_values_that_are_not_finite_are_no_start(whole: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    folder = changed(whole, tmp_path / "nan")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = np.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(OperatorError, match="not finite"):
        made(str(folder), tmp_path)


@pytest.mark.parametrize("kind", ["int32", "bool"])
def test_tensors_that_are_no_floats_are_no_params(whole: Path, tmp_path: Path, kind: str) -> None:
    from safetensors.numpy import load_file, save_file

    folder = changed(whole, tmp_path / kind)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(kind)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        OperatorError, match=r"holds model\.norm\.weight as (I32|BOOL): a run starts from floats"
    ):
        made(str(folder), tmp_path)


def test_masks_in_old_files_are_no_params(tmp_path: Path) -> None:
    """As GPT-NeoX's files have them."""
    from safetensors.numpy import load_file, save_file

    config = LLAMA | {"tie_word_embeddings": False}
    del config["num_key_value_heads"]
    saved(tmp_path, "gpt_neox", config)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["gpt_neox.layers.0.attention.bias"] = np.ones((1, 1, 64, 64), np.bool_)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    spec, params = made(str(tmp_path), tmp_path)
    assert spec.params == len(params)


def test_values_out_of_all_proportion_are_no_start(whole: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    folder = changed(whole, tmp_path / "huge")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][7, 3] = -1e30  # of a token that no trial need meet
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(OperatorError, match=r"holds a value of 1e\+30 \(model\.embed_tokens\.weight\)"):
        made(str(folder), tmp_path)
