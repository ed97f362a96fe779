"""The directory's rules, each with the case that asked for it."""

from __future__ import annotations

import pytest

from p2pdiloco import limits
from p2pdiloco.errors import PeerError, TransportError
from p2pdiloco.ids import PeerId, digest_of
from p2pdiloco.protocol.tracker import AnnounceReply, Directory
from p2pdiloco.rules.evaluation import measured_tokens
from p2pdiloco.sim.keys import FastSigner
from p2pdiloco.sim.tiny_run import tiny_run
from p2pdiloco.wire.codec import decode, encode
from p2pdiloco.wire.envelope import Opened
from p2pdiloco.wire.messages import Announce, EvalReport, Goodbye, NodeReport, PeerRecord, SetLoss


def peer_of(i: int) -> PeerId:
    return PeerId(digest_of(b"peer %d" % i))


def opened(i: int, message, *, boot: int = 1, n: int = 1) -> Opened:
    return Opened(peer_of(i), digest_of(b"key %d" % i), boot, n, 0, message)


def announce(d: Directory, i: int, *, now: float, boot=1, n=1, issued=1, port=4000, unix=1000.0, clock=1000.0,
             address="203.0.113.1", state="training", prefer=()) -> AnnounceReply:  # fmt: skip
    record = PeerRecord(("203.0.113.1",), port, f"node {i}", "node", issued)
    sealed = b"sealed %d %d" % (i, issued)
    return d.announce(
        opened(i, Announce(sealed, state, clock), boot=boot, n=n),
        opened(i, record, boot=boot, n=n),
        sealed,
        address=address,
        now=now,
        unix=unix,
        prefer=prefer,
    )


def report(state="training", **changed) -> NodeReport:
    fields = {"state": state, "why": "", "version": 3, "inner_step": 4, "inner_steps": 10, "loss": 3.0,
              "tokens_per_s": 900.0, "device": "cpu", "last_outcome": "ACCEPTED", "bytes_up": 1,
              "bytes_down": 1, "longest_inner_gap_s": 0.1, "build": "0.1.0"}  # fmt: skip
    return NodeReport(**{**fields, **changed})


def live(d: Directory, now: float) -> set[PeerId]:
    return {row.peer for row in d.listed(now) if row.live}


def test_reply_names_the_others_with_the_interval_of_the_run():
    d = Directory(local=True)
    assert announce(d, 1, now=0).records == ()
    reply = announce(d, 2, now=0)
    assert reply.records == (b"sealed 1 1",)
    assert reply.interval_s == limits.announce_interval_local_s
    assert Directory(local=False).interval_s == limits.announce_interval_s
    assert decode(encode(reply), AnnounceReply) == reply


def test_a_silent_peer_goes_offline_and_is_not_given_out_any_more():  # S2
    d = Directory(local=True)
    announce(d, 1, now=0)
    announce(d, 2, now=7)
    assert live(d, 8) == {peer_of(1), peer_of(2)}
    assert live(d, 8.1) == {peer_of(2)}
    assert announce(d, 3, now=9).records == (b"sealed 2 1",)
    assert {r.peer: round(r.silent_s) for r in d.listed(20)}[peer_of(1)] == 20
    d.forget_old(limits.offline_row_kept_s + 8)
    assert peer_of(1) not in {r.peer for r in d.listed(20)}


def test_the_same_key_on_another_port_is_the_same_row():  # S2c
    d = Directory(local=True)
    announce(d, 1, now=0)
    announce(d, 1, now=1, boot=2, n=1, issued=2, port=4001)
    assert len(d.listed(1)) == 1
    assert announce(d, 2, now=1).records == (b"sealed 1 2",)


def test_a_late_announce_does_not_bring_back_who_said_goodbye():  # S2b
    d = Directory(local=True)
    announce(d, 1, now=0, n=1)
    d.goodbye(opened(1, Goodbye("moving house"), n=3), now=1)
    assert live(d, 1) == set()
    with pytest.raises(PeerError, match="GONE"):
        announce(d, 1, now=2, n=2)
    with pytest.raises(PeerError, match="GONE"):
        d.report(opened(1, report(), n=2), now=2)
    assert live(d, 2) == set()
    assert d.listed(2)[0].left == "moving house"
    announce(d, 1, now=3, boot=2, n=1, issued=2)  # a new start does
    assert live(d, 3) == {peer_of(1)}


def test_a_replayed_announce_is_answered_but_keeps_nobody_alive():
    d = Directory(local=True)
    announce(d, 1, now=0, n=5)
    announce(d, 2, now=7)
    assert announce(d, 1, now=7, n=5, address="198.51.100.9").records == (b"sealed 2 1",)
    assert live(d, 9) == {peer_of(2)}


def test_an_older_record_and_an_older_start_are_refused():  # ID1
    d = Directory(local=True)
    announce(d, 1, now=0, boot=4, issued=9)
    with pytest.raises(PeerError, match="STALE_RECORD"):
        announce(d, 1, now=1, boot=4, n=2, issued=8)
    with pytest.raises(PeerError, match="started again elsewhere"):
        announce(d, 1, now=1, boot=3, n=50, issued=9)


