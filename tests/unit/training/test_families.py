"""Which models are trained, each built tiny, and what a stranger's config may not say."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.run_spec import ModelSpec
from p2pdiloco_node.training.families import FAMILIES, check_values, open_config, without_dropout
from p2pdiloco_node.training.presets import config_bytes, inner_spec

VOCAB, SEQ = 64, 12
PLAIN = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": SEQ,
}  # fmt: skip
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2}
OWN: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": VOCAB, "n_positions": SEQ, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "gpt_neox": {key: value for key, value in PLAIN.items() if key != "num_key_value_heads"},
    "granite": PLAIN | {"logits_scaling": 4.0},
    "qwen3": PLAIN | {"head_dim": 8},
    "gemma": PLAIN | {"head_dim": 8},
    "gemma2": PLAIN | {"head_dim": 8, "final_logit_softcapping": 0.5},
    "gemma3_text": PLAIN | {"head_dim": 8, "final_logit_softcapping": 0.5},
    "mixtral": PLAIN | {"num_local_experts": 4},
    "olmoe": PLAIN | SPARSE,
    "qwen2_moe": PLAIN | SPARSE | {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "qwen3_moe": PLAIN | SPARSE | {"moe_intermediate_size": 16},
    "deepseek_v3": PLAIN | {
        "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4, "n_group": 2,
        "topk_group": 1, "num_experts_per_tok": 2, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 1,
    },
}  # fmt: skip


def tiny_config(family: str, **changes: Any) -> dict[str, Any]:
    return OWN.get(family, PLAIN) | changes


def tiny_spec(family: str, **changes: Any) -> tuple[ModelSpec, Any]:
    """As `run new` writes it, with every argument, and a model at version 0."""
    import torch

    from p2pdiloco_node.training.models import frozen_config, initialised, make_config, tensor_layout

    torch.manual_seed(5)
    config = make_config(family, tiny_config(family, **changes))
    model = initialised(family, config)
    frozen = config_bytes(frozen_config(config))
    return ModelSpec(family, "tiny", frozen, VOCAB, SEQ, tensor_layout(model)), model


class Terms(msgspec.Struct):
    model: ModelSpec
    inner: Any = inner_spec("llama:tiny", 10**6)


def tokens(sequences: int = 4) -> Any:
    return np.random.default_rng(1).integers(0, VOCAB, (sequences, SEQ + 1))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains_as_transformers_computes_it(family: str, tied: bool) -> None:
    import torch

    from p2pdiloco_node.training.inner_loop import InnerLoop
    from p2pdiloco_node.training.models import flatten_params

    spec, model = tiny_spec(family, tie_word_embeddings=tied)
    loop = InnerLoop(Terms(spec))
    loop.start_from(flatten_params(model).numpy())
    # What has no memory of its own in the RunSpec is derived alike.
    here, there = dict(loop._model.named_buffers()), dict(model.named_buffers())
    assert here.keys() == there.keys()
    assert all(torch.equal(here[name], there[name]) for name in here)
    batch = tokens()
    logits = model(input_ids=torch.from_numpy(batch[:, :-1])).logits.float()
    targets = torch.from_numpy(batch[:, 1:]).reshape(-1)
    expected = float(torch.nn.functional.cross_entropy(logits.detach().reshape(-1, VOCAB), targets))
    before = loop.theta.clone()
    assert loop.step(batch, 1e-2) == pytest.approx(expected, rel=1e-5)
    at = 0
    for tensor in spec.tensors:
        part = slice(at, at + tensor.size)
        assert not torch.equal(loop.theta[part], before[part]), f"{tensor.name} does not learn"
        at += tensor.size
    names = {tensor.name for tensor in spec.tensors}
    assert any("lm_head" in name or "embed_out" in name for name in names) != tied
    losses = [loop.step(batch, 1e-2) for _ in range(8)]
    assert losses[-1] is not None
    assert losses[-1] < expected


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "granite", "mixtral"])
def test_less_memory_gives_the_same_gradient(family: str) -> None:
    """Checkpointing, logits in pieces and micro-batches change what is kept, not what comes out."""
    import torch

    from p2pdiloco_node.training.inner_loop import InnerLoop
    from p2pdiloco_node.training.losses import CausalLoss
    from p2pdiloco_node.training.models import flatten_params

    # Without the balance loss, which is a mean over each part.
    more = {"router_aux_loss_coef": 0.0} if family == "mixtral" else {}
    spec, model = tiny_spec(family, **more)

    def gradient(*, pieces: int = 0, **how: Any) -> Any:
        loop = InnerLoop(Terms(spec), **how)
        if pieces:
            loop._forward = CausalLoss(loop._model, bf16=False, logits_bytes=4 * VOCAB * pieces)
        loop.start_from(flatten_params(model).numpy())
        loss = loop.step(tokens(), 0.0)
        return loss, loop._held.gradient.clone()

    loss, whole = gradient()
    for how in ({"checkpointing": True}, {"pieces": 5}, {"micro_batch": 1}, {"micro_batch": 3, "pieces": 1}):
        other_loss, other = gradient(**how)
        assert other_loss == pytest.approx(loss, rel=1e-5)
        torch.testing.assert_close(other, whole, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"])
def test_the_balance_loss_is_transformers_own(family: str) -> None:
    import torch

    from p2pdiloco_node.training.losses import CausalLoss

    _, model = tiny_spec(family, router_aux_loss_coef=0.3)
    losses = CausalLoss(model, bf16=False).train()
    batch = torch.from_numpy(tokens())
    theirs = model.train()(input_ids=batch[:, :-1], output_router_logits=True)
    assert losses.balance_weight == 0.3
    assert losses(batch).balance.item() == pytest.approx(theirs.aux_loss.item(), rel=1e-6)
    routed = losses.take_routed()
    assert routed.sum(dim=1).tolist() == [4 * SEQ * 2] * 2  # sequences, tokens, experts of a token
    assert losses.take_routed() is None
    losses.eval()
    assert losses(batch).balance.item() == 0.0


def test_a_mixture_lowers_its_balance_loss_and_reports_the_cross_entropy_alone() -> None:
    from p2pdiloco_node.training.inner_loop import InnerLoop
    from p2pdiloco_node.training.models import flatten_params

    ends = []
    for weight in (0.0, 5.0):
        spec, model = tiny_spec("mixtral", router_aux_loss_coef=weight)
        loop = InnerLoop(Terms(spec))
        loop.start_from(flatten_params(model).numpy())
        first = loop.step(tokens(), 1e-2)
        assert first == pytest.approx(np.log(VOCAB), abs=0.2)
        loop.expert_evenness()
        for _ in range(20):
            loop.step(tokens(), 1e-2)
        evenness = loop.expert_evenness()
        assert len(evenness) == 2
        assert all(0 < share <= 1 for share in evenness)
        assert loop.expert_evenness() == ()
        ends.append(min(evenness))
    assert ends[1] > ends[0]


def test_dropout_is_zero_unless_asked_for() -> None:
    from p2pdiloco_node.training.models import make_config

    assert make_config("gpt2", tiny_config("gpt2")).resid_pdrop == 0.0
    assert make_config("gpt2", tiny_config("gpt2", resid_pdrop=0.25)).resid_pdrop == 0.25
    assert without_dropout("llama", {"attention_dropout": 0.5}) == {"attention_dropout": 0.5}


def test_evaluation_drops_nothing_out() -> None:
    from p2pdiloco_node.training.inner_loop import InnerLoop
    from p2pdiloco_node.training.models import flatten_params

    spec, model = tiny_spec("gpt2", resid_pdrop=0.5)
    loop = InnerLoop(Terms(spec))
    loop.start_from(flatten_params(model).numpy())
    loop.load_evaluation(flatten_params(model).numpy())
    assert loop.evaluate(tokens()) == loop.evaluate(tokens())
    assert loop.step(tokens(), 0.0) != loop.step(tokens(), 0.0)


@pytest.mark.parametrize(
    ("family", "change", "said"),
    [
        ("lama", {}, "did you mean 'llama'\\? It has deepseek_v3, gemma"),
        ("bert", {}, "'bert' are not trained by this build\\. It has"),
        ("llama", {"auto_map": {"AutoConfig": "x.Y"}}, "names code of its own"),
        ("llama", {"rope_parameters": {"auto_map": 1}}, "names code of its own"),
        ("llama", {"_name_or_path": "org/model"}, "a place to download from"),
        ("llama", {"quantization_config": {}}, "quantised"),
        ("llama", {"attn_implementation": "org/kernel"}, "each node's own affair"),
        ("llama", {"_attn_implementation_internal": "x"}, "transformers' own"),
        ("llama", {"hidden_size": 2**40}, "numbers go up to"),
        ("llama", {"rms_norm_eps": 1e300}, "numbers go up to"),
        ("llama", {"hidden_act": "silly"}, "did you mean 'silu'\\? Nothing of it"),
        ("llama", {"num_hidden_layers": 10_000}, "up to 512 layers"),
        ("llama", {"num_hidden_layers": -1}, "it is a whole number, at least 1"),
        ("mixtral", {"num_local_experts": 5000}, "up to 1024 experts"),
        ("llama", {"attention_dropout": 1.0}, "from 0 to less than 1"),
        ("llama", {"x": "y" * 100}, "more than 64 characters"),
        ("llama", {"layer_types": ["a"] * 2000}, "too large or too deep"),
        ("llama", {"a": {"b": {"c": {"d": {}}}}}, "too large or too deep"),
        ("gpt2", {"add_cross_attention": True}, "not trained as a language model"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "not trained as a language model"),
    ],
)
def test_what_a_config_may_not_say(family: str, change: dict[str, Any], said: str) -> None:
    with pytest.raises(OperatorError, match=said):
        check_values(family, PLAIN | change)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (b"[1]", "not a JSON object"),
        (b"{", "not JSON"),
        (b'{"a": NaN}', "no number of JSON"),
        (b'{"a": 1, "a": 2}', "stands twice"),
        (b"[" * 5000, "not JSON"),
    ],
)
def test_what_is_no_config(config: bytes, said: str) -> None:
    with pytest.raises(OperatorError, match=said):
        open_config("llama", config)


def built(family: str, config: dict[str, Any]) -> Any:
    from p2pdiloco_node.training.models import build_model

    return build_model(ModelSpec(family, "x", json.dumps(config).encode(), VOCAB, SEQ, ()))


@pytest.mark.parametrize(
    ("family", "change", "said"),
    [
        (
            "llama",
            {"hiden_size": 32},
            "'hiden_size', which 'llama' does not know; did you mean 'hidden_size'",
        ),
        ("llama", {"num_local_experts": 4}, "does not know"),
        ("llama", {"is_encoder_decoder": True}, "does not know"),
        ("llama", {"rope_theta": 1e4}, "does not know"),  # an old name: files may have it, runs have not
        ("llama", {"hidden_size": 30}, "cannot be made"),
        ("llama", {"hidden_size": "32"}, "hidden_size is '32': it is a whole number"),
        ("llama", {"hidden_size": 2**20, "vocab_size": 2**20}, r"up to 2\*\*36 parameters"),
        ("llama", {"max_position_embeddings": 2**24}, ""),  # frequencies are few: no table of positions
        ("gpt2", {"n_positions": 2**24, "n_embd": 2**16}, r"up to 2\*\*36 parameters"),
    ],
)
def test_what_cannot_be_built_is_refused_before_it_takes_memory(
    family: str, change: dict[str, Any], said: str
) -> None:
    config = tiny_config(family) | change
    if not said:
        assert built(family, config) is not None
        return
    with pytest.raises(OperatorError, match=said):
        built(family, config)


def test_a_run_whose_tensors_are_not_its_configs_is_refused() -> None:
    from p2pdiloco_node.training.models import outline_of

    spec, _ = tiny_spec("llama")
    first, *rest = spec.tensors
    wider = msgspec.structs.replace(first, shape=(VOCAB, 64))
    for tensors, said in (
        ((wider, *rest), r"names the tensor .* \[64, 64\]"),
        (tuple(rest), "another|names"),
    ):
        with pytest.raises(OperatorError, match=said) as refused:
            outline_of(msgspec.structs.replace(spec, tensors=tensors))
        assert refused.value.exit_code == 5
    # A token without a row in the embedding would end the trainer at some step, and again.
    with pytest.raises(OperatorError, match=r"The run names .* tokens where") as refused:
        outline_of(msgspec.structs.replace(spec, vocab_size=VOCAB + 1))
    assert refused.value.exit_code == 5


def test_too_little_memory_is_not_the_config_s_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    from p2pdiloco_node.training import models

    def full(*_: Any, **__: Any) -> Any:
        raise MemoryError

    spec, _ = tiny_spec("llama")
    monkeypatch.setattr(models.AutoModelForCausalLM, "from_config", full)
    with pytest.raises(MemoryError):
        models.outline_of(spec)


def test_a_frozen_config_says_everything() -> None:
    """Another release may have other defaults; the run's model may not change with them."""
    spec, _ = tiny_spec("llama")
    frozen = json.loads(spec.config)
    assert frozen["rope_parameters"] == {"rope_theta": 10000.0, "rope_type": "default"}
    assert {"rms_norm_eps", "hidden_act", "head_dim", "attention_bias"} <= frozen.keys()
    assert not {"use_cache", "transformers_version", "dtype"} & frozen.keys()
    assert len(spec.config) < limits.model_config_bytes_max // 8


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_nothing_is_frozen_that_no_model_reads(family: str) -> None:
    """A release that drops such a key from its class would end every run that names it."""
    spec, _ = tiny_spec(family)
    frozen = json.loads(spec.config)
    assert not {"bos_token_id", "eos_token_id", "pad_token_id", "pretraining_tp"} & frozen.keys()
    assert not [key for key in frozen if key.startswith("summary_")]


