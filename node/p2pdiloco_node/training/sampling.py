"""Greedy continuations of a few prompts, some tokens at a time, so that training waits for none of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from transformers import DynamicCache

from p2pdiloco import limits
from p2pdiloco.run_spec import RunSpec
from p2pdiloco_node.training.text_codec import TextCodec


class Lends(Protocol):
    """Lends the model while it computes with the params under evaluation."""

    def under_evaluation(self) -> AbstractContextManager[Any]: ...


class Continuations:
    """One version's continuations under way. Positions of a prompt and its continuation: at most seq_len."""

    def __init__(self, spec: RunSpec, codec: TextCodec, lender: Lends, clock: Callable[[], float]) -> None:
        self._codec, self._lender, self._clock = codec, lender, clock
        self._end_token = spec.data.tokenizer.end_token
        # Embeddings may have more rows than there are tokens.
        self._vocab_size = min(spec.data.tokenizer.vocab_size, spec.model.vocab_size)
        self._length = max(1, min(spec.samples.tokens, spec.model.seq_len - 1))
        room = max(1, spec.model.seq_len - self._length)
        # An empty prompt begins where a document does: behind the end of another one.
        self._prompts = [list(prompt[-room:]) or [self._end_token] for prompt in spec.samples.encoded]
        self._written: list[list[int]] = [[] for _ in self._prompts]
        self._at = 0  # the prompt that is being continued
        self._cache: Any = None  # keys and values of what the model has seen of it

    def turn(self) -> bool:
        """Go on for about `evaluation_slice_s`, at least by one token. True: all are written."""
        until = self._clock() + limits.evaluation_slice_s
        with self._lender.under_evaluation() as model:
            while self._at < len(self._prompts):
                self._write_one(model)
                if self._clock() >= until:
                    break
        return self._at == len(self._prompts)

    def texts(self) -> tuple[str, ...]:
        """By prompt, each at most `sample_chars_max` characters, without the prompt."""
        return tuple(
            # A lone surrogate is no UTF-8: the wire would not take it.
            self._codec.decode(tokens).encode(errors="replace").decode()[: limits.sample_chars_max]
            for tokens in self._written
        )

    def _write_one(self, model: Any) -> None:
        written = self._written[self._at]
        if self._cache is None:
            self._cache = DynamicCache(config=model.config)
        seen: Sequence[int] = written[-1:] or self._prompts[self._at]
        tokens = torch.tensor([seen], dtype=torch.int64, device=model.device)
        # The model adds to the cache in place.
        seen_before = {_cache_name(type(model)): self._cache}
        out = model(input_ids=tokens, use_cache=True, logits_to_keep=1, **seen_before)
        token = int(out.logits[0, -1, : self._vocab_size].argmax())
        if token != self._end_token:
            written.append(token)
        if token == self._end_token or len(written) == self._length:
            self._at, self._cache = self._at + 1, None


def _cache_name(kind: type) -> str:
    """How the model's forward calls its cache: transformers has renamed it."""
    return "cache" if "cache" in inspect.signature(kind.forward).parameters else "past_key_values"  # type: ignore[attr-defined]
