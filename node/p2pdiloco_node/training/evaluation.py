"""Held-out loss of a certified state, a slice at a time between inner steps, so that training goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from p2pdiloco_node.training.data import Place, Tokens


class Evaluation:
    """One evaluation under way."""

    def __init__(self, version: int, places: Sequence[Place], *, slice_sequences: int) -> None:
        """`places`: the held-out sequences; a slice costs about a third of an inner step of as many."""
        self.version = version
        self._places = places
        self._slice = slice_sequences
        self._done = 0
        self._loss_sum = 0.0

    def turn(self, read: Callable[[Sequence[Place]], Tokens], loss_sum: Callable[[Tokens], float]) -> bool:
        """Evaluate the next slice. True: that was the last one."""
        part = self._places[self._done : self._done + self._slice]
        self._loss_sum += loss_sum(read(part))
        self._done += len(part)
        return self._done == len(self._places)

    def loss(self, seq_len: int) -> float:
        """Nats per token."""
        return self._loss_sum / self.tokens(seq_len)

    def tokens(self, seq_len: int) -> int:
        return self._done * seq_len
