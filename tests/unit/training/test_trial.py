"""A model computes once before it becomes a run's: what builds and cannot train is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from p2pdiloco.errors import OperatorError
from p2pdiloco.exit_codes import RESOURCES
from p2pdiloco.run_spec import ModelSpec
from p2pdiloco_node.training.presets import config_bytes
from p2pdiloco_node.training.ram import Ram
from p2pdiloco_node.training.version_0 import GenesisMade, GenesisOrder

LLAMA: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}  # fmt: skip


def tried(family: str, config: dict[str, Any], *, vocab_size: int = 300, params: str = "") -> GenesisMade:
    from p2pdiloco_node.training.genesis import make

    return make(GenesisOrder(family, config_bytes(config), vocab_size, 16, "", 1, params))


def test_what_a_look_has_tried_is_not_tried_again(tmp_path: Path) -> None:
    """A large model takes minutes."""
    from p2pdiloco_node.training.genesis import make

    config = config_bytes(LLAMA | {"hidden_size": 30})  # builds, and cannot compute
    order = GenesisOrder("qwen2", config, 300, 16, "", 1, str(tmp_path / "params"), tried=True)
    assert make(order).tensors
    assert (tmp_path / "params").stat().st_size > 0


def test_what_goes_on_is_said_meanwhile(tmp_path: Path) -> None:
    from p2pdiloco_node.training.genesis import make

    heard: list[str] = []
    order = GenesisOrder("llama", config_bytes(LLAMA), 300, 16, "", 1, str(tmp_path / "params"))
    made = make(order, heard.append, lambda made: heard.append(f"{len(made.tensors)} tensors"))
    assert heard == [
        "building it", f"{len(made.tensors)} tensors",
        "initialising its params", "looking at its params", "forward pass", "backward pass",
        "evaluating and sampling", "writing its params",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "differs", "said"),
    [
        ("qwen2", {"hidden_size": 30}, "cannot compute: The size of tensor"),
        ("granite", {"hidden_size": 30}, "cannot compute: The size of tensor"),
        ("mistral", {"sliding_window": 0}, "cannot compute: "),
        ("mistral", {"sliding_window": -1}, "cannot compute: "),
        ("gpt_neox", {"initializer_range": 1e5}, r"first loss is \d+: a guess"),
        ("mistral", {"initializer_range": 1e5}, r"first loss is \d+: a guess"),
        ("granite", {"logits_scaling": 0.0}, "first loss is nan"),
    ],
    ids=str,
)
def test_what_builds_and_cannot_train(
    family: str, differs: dict[str, Any], said: str, tmp_path: Path
) -> None:  # fmt: skip
    shape = LLAMA if family != "gpt_neox" else LLAMA | {"num_key_value_heads": None}
    config = {key: value for key, value in (shape | differs).items() if value is not None}
    with pytest.raises(OperatorError, match=said) as e:
        tried(family, config, params=str(tmp_path / "params"))
    assert "mend the config" in str(e.value)
    assert not (tmp_path / "params").exists()


def test_a_tokenizer_with_more_tokens_than_the_embedding() -> None:
    with pytest.raises(OperatorError, match="the tokenizer has 321 tokens and the model knows 320"):
        tried("llama", LLAMA, vocab_size=321)


def test_experts_without_a_token_are_no_fault() -> None:
    """More experts than there are tokens in the sequence."""
    config = LLAMA | {"num_local_experts": 64, "num_experts_per_tok": 1}
    assert tried("mixtral", config).notes == ()


def layout_of(model: Any) -> ModelSpec:
    from p2pdiloco_node.training.models import tensor_layout

    return ModelSpec("llama", "", config_bytes(LLAMA), 300, 16, tensor_layout(model))


def llama() -> Any:
    from p2pdiloco_node.training.models import initialised, make_config

    return initialised("llama", make_config("llama", LLAMA))


def test_params_that_no_gradient_reaches_are_named() -> None:
    import torch

    from p2pdiloco_node.training.trial import try_model

    model = llama()
    model.unused = torch.nn.Linear(3, 3)
    notes = try_model(model, layout_of(model), 2**40)
    assert notes == [
        "No gradient reaches unused.weight, unused.bias: they stay as they are, and travel with every delta."
    ]
    assert all(p.grad is None for p in model.parameters())  # memory that nothing holds any more


def test_a_gradient_that_is_not_finite() -> None:
    import torch

    from p2pdiloco_node.training.trial import try_model

    model = llama()

    def spoil(gradient: Any) -> Any:
        return torch.full_like(gradient, torch.inf)

    model.get_input_embeddings().weight.register_hook(spoil)
    with pytest.raises(OperatorError, match="gradient of the model's first loss is not finite"):
        try_model(model, layout_of(model), 2**40)


def test_a_first_loss_that_no_report_may_have() -> None:
    import torch

    from p2pdiloco_node.training.trial import try_model

    model = llama()
    with torch.no_grad():
        model.lm_head.weight.mul_(1e4)
    with pytest.raises(OperatorError, match=r"first loss is \d+: a guess among all tokens costs 12"):
        try_model(model, layout_of(model), 2**40)


def test_a_gradient_of_nothing() -> None:
    import torch

    from p2pdiloco_node.training.trial import try_model

    model = llama()
    for parameter in model.parameters():
        parameter.register_hook(torch.zeros_like)
    with pytest.raises(OperatorError, match="first loss is zero: it would never learn"):
        try_model(model, layout_of(model), 2**40)


def test_where_memory_is_short_it_is_said_and_not_tried() -> None:
    import torch

    from p2pdiloco_node.training.trial import try_model

    model = llama().to(torch.bfloat16)
    spec = layout_of(model)
    (note,) = try_model(model, spec, 4 * spec.params)
    assert note.startswith("Whether this model can be trained was not tried")
    assert model.dtype == torch.bfloat16  # and nothing grew
    assert try_model(model, spec, 2**40) == []


def test_params_that_do_not_fit_are_counted_before_they_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from p2pdiloco_node.training import genesis

    def no_memory(*_: Any) -> Any:
        raise AssertionError("memory is taken")

    monkeypatch.setattr(genesis, "initialised", no_memory)
    monkeypatch.setattr(genesis, "ram", lambda: Ram(32 << 30, 16 << 30))
    with pytest.raises(OperatorError, match=r"takes 2\d\.\d GiB of RAM, where 16\.0 GiB is free") as e:
        tried("llama", {"vocab_size": 320})  # the class's defaults for the rest
    assert e.value.exit_code == RESOURCES
