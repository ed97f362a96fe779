"""What transformers alone makes of an exported folder: the same model, tokenizer, text and loss."""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from p2pdiloco.errors import OperatorError
from p2pdiloco.run_spec import ModelSpec, TensorSpec, TokenizerSpec
from p2pdiloco_node.export import command
from p2pdiloco_node.export.command import Options, export
from p2pdiloco_node.export.config_files import full_config, model_config
from p2pdiloco_node.export.hf_config import written_out
from p2pdiloco_node.export.names import ARCHITECTURES, published
from p2pdiloco_node.export.weights import write_weights
from p2pdiloco_node.storage.files import Files
from p2pdiloco_node.training import families
from p2pdiloco_node.training.supervisor import trainer_environment

Make = Callable[..., Any]
SEQ_LEN = 32
SMALL = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": SEQ_LEN,
    "bos_token_id": None, "eos_token_id": 0, "pad_token_id": None,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "olmo2": {},
    "smollm3": {},
    "phi3": {},
    "granite": {},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16},
    "gpt_neox": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": SEQ_LEN},
    "starcoder2": {},
    "stablelm": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3_moe": {**EXPERTS, "head_dim": 16},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1,
        "topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 16, "n_shared_experts": 1, "first_k_dense_replace": 1,
    },
}  # fmt: skip


def quiet(*_: object) -> None:
    """Nobody watches."""


def tiny(family: str, **more: Any) -> tuple[Any, ModelSpec, Any]:
    """A model, its spec, and its params in the spec's order."""
    torch.manual_seed(3)
    arguments = {**SMALL, **FAMILIES[family], **more}
    config = AutoConfig.for_model(family, **arguments)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # also what would start at one or zero
            parameter.add_(0.02 * torch.randn_like(parameter))
    named = list(model.named_parameters())
    spec = ModelSpec(
        family, "tiny", json.dumps(arguments, sort_keys=True).encode(), arguments["vocab_size"], SEQ_LEN,
        tuple(TensorSpec(name, tuple(p.shape)) for name, p in named),
    )  # fmt: skip
    return model, spec, torch.cat([p.detach().reshape(-1) for _, p in named]).numpy()


def logits(model: Any, tokens: Any) -> Any:
    with torch.no_grad():
        return model(tokens).logits


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_loads_under_its_published_names(family: str, tmp_path: Path) -> None:
    model, spec, params = tiny(family)
    files, chunks = Files(), [params.tobytes()]
    written = write_weights(files, tmp_path, published(family, spec.tensors), chunks, "float32", quiet)
    config = model_config(spec, TokenizerSpec("bytes", 256, 0), "float32")
    assert config["architectures"] == [ARCHITECTURES[family]] == [type(model).__name__]
    (tmp_path / "config.json").write_text(json.dumps(written_out(config)))
    loaded, told = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not told["unexpected_keys"], told
    parameters = {name for name, _ in model.named_parameters()}
    assert not parameters & set(told["missing_keys"]), told
    tokens = torch.arange(24).reshape(1, -1)
    assert torch.equal(logits(loaded.eval(), tokens), logits(model, tokens))
    # The names are those of transformers' own export, which other tools read.
    model.save_pretrained(tmp_path / "theirs")
    from safetensors.torch import load_file

    theirs = load_file(tmp_path / "theirs/model.safetensors")
    ours = load_file(tmp_path / written[0].name)
    buffers = {name for name, _ in model.named_buffers()}
    assert set(ours) == {name for name in theirs if name not in buffers}
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_every_family_that_is_trained_has_its_name_in_the_rest_of_the_world() -> None:
    assert set(ARCHITECTURES) == set(families.FAMILIES)


def test_the_config_is_written_out_for_other_programs() -> None:
    _, spec, _ = tiny("llama")
    config = model_config(spec, TokenizerSpec("bytes", 256, 9), "bfloat16")
    full = written_out(config)
    assert full["rms_norm_eps"] == 1e-6, "a default of the class"
    assert full["rope_theta"] == 500000.0, "where older programs look for it"
    assert (full["torch_dtype"], full["eos_token_id"], full["use_cache"]) == ("bfloat16", 9, True)
    for name in ("auto_map", "_name_or_path", "transformers_version"):
        assert name not in full
    one, two = (AutoConfig.for_model(c.pop("model_type"), **c) for c in (dict(config), dict(full)))
    assert one.rope_parameters == two.rope_parameters


def test_a_config_that_makes_another_model_than_the_run_s_is_not_written() -> None:
    """It would have whoever loads the folder make memory and params of its own."""
    _, spec, _ = tiny("llama")
    words = TokenizerSpec("bytes", 256, 9)
    said = json.loads(spec.config) | {"num_hidden_layers": 32, "intermediate_size": 2**24}
    lying = msgspec.structs.replace(spec, config=json.dumps(said, sort_keys=True).encode())
    with pytest.raises(OperatorError, match=r"does not take this run's model \(The run names"):
        full_config(model_config(lying, words, "float32"), lying, trainer_environment(1))
    made = full_config(model_config(spec, words, "float32"), spec, trainer_environment(1))
    assert made is not None
    assert made["rms_norm_eps"] == 1e-6


