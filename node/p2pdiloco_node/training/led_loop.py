"""Several ranks, one inner loop: what rank 0 does with its loop, all others do with theirs.

Rank 0 has the daemon, the data and the files it writes. Before each call it tells the others which one and
with what (an order: one MessagePack map); inside the call the ranks meet in collectives, in the same order
because they do the same. Orders are given between inner steps only. Batches travel in the order, so that all
ranks take their rows of the sequences that a single rank would read, whatever has become of the shards' files
meanwhile; params and moments are files that each rank opens by itself (on one machine, or in a shared folder)
and of which it reads what it holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from p2pdiloco import limits
from p2pdiloco.run_spec import RunSpec
from p2pdiloco.wire.codec import decode
from p2pdiloco_node.training.arrays import FileValues, Floats
from p2pdiloco_node.training.data import Tokens
from p2pdiloco_node.training.inner_loop import InnerLoop, set_threads
from p2pdiloco_node.training.memory_plan import Offload
from p2pdiloco_node.training.process_group import ProcessGroup


class Order(msgspec.Struct, frozen=True, tag=True):
    """Base of all orders."""


class Begin(Order, frozen=True):
    """Make a loop: the first order but beats."""

    spec: bytes  # the encoded RunSpec
    threads: int
    micro_batch: int
    checkpointing: bool
    offload: Offload
    compiled: bool
    sharded: bool


class Beat(Order, frozen=True):
    """Nothing to do; rank 0 is still there."""


class LoadMoments(Order, frozen=True):
    path: str


class Step(Order, frozen=True):
    tokens: bytes  # little-endian int32, of the whole batch
    columns: int
    lr: float


class TakeOver(Order, frozen=True):
    anchor: str
    less: tuple[str, ...]  # files of own deltas that are to be subtracted
    first: bool
    reset: bool


class CutDelta(Order, frozen=True):
    pass


class RollBack(Order, frozen=True):
    pass


class GiveMoments(Order, frozen=True):
    pass


class GiveEvenness(Order, frozen=True):
    pass


class LoadEvaluation(Order, frozen=True):
    params: str


class Evaluate(Order, frozen=True):
    tokens: bytes
    columns: int


class UnderEvaluation(Order, frozen=True):
    begins: bool


class NextToken(Order, frozen=True):
    seen: tuple[int, ...]
    begin: bool
    vocab_size: int


class DropEvaluation(Order, frozen=True):
    pass


class End(Order, frozen=True):
    pass


Known = (
    Begin
    | Beat
    | LoadMoments
    | Step
    | TakeOver
    | CutDelta
    | RollBack
    | GiveMoments
    | GiveEvenness
    | LoadEvaluation
    | Evaluate
    | UnderEvaluation
    | NextToken
    | DropEvaluation
    | End
)

_encoder = msgspec.msgpack.Encoder()
_orders = msgspec.msgpack.Decoder(Known)


def tell(group: ProcessGroup, order: Order) -> None:
    """Rank 0 to all others."""
    group.tell(_encoder.encode(order))


def begin_loop(begin: Begin, group: ProcessGroup) -> InnerLoop:
    """The same on every rank. Raises: ModelRefused."""
    set_threads(begin.threads)
    return InnerLoop(
        decode(begin.spec, RunSpec, bytes_max=limits.run_spec_bytes_max),
        device=str(group.device),
        micro_batch=begin.micro_batch,
        checkpointing=begin.checkpointing,
        offload=begin.offload,
        compiled=begin.compiled,
        group=group,
        sharded=begin.sharded,
    )


class LedLoop:
    """Rank 0's loop: each method as in InnerLoop, on all ranks."""

    def __init__(self, begin: Begin, group: ProcessGroup) -> None:
        """Raises: ModelRefused."""
        self._group = group
        tell(group, begin)
        self._loop = begin_loop(begin, group)
        self.device_name = f"{group.size} x {self._loop.device_name}"
        self.compile_failure = self._loop.compile_failure
        self._evaluating = False  # the others are there, too

    def load_moments(self, path: Path) -> None:
        self._tell(LoadMoments(str(path)))
        self._loop.load_moments(path)
        self._meet()

    def step(self, tokens: Tokens, lr: float) -> float | None:
        self._tell(Step(*_packed(tokens), lr))
        return self._loop.step(tokens, lr)

    def expert_evenness(self) -> tuple[float, ...]:
        self._tell(GiveEvenness())
        return self._loop.expert_evenness()

    def adopt(self, anchor: FileValues, *, reset: bool) -> None:
        self._take_over(anchor, first=False, reset=reset)

    def start_from(self, anchor: FileValues) -> None:
        self._take_over(anchor, first=True, reset=False)

    def _take_over(self, anchor: FileValues, *, first: bool, reset: bool) -> None:
        order = TakeOver(str(anchor.path), tuple(map(str, anchor.less)), first, reset)
        self._tell(order)
        _take_over(self._loop, order, anchor)
        self._meet()  # the caller removes the files

    def cut_delta(self) -> Iterator[Floats]:
        self._tell(CutDelta())
        yield from self._loop.cut_delta()

    def roll_back(self) -> None:
        self._tell(RollBack())
        self._loop.roll_back()

    def moments(self) -> tuple[int, Floats]:
        self._tell(GiveMoments())
        return self._loop.moments()

    def load_evaluation(self, params: FileValues) -> None:
        self._tell(LoadEvaluation(str(params.path)))
        self._loop.load_evaluation(params)
        self._meet()

    def evaluate(self, tokens: Tokens) -> float:
        self._tell(Evaluate(*_packed(tokens)))
        return self._loop.evaluate(tokens)

    @contextmanager
    def under_evaluation(self) -> Iterator[Any]:
        if self._evaluating:
            yield None
            return
        self._tell(UnderEvaluation(begins=True))
        self._evaluating = True
        try:
            with self._loop.under_evaluation() as model:
                yield model
        finally:  # also where an evaluation set cannot be read: training goes on with theta on every rank
            self._evaluating = False
            self._tell(UnderEvaluation(begins=False))

    def next_token(self, seen: Sequence[int], *, begin: bool, vocab_size: int) -> int:
        self._tell(NextToken(tuple(seen), begin, vocab_size))
        return self._loop.next_token(seen, begin=begin, vocab_size=vocab_size)

    def drop_evaluation(self) -> None:
        self._tell(DropEvaluation())
        self._loop.drop_evaluation()

    def _tell(self, order: Order) -> None:
        tell(self._group, order)

    def _meet(self) -> None:
        self._group.least(0)


