"""The tracker's directory: who is there, how to reach them, what they say of themselves.

A pure table. A running swarm does not need it (protocol.md 1): it starts empty, and re-announcements fill
it again within one interval. It trusts nobody: messages come opened and verified (wire/envelope.py), the
address comes from the socket, and durations are measured on this machine's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Annotated, NamedTuple

from msgspec import Meta

from p2pdiloco import limits
from p2pdiloco.errors import PeerError, TransportError
from p2pdiloco.ids import PeerId, short
from p2pdiloco.rules.evaluation import report_fault
from p2pdiloco.run_spec import RunSpec
from p2pdiloco.wire.codec import Struct
from p2pdiloco.wire.envelope import Opened
from p2pdiloco.wire.messages import Announce, EvalReport, Goodbye, NodeReport, PeerRecord, Text

NODE_STATES = ("joining", "syncing", "training", "waiting", "paused", "leaving")
REPORT_WINDOW_S = 60.0


class AnnounceReply(Struct, frozen=True):
    """What the tracker answers. Not signed: each record in it is, by its owner."""

    interval_s: Annotated[float, Meta(gt=0, le=3600)]
    records: Annotated[
        tuple[Annotated[bytes, Meta(max_length=1024)], ...], Meta(max_length=limits.announce_peers_max)
    ]
    notice: Text  # one sentence for the node's owner; empty: none


class Listed(NamedTuple):
    """One peer as the page may see it: no address in it. Texts are untrusted, as the peer sent them."""

    peer: PeerId
    name: str
    role: str  # node, witness
    state: str  # one of NODE_STATES, from whichever came last: announce or report
    live: bool  # heard within the expiry, and has not said goodbye
    left: str | None  # reason of its goodbye
    silent_s: float  # since it was last heard
    outbound_only: bool
    reachable: bool | None  # answered a call-back; None: not tried
    report: NodeReport | None
    bad_report: str  # why its last report was refused; empty: it was fine
    clock_offset_s: float  # its clock minus the tracker's; + is ahead


class _Row:
    """Everything known of one key. Replaced never, changed in place: so a key has exactly one row."""

    __slots__ = (
        "address", "bad_report", "boot", "clock_offset_s", "heard_at", "issued", "left", "n", "reachable",
        "record", "report", "reports_at", "reports_n", "sealed", "state",
    )  # fmt: skip

    def __init__(self, address: str, record: PeerRecord, sealed: bytes) -> None:
        self.address = address
        self.record = record
        self.sealed = sealed
        self.issued = record.issued
        self.boot = 0
        self.n = -1
        self.heard_at = 0.0
        self.state = "joining"
        self.left: str | None = None
        self.reachable: bool | None = None
        self.report: NodeReport | None = None
        self.bad_report = ""
        self.reports_at = 0.0
        self.reports_n = 0
        self.clock_offset_s = 0.0


class Directory:
    """The table of peers of one run.

    `now` is monotonic seconds everywhere; `unix` is wall-clock seconds and serves the clock notice alone.
    """

    def __init__(self, *, local: bool) -> None:
        """`local`: the RunSpec's admission is local (announces every 2 s instead of 30 s)."""
        self.interval_s = limits.announce_interval_local_s if local else limits.announce_interval_s
        self.expiry_s = self.interval_s * limits.announce_expiry_intervals
        self._rows: dict[PeerId, _Row] = {}
        self._order: list[PeerId] = []  # keys of the rows, made anew when one came or went
        self._offset = 0  # where the next reply starts: all peers are named in turn

    def announce(
        self, opened: Opened, record: Opened, sealed: bytes, *, address: str, now: float, unix: float,
        prefer: Iterable[PeerId] = (),
    ) -> AnnounceReply:  # fmt: skip
        """Enter or refresh a peer, and answer with others.

        Args:
            opened: the Announce.
            record: the PeerRecord inside it, opened from `sealed`.
            address: the peer's IP as the socket saw it; bounds how many keys come from one place.
            prefer: peers named first in the reply (the committee).

        Raises:
            PeerError: MALFORMED, NOT_YOURS (somebody else's record), STALE_RECORD (an older `issued`),
                REPLACED (the same key was started again elsewhere), GONE (sent before its goodbye).
            TransportError: the table, or the share of one address, is full of live peers.
        """
        message, about = opened.message, record.message
        if not isinstance(message, Announce) or not isinstance(about, PeerRecord):
            raise PeerError("MALFORMED", "an announce with a peer record was expected")
        if record.sender != opened.sender:
            raise PeerError("NOT_YOURS", "the peer record is signed by another key")
        row = self._rows.get(opened.sender)
        if row is None:
            self._make_room(address, now)
            row = self._rows[opened.sender] = _Row(address, about, sealed)
            self._order = []
        if self._is_news(row, opened, about):
            row.boot, row.n = opened.boot, opened.n
            row.record, row.sealed, row.issued = about, sealed, about.issued
            row.address, row.left, row.heard_at = address, None, now
            row.state = message.state if message.state in NODE_STATES else "joining"
            row.clock_offset_s = message.clock_unix_s - unix
        return AnnounceReply(
            self.interval_s, self._records_for(opened.sender, prefer, now), clock_notice(row.clock_offset_s)
        )

    def _is_news(self, row: _Row, opened: Opened, record: PeerRecord) -> bool:
        """False for a repeated or overtaken announce: it is answered, but refreshes nothing.

        Otherwise whoever recorded an announce could keep a dead peer on the list.
        """
        if opened.boot < row.boot:
            raise PeerError(
                "REPLACED",
                f"identity {short(opened.sender)} was started again elsewhere (start {row.boot}, this is "
                f"start {opened.boot}): stop one of the two, or give this machine its own data directory",
            )
        if row.left is not None and (opened.boot, opened.n) <= (row.boot, row.n):
            raise PeerError("GONE", "this peer said goodbye after it sent this announce")
        if record.issued < row.issued:
            raise PeerError("STALE_RECORD", f"record {record.issued} comes after record {row.issued}")
        return (opened.boot, opened.n) > (row.boot, row.n)

    def goodbye(self, opened: Opened, *, now: float) -> None:
        """A peer leaves: off the list at once. What it sent before and arrives later changes nothing.

        Raises: PeerError MALFORMED, UNKNOWN_PEER.
        """
        if not isinstance(opened.message, Goodbye):
            raise PeerError("MALFORMED", "a goodbye was expected")
        row = self._row_of(opened.sender)
        if (opened.boot, opened.n) > (row.boot, row.n):
            row.boot, row.n, row.heard_at = opened.boot, opened.n, now
            row.left = opened.message.reason

    def report(self, opened: Opened, *, now: float) -> None:
        """Keep what a node says of itself; a senseless report spoils its own row and nothing else.

        Raises: PeerError MALFORMED, UNKNOWN_PEER, GONE, RATE_LIMITED, BAD_REPORT.
        """
        report = opened.message
        if not isinstance(report, NodeReport):
            raise PeerError("MALFORMED", "a node report was expected")
        row = self._row_of(opened.sender)
        if now - row.reports_at >= REPORT_WINDOW_S:
            row.reports_at, row.reports_n = now, 0
        row.reports_n += 1
        if row.reports_n > limits.reports_per_peer_per_minute_max:
            raise PeerError(
                "RATE_LIMITED", f"at most {limits.reports_per_peer_per_minute_max} reports a minute"
            )
        if (opened.boot, opened.n) <= (row.boot, row.n):
            if row.left is not None:
                raise PeerError("GONE", "this peer said goodbye after it sent this report")
            return  # overtaken by a newer message
        row.boot, row.n, row.left, row.heard_at = opened.boot, opened.n, None, now
        row.bad_report = why_bad(report)
        if row.bad_report:
            row.report = None
            raise PeerError("BAD_REPORT", row.bad_report)
        row.report, row.state = report, report.state

    def evaluation(
        self, opened: Opened, spec: RunSpec, *, root_of: Callable[[int], bytes | None]
    ) -> EvalReport:
        """An evaluation that belongs to the certified state of its version.

        `root_of(version)`: the certified state root, or None where this tracker does not know it (yet).

        Raises: PeerError MALFORMED, UNKNOWN_PEER, TOO_EARLY (not certified here yet: send it again),
            WRONG_STATE (of another state than the run's), BAD_REPORT (figures that cannot be).
        """
        report = opened.message
        if not isinstance(report, EvalReport):
            raise PeerError("MALFORMED", "an evaluation report was expected")
        self._row_of(opened.sender)
        root = root_of(report.version)
        if root is None:
            raise PeerError("TOO_EARLY", f"version {report.version} is not certified here yet")
        if root != report.state_root:
            raise PeerError("WRONG_STATE", f"not the certified state of version {report.version}")
        if fault := report_fault(report, spec):
            raise PeerError("BAD_REPORT", f"an evaluation with {fault}")
        return report

    def called_back(self, peer: PeerId, *, answered: bool) -> None:
        """The call-back to the peer's own address was answered, or not (protocol.md 6)."""
        row = self._rows.get(peer)
        if row is not None:
            row.reachable = answered

    def forget_old(self, now: float) -> None:
        """Drop rows that have been silent for longer than the page keeps them."""
        for peer in [p for p, r in self._rows.items() if now - r.heard_at > limits.offline_row_kept_s]:
            del self._rows[peer]
            self._order = []

    def listed(self, now: float) -> tuple[Listed, ...]:
        """Every row, in the order of first announces."""
        return tuple(
            Listed(
                peer=peer,
                name=row.record.name,
                role=row.record.role,
                state=row.state,
                live=self._live(row, now),
                left=row.left,
                silent_s=max(0.0, now - row.heard_at),
                outbound_only=row.record.port == 0,
                reachable=row.reachable,
                report=row.report,
                bad_report=row.bad_report,
                clock_offset_s=row.clock_offset_s,
            )
            for peer, row in self._rows.items()
        )

    def _live(self, row: _Row, now: float) -> bool:
        return row.left is None and now - row.heard_at <= self.expiry_s

    def _row_of(self, peer: PeerId) -> _Row:
        row = self._rows.get(peer)
        if row is None:
            raise PeerError("UNKNOWN_PEER", "announce first")
        return row

    def _make_room(self, address: str, now: float) -> None:
        same = [r for r in self._rows.values() if r.address == address and self._live(r, now)]
        if len(same) >= limits.announce_keys_per_address_max:
            raise TransportError(
                f"{len(same)} nodes announce from this address; the tracker lists no more of one place",
                self.interval_s,
            )
        if len(self._rows) < limits.peers_max:
            return
        gone = [(r.heard_at, p) for p, r in self._rows.items() if not self._live(r, now)]
        if not gone:
            raise TransportError(
                f"the tracker lists {limits.peers_max} live nodes and takes no more for now", self.interval_s
            )
        del self._rows[min(gone)[1]]
        self._order = []

    def _records_for(self, asker: PeerId, prefer: Iterable[PeerId], now: float) -> tuple[bytes, ...]:
        """Live peers' sealed records: the preferred ones, then the others in turn."""
        chosen: dict[PeerId, bytes] = {}
        for peer in prefer:
            row = self._rows.get(peer)
            if row is not None and peer != asker and self._live(row, now):
                chosen[peer] = row.sealed
        if len(self._order) != len(self._rows):
            self._order = list(self._rows)
        n = len(self._order)
        start = self._offset % n if n else 0
        self._offset = start + limits.announce_peers_max
        for i in range(n):
            if len(chosen) >= limits.announce_peers_max:
                break
            peer = self._order[(start + i) % n]
            if peer != asker and self._live(self._rows[peer], now):
                chosen.setdefault(peer, self._rows[peer].sealed)
        return tuple(islice(chosen.values(), limits.announce_peers_max))


def clock_notice(offset_s: float) -> str:
    """One sentence for the owner of a wrong clock; empty when it is right enough (scenarios T1, S9b)."""
    if abs(offset_s) <= limits.clock_offset_s_max:
        return ""
    way = "ahead of" if offset_s > 0 else "behind"
    return (
        f"your clock is {abs(offset_s):.0f} s {way} the tracker; training goes on, but please set it "
        "(systems with NTP do it by themselves)"
    )


def why_bad(report: NodeReport) -> str:
    """Why a well-formed report makes no sense; empty when it does."""
    if report.state not in NODE_STATES:
        return f"unknown state {report.state!r}"
    if report.inner_step > limits.pass_prolonged_factor * max(1, report.inner_steps):
        return f"inner step {report.inner_step} of {report.inner_steps}"
    if report.loss > limits.loss_shown_max or report.tokens_per_s > 1e12:
        return "a loss or a speed that cannot be"
    return ""
