"""What the trainer process does: a plain loop of inner steps that never waits for the network.

Commands come in and events go out (frames.py); arrays go through files in the exchange folder. Read
`Worker.turn` first: it is the loop's body. The process around it is in trainer_process.py.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.ids import PeerId
from p2pdiloco.rules.passes import Next, Pass, next_move, steps_expected
from p2pdiloco.rules.schedule import learning_rate
from p2pdiloco.run_spec import RunSpec, run_id_of
from p2pdiloco.wire.codec import decode
from p2pdiloco_node.training import frames
from p2pdiloco_node.training.arrays import FileValues, write_pieces
from p2pdiloco_node.training.data import DataFeed, DataOrder, NothingHere, ShardReader
from p2pdiloco_node.training.evaluation import Evaluation, HeldOut, Writes
from p2pdiloco_node.training.frames import Command, Event
from p2pdiloco_node.training.memory_plan import chosen, plan_trainer
from p2pdiloco_node.training.moments_file import write_moments
from p2pdiloco_node.training.text_codec import TextCodec, open_codec

if TYPE_CHECKING:
    from p2pdiloco_node.training.inner_loop import InnerLoop
    from p2pdiloco_node.training.led_loop import LedLoop
    from p2pdiloco_node.training.process_group import ProcessGroup


@dataclass
class Sent:
    """An own pass that the adopted anchor may not contain yet."""

    sequence: int
    path: Path
    tokens: int


class Worker:
    """One node's training. `obey` takes commands; `turn` does the next piece of work."""

    def __init__(
        self,
        configure: frames.Configure,
        emit: Callable[[Event], None],
        clock: Callable[[], float],
        group: ProcessGroup | None = None,
    ) -> None:
        """Builds the model. `group`: the ranks of which this one is the first; None: it is alone.

        Raises: OperatorError: data or device cannot be used.
        """
        self._emit, self._clock = emit, clock
        self.spec = spec = decode(configure.spec, RunSpec, bytes_max=limits.run_spec_bytes_max)
        self.loop, how = _make_loop(spec, configure, group)
        if configure.moments:
            self.loop.load_moments(Path(configure.moments))
        seq_len = spec.model.seq_len
        sizes = [shard.tokens for shard in spec.data.shards]
        order = DataOrder(
            run_id_of(configure.spec), PeerId(configure.peer), sizes,
            seq_len=seq_len, window_shards=spec.data.window_shards,
        )  # fmt: skip
        width, words = spec.data.token_bytes, spec.data.tokenizer.vocab_size
        shards = ShardReader(
            [Path(p) for p in configure.shards], sizes, seq_len=seq_len, token_bytes=width, vocab_size=words
        )
        self._data = DataFeed(
            order, shards, clock, lambda missing, why: emit(frames.ShardsMissing(tuple(missing), why))
        )
        self._held_out = HeldOut(spec, [Path(path) for path in configure.evaluations])
        self._codec, self._no_samples = self._open_codec(configure)
        self._exchange = Path(configure.exchange)
        self._next_sequence = configure.next_sequence
        self._cursor = configure.cursor
        self._allow = frames.Allow(configure.next_sequence - 1, "waiting for the swarm")
        self._pass: Pass | None = None  # None: nothing adopted yet
        self._version = 0
        self._clock_tokens = 0  # token clock that the anchor contains
        self._target_tokens = spec.target_tokens  # until the log says otherwise
        self._sent: list[Sent] = []
        self._adopt: frames.Adopt | None = None
        self._asked: deque[frames.Evaluate] = deque()
        self._evaluation: Evaluation | None = None
        self.stopped = False
        self._paused = False
        self._waiting = False
        self._starved = False  # no data shard is here
        self._saving: threading.Thread | None = None
        self._stepped_at: float | None = None  # end of the last inner step; None: the next ends no gap
        self._pass_seen_at = clock()  # up to here the pass's seconds are counted
        self._reported_at = self._evaluating_at = clock()
        self._longest_gap_s = 0.0
        self._reported_tokens = 0
        emit(frames.Configured(self.loop.device_name, spec.model.params, how))

    # The loop's body.

    @property
    def idle(self) -> bool:
        """Nothing to do until the next command."""
        if self._adopt is not None or self._evaluation is not None or self._asked:
            return False
        return self._paused or self._pass is None or self._waiting or self._starved

    def turn(self) -> None:
        """At an inner-step boundary: adopt, evaluate a slice, then one inner step or the end of the pass."""
        if self._adopt is not None:
            self._take_over(self._adopt)
            self._adopt = None
        self._evaluate_slice()
        if self._paused or self._pass is None or self._waiting or self._starved:
            return
        move = next_move(
            self._pass,
            inner_steps=self.spec.inner.inner_steps,
            pass_s=self.spec.inner.pass_s,
            allowed=self._next_sequence <= self._allow.until_sequence,
            prolong=self._allow.prolong,
        )
        if move is Next.STEP:
            self._step(self._pass)
        elif move is Next.FINISH:
            self._finish(self._pass)
        else:
            self._waiting = True
            if not self._allow.prolong:  # the owner wanted the gap; another is not hidden
                self._stepped_at = None
            self._emit(frames.Waiting(self._allow.why))

    def obey(self, command: Command) -> None:
        """Take a command; the work that follows from it is done at the next boundary."""
        match command:
            case frames.Adopt():
                if self._adopt is not None:  # overtaken before it was used
                    Path(self._adopt.anchor).unlink(missing_ok=True)
                    reset = command.reset or self._adopt.reset
                    command = msgspec.structs.replace(command, reset=reset)
                self._adopt = command
                if command.reset:
                    self._go_on()
            case frames.Allow():
                self._allow = command
                self._go_on()
            case frames.Evaluate():
                if len(self._asked) == limits.evaluations_waiting_max:
                    dropped = self._asked.popleft()
                    Path(dropped.params).unlink(missing_ok=True)
                    why = "newer versions came before its turn; further ones like it are not named."
                    self._emit(frames.NotEvaluated(dropped.version, dropped.state_root, why))
                self._asked.append(command)
            case frames.Pause():
                self._paused, self._stepped_at = True, None
            case frames.Resume():
                self._paused = False
                self._count_from_now()
            case frames.ShardsChanged(gone):
                self._data.look_again(gone)
                if self._starved:
                    self._starved = False
                    self._count_from_now()
            case frames.SaveCheckpoint(path):
                self._save(Path(path))
            case frames.Stop():
                self.stopped = True
            case frames.Configure():
                raise AssertionError("configured twice")

    def _go_on(self) -> None:
        if self._waiting:
            self._waiting = False
            self._count_from_now()

    def _count_from_now(self) -> None:
        """What it waited is no time of the pass, and no time in which tokens were trained on."""
        self._pass_seen_at = self._reported_at = self._clock()

    # Pieces of work.

    def _take_over(self, adopt: frames.Adopt) -> None:
        """algorithm.md 3. An anchor made before the daemon knew of a finished pass lacks that delta still."""
        path = Path(adopt.anchor)
        for sent in [s for s in self._sent if adopt.reset or s.sequence <= adopt.sequence]:
            sent.path.unlink(missing_ok=True)
            self._sent.remove(sent)
        anchor = FileValues(path, self.spec.model.params, [sent.path for sent in self._sent])
        first = self._pass is None
        # The first adoption of a life has no progress to carry; moments from a checkpoint stay.
        if first and not adopt.reset:
            self.loop.start_from(anchor)
        else:
            self.loop.adopt(anchor, reset=adopt.reset)
        path.unlink()
        self._version, self._target_tokens = adopt.version, adopt.target_tokens
        # Numbers that the log knows already are not used again (an own record that was lost).
        self._next_sequence = max(self._next_sequence, adopt.sequence + 1)
        self._clock_tokens = adopt.clock + sum(s.tokens for s in self._sent)
        if self._pass is None or adopt.reset:
            self._begin_pass()
        else:
            self._pass.adopted()

    def _begin_pass(self) -> None:
        self._pass = Pass(base_version=self._version, data_first=self._cursor)
        self._pass_seen_at = self._clock()

    def _step(self, current: Pass) -> None:
        inner = self.spec.inner
        step_tokens = self.spec.tokens_per_inner_step
        try:
            batch, behind = self._data.next_batch(self._cursor, inner.sequences_per_step)
        except NothingHere as error:
            self._starved, self._stepped_at = True, None
            self._emit(frames.Waiting(str(error)))
            return
        rate = learning_rate(
            inner, self._clock_tokens + current.steps * step_tokens,
            target_tokens=self._target_tokens, step_tokens=step_tokens,
        )  # fmt: skip
        began = self._clock()
        loss = self.loop.step(batch, rate)
        self._cursor = behind
        if loss is None:
            self.loop.roll_back()
            self._emit(frames.NotFinite(current.steps + 1, current.data_first, "loss or gradient"))
            self._begin_pass()  # behind the data that was used: the same batch may fail the same way
            return
        now = self._clock()
        current.add_step(loss, now - self._pass_seen_at)
        gap_s = now - (began if self._stepped_at is None else self._stepped_at)
        self._longest_gap_s = max(self._longest_gap_s, gap_s)
        self._stepped_at = self._pass_seen_at = now
        self._reported_tokens += step_tokens
        self._report(current, loss, rate, now)

    def _report(self, current: Pass, loss: float, rate: float, now: float) -> None:
        elapsed = now - self._reported_at
        if elapsed < limits.trainer_report_s:
            return
        self._emit(
            frames.Stepped(
                current.steps,
                steps_expected(current, inner_steps=self.spec.inner.inner_steps),
                loss,
                self._reported_tokens / elapsed,
                self._longest_gap_s,
                self._version,
                rate,
                self._clock_tokens + current.steps * self.spec.tokens_per_inner_step,
                self._cursor,
            )
        )
        self._reported_at, self._reported_tokens, self._longest_gap_s = now, 0, 0.0

    def _finish(self, current: Pass) -> None:
        sequence = self._next_sequence
        path = self._exchange / f"delta-{sequence}.f32"
        write_pieces(path, self.loop.cut_delta())
        self._emit(
            frames.PassDone(
                sequence,
                str(path),
                current.base_version,
                current.steps,
                current.data_first,
                self._cursor - current.data_first,
                current.loss,
                self.loop.expert_evenness(),
            )
        )
        tokens = current.steps * self.spec.tokens_per_inner_step
        self._sent.append(Sent(sequence, path, tokens))
        self._clock_tokens += tokens
        self._next_sequence += 1
        self._begin_pass()

    def _evaluate_slice(self) -> None:
        if self._evaluation is None:
            if not self._asked:
                return
            asked = self._asked.popleft()
            self.loop.load_evaluation(FileValues(Path(asked.params), self.spec.model.params))
            Path(asked.params).unlink()
            self._evaluation = Evaluation(
                asked.version, asked.state_root, self._held_out, self._writes(),
                sequences_max=self.spec.inner.sequences_per_step, clock=self._clock,
            )  # fmt: skip
        told: Event
        try:
            if not self._evaluation.turn(self.loop):
                if self._clock() - self._evaluating_at >= limits.trainer_report_s:
                    self._evaluating_at = self._clock()
                    self._emit(self._evaluation.so_far())
                return
            told = self._evaluation.result(self._no_samples)
        except OperatorError as error:
            at = self._evaluation
            told = frames.NotEvaluated(at.version, at.state_root, str(error))
        if isinstance(told, frames.NotEvaluated):
            self._emit(self._evaluation.so_far())  # sets that are done are kept
        self._evaluation = None
        self.loop.drop_evaluation()
        self._emit(told)

    def _open_codec(self, configure: frames.Configure) -> tuple[TextCodec | None, str]:
        """What continuations need of the tokenizer, or why there will be none."""
        if not self.spec.samples.prompts:
            return None, ""
        try:
            return open_codec(self.spec.data.tokenizer, [Path(path) for path in configure.tokenizer]), ""
        except OperatorError as error:
            return None, str(error)

    def _writes(self) -> Writes | None:
        if self._codec is None:
            return None
        from p2pdiloco_node.training.sampling import Continuations  # torch

        return Continuations(self.spec, self._codec, self.loop, self._clock)

    def _save(self, path: Path) -> None:
        """Copy the moments now, write them beside the loop: fsync may take long on a busy disk."""
        steps, both = self.loop.moments()

        def write() -> None:
            try:
                size, digest = write_moments(path, steps, both)
            except OSError as error:
                print(f"checkpoint not written: {error}", file=sys.stderr, flush=True)
                return
            self._emit(frames.Saved(str(path), size, digest))

        self.join_saves()
        self._saving = threading.Thread(target=write, name="checkpoint")
        self._saving.start()

    def join_saves(self) -> None:
        """Wait for the checkpoint that is being written, if there is one."""
        if self._saving is not None:
            self._saving.join()


