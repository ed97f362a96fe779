"""Greedy continuations of a few prompts, some tokens at a time, so that training waits for none of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from p2pdiloco import limits
from p2pdiloco.run_spec import RunSpec
from p2pdiloco_node.training.text_codec import TextCodec


class Continues(Protocol):
    """An inner loop under evaluation."""

    def next_token(self, seen: Sequence[int], *, begin: bool, vocab_size: int) -> int:
        """The likeliest token after `seen` and what was seen since the last `begin`."""
        ...


class Continuations:
    """One version's continuations under way. Positions of a prompt and its continuation: at most seq_len."""

    def __init__(self, spec: RunSpec, codec: TextCodec, loop: Continues, clock: Callable[[], float]) -> None:
        self._codec, self._loop, self._clock = codec, loop, clock
        self._end_token = spec.data.tokenizer.end_token
        # Embeddings may have more rows than there are tokens.
        self._vocab_size = min(spec.data.tokenizer.vocab_size, spec.model.vocab_size)
        self._length = max(1, min(spec.samples.tokens, spec.model.seq_len - 1))
        room = max(1, spec.model.seq_len - self._length)
        # An empty prompt begins where a document does: behind the end of another one.
        self._prompts = [list(prompt[-room:]) or [self._end_token] for prompt in spec.samples.encoded]
        self._written: list[list[int]] = [[] for _ in self._prompts]
        self._at = 0  # the prompt that is being continued

    def turn(self, until: float) -> bool:
        """Under evaluation: go on until then, at least by one token. True: all are written."""
        while self._at < len(self._prompts):
            self._write_one()
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

    def _write_one(self) -> None:
        written = self._written[self._at]
        seen: Sequence[int] = written[-1:] or self._prompts[self._at]
        token = self._loop.next_token(seen, begin=not written, vocab_size=self._vocab_size)
        if token != self._end_token:
            written.append(token)
        if token == self._end_token or len(written) == self._length:
            self._at += 1
