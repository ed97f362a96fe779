"""The last events of a node's life, kept in memory, written down when the node crashes.

A node's life is a list of (now, event) (architecture.md 3). Each record is one length-prefixed
MessagePack frame (now, event name, fields); a received message is kept as (kind, payload) exactly as it
travels, so that a crash report is a file that a test can replay into a `Node`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgpack
import msgspec

from p2pdiloco import limits
from p2pdiloco.errors import PeerError
from p2pdiloco.protocol import events
from p2pdiloco.protocol.events import Event, MessageReceived
from p2pdiloco.wire.codec import decode, encode
from p2pdiloco.wire.messages import KINDS

EVENTS: dict[str, type[Event]] = {kind.__name__: kind for kind in events.Event.__args__}
FRAME_BYTES_MAX = limits.message_bytes_max + 4 * limits.KIB


class Recorded(NamedTuple):
    """One moment: seconds on the node's monotonic clock, and what it learned then."""

    now: float
    event: Event


class FlightRecorder:
    """A ring of encoded events, bounded in bytes so that large messages cannot fill the memory."""

    def __init__(self, bytes_max: int = limits.flight_recorder_bytes_max) -> None:
        self._ring: deque[bytes] = deque()
        self._bytes = 0
        self._bytes_max = bytes_max

    def note(self, now: float, event: Event) -> None:
        frame = _encode(now, event)
        self._ring.append(frame)
        self._bytes += len(frame)
        while self._bytes > self._bytes_max:
            self._bytes -= len(self._ring.popleft())

    def write(self, path: Path) -> None:
        """Write the ring to `path`. Called while crashing: plain write, no ceremony."""
        with path.open("wb") as file:
            for frame in self._ring:
                file.write(len(frame).to_bytes(4, "big") + frame)


def read_flight(path: Path) -> Iterator[Recorded]:
    """The recorded moments, oldest first. Raises: PeerError MALFORMED for a damaged file."""
    with path.open("rb") as file:
        while prefix := file.read(4):
            size = int.from_bytes(prefix, "big")
            if size > FRAME_BYTES_MAX:
                raise PeerError("MALFORMED", f"a frame of {size} bytes in {path.name}")
            yield _decode(file.read(size))


def _encode(now: float, event: Event) -> bytes:
    if isinstance(event, MessageReceived):
        message = [type(event.message).__name__, encode(event.message)]
        plain: object = {
            "sender": event.sender, "key": event.key, "boot": event.boot, "sealed": event.sealed,
            "epoch": event.epoch, "message": message,
        }  # fmt: skip
    else:
        plain = msgspec.to_builtins(event, builtin_types=(bytes,))
    return bytes(msgpack.packb([now, type(event).__name__, plain], use_bin_type=True))


def _decode(frame: bytes) -> Recorded:
    try:
        now, name, fields = msgpack.unpackb(frame, raw=False)
        if EVENTS[name] is MessageReceived:
            kind, payload = fields.pop("message")
            return Recorded(now, MessageReceived(message=decode(payload, KINDS[kind]), **fields))
        return Recorded(now, msgspec.convert(fields, EVENTS[name], strict=True))
    except (KeyError, ValueError, TypeError, msgspec.ValidationError, msgpack.UnpackException) as error:
        raise PeerError("MALFORMED", f"flight record: {error}") from None