def _make_loop(
    spec: RunSpec, configure: frames.Configure, group: ProcessGroup | None
) -> tuple[InnerLoop | LedLoop, tuple[str, ...]]:
    """The loop, and sentences about how it works. Raises: OperatorError."""
    # Here, because importing torch takes seconds in which commands can already be read.
    from p2pdiloco_node.training.inner_loop import InnerLoop, choose_device, set_threads, torch_machine

    loop: InnerLoop | LedLoop
    if group is None:
        set_threads(configure.threads)
        device = choose_device(configure.device)
        plan = plan_trainer(spec, torch_machine(device, configure.exchange), configure)
        loop = InnerLoop(
            spec, device=device, micro_batch=plan.micro_batch, checkpointing=plan.checkpointing,
            offload=plan.offload, compiled=configure.compile,
        )  # fmt: skip
    else:
        from p2pdiloco_node.training.led_loop import Begin, LedLoop

        machine = torch_machine(str(group.device), configure.exchange)._replace(gpu_bytes=group.gpu_bytes)
        plan = plan_trainer(spec, machine, configure, ranks=group.size)
        begin = Begin(
            configure.spec, configure.threads, plan.micro_batch, plan.checkpointing, plan.offload,
            configure.compile, plan.parallel == "fsdp",
        )  # fmt: skip
        loop = LedLoop(begin, group)
    return loop, tuple(filter(None, (chosen(plan), loop.compile_failure)))
