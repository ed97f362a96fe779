"""What the daemon and its trainer process say to each other, over the trainer's stdin and stdout.

A frame is four bytes of length (big endian) and one MessagePack map with a tag. Arrays never travel here:
they are raw little-endian float32 files in the exchange folder, and a frame names the file. Both ends are
this program in one version, so a frame that does not open is our own fault (AssertionError).
"""

from __future__ import annotations

import asyncio
from typing import BinaryIO, NamedTuple

import msgspec

from p2pdiloco import limits

LENGTH_BYTES = 4


class Frame(msgspec.Struct, frozen=True, tag=True):
    """Base of all frames."""


class TrainerSettings(NamedTuple):
    """How this machine trains; no other node has to know."""

    device: str = "auto"  # auto, cpu, cuda, cuda:1
    micro_batch: int = 0  # sequences per forward pass; 0: as fits in memory
    checkpointing: str = "auto"  # auto, on, off
    offload: str = "auto"  # auto, none, anchor, moments
    compile: bool = False  # losses by torch.compile
    parallel: str = "auto"  # of several ranks: auto, ddp, fsdp


# Daemon to trainer ----------------------------------------------------------------------------------------


class Configure(Frame, frozen=True):
    """The first command of a trainer's life."""

    spec: bytes  # the encoded RunSpec
    peer: bytes  # PeerId, 32 bytes: the order of the data is this node's own
    shards: tuple[str, ...]  # one path per shard of the RunSpec, in its order
    evaluations: tuple[str, ...]  # one path per evaluation set of the RunSpec, in its order
    exchange: str  # folder of the array files
    cursor: int  # first sequence not yet trained on
    next_sequence: int  # the number that the next finished pass gets
    device: str = "auto"  # auto, cpu, cuda, cuda:1
    threads: int = 1  # of torch on the CPU
    micro_batch: int = 0  # these five as in TrainerSettings
    checkpointing: str = "auto"
    offload: str = "auto"
    compile: bool = False
    parallel: str = "auto"
    moments: str = ""  # file of AdamW moments to start from; empty: from zero, warmed up
    tokenizer: tuple[str, ...] = ()  # files that make up the tokenizer.json; none: bytes


class Adopt(Frame, frozen=True):
    """A new global state: the trainer takes it at its next inner-step boundary (algorithm.md 3)."""

    version: int
    clock: int  # tokens merged, plus those of this node's deltas in flight: what the anchor has seen
    target_tokens: int  # of the run, as the log says now: where the learning rate ends
    anchor: str  # file: G - sum(in_flight), for every own delta up to `sequence`
    sequence: int  # own deltas above this one are not in the anchor yet; the next pass is above it too
    reset: bool  # theta <- anchor, progress discarded, moments warmed up


class Allow(Frame, frozen=True):
    """Passes up to this number may be finished; the one after is prolonged, then the trainer waits."""

    until_sequence: int
    why: str  # one sentence for the person, said while waiting
    prolong: bool = True  # False: a pass ends at its length as always, and no other begins


class Evaluate(Frame, frozen=True):
    version: int
    state_root: (
        bytes  # comes back with what is found: an ended epoch may have had another state of this version
    )
    params: str  # file: the certified params; the trainer removes it


class Pause(Frame, frozen=True):
    """No more inner steps; an evaluation that was asked for is still done."""


class Resume(Frame, frozen=True):
    pass


class ShardsChanged(Frame, frozen=True):
    """Files of data shards came or went: look again, and read those of `gone` no more."""

    gone: tuple[int, ...]


class SaveCheckpoint(Frame, frozen=True):
    """Write the moments to `path` (they are no part of the global state)."""

    path: str


class Stop(Frame, frozen=True):
    pass


Command = Configure | Adopt | Allow | Evaluate | Pause | Resume | ShardsChanged | SaveCheckpoint | Stop

# Trainer to daemon ----------------------------------------------------------------------------------------


class Ready(Frame, frozen=True):
    """Torch is imported; the trainer waits for `Configure`."""

    import_s: float


class Configured(Frame, frozen=True):
    device: str  # for the page: "cpu, 1 thread" or the GPU's name
    params: int
    how: tuple[str, ...] = ()  # sentences for people: how it fits in memory, what was asked for and failed


