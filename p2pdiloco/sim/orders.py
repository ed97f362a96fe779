"""What each order of the brain means on a simulated machine.

Long work ends in exactly one event, later, unless the process that ordered it is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from p2pdiloco.ids import Digest, PeerId
from p2pdiloco.protocol import actions as do
from p2pdiloco.protocol import events as fact
from p2pdiloco.protocol.actions import Action
from p2pdiloco.protocol.context import HeldDelta
from p2pdiloco.sim.disk import DiskFull, StateFiles
from p2pdiloco.wire.messages import DeltaHeader, Goodbye, Outcome, PeerRecord, SnapshotOffer

if TYPE_CHECKING:
    from p2pdiloco.sim.machine import Machine

RETRY_AFTER_S = 1.0
_TRAVELS_SEALED = (DeltaHeader, Goodbye, PeerRecord)  # kinds whose envelope may be passed on

# Written before said


def save_record(m: Machine, action: do.SaveRecord) -> None:
    m.disk.save_record(action.record)
    m.world.checkers.record_saved(m, action.record)


def save_entries(m: Machine, action: do.SaveEntries) -> None:
    m.disk.save_entries(action.entries)
    m.world.checkers.entries_saved(m, action.entries)


def cut_log(m: Machine, action: do.CutLog) -> None:
    dropped = m.disk.entries[action.index :]
    m.disk.cut(action.index)
    m.world.checkers.cut(m, dropped)


def send(m: Machine, action: do.Send) -> None:
    world, message, peer = m.world, action.message, action.peer
    assert peer != m.id, f"{type(message).__name__} to itself"
    m.sent += 1
    if m.honest:
        world.checkers.sending(m, message)
    target = world.machines.get(peer)
    if target is None:
        return
    sealed = b""
    if world.real_keys or isinstance(message, _TRAVELS_SEALED):
        sealed = m.seal(message, peer)
    source, key, boot, epoch = m.id, m.signer.public_key, m.boot, m.epoch

    def deliver() -> None:
        if target.up and world.network.works(source, peer):
            target.receive(source, key, boot, message, sealed, epoch)

    world.network.send(source, peer, deliver)
    if not target.up and world.chance.happens(0.3):
        m.later(world.chance.uniform(0.05, 1.0), fact.MessageNotSent(peer))


def remember(m: Machine, action: do.RememberPeer) -> None:
    m.address_book[action.peer] = action.sealed


# Deltas


def allow(m: Machine, action: do.AllowDelta) -> None:
    delta = Digest(action.header.delta)
    m.allowed[delta] = (action.header, action.sender)
    m.senders[delta] = (action.sender, action.key)
    if delta in m.disk.blobs:
        arrived(m, action.header, delta)


def reveal(m: Machine, action: do.RevealDelta) -> None:
    m.revealed.add(action.delta)


def drop(m: Machine, action: do.DropDelta) -> None:
    m.allowed.pop(action.delta, None)
    m.revealed.discard(action.delta)
    if not any(h.delta == action.delta for h in m.disk.own.in_flight):
        m.disk.blobs.pop(action.delta, None)
        m.disk.held.pop(action.delta, None)


def arrived(m: Machine, header: DeltaHeader | None, delta: Digest) -> None:
    """The blob is on the disk: check it, and say so later."""
    world = m.world
    outcome, norm = world.arithmetic.check(delta, m.disk.blobs[delta])
    own = any(h.delta == delta for h in m.disk.own.in_flight)
    known = (m.id, m.signer.public_key) if own else m.senders.get(delta)
    if header is not None and known is not None and outcome is Outcome.HELD:
        m.disk.held[delta] = HeldDelta(header, known[0], known[1], norm)
    m.later(world.chance.uniform(0.0, 0.02), fact.DeltaArrived(delta, outcome, norm))


def accept_upload(m: Machine, sender: PeerId, delta: Digest, data: bytes) -> str:
    """The receiving side of an upload: "" or why not."""
    if not m.up or m.frozen:
        return "no answer"
    if delta in m.disk.blobs:
        return ""
    allowed = m.allowed.get(delta)
    if allowed is None or allowed[1] != sender:
        return "not announced"
    try:
        m.disk.put_blob(delta, data)
    except DiskFull:
        return "the receiver's disk is full"
    arrived(m, allowed[0], delta)
    return ""


def serves(m: Machine, delta: Digest) -> bool:
    """Commit before reveal: a delta is served once the brain says so."""
    return m.up and not m.frozen and delta in m.disk.blobs and delta in m.revealed


def upload(m: Machine, action: do.UploadDelta) -> None:
    world, peer, delta, life = m.world, action.peer, action.delta, m.life
    target = world.machines[peer]
    data = m.disk.blobs.get(delta)
    assert data is not None, "an order to upload what is not here"

    def end(arrived: bool) -> None:
        why = accept_upload(target, m.id, delta, data) if arrived else "timed out"
        if m.life == life:
            if why:
                m.post(fact.DeltaNotUploaded(delta, peer, RETRY_AFTER_S, why))
            else:
                m.post(fact.DeltaUploaded(delta, peer))

    world.network.transfer(m.id, peer, end)


def fetch_delta(m: Machine, action: do.FetchDelta) -> None:
    world, delta, life = m.world, action.delta, m.life
    donors = [world.machines[d] for d in action.donors if d != m.id and d in world.machines]

    def ask(rest: list[Machine]) -> None:
        if m.life != life:
            return
        if delta in m.disk.blobs:
            arrived(m, action.header, delta)
        elif not rest:
            m.post(fact.DeltaNotFetched(delta, "no donor gave it"))
        else:
            world.network.transfer(rest[0].id, m.id, lambda ok: end(rest, arrived=ok))

    def end(rest: list[Machine], *, arrived: bool) -> None:
        if m.life == life and arrived and serves(rest[0], delta):
            try:
                m.disk.put_blob(delta, rest[0].disk.blobs[delta])
            except DiskFull:
                rest = rest[:1]
        ask(rest[1:])

    world.at(0.001, lambda: ask(donors))


# State: computed at once, in the order of the orders, as in the real driver's state lane


def prepare(m: Machine, action: do.PrepareOuterStep) -> None:
    world = m.world
    pause = world.chance.uniform(0.005, 0.05)
    if m.state.index != action.base_index:
        m.later(pause, fact.OuterStepNotPrepared(action.ticket, "the state is at another index"))
        return
    made = world.arithmetic.step(m.state, action.step, m.disk.blobs)
    if made is None:
        m.later(pause, fact.OuterStepNotPrepared(action.ticket, "a delta is not here"))
        return
    m.prepared[action.ticket] = made
    roots = world.arithmetic.root_of(made.params), world.arithmetic.root_of(made.momentum)
    m.later(pause, fact.OuterStepPrepared(action.ticket, *roots))


def install(m: Machine, action: do.InstallEntry) -> None:
    world, life = m.world, m.life
    arrays = m.state if action.ticket is None else m.prepared[action.ticket]
    before = m.state.index
    m.state = StateFiles(action.index, action.version, arrays.params, arrays.momentum, action.rules)
    m.prepared.clear()
    world.checkers.installed(m, before)
    if world.chance.happens(0.4):
        m.disk.write_state(m.state)
        pause = world.chance.uniform(0.0, 2.0)
        world.at(pause, lambda: m.disk.sync_state() if m.life == life else None)


def take_snapshot(m: Machine, action: do.TakeSnapshot) -> None:
    state, life = m.state, m.life
    assert state.index == action.index, "an order to write a state that is not here"
    offer = m.world.arithmetic.offer(state)

    def end() -> None:
        if m.life == life and not m.disk.full:
            m.disk.keep_snapshot(offer, state)
            m.post(fact.SnapshotTaken(offer))

    m.world.at(m.world.chance.uniform(0.05, 1.0), end)


def snapshot_of(m: Machine, offer: SnapshotOffer) -> StateFiles | None:
    """The donor's side of FetchSnapshot."""
    if m.up and not m.frozen:
        for kept, state in m.disk.snapshots:
            if kept == offer:
                return state
    return None


