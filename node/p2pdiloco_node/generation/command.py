"""`p2pdiloco generate`: asks a process with torch to go on with a prompt, and shows text as it comes."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Self, TextIO

import msgspec

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.exit_codes import RESOURCES, USAGE
from p2pdiloco_node.export.command import Options as ExportOptions
from p2pdiloco_node.export.command import ended_by_sigterm, export
from p2pdiloco_node.export.hf_folder import CONFIG, FACTS
from p2pdiloco_node.generation.lines import Doing, Done, Failed, Line, Noticed, Request, Said
from p2pdiloco_node.progress import Told
from p2pdiloco_node.progress import shown as progress_shown
from p2pdiloco_node.storage.scratch import temporary_folder
from p2pdiloco_node.training.supervisor import trainer_environment

WORKER = (sys.executable, "-P", "-m", "p2pdiloco_node.generation.worker")
DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?")
SEED_MAX = 2**63 - 1
TEMPERATURE_MAX = 100.0
SILENT_S = 3.0  # without a terminal: most answers of small models come sooner
ASK_STDIN = "-"
# A model may write what a terminal obeys: shown as a mark there, passed on as it is to a file or a program.
_CONTROLS = {code: "\ufffd" for code in (*range(0x20), 0x7F, *range(0x80, 0xA0)) if chr(code) not in "\n\t"}


class Options(NamedTuple):
    """What the command was given."""

    source: str  # a folder or a link
    prompt: str
    tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    device: str = "auto"
    as_json: bool = False


def print_generated(options: Options) -> int:
    """The command. Raises: OperatorError."""
    options = _checked(options)
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
        raise OperatorError(
            "generate needs torch and transformers, and they are not installed here: "
            "pip install 'p2pdiloco[node]'.",
            RESOURCES,
        )
    with suppress(AttributeError):  # a stream that a test put there
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    with ended_by_sigterm(), _folder_of(options.source) as folder:
        seed = options.seed if options.seed is not None else secrets.randbelow(SEED_MAX)
        request = Request(
            str(folder.absolute()), options.prompt, options.tokens, options.temperature, options.top_p, seed,
            options.device,
        )  # fmt: skip
        if options.as_json:
            text, done = _listen(request, None)
            print(json.dumps(_as_json(options, seed, text, done, folder)))
        else:
            _, done = _listen(request, sys.stdout)
            print(flush=True)
    return 0


def _checked(options: Options) -> Options:
    """Raises: OperatorError (usage)."""
    if not 1 <= options.tokens <= limits.generated_tokens_max:
        raise OperatorError(f"--tokens is 1 to {limits.generated_tokens_max}, not {options.tokens}.", USAGE)
    if not 0 <= options.temperature <= TEMPERATURE_MAX:
        raise OperatorError(
            f"--temperature is 0 (greedy) to {TEMPERATURE_MAX:.0f}, not {options.temperature}.", USAGE
        )
    if not 0 < options.top_p <= 1:
        raise OperatorError(f"--top-p is more than 0 and at most 1, not {options.top_p}.", USAGE)
    if options.seed is not None and not 0 <= options.seed <= SEED_MAX:
        raise OperatorError(f"--seed is 0 to {SEED_MAX}, not {options.seed}.", USAGE)
    if DEVICE.fullmatch(options.device) is None:
        raise OperatorError(f"--device is auto, cpu, cuda or cuda:N, not {options.device!r}.", USAGE)
    if options.prompt == ASK_STDIN:
        options = options._replace(prompt=sys.stdin.read(limits.prompt_bytes_max + 1))
    # Bytes that are no UTF-8 come from a pipe as halves of characters: they are marks from here on.
    text = options.prompt.encode(errors="surrogateescape").decode(errors="replace")
    options = options._replace(prompt=text)
    if len(text.encode()) > limits.prompt_bytes_max:
        raise OperatorError(f"the prompt has more than {limits.prompt_bytes_max} bytes.", USAGE)
    return options


@contextmanager
def _folder_of(source: str) -> Iterator[Path]:
    """The Hugging Face folder that `source` is, or that is made from it for as long as it is used.

    Raises: OperatorError.
    """
    folder = Path(source).expanduser()
    if "://" not in source and (folder / CONFIG).is_file():
        yield folder
        return
    if "://" not in source and not folder.is_dir():
        raise OperatorError(
            f"--from {source!r} is neither a folder nor a link: name what p2pdiloco export made, a run's or "
            "a node's folder, or the tracker's http://HOST:PORT/#RUNID."
        )
    with temporary_folder("generate") as made:
        out = made / "model"
        link = "://" in source
        with progress_shown(on_stderr=True) as told:
            options = ExportOptions(out, join=source if link else None, run=None if link else folder)
            export(options, told.progress)
        yield out


class _Beginning:
    """Says on standard error what goes on before the first text: torch alone takes many seconds to start.

    At once on a terminal; elsewhere after some seconds, so that a quick answer comes alone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shown = ExitStack()
        self._told: Told | None = None  # None: nothing is said yet, or any more
        self._timer = threading.Timer(SILENT_S, self._begin)
        self._timer.daemon = True
        self._what = "Starting torch"
        self._over = False

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            self._begin()
        else:
            self._timer.start()
        return self

    def at(self, what: str) -> None:
        with self._lock:
            self._what = what
            if self._told is not None:
                self._told.progress(what, 0.0)

    def ends(self) -> bool:
        """Whether this is the first call."""
        self._timer.cancel()
        with self._lock:
            first, self._over, self._told = not self._over, True, None
        self._shown.close()
        return first

    def __exit__(self, *_: object) -> None:
        self.ends()

    def _begin(self) -> None:
        with self._lock:
            if not self._over:
                self._told = self._shown.enter_context(progress_shown(on_stderr=True))
                self._told.progress(self._what, 0.0)


