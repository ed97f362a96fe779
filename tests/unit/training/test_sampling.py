"""Continuations: as one forward pass over everything chooses them, in slices, never more than asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch

from p2pdiloco import limits
from p2pdiloco.run_spec import BYTES, RunSpec, SampleSpec, TokenizerSpec
from p2pdiloco_node.training.inner_loop import InnerLoop
from p2pdiloco_node.training.models import build_model, flatten_params, tensor_layout
from p2pdiloco_node.training.presets import model_spec
from p2pdiloco_node.training.sampling import Continuations
from p2pdiloco_node.training.text_codec import ByteText

if TYPE_CHECKING:
    from tests.unit.training.conftest import TinyModelRun

PROMPTS = ("abc", "", "hello world")


class Raw:
    """Tokens as text, so that nothing is lost in decoding."""

    def decode(self, tokens: Any) -> str:
        return " ".join(map(str, tokens))


def spec_of(spec: RunSpec, **samples: Any) -> RunSpec:
    fields: dict[str, Any] = {"prompts": PROMPTS, "tokens": 6} | samples
    made = SampleSpec(**fields)
    encoded = tuple(tuple(prompt.encode()) for prompt in made.prompts)
    return msgspec.structs.replace(spec, samples=msgspec.structs.replace(made, encoded=encoded))


def loop_of(spec: RunSpec, params: Any) -> InnerLoop:
    loop = InnerLoop(spec)
    loop.load_evaluation(params.copy())
    return loop


def write_all(loop: InnerLoop, spec: RunSpec, clock: Any = lambda: 0.0) -> tuple[list[list[int]], int]:
    writes = Continuations(spec, Raw(), loop, clock)
    with loop.under_evaluation():
        turns = next(n for n in range(1, 100) if writes.turn(clock() + limits.evaluation_slice_s))
    return [[int(t) for t in text.split()] for text in writes.texts()], turns


def greedily(loop: InnerLoop, prompt: list[int], n: int, vocab: int, end: int) -> list[int]:
    """Without a cache, all positions again for each token."""
    known = list(prompt)
    with loop.under_evaluation() as model:
        while len(known) < len(prompt) + n:
            token = int(model(input_ids=torch.tensor([known])).logits[0, -1, :vocab].argmax())
            if token == end:
                break
            known.append(token)
    return known[len(prompt) :]


@pytest.mark.parametrize("preset", ["llama:tiny", "mixtral:tiny"])
def test_they_are_what_the_model_would_write_without_a_cache(tiny: TinyModelRun, preset: str) -> None:
    torch.manual_seed(5)
    model = build_model(model_spec(preset, ()))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3.0)  # a fresh model repeats one token whatever came before
    made = msgspec.structs.replace(tiny.spec, model=model_spec(preset, tensor_layout(model)))
    spec = spec_of(made)
    loop = loop_of(spec, flatten_params(model).numpy())
    written, _ = write_all(loop, spec)
    vocab, end = BYTES.vocab_size, BYTES.end_token
    for prompt, tokens in zip(PROMPTS, written, strict=True):
        assert tokens == greedily(loop, list(prompt.encode()) or [end], 6, vocab, end)
    assert len({tuple(tokens) for tokens in written}) > 1


def test_they_are_written_in_slices_and_the_last_one_says_so(tiny: TinyModelRun) -> None:
    spec = spec_of(tiny.spec, prompts=("abc", "d", "hello world"))
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += limits.evaluation_slice_s * 0.6
        return now

    at_once, turns = write_all(loop_of(spec, tiny.params), spec)
    assert turns == 1
    sliced, turns = write_all(loop_of(spec, tiny.params), spec, clock)
    assert sliced == at_once
    assert turns == 9  # two tokens each


def test_training_does_not_notice(tiny: TinyModelRun) -> None:
    spec = spec_of(tiny.spec)
    loop = loop_of(spec, tiny.params + 0.5)
    loop.start_from(tiny.params)
    write_all(loop, spec)
    assert (loop.theta.numpy() == tiny.params).all()


def test_the_end_token_ends_one_and_tokens_that_no_tokenizer_has_are_not_chosen(tiny: TinyModelRun) -> None:
    spec = spec_of(tiny.spec)
    first = write_all(loop_of(spec, tiny.params), spec)[0][0][0]
    ends = msgspec.structs.replace(spec.data, tokenizer=TokenizerSpec("bytes", 256, first))
    assert write_all(loop_of(spec, tiny.params), msgspec.structs.replace(spec, data=ends))[0][0] == []
    few = msgspec.structs.replace(spec.data, tokenizer=TokenizerSpec("bytes", 20, 0))
    written = write_all(loop_of(spec, tiny.params), msgspec.structs.replace(spec, data=few))[0]
    assert all(token < 20 for tokens in written for token in tokens)


def test_positions_are_bounded_by_the_sequence(tiny: TinyModelRun) -> None:
    """Learned positions end there; what is cut is the beginning of the prompt."""
    seq_len = tiny.spec.model.seq_len
    long = "x" * 300
    spec = spec_of(tiny.spec, prompts=(long,), tokens=256)
    longest = 0
    loop = loop_of(spec, tiny.params)
    forward = loop._model.forward

    def seen(*args: Any, **kwargs: Any) -> Any:
        nonlocal longest
        out = forward(*args, **kwargs)
        longest = max(longest, loop._cache.get_seq_length())
        return out

    loop._model.forward = seen
    writes = Continuations(spec, Raw(), loop, lambda: 0.0)
    with loop.under_evaluation():
        assert writes.turn(1.0)
    written = writes.texts()[0].split()
    assert longest <= seq_len
    assert 0 < len(written) < seq_len


def test_texts_are_bounded_and_can_be_sent(tiny: TinyModelRun) -> None:
    class Wide(ByteText):
        def decode(self, tokens: Any) -> str:
            return "\ud800" + "𝄞" * 2000

    spec = spec_of(tiny.spec)
    loop = loop_of(spec, tiny.params)
    writes = Continuations(spec, Wide(), loop, lambda: 0.0)
    with loop.under_evaluation():
        assert writes.turn(1.0)
    for text in writes.texts():
        assert len(text) == limits.sample_chars_max
        assert len(text.encode()) <= limits.string_bytes_max
