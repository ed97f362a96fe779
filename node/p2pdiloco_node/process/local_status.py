"""`p2pdiloco status`: ask the daemons of this machine what they are doing.

Each daemon notes its loopback address and its folder in the user's state folder while it lives; a note whose
process is gone (kill -9) is passed over and removed.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
import urllib.error
import urllib.request
from contextlib import suppress
from http.client import BadStatusLine, HTTPException
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
import platformdirs

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.exit_codes import NETWORK, USAGE
from p2pdiloco_node.process.hosts import names_loopback
from p2pdiloco_node.telemetry import NodeStatus, state_words, step_words

ANSWER_S = 3.0
COLUMNS = 80


def notes_folder() -> Path:
    return platformdirs.user_state_path("p2pdiloco") / "daemons"


class Note(NamedTuple):
    """Where a daemon is."""

    url: str
    folder: str  # of a run or a node; empty: nobody says


def note_daemon(url: str, folder: Path) -> Path | None:
    """Leave a note for `status`; None where the state folder cannot be used (not worth failing for)."""
    path = notes_folder() / f"{os.getpid()}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_text(json.dumps({"url": url, "folder": str(folder)}))
    except OSError:
        return None
    return path


def print_status(url: str | None, *, as_json: bool) -> int:
    """The command. Raises: OperatorError where nothing answers."""
    noted = _noted()
    if url:
        named = url.rstrip("/")
        noted = [note for note in noted if note.url == named][:1] or [Note(named, "")]
    if not noted:
        raise OperatorError(
            "No daemon runs on this machine (as this user): start one with p2pdiloco node --join LINK, or "
            "name one with --url http://127.0.0.1:PORT.", NETWORK,
        )  # fmt: skip
    found = [(note, _ask(note.url, must_answer=bool(url))) for note in noted]
    answers = [(note, status) for note, status in found if status is not None]
    if as_json:
        statuses = [status for _, status in answers]
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(statuses)) + b"\n")
        return 0
    for number, (note, status) in enumerate(answers):
        lines = [*in_words(status), *where_it_is(status, note)]
        print("\n".join(["", *lines] if number else lines))
    return 0


def where_it_is(s: NodeStatus, note: Note) -> list[str]:
    """What tells two daemons of the same name apart. A folder stands alone, to be copied whole."""
    return [f"  run {s.run_id[:16]}, {note.url}", *([f"  {note.folder}"] if note.folder else [])]


def in_words(s: NodeStatus) -> list[str]:
    """A few lines of at most 80 columns."""
    lines = [f"{s.name} ({s.role}), run {s.run_name}, version {s.version:,}"]
    if s.state.word != s.role:  # a witness is always one
        lines.append(state_words(s.state.word, s.state.why))
    if s.role == "node" and not s.over:
        step = [step_words(s.inner_step, s.inner_steps, s.of_a_pass)]
        step += [f"loss {s.loss:.3f}"] if s.loss is not None else []
        step += [f"{s.tokens_per_s:,.0f} tokens/s"] if s.tokens_per_s is not None else []
        lines.append(", ".join(step))
    lines += [f"last delta {s.last_outcome}"] if s.last_outcome else []
    lines += [f"tracker {s.tracker}"] if s.role == "node" else []
    first, *rest = lines
    return [
        *textwrap.wrap(first, COLUMNS, subsequent_indent="  "),
        *textwrap.wrap("; ".join(rest), COLUMNS, initial_indent="  ", subsequent_indent="  "),
    ]


def _noted() -> list[Note]:
    notes = []
    folder = notes_folder()
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        if not (path.stem.isdecimal() and Path(f"/proc/{path.stem}").exists()):
            with suppress(OSError):
                path.unlink()
            continue
        with suppress(OSError, ValueError, KeyError):
            said = json.loads(path.read_text())
            notes.append(Note(str(said["url"]), str(said.get("folder", ""))))
    return notes


def _ask(url: str, *, must_answer: bool) -> NodeStatus | None:
    if not _is_here(url):
        raise OperatorError(
            f"--url {url!r}: daemons answer on this machine only (http://127.0.0.1:PORT).", USAGE
        )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url + "/v1/status", timeout=ANSWER_S) as answer:
            return msgspec.json.decode(answer.read(4 * limits.MIB), type=NodeStatus)
    except (OSError, ValueError, HTTPException, msgspec.MsgspecError) as error:
        if must_answer:
            raise OperatorError(
                f"{url} does not answer as a p2pdiloco daemon ({_why(error)}).", NETWORK
            ) from None
        return None


def _is_here(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme == "http" and names_loopback(f"[{parts.hostname}]:{parts.port or 80}")
    except ValueError:  # a bracket without the other, a port that is none
        return False


def _why(error: Any) -> str:
    """A word or two for people, without the system's numbers."""
    match getattr(error, "reason", error):
        case ConnectionRefusedError():
            return "refused: nothing listens there"
        case TimeoutError():
            return f"no answer within {ANSWER_S:.0f} s"
        case msgspec.MsgspecError() | BadStatusLine():
            return "it answers something else"
        case OSError(strerror=str(words)):
            return words
        case other:
            return str(other)[:200]
