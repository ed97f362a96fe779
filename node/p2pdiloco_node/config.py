"""Local taste: flags > environment (P2PDILOCO_*) > TOML file > default; each value knows its origin.

What all nodes of a run must agree on is not here but in the RunSpec. An unknown key or variable is refused
with the nearest match, so that a slip of the pen never silently means "default" (scenario G2).
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Generic, NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from p2pdiloco import limits
from p2pdiloco.errors import OperatorError
from p2pdiloco.exit_codes import FILES, USAGE
from p2pdiloco.ids import RunId

PREFIX = "P2PDILOCO_"
RESERVED = ("CONFIG", "LAB_COMPILE")  # P2PDILOCO_CONFIG names the file itself; lab/compiling.py
LAB_COMPILE = f"{PREFIX}LAB_COMPILE"  # whether the lab compiles its inner step: 1, 0, auto
LAB_COMPILE_WORDS = ("1", "0", "auto")
WORDS_ALLOWED = {  # for people, instead of the patterns below
    "device": "give auto, cpu, cuda or cuda:N (N counts this machine's GPUs from 0)",
    "checkpointing": "give auto, on or off",
    "offload": "give auto, none, anchor or moments",
    "parallel": "give auto, ddp or fsdp",
    "log_level": "give debug, info, warning or error",
}


TYPE_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "array": "a list",
}
# What Kubernetes sets beside a Service named p2pdiloco or p2pdiloco-..., and Docker's --link for such a name.
ADDRESS_SET = r"(?:tcp|udp|sctp)://\S+"
OF_A_SERVICE = re.compile(
    rf"{PREFIX}(?:\w+_)?(?:"
    r"SERVICE_HOST=[0-9a-fA-F.:]+"
    r"|SERVICE_PORT(?:_\w+)?=\d+"
    rf"|PORT={ADDRESS_SET}"
    rf"|PORT_\d+_(?:TCP|UDP|SCTP)(?:={ADDRESS_SET}|_ADDR=[0-9a-fA-F.:]+|_PORT=\d+|_PROTO=(?:tcp|udp|sctp))"
    r"|NAME=/[^/\s]+/\S+"
    r"|ENV_\w+=.*)",
    re.DOTALL,
)
INTERNAL = ("die_with_parent",)  # between our own programs, nothing that a person sets
SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)\s*([KMGT]i?B)", re.IGNORECASE)
SIZE_UNITS = {f"{letter}B": 1000 ** (n + 1) for n, letter in enumerate("KMGT")} | {
    f"{letter}IB": 1024 ** (n + 1) for n, letter in enumerate("KMGT")
}


class NodeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`p2pdiloco node`. The field's name is the key in the file, the flag and the variable."""

    join: str = ""  # tracker address, with #RUNID where known; may be empty after the first start
    data_dir: str = "p2pdiloco-node"  # everything of this node: key, run, checkpoints
    name: Annotated[str, Meta(max_length=limits.name_chars_max)] = (
        ""  # shown on the page; empty: from the key
    )
    listen: str = ""  # HOST:PORT; empty: loopback if the tracker is, else all interfaces; a free port
    advertise: tuple[str, ...] = ()  # HOST:PORT at which others reach this node, if not as it seems
    peers: tuple[str, ...] | None = None  # HOST:PORT of nodes to ask when no tracker answers
    device: Annotated[str, Meta(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    threads: Annotated[int, Meta(ge=1, le=256)] = 1  # of the trainer on a CPU
    micro_batch: Annotated[int, Meta(ge=0, le=65536)] = 0  # sequences per forward pass; 0: as fits
    checkpointing: Annotated[str, Meta(pattern="^(auto|on|off)$")] = "auto"  # activations computed twice
    offload: Annotated[str, Meta(pattern="^(auto|none|anchor|moments)$")] = "auto"  # to host memory
    gpus: str = ""  # all, or numbers (0,1,3): so many ranks; empty: one, on `device`
    ranks: Annotated[int, Meta(ge=1, le=limits.ranks_max)] = 1  # of the trainer, on CPUs
    parallel: Annotated[str, Meta(pattern="^(auto|ddp|fsdp)$")] = (
        "auto"  # the whole model on each rank, or a part
    )
    nnodes: Annotated[int, Meta(ge=1, le=limits.trainer_machines_max)] = 1  # machines of this one node
    rdzv: str = ""  # HOST:PORT on this machine, where the ranks of all machines meet
    compile: bool = False  # torch.compile; on GPUs faster after a minute or two
    data_disk: str = "64GiB"  # most that the run's data may take on disk, opened shards included
    keep_deltas: bool = False  # keep every delta, so that `verify` can start at version 0
    stay: bool = False  # when the run is over, keep serving it instead of ending
    tensorboard: str = ""  # folder for TensorBoard's files; empty: none
    wandb: str = ""  # project of Weights & Biases; empty: none
    log_level: Annotated[str, Meta(pattern="^(debug|info|warning|error)$")] = "info"
    die_with_parent: bool = False  # end when the process that started this one ends (used by the demo)


class TrackerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`p2pdiloco tracker`."""

    run: str = ""  # the folder that `p2pdiloco run new` made
    listen: str = "127.0.0.1:7474"  # HOST:PORT
    public_url: str = ""  # address to print in the join line, if not as it seems
    archive_bytes_max: Annotated[int, Meta(ge=0, le=2**50)] = 4096 * limits.MIB  # delta blobs kept
    checkpoints: Annotated[int, Meta(ge=0, le=limits.checkpoints_kept)] = 3  # offered for download
    tensorboard: str = ""  # as for a node
    wandb: str = ""
    log_level: Annotated[str, Meta(pattern="^(debug|info|warning|error)$")] = "info"
    die_with_parent: bool = False


C = TypeVar("C", NodeConfig, TrackerConfig)


class Loaded(NamedTuple, Generic[C]):
    values: C
    origins: dict[str, str]  # field -> "--flag", "P2PDILOCO_X", "FILE" or "default"


class HostPort(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class JoinLink(NamedTuple):
    """A tracker's base address (no trailing slash) and the run, where the link names it."""

    url: str
    run: RunId | None


def load(
    kind: type[C],
    flags: Mapping[str, object],
    *,
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Loaded[C]:
    """Compose one configuration. `flags`: those given, None where not.

    Raises: OperatorError (exit code 2 or 3) naming the key, its origin and the nearest match.
    """
    environment = os.environ if environment is None else environment
    file = file or (Path(environment[PREFIX + "CONFIG"]) if environment.get(PREFIX + "CONFIG") else None)
    fields = list(kind.__struct_fields__)
    raw: dict[str, object] = {}
    origins = dict.fromkeys(fields, "default")
    for key, value in _file_values(file).items():
        if key not in fields:
            raise OperatorError(f"{file}: unknown key {key!r}{nearest(key, fields) or '.'}", FILES)
        raw[key], origins[key] = value, str(file)
    check_variables(environment)
    for key in fields:
        variable = PREFIX + key.upper()
        if variable in environment:
            if not is_utf8(environment[variable]):
                raise OperatorError(f"{variable} is no UTF-8: {environment[variable]!r}.", FILES)
            raw[key], origins[key] = _split(kind, key, environment[variable]), variable
    for key, flag_value in flags.items():
        assert key in fields, f"a flag without a field: {key}"
        if flag_value is not None:
            raw[key], origins[key] = flag_value, "--" + key.replace("_", "-")
    return Loaded(_convert(kind, raw, origins), origins)


def check_variables(environment: Mapping[str, str]) -> None:
    """For every command that reads one: those of another command are no slip. Raises: OperatorError."""
    known = sorted({*map(str.upper, _all_fields()), *RESERVED})
    for variable in sorted(v for v in environment if v.startswith(PREFIX)):
        word = variable.removeprefix(PREFIX)
        if word not in known and not OF_A_SERVICE.fullmatch(f"{variable}={environment[variable]}"):
            # Without the prefix, which would make any two names near.
            close = nearest(word.upper(), known, prefix=PREFIX)
            where = ": the names are those of the flags in p2pdiloco node --help and tracker --help"
            raise OperatorError(f"Unknown environment variable {variable}{close or where + '.'}", FILES)


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """For a process that is told by its flags alone."""
    return {key: value for key, value in environment.items() if not key.startswith(PREFIX)}


def lab_compile(environment: Mapping[str, str]) -> str:
    """1, 0 or auto. Raises: OperatorError."""
    check_variables(environment)
    word = environment.get(LAB_COMPILE, "auto").lower()
    if word not in LAB_COMPILE_WORDS:
        raise OperatorError(f"{LAB_COMPILE}: {word[:80]!r} is not possible: give 1, 0 or auto.", FILES)
    return word


def is_utf8(text: str) -> bool:
    """Whether what came from the command line or the environment can be written down as it is."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def in_a_line(value: object) -> str:
    """A setting as a person would write it; `-` where none is set."""
    if value is None or value in ("", ()):
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def nearest(word: str, words: Iterable[str], *, prefix: str = "") -> str:
    """`; did you mean X?` or nothing. `prefix`: of all of them, as they are shown."""
    close = difflib.get_close_matches(word, list(words), n=1, cutoff=0.6)
    return f"; did you mean {prefix + close[0]!r}?" if close else ""


def parse_host_port(text: str, what: str) -> HostPort:
    """`HOST:PORT`, `[IPv6]:PORT` or `:PORT` (all interfaces). Raises: OperatorError (usage)."""
    host, colon, port = text.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise OperatorError(f"{what} {text!r} is not HOST:PORT: write it like 0.0.0.0:7474.", USAGE)
    if ":" in host:
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise OperatorError(
                f"{what} {text!r} is not HOST:PORT: write it like [::]:7474.", USAGE
            ) from None
    return HostPort(host or "0.0.0.0", int(port))  # noqa: S104 - asked for by leaving the host out


def parse_address(text: str, what: str) -> HostPort:
    """As `parse_host_port` for a host that is an IP address: peers dial literals only.

    Raises: OperatorError (usage).
    """
    host, port = parse_host_port(text, what)
    host = "127.0.0.1" if host == "localhost" else host
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise OperatorError(
            f"{what} {text!r} names a host: give its IP address, like 0.0.0.0:7474.", USAGE
        ) from None
    return HostPort(host, port)


def parse_join(text: str, what: str = "--join") -> JoinLink:
    """`http(s)://HOST:PORT/#RUNID`, or the bare address. `what`: where it was given.

    Raises: OperatorError (usage) with the remedy.
    """
    text = text.strip()
    if not text:
        raise OperatorError(
            "No tracker is named: give --join with the line that the tracker printed "
            "(http://HOST:PORT/#RUNID).", USAGE,
        )  # fmt: skip
    parts = urlsplit(text if "://" in text else "//" + text)
    try:
        port = parts.port
    except ValueError:
        port = -1
    if "://" not in text:
        hint = f"http://{text}" if port and port > 0 and "//" not in text else "http://HOST:PORT/#RUNID"
        raise OperatorError(f"{what} {text!r} has no scheme: write {hint}.", USAGE)
    if parts.scheme not in ("http", "https"):
        raise OperatorError(f"{what} {text!r}: the scheme is http or https, not {parts.scheme!r}.", USAGE)
    if not parts.hostname or port == -1 or parts.username or parts.query or parts.path not in ("", "/"):
        raise OperatorError(f"{what} {text!r} is not an address: write http://HOST:PORT/#RUNID.", USAGE)
    run: RunId | None = None
    if parts.fragment:
        try:
            run = RunId(bytes.fromhex(parts.fragment))
        except ValueError:
            run = None
        if run is None or len(run) != 32:
            raise OperatorError(
                f"{what}: {parts.fragment[:80]!r} after # is not a RunId (64 hex digits): copy the line "
                "that the tracker printed.", USAGE,
            )  # fmt: skip
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    port = port or (443 if parts.scheme == "https" else 80)
    return JoinLink(f"{parts.scheme}://{host}:{port}", run)


def parse_size(text: str, what: str) -> int:
    """`20GB`, `500MB`, `1.5TiB`: bytes. Raises: OperatorError (usage)."""
    found = SIZE.fullmatch(text.strip())
    unit = SIZE_UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None or not 0 < float(found[1]) * unit <= 2**60:
        raise OperatorError(f"{what} {text!r} is not a size: write it like 20GB or 500MB.", USAGE)
    return int(float(found[1]) * unit)


def parse_peers(peers: tuple[str, ...] | None) -> list[HostPort]:
    """The given bootstrap addresses. Raises: OperatorError for an empty list (scenario G1) or a bad one."""
    if peers is None:
        return []
    given = [p for p in peers if p.strip()]
    if not given:
        raise OperatorError(
            "The list of peers is empty (an unset variable?): name at least one HOST:PORT, leave --peers "
            "out to use the tracker alone, or start a new run with p2pdiloco run new.", USAGE,
        )  # fmt: skip
    return [parse_host_port(p, "--peers") for p in given]


def _all_fields() -> set[str]:
    return set(NodeConfig.__struct_fields__) | set(TrackerConfig.__struct_fields__)


def _file_values(file: Path | None) -> dict[str, object]:
    if file is None:
        return {}
    try:
        with file.open("rb") as opened:
            return tomllib.load(opened)
    except OSError as error:
        raise OperatorError(f"The configuration {file} cannot be read: {error.strerror}.", FILES) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OperatorError(f"The configuration {file} is not valid TOML: {error}.", FILES) from None


def _split(kind: type[C], key: str, text: str) -> object:
    """Lists in one variable are separated by commas or blanks."""
    if "tuple" in str(kind.__annotations__[key]):
        return tuple(part for part in text.replace(",", " ").split() if part)
    return text


def _convert(kind: type[C], raw: dict[str, object], origins: Mapping[str, str]) -> C:
    for key, value in raw.items():
        try:
            msgspec.convert({key: value}, kind, strict=False)
        except msgspec.ValidationError as error:
            what = WORDS_ALLOWED.get(key) or _in_words(str(error))
            raise OperatorError(
                f"{origins[key]}: {key} = {value!r} is not possible: {what}.", FILES
            ) from None
    return msgspec.convert(raw, kind, strict=False)


def _in_words(said: str) -> str:
    """What msgspec says of a value, for people: "Expected `int` >= 1 - at `$.threads`"."""
    said = re.split(r", got | - at ", said)[0].removeprefix("Expected ").replace(" | null", "")
    return "give " + re.sub(r"`(\w+)`", lambda found: TYPE_WORDS.get(found[1], found[1]), said)