@pytest.mark.parametrize("value", [None, False, "", [], {}])
def test_a_run_of_a_newer_release_says_no_to_what_is_unknown_here(value: Any) -> None:
    from p2pdiloco_node.training.models import make_config, outline_of

    spec, _ = tiny_spec("llama")
    said = json.loads(spec.config) | {"of_the_next_release": value, "pretraining_tp": 1, "eos_token_id": 9}
    newer = msgspec.structs.replace(spec, config=json.dumps(said).encode())
    assert outline_of(newer) is not None
    assert make_config("llama", said).eos_token_id is None, "no model reads it"


def test_a_run_that_needs_another_release_names_it() -> None:
    from p2pdiloco_node.training.models import outline_of, releases

    spec, _ = tiny_spec("llama")
    said = json.loads(spec.config) | {"of_the_next_release": 2}
    newer = msgspec.structs.replace(
        spec, config=json.dumps(said).encode(), made_with="transformers 9.1.0, tokenizers 1.0"
    )
    with pytest.raises(OperatorError, match=r"install transformers 9\.1\.0, tokenizers 1\.0 \(here is trans"):
        outline_of(newer)
    other = msgspec.structs.replace(newer, config=spec.config, tensors=spec.tensors[1:])
    with pytest.raises(OperatorError, match=r"made with transformers 9\.1\.0"):
        outline_of(other)
    assert releases().startswith("transformers 5.")