class Stepped(Frame, frozen=True):
    """At most every half second."""

    step: int  # inner steps of this pass so far
    inner_steps: int  # of this pass in all, as far as it is known: H from the first adoption in it
    loss: float  # of the last inner step, nats per token
    tokens_per_s: float  # since the last report
    longest_gap_s: float  # between the ends of two inner steps since the last report
    version: int  # adopted
    lr: float
    clock: int = 0  # tokens, of the run's clock, up to here
    cursor: int = 0  # first sequence of the node's own order that is not read yet


class PassDone(Frame, frozen=True):
    """A pass ended; the trainer goes on at once."""

    sequence: int
    delta: str  # file: the raw pseudo-gradient; the trainer removes it once an anchor contains it
    base_version: int  # the anchor's version when the pass began
    steps: int
    data_first: int  # in sequences of the node's own order
    data_count: int
    loss: float  # mean over the pass, nats per token
    evenness: tuple[
        float, ...
    ] = ()  # of each layer's experts: 1 all used alike, 0 one alone; none: no experts


class Waiting(Frame, frozen=True):
    """The prolonged pass is full and nothing is allowed: the one exception to "nobody waits"."""

    why: str


class NotFinite(Frame, frozen=True):
    """A loss or gradient that is not finite: back to the anchor, no delta, the pass begins again."""

    step: int
    data_first: int
    what: str


class Evaluating(Frame, frozen=True):
    """How far an evaluation is, and what it found so far; at most every half second."""

    version: int
    state_root: bytes
    losses: tuple[float, ...]  # of the sets that are done, the first ones
    tokens: tuple[int, ...]  # over which
    share: float  # of the held-out tokens


class Evaluated(Frame, frozen=True):
    version: int
    state_root: bytes
    losses: tuple[float, ...]  # nats per token, by evaluation set
    tokens: tuple[int, ...]  # over which
    samples: tuple[str, ...] = ()  # continuations, by prompt of the RunSpec
    why: str = ""  # there are none, where some were wanted


class NotEvaluated(Frame, frozen=True):
    """An evaluation set cannot be read here; training goes on."""

    version: int
    state_root: bytes
    why: str


class ShardsMissing(Frame, frozen=True):
    """These shards of the window in use are passed over, until they are there; none: all are there."""

    shards: tuple[int, ...]
    why: str  # of one of them; empty where some came back


class Saved(Frame, frozen=True):
    path: str
    size: int  # bytes
    digest: bytes  # SHA-256 of the file


class Failed(Frame, frozen=True):
    """The last word of a trainer that cannot go on and knows why."""

    message: str
    exit_code: int = 0  # another: a setting of this machine is wrong, and starting again does not mend it


Event = (
    Ready
    | Configured
    | Stepped
    | PassDone
    | Waiting
    | NotFinite
    | Evaluating
    | Evaluated
    | NotEvaluated
    | ShardsMissing
    | Saved
    | Failed
)

_encoder = msgspec.msgpack.Encoder()
_commands = msgspec.msgpack.Decoder(Command)
_events = msgspec.msgpack.Decoder(Event)


def pack(frame: Frame) -> bytes:
    """Length and content."""
    content = _encoder.encode(frame)
    assert len(content) <= limits.trainer_frame_bytes_max, f"a frame of {len(content)} bytes"
    return len(content).to_bytes(LENGTH_BYTES, "big") + content


def write_event(stream: BinaryIO, event: Event) -> None:
    stream.write(pack(event))
    stream.flush()


def read_command(stream: BinaryIO) -> Command | None:
    """Blocks. None: the daemon is gone."""
    header = stream.read(LENGTH_BYTES)
    if len(header) < LENGTH_BYTES:
        return None
    size = int.from_bytes(header, "big")
    content = stream.read(size)
    return _commands.decode(content) if len(content) == size else None


async def read_event(stream: asyncio.StreamReader) -> Event | None:
    """None: the trainer closed its end."""
    try:
        size = int.from_bytes(await stream.readexactly(LENGTH_BYTES), "big")
        assert size <= limits.trainer_frame_bytes_max, f"a frame of {size} bytes"
        return _events.decode(await stream.readexactly(size))
    except (asyncio.IncompleteReadError, ConnectionResetError):
        return None