def fetch_snapshot(m: Machine, action: do.FetchSnapshot) -> None:
    world, offer, life = m.world, action.offer, m.life
    donors = [world.machines[d] for d in action.donors if d != m.id and d in world.machines]
    own = m.disk.genesis if offer.index == 0 else snapshot_of(m, offer)

    def ask(rest: list[Machine]) -> None:
        if m.life != life:
            return
        if own is not None and not m.disk.full:
            keep(own)
        elif rest:
            source = rest[0].id
            world.network.transfer(source, m.id, lambda ok: end(rest, arrived=ok), snapshot=True)
        else:
            m.post(fact.SnapshotNotFetched(offer.index, "no donor gave it"))

    def end(rest: list[Machine], *, arrived: bool) -> None:
        state = snapshot_of(rest[0], offer) if arrived else None
        if m.life != life or state is None or m.disk.full:
            ask(rest[1:])
            return
        world.snapshots_fetched += 1
        keep(state)

    def keep(state: StateFiles) -> None:
        before = m.state.index
        m.state = replace(state, version=action.version, rules=bytes(offer.rules))
        m.prepared.clear()
        m.disk.install_snapshot(offer, m.state)
        world.checkers.snapshot_installed(m, before)
        m.post(fact.SnapshotFetched(offer.index))

    world.at(0.001, lambda: ask(donors))


# Own work


def settle(m: Machine, action: do.SettleDelta) -> None:
    m.world.checkers.settled(m, action.delta, action.how)
    if m.trainer is not None:
        m.trainer.settle(action.delta, action.how)


def adopt(m: Machine, action: do.AdoptState) -> None:
    if m.trainer is not None:
        m.trainer.adopt(action.version, reset=action.reset)


def allow_passes(m: Machine, action: do.AllowPasses) -> None:
    if m.trainer is not None:
        m.trainer.allow(action.allowed, prolong=action.prolong)


def run_ended(m: Machine, action: do.RunEnded) -> None:  # noqa: ARG001 (one shape for all orders)
    m.ended = True
    if m.trainer is not None:
        m.trainer.stop()


def leave_done(m: Machine, action: do.LeaveDone) -> None:  # noqa: ARG001
    m.gone = True
    m.stop()


def nothing(m: Machine, action: Action) -> None:
    """For people, or for the tracker's page: nothing in this world depends on it."""


PERFORM: dict[type[Action], Callable[[Machine, Any], None]] = {
    do.SaveRecord: save_record,
    do.SaveEntries: save_entries,
    do.CutLog: cut_log,
    do.Send: send,
    do.RememberPeer: remember,
    do.UploadDelta: upload,
    do.FetchDelta: fetch_delta,
    do.AllowDelta: allow,
    do.RevealDelta: reveal,
    do.DropDelta: drop,
    do.PrepareOuterStep: prepare,
    do.InstallEntry: install,
    do.TakeSnapshot: take_snapshot,
    do.FetchSnapshot: fetch_snapshot,
    do.SettleDelta: settle,
    do.AdoptState: adopt,
    do.AllowPasses: allow_passes,
    do.EnterEpoch: nothing,  # a machine seals in the epoch that its brain is in
    do.EvaluateState: nothing,
    do.Say: nothing,
    do.RunEnded: run_ended,
    do.LeaveDone: leave_done,
}
