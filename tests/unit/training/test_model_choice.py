"""What --model may name."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest

from p2pdiloco.errors import OperatorError
from p2pdiloco.run_spec import ModelSpec
from p2pdiloco_node.training.model_choice import ModelChoice, check_parts, choose_model
from p2pdiloco_node.training.presets import LADDER, PRESETS, inner_of, inner_spec, model_spec

CONFIG: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16",
    "vocab_size": 300, "auto_map": {"AutoModel": "code.Model"}, "_name_or_path": "somewhere/else",
    "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64,
    "rope_theta": 500000.0, "use_cache": True,
}  # fmt: skip


def written(folder: Path, **changes: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps({k: v for k, v in (CONFIG | changes).items() if v is not None}))
    return file


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_about_as_large_as_it_says(name: str) -> None:
    from p2pdiloco_node.training.models import make_config, open_config, outline, outline_of, tensor_layout

    spec = model_spec(name, ())
    model = outline(spec.family, make_config(spec.family, open_config(spec.family, spec.config)))
    params = sum(p.numel() for p in model.parameters())
    size = name.partition(":")[2].removeprefix("8x")
    if "8x" in name:
        return  # named after one expert's model
    if size != "tiny":
        said = float(size[:-1]) * {"m": 1e6, "b": 1e9}[size[-1]]
        assert params == pytest.approx(said, rel=0.3)  # qwen's names count a vocabulary of 150 thousand
    assert PRESETS[name].params / 3.5 < params < PRESETS[name].params * 3.5
    whole = ModelSpec(spec.family, name, spec.config, 256, spec.seq_len, tensor_layout(model))
    assert sum(p.numel() for p in outline_of(whole).parameters()) == params


def test_inner_loops_follow_size() -> None:
    for smaller, larger in itertools.pairwise(LADDER):
        assert smaller.params < larger.params
        assert smaller.lr >= larger.lr
        assert smaller.batch_tokens <= larger.batch_tokens
        assert smaller.pass_s <= larger.pass_s
    assert inner_of(1.1e9) is inner_of(0.9e9) is LADDER[5]
    inner = inner_spec("llama:110m", 10**9)
    assert (inner.sequences_per_step, inner.inner_steps, inner.lr) == (64, 200, 8e-4)


def test_a_preset_with_another_vocabulary_and_length() -> None:
    choice = choose_model("llama:20m", seq_len=256)
    assert choice.checkpoint is None
    arguments = choice.arguments(50_257)
    assert arguments["vocab_size"] == 50_304  # rows up to a multiple of 64
    assert arguments["max_position_embeddings"] == choice.seq_len == 256
    assert arguments["eos_token_id"] is None
    # Half as long sequences, twice as many: the batch keeps its tokens.
    assert (
        choice.inner_spec(10**9).sequences_per_step == 2 * inner_spec("llama:20m", 10**9).sequences_per_step
    )
    spec = model_spec("llama:20m", (), vocab_size=50_257, seq_len=256)
    assert (spec.vocab_size, spec.seq_len) == (50_257, 256)
    assert json.loads(spec.config) == arguments


def test_a_config_file(tmp_path: Path) -> None:
    choice = choose_model(str(written(tmp_path)))
    assert choice.family == "llama"
    assert choice.checkpoint is None
    assert choice.seq_len == 32  # of its size
    assert not {"auto_map", "_name_or_path", "torch_dtype", "model_type"} & choice.config.keys()
    assert choice.arguments(256)["vocab_size"] == 256
    assert choose_model(str(tmp_path / "config.json"), seq_len=64).seq_len == 64


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": None}, "does not say its model_type"),
        ({"model_type": "bert"}, "not trained by this build"),
        ({"hidden_size": None}, "does not say its hidden_size or n_embd, and would be as large as its class"),
        ({"num_hidden_layers": None}, "does not say its num_hidden_layers or n_layer"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"hidden_act": "evil"}, "hidden_act"),
    ],
)
def test_files_that_are_no_model(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(OperatorError, match=said):
        choose_model(str(written(tmp_path, **changes)))


def test_more_positions_than_there_are(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="more than the 64 positions"):
        choose_model(str(written(tmp_path)), seq_len=65)
    with pytest.raises(OperatorError, match="--seq-len is 1 to"):
        choose_model("llama:1m", seq_len=0)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lama:tiny",
         "^there is no model 'lama:tiny'; did you mean 'llama:tiny'\\? Or name a config.json or a folder"),
        ("llama:20", "did you mean 'llama:20m'"),
        ("xyzzy", "^there is no model 'xyzzy': choose one of llama:.*, or name a config.json or a folder"),
        ("models/none", "no file or folder"),
        ("none.json", "no file or folder"),
    ],
)  # fmt: skip
def test_names_of_nothing(name: str, said: str) -> None:
    with pytest.raises(OperatorError, match=said):
        choose_model(name)


def folder(tmp_path: Path, *files: str) -> Path:
    written(tmp_path)
    for name in files:
        (tmp_path / name).write_bytes(b"x")
    return tmp_path


def test_a_folder_with_a_checkpoint(tmp_path: Path) -> None:
    choice: ModelChoice = choose_model(str(folder(tmp_path, "model.safetensors", "tokenizer.json")))
    assert choice.checkpoint == tmp_path
    assert choice.tokenizer == tmp_path / "tokenizer.json"
    assert choice.arguments(256)["vocab_size"] == 300  # its own rows, whatever the tokenizer has
    with pytest.raises(OperatorError, match=r"301 tokens and the model .* knows 300.*--tokenizer"):
        choice.arguments(301)


@pytest.mark.parametrize(
    ("facts", "origin"),
    [
        (None, "a checkpoint of the owner's"),
        ({"run": {"id": "ab" * 32}, "version": 7}, f"version 7 of run {'ab' * 32}"),
        ({"run": {"id": "ab" * 32 + " and more"}, "version": 7}, "a checkpoint of the owner's"),
        ({"run": {"id": "ab" * 32}, "version": True}, "a checkpoint of the owner's"),
        ({"run": {"id": "ab" * 32}, "version": 10**90}, "a checkpoint of the owner's"),
        ({"run": 7, "version": 7}, "a checkpoint of the owner's"),
        ([], "a checkpoint of the owner's"),
    ],
)
def test_no_name_of_the_owner_s_disk_goes_into_a_run(tmp_path: Path, facts: object, origin: str) -> None:
    """The public card said "version 0 | out". Where an export says what it is of, that is said."""
    made = folder(tmp_path, "model.safetensors")
    if facts is not None:
        (made / "p2pdiloco.json").write_text(json.dumps(facts))
    choice = choose_model(str(made))
    assert (choice.name, choice.origin) == ("", origin)
    alone = choose_model(str(made / "config.json"))
    assert (alone.name, alone.origin) == ("", ""), "initialised: only its shape is from a file"


def test_a_folder_in_pieces(tmp_path: Path) -> None:
    index = folder(tmp_path, "a-1.safetensors", "a-2.safetensors") / "model.safetensors.index.json"
    where = {"x": "a-1.safetensors", "y": "a-2.safetensors"}
    index.write_text(json.dumps({"weight_map": where}))
    with pytest.raises(OperatorError, match='lacks "metadata"'):
        check_parts(tmp_path)
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    assert check_parts(tmp_path) == [tmp_path / "a-1.safetensors", tmp_path / "a-2.safetensors"]
    (tmp_path / "a-2.safetensors").unlink()
    with pytest.raises(OperatorError, match=r"lacks a-2\.safetensors"):
        check_parts(tmp_path)
    for name in ("../../a.safetensors", "a-1.safetensors\n", {}, [], 7):
        index.write_text(json.dumps({"metadata": {}, "weight_map": {"x": name}}))
        with pytest.raises(OperatorError, match="does not name files beside it"):
            check_parts(tmp_path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    for model in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(OperatorError, match=r"config\.json is not a file"):
            choose_model(str(model))


def test_pickled_weights_are_not_opened(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match=r"pytorch_model\.bin may run code"):
        choose_model(str(folder(tmp_path, "pytorch_model.bin")))