@pytest.mark.parametrize("end", ["raise MemoryError", "import os; os.kill(os.getpid(), 9)"])
def test_too_little_memory_for_a_config_is_not_the_run_s_fault(
    monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    _, spec, _ = tiny("llama")
    config = model_config(spec, TokenizerSpec("bytes", 256, 9), "float32")
    monkeypatch.setattr("p2pdiloco_node.export.config_files.PROCESS", (sys.executable, "-c", end))
    with pytest.raises(OperatorError, match="free memory") as said:
        full_config(config, spec, trainer_environment(1))
    assert said.value.exit_code == 6


@pytest.fixture(scope="module")
def tokenizer_json() -> bytes:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer.to_str().encode()


TEXT = "Once upon a time there was a swarm that trained one model together.\n" * 30


def evaluation_script(root: Path) -> str:
    """The one that docs/export.md shows."""
    page = (root / "docs/export.md").read_text()
    found = re.search(r"^```python\n(# evaluate\.py.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def said_by(script: str, folder: Path, capsys: Any, monkeypatch: Any) -> str:
    path = folder.parent / "evaluate.py"
    path.write_text(script)
    monkeypatch.setattr("sys.argv", [str(path), str(folder)])
    runpy.run_path(str(path), run_name="__main__")
    return str(capsys.readouterr().out)


@pytest.fixture
def root() -> Path:
    return Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("kind", ["bytes", "bpe", "bpe bfloat16"])
def test_evaluated_by_transformers_alone_the_loss_is_the_run_s(
    kept_run: Make, tmp_path: Path, tokenizer_json: bytes, root: Path, kind: str, capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Held-out text, tied embeddings, a version with merged deltas; 0.5 % (target of the run's owner)."""
    monkeypatch.setattr(command, "full_config", lambda config, *_: written_out(config))
    model, spec, params = tiny("llama", tie_word_embeddings=True)
    more: dict[str, Any] = {}
    if kind == "bytes":
        held_out, unused = TEXT.encode(), 256
    else:
        tokenizer = Tokenizer.from_str(tokenizer_json.decode())
        tokens = np.array(tokenizer.encode(TEXT).ids, "<u2")
        held_out, unused = tokens.tobytes(), tokenizer.get_vocab_size()
        more = {
            "tokenizer_json": tokenizer_json,
            "tokenizer": TokenizerSpec("json", tokenizer.get_vocab_size(), 0),
            "token_bytes": 2,
            "text_bytes": len(TEXT.encode()),
        }
    run = kept_run(model=spec, params=params, held_out=held_out, **more).steps(2)
    dtype = "bfloat16" if "bfloat16" in kind else "float32"
    out = tmp_path / "out"
    export(Options(out, run=run.folder, dtype=dtype, held_out=True), quiet)

    said = re.match(r"loss (\d+\.\d+) ", said_by(evaluation_script(root), out, capsys, monkeypatch))
    assert said is not None
    assert float(said[1]) == pytest.approx(the_run_s_loss(model, run), rel=0.005)

    text = AutoTokenizer.from_pretrained(out)
    for sample in (TEXT, " leading", "\x00 é\u2028 <|endoftext|>\n"):
        ids = text(sample)["input_ids"]
        if kind == "bytes":
            assert ids == list(sample.encode())
            assert text.decode(ids) == sample
        else:
            assert ids == Tokenizer.from_str(tokenizer_json.decode()).encode(sample).ids
    assert text.eos_token_id == (None if kind == "bytes" else 0)
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.dtype == getattr(torch, dtype)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight, "tied weights are one"
    assert loaded.generation_config.eos_token_id == 0
    assert loaded.generation_config.suppress_tokens == list(range(unused, 320))


def test_the_script_says_of_which_version_the_run_s_figure_is(
    kept_run: Make, tmp_path: Path, root: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An export before the last version's evaluation seemed to miss the promised half percent."""
    monkeypatch.setattr(command, "full_config", lambda config, *_: written_out(config))
    _, spec, params = tiny("llama", tie_word_embeddings=True)
    out = tmp_path / "out"
    run = kept_run(model=spec, params=params, held_out=TEXT.encode()).steps(2)
    export(Options(out, run=run.folder, held_out=True), quiet)
    facts = json.loads((out / "p2pdiloco.json").read_bytes())
    for evaluation, words in (
        (None, "no evaluation by the run was known at the export"),
        ({"version": 2, "loss": 5.4879}, "the run said 5.4879"),
        ({"version": 1, "loss": 5.953}, "the run said 5.9530 of version 1, which is another model than this"),
    ):
        (out / "p2pdiloco.json").write_text(json.dumps(facts | {"evaluation": evaluation}))
        said = said_by(evaluation_script(root), out, capsys, monkeypatch)
        assert said.endswith(f" nats per token of version 2; {words}\n")


def the_run_s_loss(model: Any, run: Any) -> float:
    """As an evaluator computes it, with the certified params (training/evaluation.py)."""
    from p2pdiloco.wire.frames import open_frame
    from p2pdiloco_node.training.data import evaluation_places

    width = run.spec.data.token_bytes
    raw = open_frame(run.blobs.read(run.held_out.digest), width * run.held_out.tokens)
    tokens = np.frombuffer(raw, f"<u{width}").astype(np.int64)
    at = 0
    with torch.no_grad():
        for tensor, (_, parameter) in zip(run.model.tensors, model.named_parameters(), strict=True):
            values = run.params[run.version][at : at + tensor.size]
            parameter.copy_(torch.from_numpy(values.copy()).view(tensor.shape))
            at += tensor.size
    total = count = 0.0
    for place in evaluation_places(len(tokens), seq_len=SEQ_LEN, tokens_max=1 << 16):
        row = torch.from_numpy(tokens[place.offset : place.offset + SEQ_LEN + 1])[None]
        found = logits(model, row[:, :-1])[0]
        total += float(torch.nn.functional.cross_entropy(found, row[0, 1:], reduction="sum"))
        count += SEQ_LEN
    return total / count


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
