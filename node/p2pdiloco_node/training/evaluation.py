"""Held-out losses of a certified state and what it writes, a slice at a time between inner steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from p2pdiloco import limits
from p2pdiloco.rules.evaluation import measured_tokens
from p2pdiloco.run_spec import RunSpec
from p2pdiloco_node.training import frames
from p2pdiloco_node.training.data import Place, ShardReader, Tokens, evaluation_places


class Computes(Protocol):
    """An inner loop that holds the params under evaluation beside its own."""

    def under_evaluation(self) -> AbstractContextManager[Any]:
        """In it the model has the params under evaluation; on the way in and out all params are moved."""
        ...

    def evaluate(self, tokens: Tokens) -> float:
        """Under evaluation: the sum of losses in nats over (sequences, seq_len + 1) tokens."""
        ...


class Writes(Protocol):
    """Continuations under way (sampling.py)."""

    def turn(self, until: float) -> bool: ...
    def texts(self) -> tuple[str, ...]: ...


class HeldOut:
    """The run's evaluation sets on this disk."""

    def __init__(self, spec: RunSpec, paths: Sequence[Path]) -> None:
        """`paths`: one for each set of the RunSpec, in its order."""
        data, sets = spec.data, spec.data.evaluations
        assert len(paths) == len(sets), f"{len(paths)} files for {len(sets)} evaluation sets"
        self.names = [held_out.name for held_out in sets]
        self._seq_len = spec.model.seq_len
        self._reader = ShardReader(
            paths, [held_out.shard.tokens for held_out in sets], seq_len=self._seq_len,
            token_bytes=data.token_bytes, vocab_size=data.tokenizer.vocab_size,
        )  # fmt: skip
        self.tokens = measured_tokens(spec)  # predicted in one evaluation, by set
        self.places = [
            [
                Place(number, place.offset)
                for place in evaluation_places(
                    held_out.shard.tokens, seq_len=self._seq_len, tokens_max=self.tokens[number]
                )
            ]
            for number, held_out in enumerate(sets)
        ]

    def read(self, places: Sequence[Place]) -> Tokens:
        """(len(places), seq_len + 1) tokens. Raises: OperatorError: the set is not here, or damaged."""
        return self._reader.read(places)


class Evaluation:
    """One evaluation under way: first the losses, set by set, then the continuations."""

    def __init__(
        self, version: int, state_root: bytes, held_out: HeldOut, writes: Writes | None, *,
        sequences_max: int, clock: Callable[[], float],
    ) -> None:  # fmt: skip
        """`sequences_max`: of a slice; as many as an inner step has are surely there in memory."""
        self.version = version
        self.state_root = state_root
        self._held_out = held_out
        self._writes = writes
        self._max = sequences_max
        self._clock = clock
        self._size = 1  # sequences of the next forward pass, as many as take about `evaluation_slice_s`
        self._sums = [0.0] * len(held_out.places)
        self._left = deque((n, deque(places)) for n, places in enumerate(held_out.places) if places)

    def turn(self, loop: Computes) -> bool:
        """The next slice. True: that was the last one. Raises: OperatorError: a set cannot be read.

        Params that are moved in must be moved out again before training goes on. Where that takes long (a
        large model, a slow bus), a slice is longer, too: most of an evaluation is computing, always.
        """
        began = self._clock()
        with loop.under_evaluation():
            now = self._clock()
            until = now + max(limits.evaluation_slice_s, limits.evaluation_slice_moves * 2 * (now - began))
            while self._left:
                took_s = self._forward(loop)
                if self._clock() + took_s > until:
                    return not self._left and self._writes is None
            return self._writes is None or self._writes.turn(until)

    def _forward(self, loop: Computes) -> float:
        """One forward pass over held-out sequences; its seconds."""
        number, places = self._left[0]
        batch = self._held_out.read([places.popleft() for _ in range(min(self._size, len(places)))])
        began = self._clock()
        self._sums[number] += loop.evaluate(batch)
        took_s = self._clock() - began
        if took_s > limits.evaluation_slice_s:
            self._size = max(1, self._size // 2)
        elif took_s < limits.evaluation_slice_s / 2:
            self._size = min(self._max, 2 * self._size)
        if not places:
            self._left.popleft()
        return took_s

    def so_far(self) -> frames.Evaluating:
        """What is known already: the sets before the first that is not done, or has no finite loss."""
        tokens = self._held_out.tokens
        done = self._left[0][0] if self._left else len(tokens)
        losses = [total / max(1, n) for total, n in zip(self._sums[:done], tokens[:done], strict=True)]
        kept = next((n for n, loss in enumerate(losses) if not (tokens[n] and math.isfinite(loss))), done)
        left = sum(len(places) for _, places in self._left) / max(1, sum(map(len, self._held_out.places)))
        return frames.Evaluating(self.version, self.state_root, tuple(losses[:kept]), tokens[:kept], 1 - left)

    def result(self, why: str) -> frames.Evaluated | frames.NotEvaluated:
        """`why` there are no continuations, where some were wanted."""
        tokens = self._held_out.tokens
        if 0 in tokens:
            name = self._held_out.names[tokens.index(0)]
            why = f"evaluation set {name!r} is shorter than a sequence."
            return frames.NotEvaluated(self.version, self.state_root, why)
        losses = tuple(total / n for total, n in zip(self._sums, tokens, strict=True))
        if not all(map(math.isfinite, losses)):
            return frames.NotEvaluated(self.version, self.state_root, "its loss is not finite.")
        samples = self._writes.texts() if self._writes is not None else ()
        return frames.Evaluated(self.version, self.state_root, losses, tokens, samples, why)
