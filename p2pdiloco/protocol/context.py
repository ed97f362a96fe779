"""What the parts of a node share: who it is, what time it is, and the list of actions being filled."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from p2pdiloco.ids import NO_DIGEST, Digest, PeerId, RunId
from p2pdiloco.protocol.actions import Action, Say, Send, VoterRecord
from p2pdiloco.run_spec import RunSpec
from p2pdiloco.wire.log import Entry
from p2pdiloco.wire.messages import DeltaHeader, Message, SnapshotOffer
from p2pdiloco.wire.signing import Signer, Verify, verify_ed25519


class Identity(msgspec.Struct, frozen=True):
    """Who this node is in which run."""

    run: RunId
    spec: RunSpec
    signer: Signer
    boot: int  # starts so far, durable (protocol.md 2)
    role: str  # "node" or "witness"
    verify: Verify = verify_ed25519

    @property
    def me(self) -> PeerId:
        return self.signer.peer_id


class HeldDelta(msgspec.Struct, frozen=True):
    """A delta whose blob is on this disk, checked."""

    header: DeltaHeader
    sender: PeerId
    key: bytes
    norm: float


class Restored(msgspec.Struct, frozen=True):
    """Everything durable that a node starts with; the defaults are a first start."""

    record: VoterRecord | None = None
    entries: tuple[Entry, ...] = ()
    state_index: int = 0  # the entry whose state the arrays on disk are
    rules: bytes = b""  # encoded RulesState at state_index; empty: genesis
    params_root: Digest = NO_DIGEST  # ignored at genesis
    momentum_root: Digest = NO_DIGEST
    in_flight: tuple[DeltaHeader, ...] = ()
    held: tuple[HeldDelta, ...] = ()
    snapshots: tuple[SnapshotOffer, ...] = ()
    adopted_version: int = 0  # the version that the trainer's own work stands on
    evaluated_version: int = -1  # newest that this node has evaluated and reported


class Context:
    """One `handle` call's surroundings. Parts append to `out`; nobody else does."""

    def __init__(self, identity: Identity, rng: Callable[[], float]) -> None:
        self.identity = identity
        self.me = identity.me
        self.spec = identity.spec
        self.rng = rng  # uniform in [0, 1)
        self.now = 0.0  # monotonic seconds of this machine
        self.out: list[Action] = []

    def emit(self, action: Action) -> None:
        self.out.append(action)

    def send(self, peer: PeerId, message: Message) -> None:
        """To a peer; to oneself nothing is sent."""
        if peer != self.me:
            self.out.append(Send(peer, message))

    def say(self, kind: str, text: str) -> None:
        self.out.append(Say(kind, text))