def _listen(request: Request, shown: TextIO | None) -> tuple[str, Done]:
    """Everything that was said. Raises: OperatorError: the process failed, with its last words."""
    text: list[str] = []
    with (
        _Beginning() as beginning,
        tempfile.TemporaryFile() as words,  # a pipe that nobody reads would stop it
        subprocess.Popen(
            WORKER,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=words,
            env=trainer_environment(os.cpu_count() or 1),
        ) as process,
    ):
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            with suppress(BrokenPipeError):  # it ended at once: its last words say why
                process.stdin.write(msgspec.json.encode(request) + b"\n")
                process.stdin.close()
            for data in process.stdout:
                line: Line = msgspec.json.decode(data, type=Line)
                if isinstance(line, Doing):
                    beginning.at(line.what)
                    continue
                if beginning.ends() and shown is not None and not isinstance(line, Failed):
                    _show(request.prompt, shown)
                match line:
                    case Said(piece):
                        text.append(piece)
                        if shown is not None:
                            _show(piece, shown)
                    case Noticed(notice):
                        print(f"({notice})", file=sys.stderr, flush=True)
                    case Failed(why, exit_code):
                        raise OperatorError(why, exit_code)
                    case Done():
                        return "".join(text), line
            words.seek(0)
            last = (words.read().decode(errors="replace").strip().splitlines() or ["no word"])[-1]
            raise OperatorError(f"The model's process ended without a result ({last[:300]}).", RESOURCES)
        finally:
            process.kill()


def _show(text: str, stream: TextIO) -> None:
    stream.write(text.translate(_CONTROLS) if stream.isatty() else text)
    stream.flush()


def _as_json(options: Options, seed: int, text: str, done: Done, folder: Path) -> dict[str, Any]:
    try:
        facts = json.loads((folder / FACTS).read_bytes())
        origin = {"run": facts["run"]["id"], "version": facts["version"]}
    except (OSError, ValueError, KeyError, TypeError):
        origin = {"run": None, "version": None}  # a model from elsewhere
    return {
        "prompt": options.prompt,
        "text": text,
        "tokens": done.tokens,
        "ended": done.why,
        "seconds": round(done.seconds, 3),
        "device": done.device,
        "seed": seed if options.temperature > 0 else None,
        **origin,
    }
