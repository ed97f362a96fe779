"""Peers are remembered as they signed themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2pdiloco import limits
from p2pdiloco.errors import PeerError
from p2pdiloco.ids import RunId
from p2pdiloco.wire.envelope import seal
from p2pdiloco.wire.messages import Goodbye, PeerRecord
from p2pdiloco.wire.signing import Ed25519Signer, verify_ed25519
from p2pdiloco_node.storage.address_book import DiskAddressBook

RUN = RunId(bytes(32))


def signer(n: int) -> Ed25519Signer:
    return Ed25519Signer(n.to_bytes(32, "big"))


def sealed(n: int, issued: int = 1, run: RunId = RUN) -> bytes:
    record = PeerRecord(("192.0.2.1",), 7000 + n, f"node {n}", "node", issued)
    return seal(record, signer(n), run=run, epoch=0, boot=1, n=1)


def book(path: Path) -> DiskAddressBook:
    return DiskAddressBook(path, RUN, verify_ed25519)


def test_kept_over_a_restart_and_verified_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "peers"
    one = book(path)
    for n in range(3):
        assert one.remember(sealed(n)) is not None
    one.flush()
    data = path.read_bytes()
    two = book(path)
    assert [two.get(signer(n).peer_id) for n in range(3)] == [one.get(signer(n).peer_id) for n in range(3)]
    assert set(two.records().values()) == {sealed(n) for n in range(3)}
    path.write_bytes(data.replace(b"node 1", b"evil 1"))
    three = book(path)
    assert three.get(signer(1).peer_id) is None
    assert three.get(signer(2).peer_id) is not None
    assert "not valid" in caplog.text
    path.write_bytes(data[:-3])
    assert book(path).records() == {}


def test_the_higher_issue_holds(tmp_path: Path) -> None:
    peers = book(tmp_path / "peers")
    assert peers.remember(sealed(1, issued=5)) is not None
    assert peers.remember(sealed(1, issued=4)) is None
    assert peers.remember(sealed(1, issued=5)) is None
    assert peers.remember(sealed(1, issued=6)) is not None
    record = peers.get(signer(1).peer_id)
    assert record is not None
    assert record.issued == 6


def test_what_is_not_a_record_of_this_run_is_refused(tmp_path: Path) -> None:
    peers = book(tmp_path / "peers")
    goodbye = seal(Goodbye("bye"), signer(1), run=RUN, epoch=0, boot=1, n=1, to=signer(2).peer_id)
    forged = bytearray(sealed(1))
    forged[-1] ^= 1
    for data in (b"", b"x" * 100, sealed(1, run=RunId(b"1" * 32)), goodbye, bytes(forged), sealed(1) * 5):
        with pytest.raises(PeerError):
            peers.remember(data)
    assert peers.records() == {}


def test_no_more_than_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "peers_max", 3)
    peers = book(tmp_path / "peers")
    for n in range(3):
        peers.remember(sealed(n))
    peers.remember(sealed(0))  # heard of just now
    peers.remember(sealed(9))
    assert set(peers.records()) == {signer(n).peer_id for n in (0, 2, 9)}