def test_nobody_announces_for_somebody_else():
    d = Directory(local=True)
    record = PeerRecord((), 0, "x", "node", 1)
    with pytest.raises(PeerError, match="NOT_YOURS"):
        d.announce(
            opened(1, Announce(b"s", "joining", 0.0)), opened(2, record), b"s", address="a", now=0, unix=0
        )
    assert d.listed(0) == ()


def test_one_address_cannot_fill_the_table():
    d = Directory(local=False)
    for i in range(limits.announce_keys_per_address_max):
        announce(d, i, now=0)
    with pytest.raises(TransportError, match="this address"):
        announce(d, 999, now=0)
    announce(d, 999, now=0, address="198.51.100.7")


def test_a_full_table_gives_an_offline_row_away_and_never_a_live_one():
    d = Directory(local=False)
    for i in range(limits.peers_max):
        announce(d, i, now=float(i > 0), address=f"a{i // 60}")
    with pytest.raises(TransportError, match="live nodes"):
        announce(d, 5000, now=2, address="b")
    late = 1 + d.expiry_s
    announce(d, 5000, now=late, address="b")
    rows = {r.peer for r in d.listed(late)}
    assert len(rows) == limits.peers_max
    assert peer_of(0) not in rows
    assert peer_of(1) in rows


def test_every_peer_is_named_in_turn_and_the_committee_always():
    d = Directory(local=False)
    for i in range(300):
        announce(d, i, now=0, address=f"a{i // 60}")
    seen: set[bytes] = set()
    for n in range(2, 10):
        reply = announce(d, 0, now=0, n=n, prefer=[peer_of(250), peer_of(0)])
        assert len(reply.records) == limits.announce_peers_max
        assert reply.records[0] == b"sealed 250 1"
        seen |= set(reply.records)
    assert len(seen) == 299


def test_a_wrong_clock_is_told_and_changes_nothing_else():  # T1, S9b
    d = Directory(local=True)
    assert announce(d, 1, now=0, unix=1000, clock=1005).notice == ""
    assert "your clock is 90 s behind the tracker" in announce(d, 1, now=1, n=2, unix=1000, clock=910).notice
    assert "86400 s ahead of" in announce(d, 1, now=2, n=3, unix=1000, clock=87400).notice
    assert live(d, 2) == {peer_of(1)}


def test_a_bad_report_spoils_one_row():  # P6
    d = Directory(local=True)
    announce(d, 1, now=0)
    announce(d, 2, now=0)
    d.report(opened(1, report(), n=2), now=1)
    with pytest.raises(PeerError, match="BAD_REPORT"):
        d.report(opened(2, report(state="on fire"), n=2), now=1)
    one, two = d.listed(1)
    assert (one.state, one.bad_report) == ("training", "")
    assert one.report is not None
    assert two.report is None
    assert "on fire" in two.bad_report
    assert two.live


def test_reports_have_a_rate():
    d = Directory(local=True)
    announce(d, 1, now=0)
    for n in range(limits.reports_per_peer_per_minute_max):
        d.report(opened(1, report(), n=2 + n), now=1)
    with pytest.raises(PeerError, match="RATE_LIMITED"):
        d.report(opened(1, report(), n=900), now=2)
    d.report(opened(1, report(state="paused"), n=901), now=62)
    assert d.listed(62)[0].state == "paused"


def test_a_node_of_a_local_run_that_reports_every_second_is_heard():
    d = Directory(local=True)
    announce(d, 1, now=0)
    for n in range(200):
        d.report(opened(1, report(), n=2 + n), now=0.98 * n)  # a clock's second is not another's


def test_an_evaluation_counts_only_for_the_certified_state():
    d = Directory(local=True)
    announce(d, 1, now=0)
    roots = {8: digest_of(b"root 8")}
    owner = FastSigner("owner")
    spec = tiny_run(owner, owner.peer_id).spec
    (tokens,) = measured_tokens(spec)
    sets = (SetLoss(2.5, tokens),)
    good = EvalReport(8, roots[8], sets)
    assert d.evaluation(opened(1, good), spec, root_of=roots.get) == good
    for reason, bad in {
        "WRONG_STATE": EvalReport(8, digest_of(b"other"), sets),
        "TOO_EARLY": EvalReport(9, roots[8], sets),
        "on 0 held-out": EvalReport(8, roots[8], (SetLoss(2.5, 0),)),
        f"where {tokens} are": EvalReport(8, roots[8], (SetLoss(2.5, tokens - spec.model.seq_len),)),
        "2 losses for 1": EvalReport(8, roots[8], sets * 2),
        "a loss of 101": EvalReport(8, roots[8], (SetLoss(101.0, tokens),)),
        "held-out tokens": EvalReport(8, roots[8], (SetLoss(2.5, tokens + 1),)),
        "1 samples for 0": EvalReport(8, roots[8], sets, ("text",)),
    }.items():
        with pytest.raises(PeerError, match=reason):
            d.evaluation(opened(1, bad), spec, root_of=roots.get)
    with pytest.raises(PeerError, match="UNKNOWN_PEER"):
        d.evaluation(opened(2, good), spec, root_of=roots.get)


def test_an_emptied_tracker_is_filled_again_by_announces():  # B1
    d = Directory(local=True)
    for i in range(3):
        announce(d, i, now=0)
    fresh = Directory(local=True)
    for i in range(3):
        announce(fresh, i, now=100, n=40 + i, issued=1)
    assert live(fresh, 101) == live(d, 1)