def follow(group: ProcessGroup) -> None:
    """The life of a rank that is not the first: what it is told, until the end."""
    begin = _hear(group)
    while isinstance(begin, Beat):
        begin = _hear(group)
    if isinstance(begin, End):
        return
    assert isinstance(begin, Begin), f"the first order is {type(begin).__name__}"
    loop = begin_loop(begin, group)
    params = sum(tensor.size for tensor in loop.layout)
    with ExitStack() as evaluating:
        while not isinstance(order := _hear(group), End):
            _obey(order, loop, group, params, evaluating)


def _obey(order: Known, loop: InnerLoop, group: ProcessGroup, params: int, evaluating: ExitStack) -> None:
    match order:
        case Step():
            loop.step(_unpacked(order), order.lr)
        case TakeOver():
            _take_over(loop, order, FileValues(Path(order.anchor), params, [Path(p) for p in order.less]))
            group.least(0)
        case CutDelta():
            assert not any(len(piece) for piece in loop.cut_delta()), "rank 0 alone gets the pseudo-gradient"
        case RollBack():
            loop.roll_back()
        case GiveMoments():
            loop.moments()
        case LoadMoments(path):
            loop.load_moments(Path(path))
            group.least(0)
        case GiveEvenness():
            loop.expert_evenness()
        case LoadEvaluation(path):
            loop.load_evaluation(FileValues(Path(path), params))
            group.least(0)
        case Evaluate():
            loop.evaluate(_unpacked(order))
        case UnderEvaluation(begins):
            if begins:
                evaluating.enter_context(loop.under_evaluation())
            else:
                evaluating.close()
        case NextToken():
            loop.next_token(order.seen, begin=order.begin, vocab_size=order.vocab_size)
        case DropEvaluation():
            loop.drop_evaluation()
        case Beat():
            pass
        case _:
            raise AssertionError(f"{type(order).__name__} is no order for now")


def _take_over(loop: InnerLoop, order: TakeOver, anchor: FileValues) -> None:
    if order.first:
        loop.start_from(anchor)
    else:
        loop.adopt(anchor, reset=order.reset)


def _hear(group: ProcessGroup) -> Known:
    return _orders.decode(group.hear())


def _packed(tokens: Tokens) -> tuple[bytes, int]:
    return tokens.astype("<i4").tobytes(), tokens.shape[1]


def _unpacked(order: Step | Evaluate) -> Tokens:
    return np.frombuffer(order.tokens, "<i4").astype(np.int64).reshape(-1, order.columns)
