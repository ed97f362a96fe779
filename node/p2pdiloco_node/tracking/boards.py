"""Curves and samples for TensorBoard and Weights & Biases, where somebody asked for them.

Both libraries block now and then, so one thread of their own writes, and whatever fails there ends the
tracking and nothing else. The step of every point is the run's token clock: curves of tracker and nodes lie
over each other. Without a flag neither library is imported.
"""

from __future__ import annotations

import asyncio
import html
import importlib.util
import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.exit_codes import FILES

log = logging.getLogger("p2pdiloco.node")
FLUSH_S = 10  # an open TensorBoard shows a point after so long at most
MISSING = (
    "--{flag} needs a library that is not installed here: pip install 'p2pdiloco[{flag}]', or leave "
    "--{flag} out."
)


class Point(NamedTuple):
    """Figures and texts of one moment."""

    step: int  # tokens, of the run's clock
    when_unix: float
    scalars: Mapping[str, float]
    texts: Mapping[str, str] = {}  # untrusted: shown as they are, never as markup


class Wanted(NamedTuple):
    """What the flags say."""

    tensorboard: str = ""  # folder of the event files; empty: none
    wandb: str = ""  # project; empty: none

    def check(self) -> None:
        """Without importing anything. Raises: OperatorError: a library is missing."""
        for flag, value in self._asdict().items():
            if value and importlib.util.find_spec(flag) is None:
                raise OperatorError(MISSING.format(flag=flag), FILES)


class About(NamedTuple):
    """Of which run and by whom, for W&B."""

    name: str  # of this process among the others of the project
    folder: Path  # where W&B keeps its files; beside everything else of this process
    config: Mapping[str, object]


class Sink(Protocol):
    def write(self, point: Point) -> None: ...
    def close(self) -> None: ...


class TensorBoardSink:
    """An event file in `folder`."""

    def __init__(self, folder: str) -> None:
        """Raises: OSError."""
        # TensorBoard's own writer: other libraries for its format import torch where it is installed.
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary, self._tensor, self._string = Event, Summary, TensorProto, DT_STRING
        self._text_metadata = create_summary_metadata
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(folder, max_queue_size=64, flush_secs=FLUSH_S)

    def write(self, point: Point) -> None:
        values = [self._summary.Value(tag=t, simple_value=x) for t, x in point.scalars.items()]
        for tag, text in point.texts.items():
            # Markdown would make markup of it: as a block of code it is text.
            block = "\n".join("    " + line for line in text.splitlines()) or "    "
            tensor = self._tensor(dtype=self._string, string_val=[block.encode(errors="replace")])
            metadata = self._text_metadata(display_name=tag, description="")
            values.append(self._summary.Value(tag=tag, tensor=tensor, metadata=metadata))
        event = self._event(wall_time=point.when_unix, step=point.step, summary=self._summary(value=values))
        self._writer.add_event(event)

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """A run of a W&B project; without a network by W&B's own switch, WANDB_MODE=offline."""

    def __init__(self, project: str, about: About) -> None:
        """Raises: OperatorError: nobody is logged in here."""
        import wandb

        online = os.environ.get("WANDB_MODE", "online") == "online"
        # It would ask at the terminal, where nobody may be.
        if online and not wandb.login(prompt=False):
            raise OperatorError(
                "--wandb: nobody is logged in to W&B here: run wandb login, or keep the files on this "
                "machine with WANDB_MODE=offline.", FILES,
            )  # fmt: skip
        self._html = wandb.Html
        self._run: Any = wandb.init(
            project=project, name=about.name, dir=str(about.folder), config=dict(about.config),
            settings=wandb.Settings(silent=True, console="off"),
        )  # fmt: skip
        # Its own steps may never go back; a token clock does, when a node starts again.
        self._run.define_metric("*", step_metric="tokens")

    def write(self, point: Point) -> None:
        texts = {tag: self._html(f"<pre>{html.escape(text)}</pre>") for tag, text in point.texts.items()}
        self._run.log({"tokens": point.step, **point.scalars, **texts})

    def close(self) -> None:
        self._run.finish()


class Tracking:
    """`async with Tracking(...) as tracking`; `add` returns at once. Wanting nothing, it does nothing."""

    def __init__(self, wanted: Wanted, about: About, *, say: Callable[[str, str], None]) -> None:
        """`say(kind, sentence)` is told on the event loop when tracking ends early."""
        self._wanted = wanted
        self._about = about
        self._say = say
        self._points: queue.Queue[Point | None] = queue.Queue(limits.tracked_waiting_max)
        self._thread: threading.Thread | None = None
        self._loop = asyncio.get_running_loop()
        self._left_out = 0

    @property
    def is_on(self) -> bool:
        return self._thread is not None

    async def __aenter__(self) -> Self:
        """Raises: OperatorError: a library is missing, a folder cannot be written, W&B cannot be used."""
        self._wanted.check()
        if any(self._wanted):
            sinks = await asyncio.to_thread(self._open)
            self._thread = threading.Thread(target=self._write, args=(sinks,), name="tracking", daemon=True)
            self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is None:
            return
        await asyncio.to_thread(self._end, self._thread)
        if self._left_out:
            log.warning("%d points of the tracked curves were left out: it was too slow.", self._left_out)

    def add(self, point: Point) -> None:
        """For the tracking thread; left out where that is far behind."""
        if self._thread is None:
            return
        try:
            self._points.put_nowait(point)
        except queue.Full:
            self._left_out += 1

    def _open(self) -> list[Sink]:
        sinks: list[Sink] = []
        folder, project = self._wanted
        try:
            if folder:
                sinks.append(TensorBoardSink(folder))
            if project:
                sinks.append(WandbSink(project, self._about))
        except OperatorError:
            raise
        except OSError as error:
            raise OperatorError(f"--tensorboard {folder}: {error.strerror or error}.", FILES) from None
        except Exception as error:  # noqa: BLE001 - whatever W&B raises is about its account or service
            raise OperatorError(f"--wandb {project}: {str(error)[:300]}", FILES) from None
        return sinks

    # In the thread.

    def _write(self, sinks: list[Sink]) -> None:
        while (point := self._points.get()) is not None:
            for sink in list(sinks):
                try:
                    sink.write(point)
                except Exception as error:  # noqa: BLE001 - a full disk, a service that is gone: never training
                    sinks.remove(sink)
                    self._tell(f"{type(sink).__name__} ended ({str(error)[:200]}); everything else goes on.")
        for sink in sinks:
            try:
                sink.close()
            except Exception as error:  # noqa: BLE001 - as above
                log.warning("%s did not end well: %s", type(sink).__name__, error)

    def _tell(self, sentence: str) -> None:
        self._loop.call_soon_threadsafe(self._say, "tracking", sentence)

    def _end(self, thread: threading.Thread) -> None:
        """W&B may upload for minutes: what is not written by then stays on this disk."""
        try:
            self._points.put(None, timeout=limits.tracking_end_s)
        except queue.Full:
            return
        thread.join(limits.tracking_end_s)
