"""Each header gets one typed outcome (protocol.md 5; scenario S9)."""

import pytest
from msgspec.structs import replace

from p2pdiloco.rules.admission import check_header
from p2pdiloco.rules.delta_layout import encoded_size
from p2pdiloco.rules.state import after_owner
from p2pdiloco.wire.log import OwnerWord
from p2pdiloco.wire.messages import DeltaHeader, Outcome


@pytest.fixture
def header(spec):
    size = encoded_size("int4", spec.model.tensors)
    return DeltaHeader(
        delta=bytes(32), size=size, codec="int4", fragment=0, base_version=6, sequence=7, steps=10,
        data_first=0, data_count=10, loss=2.0, signature=bytes(64),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({}, Outcome.NOTED),
        ({"steps": 40}, Outcome.NOTED),
        ({"steps": 41}, Outcome.BAD_SHAPE),
        ({"codec": "fp16"}, Outcome.BAD_SHAPE),
        ({"fragment": 1}, Outcome.BAD_SHAPE),
        ({"sequence": 6}, Outcome.DUPLICATE),
        ({"sequence": 99}, Outcome.NOTED),
        ({"base_version": 7}, Outcome.TOO_EARLY),
        ({"base_version": 3}, Outcome.NOTED),
        ({"base_version": 2}, Outcome.TOO_LATE),
    ],
)
def test_outcomes(make_log, name_peer, header, changes, outcome):
    log = make_log(outer={"staleness_max": 2})
    for _ in range(6):
        log.deliver(1, 2)
    assert check_header(log.state, log.spec, replace(header, **changes), name_peer(1)) is outcome


def test_size_is_exact(log, name_peer, header):
    header = replace(header, base_version=0)
    for size, outcome in ((1, Outcome.TOO_BIG), (-1, Outcome.BAD_SHAPE), (0, Outcome.NOTED)):
        changed = replace(header, size=header.size + size)
        assert check_header(log.state, log.spec, changed, name_peer(1)) is outcome


def test_revoked_and_over(log, name_peer, header):
    header = replace(header, base_version=0)
    revoked = after_owner(log.state, OwnerWord("revoke", 1, 0, name_peer(1), bytes(64)))
    assert check_header(revoked, log.spec, header, name_peer(1)) is Outcome.NOT_ADMITTED
    assert check_header(revoked, log.spec, header, name_peer(2)) is Outcome.NOTED
    over = after_owner(log.state, OwnerWord("finish", 0, 0, b"", b""))
    assert check_header(over, log.spec, header, name_peer(1)) is Outcome.RUN_OVER
